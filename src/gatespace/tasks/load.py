"""Tasks by name: built in, registered by a plugin, or provided by an installed package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gatespace.errors import UsageError, unknown_name
from gatespace.plugins import provided, provider
from gatespace.tasks.data import Task
from gatespace.tasks.synthetic import synthetic_task
from gatespace.tasks.tweeteval import KNOWN, load_tweeteval

TASKS = ("synthetic", *(f"tweeteval/{name}" for name in KNOWN))
_registered: dict[str, Callable[[], Task]] = {}


def register(name: str) -> Callable[[Callable[[], Task]], Callable[[], Task]]:
    """Make a function that returns a `Task` usable as ``task.name`` in a configuration.

    Examples:
        >>> @register("mine")
        ... def mine() -> Task:
        ...     return synthetic_task(size=60)
        >>> load_task("mine").labels == load_task("synthetic").labels
        True
        >>> del _registered["mine"]
    """

    def wrap(function: Callable[[], Task]) -> Callable[[], Task]:
        if name in _registered or name in TASKS:
            raise UsageError(f"the task name {name!r} is taken", instead="another name")
        _registered[name] = function
        return function

    return wrap


def load_task(name: str, root: str | Path | None = None) -> Task:
    """The task `name`: ``tweeteval/emotion``, ``tweeteval/stance/climate``, …, ``synthetic``, or a registered one.

    Args:
        name: One of `TASKS`, ``tweeteval/<folder>`` for a further folder of `root` in TweetEval's layout, a name that
            a plugin has registered, or an entry point of the group ``gatespace.tasks``.
        root: A TweetEval folder. None: $GATESPACE_TWEETEVAL, then the Hugging Face Hub.

    Examples:
        >>> load_task("synthetic").labels
        ('good news', 'bad news', 'open question', 'open offer')
    """
    family, _, rest = name.partition("/")
    if family == "tweeteval" and rest:
        return load_tweeteval(rest, root)
    known = {"synthetic": synthetic_task, **_registered}
    if name not in known:
        if name not in provided("tasks"):
            raise unknown_name("task", name, [*TASKS, *_registered, *provided("tasks")])
        known[name] = provider("tasks", name)
    if root is not None:
        raise UsageError(f"the task {name} has no folder", got=f"root={root}")
    return known[name]()
