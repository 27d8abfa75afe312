"""A task by its name."""

from __future__ import annotations

from pathlib import Path

from gatespace.errors import UsageError, unknown_name
from gatespace.tasks.data import Task
from gatespace.tasks.synthetic import synthetic_task
from gatespace.tasks.tweeteval import load_tweeteval
from gatespace.tasks.tweeteval_labels import KNOWN

TASKS = ("synthetic", *(f"tweeteval/{name}" for name in KNOWN))


def load_task(name: str, root: str | Path | None = None) -> Task:
    """The task `name`: ``tweeteval/emotion``, ``tweeteval/stance/climate``, …, or ``synthetic``.

    Args:
        name: One of `TASKS`, or ``tweeteval/<folder>`` for a further folder of `root` in TweetEval's layout.
        root: A TweetEval folder. None: $GATESPACE_TWEETEVAL, then the Hugging Face Hub.

    Example:
        >>> load_task("synthetic").labels
        ('good news', 'bad news', 'open question', 'open offer')
    """
    family, _, rest = name.partition("/")
    if family == "tweeteval" and rest:
        return load_tweeteval(rest, root)
    if name != "synthetic":
        raise unknown_name("task", name, TASKS)
    if root is not None:
        raise UsageError("the synthetic task is generated and has no folder", got=f"root={root}")
    return synthetic_task()
