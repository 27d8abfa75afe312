"""From the MODEL of a command line to a model, and to the task that its run was about."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatespace.errors import UsageError
from gatespace.runs import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable

    from gatespace.config import TaskConfig
    from gatespace.models import Model
    from gatespace.tasks import Prompt, Task


@dataclass(frozen=True)
class Found:
    """A model and what it is asked."""

    model: Model
    task: Task
    prompt: Prompt
    max_new_tokens: int
    batch_size: int


def model_folder(name: str) -> str:
    """`name`, or the folder of the model where it is a run's folder."""
    run = RunFolder(name)
    if not run.exists or (run.path / "config.json").is_file():
        return name
    if not run.model.is_dir():
        raise UsageError("this run has no model yet", got=name, instead="the command that began it resumes it")
    return str(Path(name) / run.model.name)


def run_settings(name: str) -> dict[str, Any]:
    """The settings of the run that wrote the model folder `name`; {} where no run did."""
    folder = RunFolder(name)
    run = folder if folder.exists else RunFolder(folder.path.parent)
    if not folder.path.is_dir() or not run.exists:
        return {}
    return _read(run.config_file)


@dataclass(frozen=True)
class ModelOptions:
    """The options by which `evaluate` and `predict` describe a model's task and how it is asked; None: as in its run."""

    config: Path | None = None
    task: str | None = None
    root: Path | None = None
    brief: bool | None = None
    prefill: str | None = None
    precision: str | None = None
    device: str = "auto"
    max_new_tokens: int | None = None
    batch_size: int | None = None


def find(name: str, options: ModelOptions, *, report: Callable[[str], None], rows: bool = True) -> Found:
    """Load the model. What an option leaves open is as in the model's run, or else the default.

    Without `rows`, the task has labels and a prompt, and its data need not be there.
    """
    from gatespace.config import TeachEngineConfig, parse_config
    from gatespace.config.address import is_address
    from gatespace.tasks.configured import configured_prompt, load_configured_task

    if is_address(name):
        raise UsageError(
            "a teacher that is a service scores responses and writes none",
            got=name,
            instead="the folder or the name of the model that it serves",
        )
    folder = model_folder(name)
    settings = _read(options.config) if options.config is not None else run_settings(folder)
    section = task_section(
        settings, task=options.task, root=options.root, brief=options.brief, prefill=options.prefill
    )
    precision = options.precision or settings.get("engine", {}).get("precision", "auto")
    engine = {"device": options.device, "precision": precision}
    placed = parse_config(TeachEngineConfig, engine)
    loaded = _without_rows(section, folder) if not rows else None
    loaded = loaded or load_configured_task(section)
    prompt = configured_prompt(section, loaded)

    from gatespace.training.setup import open_model, placement

    place = placement(placed)
    model = open_model(
        folder, "MODEL", role="student", task=loaded, device=place.device, dtype=place.dtype, report=report
    )
    evaluation = settings.get("evaluation", {})
    return Found(
        model,
        loaded,
        prompt,
        options.max_new_tokens or evaluation.get("max_new_tokens", 32),
        options.batch_size or evaluation.get("batch_size", 64),
    )


def task_section(
    settings: dict[str, Any], *, task: str | None, root: Path | None, brief: bool | None, prefill: str | None
) -> TaskConfig:
    """The task of these settings with the options set over it."""
    from gatespace.config import TaskConfig, parse_config

    section: dict[str, Any] = dict(settings.get("task") or {})
    if task is None and not section:
        raise UsageError(
            "which task?",
            why="MODEL does not lie in the folder of a run, which would say",
            instead="--task tweeteval/emotion, or --config with a file that has a section task",
        )
    if task is not None and task != section.get("name"):
        section |= {"name": task, "table": None, "root": section.get("root") if task.startswith("tweeteval/") else None}
    given = {"root": None if root is None else str(root), "brief": brief, "prefill": prefill}
    section |= {key: value for key, value in given.items() if value is not None}
    return parse_config(TaskConfig, section)


def _without_rows(section: TaskConfig, model: str) -> Task | None:
    """The task with one row in place of all, where its labels are known without its data."""
    from gatespace.models.load import TINY
    from gatespace.tasks import Example, Task
    from gatespace.tasks.tweeteval import VARIABLE
    from gatespace.tasks.tweeteval_labels import KNOWN

    if model in TINY:  # made from the rows
        return None
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
    """Whether there is a folder that may name the labels in another order."""
    return (section.root is not None and section.root.is_dir()) or bool(variable)


def _read(path: Path) -> dict[str, Any]:
    from gatespace.config.text import read_yaml

    try:
        found = read_yaml(path.read_text(encoding="utf-8-sig"), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read", why=getattr(error, "strerror", None) or str(error)) from None
    return {key: value for key, value in found.items() if isinstance(value, dict)} if isinstance(found, dict) else {}
