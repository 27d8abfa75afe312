"""Evidence: the statistics of a study, and what they may claim."""
