"""Evaluation: greedy answers to held-out texts, and how often they are right."""

from __future__ import annotations

from gatespace.evaluation.calibration import Calibration, LabelProbabilities, calibrate
from gatespace.evaluation.evaluate import Evaluation, Prediction, evaluate, write
from gatespace.evaluation.metrics import LabelRow, Metrics, measure

__all__ = [
    "Calibration",
    "Evaluation",
    "LabelProbabilities",
    "LabelRow",
    "Metrics",
    "Prediction",
    "calibrate",
    "evaluate",
    "measure",
    "write",
]
