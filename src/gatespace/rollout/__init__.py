"""Rollouts: a model writes responses."""

from __future__ import annotations

from gatespace.rollout.greedy import Answer, greedy
from gatespace.rollout.native import Rollout, Sampling, sample

__all__ = ["Answer", "Rollout", "Sampling", "greedy", "sample"]
