"""Studies: tasks × points × axes × seeds, planned before anything is trained, run in any order, read back as one."""
