"""Evaluation: greedy responses to held-out rows, and their metrics."""

from __future__ import annotations

from gatespace.evaluation.calibration import Calibration, LabelProbabilities, calibrate
from gatespace.evaluation.evaluate import Evaluation, Prediction, evaluate, write
from gatespace.evaluation.metrics import LabelRow, Metrics, measure
from gatespace.evaluation.text import TextMetrics, TextPrediction

__all__ = [
    "Calibration",
    "Evaluation",
    "LabelProbabilities",
    "LabelRow",
    "Metrics",
    "Prediction",
    "TextMetrics",
    "TextPrediction",
    "calibrate",
    "evaluate",
    "measure",
    "write",
]
