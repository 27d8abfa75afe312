"""Resolve the MODEL argument: the model itself, and the task and prompt of the run that trained it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatespace.config import EngineConfig, TaskConfig, parse_config
from gatespace.config.address import is_address
from gatespace.config.text import read_yaml
from gatespace.errors import UsageError
from gatespace.models.cache_root import read_record
from gatespace.plugins import load_plugins
from gatespace.runs import RunFolder
from gatespace.tasks import Example, Prompt, Task
from gatespace.tasks.configured import configured_prompt, load_configured_task, text_prompt
from gatespace.tasks.tweeteval import KNOWN, VARIABLE

if TYPE_CHECKING:
    from gatespace.models import Model


@dataclass(frozen=True)
class Found:
    """A model, its task and its prompt."""

    model: Model
    task: Task
    prompt: Prompt
    max_new_tokens: int
    batch_size: int


def model_folder(name: str) -> str:
    """The model's folder if `name` is a run's folder, else `name` itself."""
    run = RunFolder(name)
    if not run.exists or (run.path / "config.json").is_file():
        return name
    if not run.model.is_dir():
        raise UsageError("this run has no model yet", got=name, instead="the command that began it resumes it")
    return str(Path(name) / run.model.name)


def run_settings(name: str) -> dict[str, Any]:
    """The settings of the run that wrote the model folder `name`, or {} if no run did."""
    folder = RunFolder(name)
    run = folder if folder.exists else RunFolder(folder.path.parent)
    return run.settings() if folder.path.is_dir() and run.exists else {}


@dataclass(frozen=True)
class ModelOptions:
    """Options of `evaluate` and `predict` for a model's task, prompt and device; None: as in the model's run."""

    config: Path | None = None
    task: str | None = None
    root: Path | None = None
    brief: bool | None = None
    prefill: str | None = None
    precision: str | None = None
    device: str = "auto"
    max_new_tokens: int | None = None
    batch_size: int | None = None
    plugins: Sequence[str] = ()


def task_section(name: str, options: ModelOptions) -> TaskConfig:
    """The `task` section of the model's run or of the given file, overridden by the options."""
    folder = model_folder(name)
    return _task_section(folder, _settings(folder, options), options)


def _settings(folder: str, options: ModelOptions) -> dict[str, Any]:
    """The settings of the given file, of the model's run, or in the record of an export."""
    if options.config is not None:
        return _read(options.config)
    return run_settings(folder) or _section(read_record(Path(folder).expanduser()), "settings")


def find(name: str, options: ModelOptions, *, report: Callable[[str], None], rows: bool = True) -> Found:
    """Load the model. Options not given are as in the model's run, or else their defaults.

    Without `rows`, the task has only labels and a prompt, and its data need not exist.
    """
    if is_address(name):
        raise UsageError(
            "a teacher that is a service scores responses and generates none",
            got=name,
            instead="the folder or the name of the model that it serves",
        )
    load_plugins(options.plugins)
    folder = model_folder(name)
    settings = _settings(folder, options)
    section = _task_section(folder, settings, options)
    precision = options.precision or _section(settings, "engine").get("precision", "auto")
    placed = parse_config(EngineConfig, {"device": options.device, "precision": precision})
    try:
        task = (None if rows else _without_rows(section, folder)) or load_configured_task(section)
    except UsageError as error:
        raise _about_plugins(error, settings, options) from None
    for note in task.notes:
        report(note)
    prompt = configured_prompt(section, task)

    from gatespace.training.setup import ModelSpec, open_model, placement

    place = placement(placed)
    model = open_model(ModelSpec(folder, "MODEL", dtype=place.dtype, device=place.device), task, report)
    evaluation = _section(settings, "evaluation")
    return Found(
        model,
        task,
        prompt,
        options.max_new_tokens or evaluation.get("max_new_tokens", 32),
        options.batch_size or evaluation.get("batch_size", 64),
    )


def _section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, dict) else {}


def _task_section(folder: str, settings: dict[str, Any], options: ModelOptions) -> TaskConfig:
    """The task of these settings, overridden by the options."""
    section, task = dict(_section(settings, "task")), options.task
    if task is None and not section:
        from gatespace.models.load import SMOLLM2, TINY

        known = folder in (SMOLLM2, *TINY) or Path(folder).expanduser().is_dir()
        raise UsageError(
            "which task?" if known else "no such model folder, and which task if it is a model of the Hub?",
            got=repr(folder),
            why="MODEL is neither in the folder of a run nor an export of one, which would name it",
            instead="--task tweeteval/emotion, or --config with a file that has a section task",
        )
    if task is not None and task != section.get("name"):
        if section.pop("text", None) is not None:
            section.pop("prefill", None)
        section |= {"name": task, "table": None, "root": section.get("root") if task.startswith("tweeteval/") else None}
    root = None if options.root is None else str(options.root)
    given = {"root": root, "brief": options.brief, "prefill": options.prefill}
    section |= {key: value for key, value in given.items() if value is not None}
    return parse_config(TaskConfig, section)


def _about_plugins(error: UsageError, settings: dict[str, Any], options: ModelOptions) -> UsageError:
    """The error, plus the plugins to pass if its task or metric may come from one that was not imported."""
    listed = settings.get("plugins")
    unnamed = [str(one) for one in listed if one not in options.plugins] if isinstance(listed, list) else []
    if not any(f"unknown {kind}" in error.what for kind in ("task", "metric")) or not unnamed:
        return error
    return UsageError(
        error.what,
        got=error.got,
        why="its run imported plugins, which this command imports only where they are named",
        instead=" ".join(f"--plugin {one}" for one in unnamed),
    )


def _without_rows(section: TaskConfig, model: str) -> Task | None:
    """The task with a single placeholder row, if its labels or prompt are known without its data; else None."""
    from gatespace.models.load import TINY

    if model in TINY:  # built from the rows
        return None
    if (text := section.text) is not None:
        return Task(text.name or "text", [Example("-", "-")], [], [], metric=text.metric, prompt=text_prompt(text))
    table, name = section.table, (section.name or "").removeprefix("tweeteval/")
    if table is not None:
        labels, definitions, question = table.labels, table.definitions, table.question
    elif section.name == f"tweeteval/{name}" and name in KNOWN and not _has_folder(section, os.environ.get(VARIABLE)):
        definitions, question = KNOWN[name].definitions, KNOWN[name].question
        labels = tuple(definitions)
    else:
        return None
    return Task(
        name=section.name or "table",
        labels=labels,
        definitions=definitions,
        train=[Example("-", labels[0])],
        val=[],
        test=[],
        question=question,
    )


def _has_folder(section: TaskConfig, variable: str | None) -> bool:
    """Whether there is a TweetEval folder, which may list the labels in another order."""
    return (section.root is not None and section.root.is_dir()) or bool(variable)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_yaml(path.read_text(encoding="utf-8-sig"), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read", why=getattr(error, "strerror", None) or str(error)) from None
    return found if isinstance(found, dict) else {}
