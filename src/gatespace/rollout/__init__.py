"""Rollouts: a model samples responses."""

from __future__ import annotations

from gatespace.rollout.greedy import Answer, greedy
from gatespace.rollout.native import Rollout, Sampler, Sampling, sample

__all__ = ["Answer", "Rollout", "Sampler", "Sampling", "greedy", "sample"]
