"""Pages for a browser: the explorer of gates on recorded tokens, and the live page of a study."""
