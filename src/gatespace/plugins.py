"""Extensions: add-ons and installed packages through entry points, and a user's own files.

An entry point ``zmq = "gatespace.addons.service:open_teacher"`` in the group ``gatespace.teachers`` makes
``pair.teacher: zmq://HOST:PORT`` work; the core looks names up here and imports no add-on. A file listed under
``plugins`` in a configuration is imported once per process and registers signals, objectives or tasks on import.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from gatespace.errors import UsageError, missing_extra, unknown_name

GROUPS = {
    "commands": "a typer command or group",
    "engines": "does the runs of a study",
    "evaluators": "generates in place of the model in `gatespace evaluate --sampler`",
    "finishers": "called with the RunFolder of a run that is done",
    "objectives": "an Objective class, for objective.method",
    "processes": "several processes that do one run together",
    "references": "published results that a report shows beside a study's own",
    "results": "results of a study: url through a URL, archive from one file",
    "samplers": "samples the student's responses in place of the student",
    "signals": "a module that registers signals",
    "tasks": "a function that loads a Task",
    "teachers": "scores responses, by the scheme of pair.teacher",
    "trackers": "gets the metrics of a run",
}
"""Entry-point group (below ``gatespace.``) → what an entry is."""


@cache
def provided(group: str) -> dict[str, EntryPoint]:
    """Return name → entry point of all installed packages, without those whose module does not exist."""
    assert group in GROUPS, group
    return {point.name: point for point in sorted(entry_points(group=f"gatespace.{group}")) if _spec(point.module)}


def provider(group: str, name: str, *, kind: str = "", known: Iterable[str] = ()) -> Any:
    """Load an entry point.

    Args:
        group: One of `GROUPS`.
        name: Name of the entry point.
        kind: What the name stands for, for the error if it is unknown.
        known: Names that the core itself provides.
    """
    found = provided(group)
    if name not in found:
        raise unknown_name(kind or group.removesuffix("s"), name, [*known, *found])
    point = found[name]
    try:
        return point.load()
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == point.module.partition(".")[0]:
            raise
        extra = point.extras[0] if point.extras else name
        raise missing_extra(f"{kind or group.removesuffix('s')} {name!r}", module=error.name, extra=extra) from error


def _spec(module: str) -> ModuleSpec | None:
    """Find a module's spec; unlike `importlib.util.find_spec`, without importing its parent packages."""
    spec: ModuleSpec | None = None
    name, places = "", None
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = next(filter(None, (finder.find_spec(name, places) for finder in sys.meta_path)), None)
        if spec is None:
            break
        places = spec.submodule_search_locations or []
    return spec


# ---------------------------------------------------------------------------------------------------- user plugins

_loaded: dict[str, str] = {}
"""Plugin → hash of its source as imported by this process."""


def plugin_hash(plugin: str) -> str:
    """Return the SHA-256 of a plugin's source (a file or a module); an error if it does not exist."""
    return hashlib.sha256(_source(plugin).read_bytes()).hexdigest()


def plugins_digest(plugins: Sequence[str]) -> str:
    """Return one hash of several plugins, independent of their names and folders."""
    return hashlib.sha256("".join(sorted(map(plugin_hash, plugins))).encode()).hexdigest()


def load_plugins(plugins: Sequence[str]) -> None:
    """Import a user's files (``signals.py``) or modules (``my_package.signals``), each once per process."""
    for plugin in plugins:
        source, digest = _source(plugin), plugin_hash(plugin)
        if digest in _loaded.values():
            continue
        if plugin in _loaded:
            raise UsageError(
                "plugins: this file has changed since this process imported it", got=plugin, instead="start again"
            )
        try:
            if plugin.endswith(".py"):
                name = f"gatespace_plugin_{digest[:12]}"
                module = sys.modules[name] = ModuleType(name)
                module.__file__ = str(source)
                # bypass the import system: its bytecode cache mistakes a file of equal size and mtime for the old one
                exec(compile(source.read_bytes(), source, "exec"), module.__dict__)
            else:
                importlib.import_module(plugin)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise UsageError("plugins: this code fails when it is imported", got=plugin, why=why) from error
        _loaded[plugin] = digest


def copy_plugins(plugins: Sequence[str], folder: Path) -> None:
    """Copy the source of every plugin to `folder`, as a record of what a run did."""
    for plugin in plugins:
        source = _source(plugin)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{plugin_hash(plugin)[:12]}-{source.name}").write_bytes(source.read_bytes())


def _source(plugin: str) -> Path:
    if plugin.endswith(".py"):
        path = Path(plugin).expanduser()
        if not path.is_file():
            raise UsageError("plugins: there is no such file", got=plugin, instead="a Python file, or a module's name")
        return path
    spec = _spec(plugin)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise UsageError("plugins: there is no such module", got=plugin, instead="my_signals.py, or a module's name")
    return Path(spec.origin)
