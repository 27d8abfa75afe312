"""Evaluation: greedy answers to held-out texts, and how often they are right."""

from __future__ import annotations

from gatespace.evaluation.evaluate import Evaluation, Prediction, evaluate, write
from gatespace.evaluation.metrics import LabelRow, Metrics, measure

__all__ = ["Evaluation", "LabelRow", "Metrics", "Prediction", "evaluate", "measure", "write"]
