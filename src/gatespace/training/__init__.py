"""Training: from a configuration to a student that has learned."""
