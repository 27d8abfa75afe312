from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from gatespace.evaluation import Metrics, measure
from gatespace.training.warnings import Answers, concerns, of_choice, of_teacher, start_of

LABELS = ("a", "b", "c")
GOLD = ["a"] * 80 + ["b"] * 60 + ["c"] * 60


def said(*parts: tuple[str | None, int]) -> Metrics:
    return measure(GOLD, [label for label, count in parts for _ in range(count)], LABELS)


RIGHT = said(("a", 80), ("b", 60), ("c", 60))
COLLAPSED = said(("b", 193), ("a", 7))
FALLING = [{"loss": 2.0 - 0.02 * step, "lr": 1e-3} for step in range(60)]


def losses(values: Sequence[float], lr: float = 1e-3) -> list[dict[str, float]]:
    return [{"loss": value, "lr": lr} for value in values]


def kinds(evaluations: dict[str, Metrics], **known: Any) -> list[str]:
    return [concern.kind for concern in concerns(evaluations, **known)]


def test_a_good_result_has_none() -> None:
    before = {"val": Answers.of(said(("a", 70), ("b", 70), ("c", 60)))}
    assert concerns({"val": RIGHT, "test": RIGHT}, start=before, steps=FALLING) == []
    assert of_teacher("val", 0.8, 0.3) == []


def test_a_collapsed_student_is_noticed() -> None:
    start = {"val": Answers.of(said(("a", 70), ("b", 70), ("c", 60)))}
    found = concerns({"test": COLLAPSED, "val": COLLAPSED}, start=start, steps=FALLING)
    assert [one.kind for one in found] == ["one label", "below the best constant", "below the start"]
    first, second, third = map(str, found)
    assert first.startswith("193 of 200 texts of val get the label 'b', which is right for 60 of them. ")
    assert second.startswith("Accuracy on val is 30.0 %; always predicting 'a' scores 40.0 %. ")
    assert third.startswith("Accuracy on val is 30.0 %, below the 95.0 % before training. ")
    assert all(one.helps for one in found)


def test_one_label_for_texts_of_one_label_is_none() -> None:
    lopsided = measure(["a"] * 95 + ["b"] * 5, ["a"] * 100, ("a", "b"))
    assert kinds({"val": lopsided}) == []


@pytest.mark.parametrize("auc, noticed", [(0.55, True), (0.45, True), (0.65, False), (None, False)])
def test_a_model_that_knows_the_label_prior_alone(auc: float | None, noticed: bool) -> None:
    found = kinds({"test": RIGHT, "val": RIGHT}, aucs={"test": auc, "val": auc})
    assert found == ["label prior only"] * noticed  # once, whatever the splits
    both, start = {"val": COLLAPSED, "test": COLLAPSED}, {"val": Answers.of(COLLAPSED)}
    cause = ["label prior only"] if noticed else ["one label", "below the best constant"]  # a report says the first
    assert kinds(both, start=start, aucs={"test": auc}) == [*cause, "nothing learned"]


def test_answers_without_a_label() -> None:
    assert kinds({"val": said(("a", 80), (None, 20), ("b", 50), ("c", 50))}) == []
    assert kinds({"val": said(("a", 80), (None, 120))}) == ["no label"]


def test_a_teacher_that_knows_no_more_than_the_student() -> None:
    (found,) = of_teacher("test", 0.4, 0.45)
    assert str(found).startswith("On test the teacher is right in 40.0 %, the student before training in 45.0 %. ")


@pytest.mark.parametrize("steps", [FALLING, losses([6.2, 6.1, 6.3] * 20)])
def test_the_answers_of_before_are_nothing_learned(steps: list[dict[str, float]]) -> None:
    start, now = (said(("a", 70 + more), ("b", 70 - more), ("c", 60)) for more in (0, 1))
    assert kinds({"val": now}, start={"val": Answers.of(start)}, steps=steps) == ["nothing learned"]


def test_a_flat_loss_of_a_student_that_changed_is_not_nothing_learned() -> None:
    """The loss of a sampled policy gradient is noise: the advice of a larger learning rate would be wrong."""
    start = {"val": Answers.of(said(("a", 70), ("b", 70), ("c", 60)))}
    noise = losses([6.2, 6.0, 6.3, 6.1] * 15)
    found = kinds({"val": COLLAPSED}, start=start, steps=noise)
    assert found == ["one label", "below the best constant", "below the start"]


def test_few_validation_rows_that_chose_the_weights() -> None:
    assert of_choice(None) == of_choice(50) == []
    (found,) = of_choice(40)
    assert str(found).startswith("40 validation rows chose the weights: a score on so few is uncertain by up to ±15 ")


def test_weights_of_before_training_say_nothing_about_the_learning_rate() -> None:
    start = said(("a", 70), ("b", 70), ("c", 60))
    (found,) = concerns({"val": start}, start={"val": Answers.of(start)}, steps=FALLING, unchanged=True)
    assert found.kind == "nothing gained"
    assert "smaller learning rate" in str(found)


def test_a_loss_that_stands_still() -> None:
    noise = losses([6.2, 6.0, 6.3, 6.1] * 15)
    assert kinds({"val": RIGHT}, steps=noise) == ["nothing learned"]
    assert kinds({"val": RIGHT}, steps=noise[:6]) == []  # too few to tell
    gained = {"val": Answers.of(COLLAPSED)}
    assert kinds({"val": RIGHT}, start=gained, steps=noise) == []  # the loss of some methods is no measure


def test_a_learning_rate_that_is_too_large() -> None:
    rising = losses([1.0, *[9.0] * 29])
    assert kinds({"val": RIGHT}, steps=rising) == ["diverged"]
    assert kinds({"val": RIGHT}, start={"val": Answers.of(COLLAPSED)}, steps=rising) == []  # as with TAID
    # Where the weights are so large that nothing moves any more, the loss shows nothing.
    stuck = losses([6.5, *[6.1] * 29], lr=1e6)
    found = concerns({"val": COLLAPSED}, start={"val": Answers.of(COLLAPSED)}, steps=stuck)
    assert found[0].kind == "diverged"
    assert "The learning rate is 1e+06" in found[0].seen
    assert "nothing learned" not in [one.kind for one in found]  # which would ask for a larger one


def test_the_start_is_read_from_the_records_of_a_run() -> None:
    line = {"step": 0, "split": "val", "count": 200, "accuracy": 0.3, "predicted": {"a": 7, "b": 193, "c": 0}}
    known = start_of([json.loads(json.dumps(one)) for one in (line, {**line, "step": 20})])
    assert known["val"] == Answers.of(COLLAPSED)
    del line["predicted"]  # an earlier release
    assert not start_of([line])["val"].same(Answers.of(COLLAPSED))
    assert "below the start" in kinds({"val": COLLAPSED}, start={"val": Answers(0.41, {})})
    # 30 % of 200 rows against 35 %: chance explains it
    assert "below the start" not in kinds({"val": COLLAPSED}, start={"val": Answers(0.35, {})})
