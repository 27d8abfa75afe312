"""The teacher: scores of the student's tokens, computed once and cached."""
