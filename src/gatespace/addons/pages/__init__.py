"""Browser pages: the gate explorer on recorded tokens, and the live page of a study."""
