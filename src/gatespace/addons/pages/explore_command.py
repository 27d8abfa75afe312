"""The command under the name of its entry point."""

from gatespace.addons.pages.command import explore

__all__ = ["explore"]
