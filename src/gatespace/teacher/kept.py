"""Moved to `gatespace.teacher.scores`."""

from gatespace.teacher.scores import Form, RowScores

__all__ = ["Form", "RowScores"]
