"""The taught teacher and the tiny pair of the training tests."""

from tests.training.conftest import one_thread, own_cache, shared_place, synthetic, taught, tiny

__all__ = ["one_thread", "own_cache", "shared_place", "synthetic", "taught", "tiny"]
