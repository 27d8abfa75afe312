"""Tasks from a configuration.

Not exported by `gatespace.tasks`, so that tasks can be used without the configuration's dependencies.
"""

from __future__ import annotations

from dataclasses import replace

from gatespace.config import TaskConfig, TextConfig, in_setting
from gatespace.config.sections import TeacherPromptConfig
from gatespace.errors import UsageError
from gatespace.tasks.data import Example, Task, split_rows
from gatespace.tasks.load import load_task
from gatespace.tasks.prompt import Prompt, TeacherPrompt, Template
from gatespace.tasks.read import load_table, load_text


def load_configured_task(config: TaskConfig, *, path: str = "task") -> Task:
    """The task with all its rows.

    Args:
        config: The section `task`.
        path: Of that section, for errors.
    """
    for kind, load in (("table", load_table), ("text", load_text)):
        if (section := getattr(config, kind)) is not None:
            with in_setting(f"{path}.{kind}"):  # its settings are the arguments
                return load(**dict(section) | {"carve": section.carve.shares()})
    assert config.name is not None  # a section has a name, a table or texts
    with in_setting(f"{path}.name" if config.root is None else path):
        return load_task(config.name, config.root)


def text_prompt(text: TextConfig) -> Prompt:
    """The prompt of a text task, except for the prefill."""
    names = ("system", "stop", "thinking", "max_prompt_tokens", "too_long")
    return Prompt(conversations=text.messages is not None, **{name: getattr(text, name) for name in names})


def configured_prompt(config: TaskConfig, task: Task, *, path: str = "task") -> Prompt:
    """The prompt of `task`, as configured."""
    # The default prefill begins a label: a free-text task that is loaded by its name keeps its own.
    prefill = config.prefill if task.labels or config.text is not None else None
    with in_setting(f"{path}.prefill"):
        return Prompt.of(task, prefill, brief=config.brief)


def teacher_prompt(settings: TeacherPromptConfig | None, prompt: Prompt) -> Prompt:
    """The teacher's prompt: the student's `prompt`, unless the settings give it another."""
    if settings is None:
        return prompt
    with in_setting("teacher.prompt.prompt"):
        if settings.prompt is not None:
            Template(settings.prompt)
    examples = tuple((shot.user, shot.assistant) for shot in settings.examples)
    # Only the student's prompts are cut.
    return replace(prompt, teacher=TeacherPrompt(settings.prompt, settings.system, examples), max_prompt_tokens=None)


def configured_rows(config: TaskConfig, task: Task, part: str, *, path: str = "task") -> list[Example]:
    """The training rows of one part: ``teacher`` to train a teacher on, ``distill`` to distil on.

    Without a split each part is all of train.
    """
    rows = task.train
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
        rows = split_rows(rows, shares, config.split_seed)[part]
    return task.lessons(rows) if part == "teacher" else rows
