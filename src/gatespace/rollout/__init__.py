"""Rollouts: sampled, greedy and expected responses of a model."""

from __future__ import annotations

from gatespace.rollout.expected import Expansion, expand
from gatespace.rollout.greedy import Answer, Draws, greedy
from gatespace.rollout.labels import label_log_probs, label_responses, score_labels
from gatespace.rollout.native import Rollout, Sampler, Sampling, sample

__all__ = [
    "Answer",
    "Draws",
    "Expansion",
    "Rollout",
    "Sampler",
    "Sampling",
    "expand",
    "greedy",
    "label_log_probs",
    "label_responses",
    "sample",
    "score_labels",
]
