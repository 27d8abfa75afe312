"""A generated task for the demo and for tests: short messages whose ambiguity is known.

A message is a list of two to four cues, each of which points to exactly one label. In a clear message all cues point to
one label. In a mixed one k of n point to one and the rest to a second, and the gold label is drawn with probabilities
k/n and (n-k)/n. These are the exact posteriors, so the attainable accuracy is known too.

Two of the labels share their first word. A message between ``good news`` and ``bad news`` is uncertain at the first
token of the answer (u and h), one between ``open question`` and ``open offer`` only at a later one (h alone).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

from gatespace.errors import UsageError
from gatespace.seeding import generator
from gatespace.tasks.data import SPLITS, Example, Task

_T = TypeVar("_T")

CUES: dict[str, tuple[str, ...]] = {
    label: tuple(cues.split(", "))
    for label, cues in {
        "good news": "{} is fixed, {} came early, {} won a prize, {} looks great, we love {}, {} was worth it, "
        "they saved {}, {} is back at last",
        "bad news": "{} is broken, {} came too late, {} lost its place, {} looks awful, we miss {}, {} was a waste, "
        "they stole {}, {} is gone for good",
        "open question": "where is {}, who has {}, what is wrong with {}, when will {} be ready, "
        "why did they move {}, how does {} work, is {} the right one, does anyone know {}",
        "open offer": "take {} if you like, you can have {}, ask me for {}, come and see {}, {} is free for you, "
        "i can lend you {}, you may use {}, help yourself to {}",
    }.items()
}
THINGS = tuple(
    f"{owner} {noun}"
    for owner, nouns in {
        "the": ("bike", "train", "bridge", "lamp", "cake", "clock", "window", "map", "kettle", "song", "ladder"),
        "my": ("phone", "coat", "guitar", "ticket", "desk", "lunch"),
        "our": ("garden", "boat", "tent", "dog", "roof", "school", "market"),
    }.items()
    for noun in nouns
)
DEFINITIONS = {
    "good news": "The message tells of something that went well.",
    "bad news": "The message tells of something that went wrong.",
    "open question": "The message asks for something the author does not know.",
    "open offer": "The message offers something to the reader.",
}
CUE_COUNTS = (2, 3, 4)


def synthetic_task(seed: int = 0, size: int = 2400, *, ambiguity: float = 0.5) -> Task:
    """Generate the task. No text occurs twice, within a split or across splits.

    Args:
        seed: The same seed gives the same task, and each split has its own stream.
        size: Rows of train. Val has a sixth of it and test a third.
        ambiguity: The share of messages that mix the cues of two labels.

    Examples:
        >>> task = synthetic_task(seed=0, size=600)
        >>> task.train[0]
        Example(text=..., label=...)
    """
    if size < 6:
        raise UsageError("size is at least 6", got=size, why="val has a sixth of the rows of train")
    if not 0.0 <= ambiguity <= 1.0:
        raise UsageError("ambiguity is a share of the messages, from 0 to 1", got=ambiguity)
    seen: set[str] = set()
    rows: dict[str, list[Example]] = {}
    for split, count in zip(SPLITS, (size, size // 6, size // 3), strict=True):
        rng = generator(seed, "tasks", "synthetic", split)
        rows[split] = []
        while len(rows[split]) < count:
            text, posterior = _message(rng, ambiguity)
            label = _drawn(rng, posterior)
            if text not in seen:
                seen.add(text)
                rows[split].append(Example(text, label))
    return Task(
        name="synthetic",
        labels=tuple(CUES),
        definitions=DEFINITIONS,
        train=rows["train"],
        val=rows["val"],
        test=rows["test"],
        question="What kind of message is this?",
        source=f"generated, seed {seed}, size {size}, ambiguity {ambiguity:g}",
    )


def _message(rng: random.Random, ambiguity: float) -> tuple[str, dict[str, float]]:
    first, second = _some(rng, list(CUES), 2)
    total = _some(rng, CUE_COUNTS, 1)[0]
    # At least half of the cues point to `first`, so that every mixture has one form: 1:1, 2:1, 3:1, 2:2.
    minority = 1 + int(rng.random() * (total // 2)) if rng.random() < ambiguity else 0
    counts = {first: total - minority, second: minority}
    patterns = [pattern for label, count in counts.items() for pattern in _some(rng, CUES[label], count)]
    things = _some(rng, THINGS, total)
    cues = [pattern.format(thing) for pattern, thing in zip(_some(rng, patterns, total), things, strict=True)]
    return ", ".join(cues), {label: count / total for label, count in counts.items() if count}


def _some(rng: random.Random, items: Sequence[_T], count: int) -> list[_T]:
    # rng.sample may change between versions of Python; rng.random may not
    rest = list(items)
    return [rest.pop(int(rng.random() * len(rest))) for _ in range(count)]


def _drawn(rng: random.Random, posterior: Mapping[str, float]) -> str:
    point = rng.random()
    for label, probability in posterior.items():
        point -= probability
        if point < 0:
            return label
    return label  # the probabilities summed to just under 1
