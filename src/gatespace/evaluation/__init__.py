"""Evaluation: greedy responses to held-out rows, and their metrics."""

from __future__ import annotations

from gatespace.evaluation.calibration import Calibration, LabelProbabilities, calibrate
from gatespace.evaluation.evaluate import Evaluation, evaluate, write
from gatespace.evaluation.metrics import LabelRow, LabelStatistics, Metrics, Prediction, measure

__all__ = [
    "Calibration",
    "Evaluation",
    "LabelProbabilities",
    "LabelRow",
    "LabelStatistics",
    "Metrics",
    "Prediction",
    "calibrate",
    "evaluate",
    "measure",
    "write",
]
