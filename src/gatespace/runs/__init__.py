"""All that is on disk: the folder of a run, the folder of a study. The one place that knows file names; no torch."""

from __future__ import annotations

from gatespace.runs.run_folder import RunFolder, State
from gatespace.runs.study_folder import ARCHIVE, Base, StudyFolder, pages_of

__all__ = ["ARCHIVE", "Base", "RunFolder", "State", "StudyFolder", "pages_of"]
