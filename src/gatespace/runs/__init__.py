"""Run and study folders on disk: the only place that knows file names. Does not import torch."""

from __future__ import annotations

from gatespace.runs.run_folder import RunFolder, State
from gatespace.runs.study_folder import ARCHIVE, Base, StudyFolder, pages_of

__all__ = ["ARCHIVE", "Base", "RunFolder", "State", "StudyFolder", "pages_of"]
