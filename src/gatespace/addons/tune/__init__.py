"""`gatespace tune`: searches for the gate of a study on validation, and says on fresh seeds whether it is worth having."""
