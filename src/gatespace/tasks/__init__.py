"""Tasks: what is asked, and how a response is judged: texts with labels, or prompts with references."""

from __future__ import annotations

from gatespace.tasks.data import Example, Task, split_rows
from gatespace.tasks.load import load_task, register
from gatespace.tasks.parser import parse_label
from gatespace.tasks.prompt import Prompt
from gatespace.tasks.read import load_table, load_text
from gatespace.tasks.scores import register_metric
from gatespace.tasks.synthetic import synthetic_task

__all__ = [
    "Example",
    "Prompt",
    "Task",
    "load_table",
    "load_task",
    "load_text",
    "parse_label",
    "register",
    "register_metric",
    "split_rows",
    "synthetic_task",
]
