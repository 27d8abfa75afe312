"""`gatespace tune`: a search for the gate of a study on validation, and on fresh seeds whether it is worth having."""
