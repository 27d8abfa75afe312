"""Rollouts: a model samples responses."""

from __future__ import annotations

from gatespace.rollout.expected import Expansion, expand
from gatespace.rollout.greedy import Answer, greedy
from gatespace.rollout.native import Rollout, Sampler, Sampling, sample

__all__ = ["Answer", "Expansion", "Rollout", "Sampler", "Sampling", "expand", "greedy", "sample"]
