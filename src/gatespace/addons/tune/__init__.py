"""`gatespace tune`: search for a study's best gate on validation, and judge it on fresh seeds."""
