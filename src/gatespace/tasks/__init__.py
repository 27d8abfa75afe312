"""Tasks: texts with labels, the prompt that asks for a label, and the parser of the response."""

from __future__ import annotations

from gatespace.tasks.data import Example, Task, split_rows
from gatespace.tasks.load import load_task, register
from gatespace.tasks.parser import parse_label
from gatespace.tasks.prompt import Prompt
from gatespace.tasks.synthetic import synthetic_task
from gatespace.tasks.table import load_table

__all__ = [
    "Example",
    "Prompt",
    "Task",
    "load_table",
    "load_task",
    "parse_label",
    "register",
    "split_rows",
    "synthetic_task",
]
