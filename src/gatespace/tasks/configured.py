"""The task that a configuration names.

Not among the names of `gatespace.tasks`, so that tasks can be used without the configuration's dependencies.
"""

from __future__ import annotations

from gatespace.config import TaskConfig, in_setting
from gatespace.errors import UsageError
from gatespace.tasks.data import Example, Task, split_rows
from gatespace.tasks.load import load_task
from gatespace.tasks.prompt import Prompt
from gatespace.tasks.table import load_table


def load_configured_task(config: TaskConfig, *, path: str = "task") -> Task:
    """The task with all its rows.

    Args:
        config: The section `task`.
        path: Where that section stands, for errors.
    """
    table = config.table
    if table is None:
        assert config.name is not None  # a section has a name or a table
        with in_setting(f"{path}.name" if config.root is None else path):
            return load_task(config.name, config.root)
    with in_setting(f"{path}.table"):
        return load_table(
            table.source,
            labels=table.labels,
            definitions=table.definitions,
            text_column=table.text_column,
            label_column=table.label_column,
            split=table.carve.shares(),
            seed=table.carve_seed,
            name=table.name,
            question=table.question,
        )


def configured_prompt(config: TaskConfig, task: Task, *, path: str = "task") -> Prompt:
    """The prompt of `task`, as the section asks for it."""
    with in_setting(f"{path}.prefill"):
        return Prompt.of(task, config.prefill, brief=config.brief)


def configured_rows(config: TaskConfig, task: Task, part: str, *, path: str = "task") -> list[Example]:
    """The training rows of one part: ``teacher`` to make a teacher from, ``distill`` to distil on.

    Without a split each part is all of train.
    """
    if config.split is None:
        return task.train
    shares = config.split.shares()
    if part not in shares:
        raise UsageError(
            f"{path}.split.{part}: no share of the training rows is given",
            got=shares,
            instead="teacher: 0.6, distill: 0.4; or split: null, all rows for both",
        )
    with in_setting(f"{path}.split"):
        return split_rows(task.train, shares, config.split_seed)[part]
