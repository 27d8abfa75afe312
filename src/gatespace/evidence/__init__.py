"""Evidence: the statistics of a study, and the claims they support."""
