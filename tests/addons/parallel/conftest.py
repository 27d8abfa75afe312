"""The taught teacher and the tiny pair of the training tests."""

from tests.training.conftest import one_thread, own_cache, shared_place, synthetic, taught, tiny

__all__ = ["one_thread", "own_cache", "shared_place", "synthetic", "taught", "tiny"]

collect_ignore = ["own_signal.py"]  # a plugin: looked at for doctests it would be imported, and once is all it may be
