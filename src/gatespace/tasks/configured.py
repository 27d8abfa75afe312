"""Tasks from a configuration.

Not exported by `gatespace.tasks`, so that tasks can be used without the configuration's dependencies.
"""

from __future__ import annotations

from dataclasses import replace

from gatespace.config import TaskConfig, TextConfig, in_setting
from gatespace.config.sections import TeacherPromptConfig
from gatespace.errors import UsageError
from gatespace.tasks.data import AnyExample, AnyTask, Task, split_rows
from gatespace.tasks.load import load_task
from gatespace.tasks.prompt import AnyPrompt, Prompt
from gatespace.tasks.table import load_table
from gatespace.tasks.text import OtherPrompt, Template, TextPrompt, TextTask, load_text


def load_configured_task(config: TaskConfig, *, path: str = "task") -> AnyTask:
    """The task with all its rows.

    Args:
        config: The section `task`.
        path: Of that section, for errors.
    """
    table, text = config.table, config.text
    if text is not None:
        with in_setting(f"{path}.text"):
            return load_text(
                text.source,
                prompt=text.prompt,
                messages=text.messages,
                answer=text.answer,
                metric=text.metric,
                also=text.also,
                columns=text.columns,
                teacher_column=text.teacher_column,
                group=text.group,
                how=text_prompt(text),
                split=text.carve.shares(),
                seed=text.carve_seed,
                name=text.name,
            )
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
            teacher_column=table.teacher_column,
            split=table.carve.shares(),
            seed=table.carve_seed,
            name=table.name,
            question=table.question,
        )


def text_prompt(text: TextConfig) -> TextPrompt:
    """The prompt of a text task, except for the prefill."""
    return TextPrompt(
        conversations=text.messages is not None,
        system=text.system,
        stop=text.stop,
        thinking=text.thinking,
        max_prompt_tokens=text.max_prompt_tokens,
        too_long=text.too_long,
    )


def configured_prompt(config: TaskConfig, task: AnyTask, *, path: str = "task") -> AnyPrompt:
    """The prompt of `task`, as configured."""
    if isinstance(task, TextTask):
        return replace(task.prompt, prefill=config.prefill if config.text is not None else task.prompt.prefill)
    assert isinstance(task, Task)
    with in_setting(f"{path}.prefill"):
        return Prompt.of(task, config.prefill, brief=config.brief)


def teacher_prompt(own: TeacherPromptConfig | None, prompt: AnyPrompt) -> AnyPrompt:
    """The teacher's prompt: the student's `prompt`, unless it has its `own`."""
    if own is None:
        return prompt
    with in_setting("teacher.prompt.prompt"):
        template = None if own.prompt is None else Template(own.prompt)
    return OtherPrompt(prompt, template, own.system, tuple((shot.user, shot.assistant) for shot in own.examples))


def configured_rows(config: TaskConfig, task: AnyTask, part: str, *, path: str = "task") -> list[AnyExample]:
    """The training rows of one part: ``teacher`` to train a teacher on, ``distill`` to distil on.

    Without a split each part is all of train.
    """
    rows: list[AnyExample] = task.rows("train")
    if config.split is None:
        return task.lessons(rows) if part == "teacher" else rows
    shares = config.split.shares()
    if part not in shares:
        raise UsageError(
            f"{path}.split.{part}: no share of the training rows is given",
            got=shares,
            instead="teacher: 0.6, distill: 0.4; or split: null, all rows for both",
        )
    with in_setting(f"{path}.split"):
        found = split_rows(rows, shares, config.split_seed)[part]
    return task.lessons(found) if part == "teacher" else found
