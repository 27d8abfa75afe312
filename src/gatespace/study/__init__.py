"""Studies: tasks × points × axes × seeds, planned before training, run in any order, read back as a whole."""
