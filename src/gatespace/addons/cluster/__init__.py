"""Studies on a Ray cluster, and results at a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gatespace.config import StudyConfig
    from gatespace.runs import StudyFolder
    from gatespace.study.engines import Engine, EngineSpec, Results


def ray_engine(spec: EngineSpec) -> Engine:
    """Return the engine of ``gatespace run STUDY --engine ray``."""
    from gatespace.addons.cluster.ray_cluster import RayEngine

    return RayEngine(spec)


def open_results(url: str, folder: StudyFolder, config: StudyConfig) -> Results:
    """Open the results of ``gatespace run STUDY --results URL``."""
    from gatespace.addons.cluster.results import UrlResults

    return UrlResults(url, folder, config)
