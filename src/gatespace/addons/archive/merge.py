"""Merge results of one study from several machines."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gatespace.addons.archive.pack import pack
from gatespace.addons.archive.published import Published
from gatespace.addons.archive.unpack import opened
from gatespace.config import StudyConfig, dump_config, dump_yaml, parse_config
from gatespace.errors import UsageError
from gatespace.files import atomic_write
from gatespace.runs import ARCHIVE, RunFolder, StudyFolder
from gatespace.study.plan import make_plan
from gatespace.study.results import reading

_OF_A_MACHINE = ("workers", "resources", "output", "keep_models", "tune")
"""Settings of a study that its runs' results do not depend on."""


@dataclass(frozen=True)
class Merged:
    """Result of a merge.

    Args:
        path: The folder or archive.
        done: Ids of the plan's finished runs.
        missing: Ids of its missing runs.
        twice: Names of jobs finished in several sources, with the same results.
    """

    path: Path
    done: tuple[str, ...]
    missing: tuple[str, ...]
    twice: tuple[str, ...]


def merge(sources: Sequence[Path], output: Path) -> Merged:
    """Merge folders or archives of one study into a new folder or archive.

    Sources may have different seeds: the merged study has all of them. Raises if the sources are not of one study, or
    have a run with different results.

    Args:
        sources: Folders or archives.
        output: The new folder, or an archive if its name ends with `ARCHIVE`.
    """
    if output.exists():
        raise UsageError("the output exists already", got=str(output), instead="a new name")
    if missing := [path for path in sources if not path.exists()]:
        raise UsageError("there is no such folder or archive", got=str(missing[0]))
    with reading(*sources):
        return _merge(sources, output)


def _merge(sources: Sequence[Path], output: Path) -> Merged:
    folders = [StudyFolder.open(opened(path) if path.is_file() else path) for path in sources]
    parts = [Published(folder) for folder in folders]
    config = _joined([part.config for part in parts], sources)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
        whole = StudyFolder(Path(scratch) / "study")
        whole.path.mkdir()
        for part in parts:
            for path in [*part.folder.plugins.rglob("*.py"), part.folder.store_file]:
                _copy(part, path, whole)
        atomic_write(whole.study_file, dump_yaml(config))
        _join_bases(folders, sources, whole)
        for look in {str(look): look for folder in folders for look in folder.looks()}.values():
            whole.look(look)
        twice = _join_jobs(parts, whole)
        plan = make_plan(whole.config(), {task: base.point for task, base in whole.bases().items()})
        done = tuple(name for name in plan.runs if whole.run(name).is_done)
        if output.name.endswith(ARCHIVE):
            pack(whole, output)
        else:
            os.rename(whole.path, output)
    return Merged(output, done, tuple(name for name in plan.runs if name not in done), twice)


def _copy(part: Published, path: Path, whole: StudyFolder) -> None:
    """Copy a file of a source under its published name and content, unless an earlier source had it."""
    target = whole.path / part.name(path)
    if path.is_file() and not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(part.content(path))
        shutil.copystat(path, target)  # a run's duration is read from file times


# ---------------------------------------------------------------------------------------------------- the study


def _joined(configs: Sequence[StudyConfig], sources: Sequence[Path]) -> StudyConfig:
    """The common study of all sources, with all their seeds."""
    plain = [_comparable(config) for config in configs]
    for source, other in zip(sources, plain, strict=True):
        if differ := sorted(key for key in {*plain[0], *other} if plain[0].get(key) != other.get(key)):
            raise UsageError(
                "these are not results of one study",
                got=f"{sources[0]} and {source}",
                why=f"their study files differ in {', '.join(differ)}",
                instead="results of the same study file; only seeds and machines may differ",
            )
    first = dump_config(configs[0])
    first["seeds"] = _union(config.seeds for config in configs)
    if configs[0].replication is not None:
        fresh = _union(config.replication.seeds for config in configs if config.replication is not None)
        first["replication"]["seeds"] = fresh
    first["selection_seed"] = configs[0].choosing_seed if configs[0].selection_seed is not None else None
    return parse_config(StudyConfig, first, where="the joined study")


def _comparable(config: StudyConfig) -> dict[str, Any]:
    found = {key: value for key, value in dump_config(config).items() if key not in (*_OF_A_MACHINE, "seeds")}
    found["replication"] = found["replication"] and {**found["replication"], "seeds": None}
    return found


def _union(seeds: Iterable[Sequence[int]]) -> list[int]:
    return list(dict.fromkeys(seed for some in seeds for seed in some))


def _join_bases(folders: Sequence[StudyFolder], sources: Sequence[Path], whole: StudyFolder) -> None:
    for folder, source in zip(folders, sources, strict=True):
        for task, base in folder.bases().items():
            known = whole.bases().get(task, base)
            if known.point != base.point:
                raise UsageError(
                    f"these results have different bases of {task}",
                    got=str(source),
                    why=f"HG points are built on {base.point} there, and on {known.point} in another",
                    instead="name the base in the study file when several machines run it",
                )
            if task not in whole.bases():
                whole.choose(task, base)


# ---------------------------------------------------------------------------------------------------- runs


def _join_jobs(parts: Sequence[Published], whole: StudyFolder) -> tuple[str, ...]:
    """Copy every baseline and run once; return the names of those finished in several sources."""
    jobs: dict[Path, dict[RunFolder, Published]] = {}
    for part in parts:
        for job in part.folder.jobs():
            jobs.setdefault(Path(part.name(job.path)), {})[job] = part
    twice: list[str] = []
    conflicts: list[str] = []
    for place, found in sorted(jobs.items()):
        done = [job for job in found if job.is_done]
        if any(_results(found[job], job) != _results(found[done[0]], done[0]) for job in done[1:]):
            conflicts.append(place.name)
        if len(done) > 1:
            twice.append(place.name)
        chosen = (done or [*found])[0]
        for path in chosen.records():
            _copy(found[chosen], path, whole)
        if ledger := _ledger([*found]):
            atomic_write(RunFolder(whole.path / place).reads_file, ledger)
    if conflicts:
        raise UsageError(
            "the same run has different results",
            got=", ".join(conflicts),
            why="a run's numbers depend on its settings and the kind of machine alone",
            instead="decide which results count, and remove the other folders of these runs from copies of the sources",
        )
    return tuple(twice)


def _results(part: Published, job: RunFolder) -> dict[str, Any]:
    """The results that must be equal: everything but machine, time, speed and which tokens were recorded."""
    aside = {job.config_file, job.reads_file, job.log_file("timings"), job.log_file("tokens")}
    aside |= {job.path / name for name in ("environment.json", "error.json")}
    found: dict[str, Any] = {path.name: part.content(path) for path in job.records() if path not in aside}
    if (name := "baseline.json") in found:
        found[name] = job.baseline()["digest"]  # the rest is where the model was
    return found


def _ledger(jobs: Sequence[RunFolder]) -> bytes:
    """All reads of held-out splits: a run computed on two machines counts twice, a copy of a run, recognized by equal
    timings, once. Baselines have no timings and count as copies."""
    ledgers: dict[bytes, bytes] = {}
    for job in jobs:
        timings, reads = (
            path.read_bytes() if path.is_file() else b"" for path in (job.log_file("timings"), job.reads_file)
        )
        ledgers[timings] = max(ledgers.get(timings, b""), reads, key=len)
    return b"".join(ledgers.values())
