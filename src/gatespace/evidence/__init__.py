"""Evidence: what the numbers of a study, or of the paper, may claim."""
