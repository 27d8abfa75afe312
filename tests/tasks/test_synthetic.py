"""The generated task: repeatable, disjoint, and as ambiguous as it says."""

from __future__ import annotations

from collections import Counter

import pytest

from gatespace.errors import UsageError
from gatespace.tasks import Example, load_task, synthetic_task
from gatespace.tasks.synthetic import CUES, THINGS

TASK = synthetic_task(seed=3, size=3000)
SPEAKS_FOR = {
    pattern.format(thing): label for label, patterns in CUES.items() for pattern in patterns for thing in THINGS
}


def proportions(text: str) -> dict[str, float]:
    """The posterior, read back from the text alone."""
    cues = text.split(", ")
    return {label: count / len(cues) for label, count in Counter(SPEAKS_FOR[cue] for cue in cues).items()}


def test_every_cue_speaks_for_one_label() -> None:
    assert len(SPEAKS_FOR) == len(THINGS) * sum(map(len, CUES.values()))
    assert len(set(THINGS)) == len(THINGS)


def test_same_seed_same_task() -> None:
    again = synthetic_task(seed=3, size=3000)
    assert again == TASK
    assert again.digest == TASK.digest
    assert synthetic_task(seed=4, size=3000).train != TASK.train
    assert load_task("synthetic") == synthetic_task()


def test_task_is_pinned() -> None:
    task = synthetic_task(seed=0, size=60)
    assert task.train[0] == Example(
        "my guitar looks great, the song is back at last, the window came early, my coat was worth it", "good news"
    )
    assert task.digest == "189023732457d8920eb9c53ae336d9b8"


def test_splits_are_disjoint() -> None:
    texts = [row.text for split in ("train", "val", "test") for row in TASK.rows(split)]
    assert len(set(texts)) == len(texts) == 3000 + 500 + 1000
    assert TASK.test_in_train == ()


def test_gold_labels_follow_the_posteriors() -> None:
    """Of the messages at a given proportion, that share has the label, within four standard errors."""
    hits: dict[float, list[bool]] = {}
    for row in TASK.train:
        for label, share in proportions(row.text).items():
            hits.setdefault(round(share, 3), []).append(row.label == label)
    assert set(hits) == {0.25, 0.333, 0.5, 0.667, 0.75, 1.0}
    for share, seen in hits.items():
        error = (share * (1 - share) / len(seen)) ** 0.5
        assert abs(sum(seen) / len(seen) - share) <= 4 * error + 1e-3


def test_ambiguity_is_graded_and_of_both_kinds() -> None:
    """Between labels that part at the first word (u), and between the two that share it (h at a later token)."""
    mixed = [labels for row in TASK.train if len(labels := {*proportions(row.text)}) == 2]
    assert len(mixed) / len(TASK.train) == pytest.approx(0.5, abs=0.04)
    shares = Counter(frozenset(pair) for pair in mixed)
    assert len(shares) == 6
    assert min(shares.values()) > 0.1 * len(mixed)
    assert {"open question", "open offer"} in mixed


@pytest.mark.parametrize("ambiguity", [0, 1])
def test_limits_of_ambiguity(ambiguity: int) -> None:
    task = synthetic_task(size=300, ambiguity=ambiguity)
    assert {len(proportions(row.text)) for row in task.train} == {1 + ambiguity}


def test_labels_are_several_words() -> None:
    assert all(len(label.split()) == 2 for label in TASK.labels)
    assert set(TASK.definitions) == set(TASK.labels)


@pytest.mark.parametrize("options", [{"size": 5}, {"ambiguity": 1.5}, {"ambiguity": -0.1}])
def test_settings_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        synthetic_task(**options)  # type: ignore[arg-type]
