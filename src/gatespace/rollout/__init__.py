"""Rollouts: sampled and greedy responses of a model, and scores of its labels."""

from __future__ import annotations

from gatespace.rollout.greedy import Answer, Draws, greedy
from gatespace.rollout.labels import label_log_probs, label_responses, score_labels
from gatespace.rollout.native import Rollout, Sampler, Sampling, sample

__all__ = [
    "Answer",
    "Draws",
    "Rollout",
    "Sampler",
    "Sampling",
    "greedy",
    "label_log_probs",
    "label_responses",
    "sample",
    "score_labels",
]
