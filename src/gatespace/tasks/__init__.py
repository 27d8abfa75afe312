"""Tasks: what is asked, and how a response is judged: texts with labels, or prompts with references."""

from __future__ import annotations

from gatespace.tasks.data import AnyTask, Example, Task, split_rows
from gatespace.tasks.load import load_task, register
from gatespace.tasks.parser import parse_label
from gatespace.tasks.prompt import Prompt
from gatespace.tasks.scores import register_metric
from gatespace.tasks.synthetic import synthetic_task
from gatespace.tasks.table import load_table
from gatespace.tasks.text import TextExample, TextTask, load_text

__all__ = [
    "AnyTask",
    "Example",
    "Prompt",
    "Task",
    "TextExample",
    "TextTask",
    "load_table",
    "load_task",
    "load_text",
    "parse_label",
    "register",
    "register_metric",
    "split_rows",
    "synthetic_task",
]
