"""Evaluation of real networks, against transformers' own generate on one whole prompt at a time."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import pytest

from gatespace import evaluation
from gatespace.config import EvaluationConfig
from gatespace.errors import UsageError
from gatespace.evaluation import Evaluation, LabelProbabilities, calibrate, measure
from gatespace.tasks import Prompt, Task, load_task, parse_label

if TYPE_CHECKING:
    from gatespace.models import Model


SETTINGS = ("limit", "max_new_tokens", "batch_size")


def evaluate(model: Model, task: Task, prompt: Prompt, **options: Any) -> Evaluation:
    settings = EvaluationConfig(**{name: options.pop(name) for name in SETTINGS if name in options})
    return evaluation.evaluate(model, task, prompt, settings, **options)


def check_raw(raw: str, model: Model, prompt: Prompt, text: str, max_new_tokens: int) -> None:
    """`raw` is what generate writes, or its start up to the end of a JSON object."""
    answer = generated(model, prompt, text, max_new_tokens)
    assert answer.startswith(raw)
    assert raw == answer or "}" in raw[-3:]


def generated(model: Model, prompt: Prompt, text: str, max_new_tokens: int) -> str:
    import torch

    ids = torch.tensor([prompt.render(model.tokenizer, text)])
    output = model.network.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(model.end_ids),
        pad_token_id=model.pad_id,
        # rows of the head that are no tokens
        suppress_tokens=[*range(model.vocab_size, len(model.head.weight))] or None,
    )
    written: str = model.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return written


@pytest.fixture(scope="module")
def whole(trained: Model, task: Task, prompt: Prompt) -> Evaluation:
    return evaluate(trained, task, prompt, split="test")


def test_predictions_are_those_of_generate(trained: Model, task: Task, prompt: Prompt, whole: Evaluation) -> None:
    assert len(whole.predictions) == len(task.test) == 80
    for index, (row, said) in enumerate(zip(task.test, whole.predictions, strict=True)):
        assert (said.index, said.text, said.gold) == (index, row.text, row.label)
        check_raw(said.raw, trained, prompt, row.text, 32)
        assert said.response == json.loads(prompt.prefill + said.raw)["label"]
        assert said.ended


def test_the_measures_are_counted_over_all_rows(task: Task, whole: Evaluation) -> None:
    right = sum(said.response == row.label for row, said in zip(task.test, whole.predictions, strict=True))
    found = whole.metrics.labels
    assert found is not None
    assert (found.correct, whole.metrics.count, whole.metrics.score) == (right, 80, right / 80)
    # Neither perfect nor blind, or the comparisons here would say little.
    assert found.best_constant.accuracy + 0.1 < found.accuracy < 1
    assert found.best_constant == task.best_constant("test")
    assert [row.label for row in found.per_label] == list(task.labels)
    assert (whole.task, whole.task_digest, whole.split, whole.available) == (task.name, task.digest, "test", 80)
    # No text of the generated task stands twice.
    assert (whole.duplicates, whole.without_duplicates, whole.not_applicable) == (0, whole.metrics, "")


def test_probabilities_of_labels_are_those_of_the_network(
    trained: Model, task: Task, prompt: Prompt, whole: Evaluation
) -> None:
    import torch

    found = evaluate(trained, task, prompt, split="test", probabilities=True)
    assert [replace(row, probabilities=None, mass=None) for row in found.predictions] == whole.predictions
    for row in found.predictions[:5]:
        asked, log_probs = prompt.render(trained.tokenizer, row.text), {}
        for label in task.labels:
            said = trained.tokenizer.encode(prompt.gold_response(label), add_special_tokens=False)
            with torch.no_grad():
                logits = trained.network(input_ids=torch.tensor([[*asked, *said]])).logits[0]
            each = logits[len(asked) - 1 : -1, : trained.vocab_size].double().log_softmax(-1)
            log_probs[label] = float(each.gather(1, torch.tensor(said)[:, None]).sum())
        raw = {label: math.exp(one) for label, one in log_probs.items()}
        assert row.mass == pytest.approx(sum(raw.values()), rel=1e-5)
        assert row.probabilities == pytest.approx({label: p / row.mass for label, p in raw.items()}, rel=1e-4, abs=1e-7)
    likely = [LabelProbabilities(row.probabilities or {}, row.mass or 0.0) for row in found.predictions]
    assert found.calibration == calibrate([row.label for row in task.test], likely)
    assert found.calibration is not None
    # What it writes is what it holds for the most probable, in a task whose labels it can spell.
    assert found.calibration.accuracy == pytest.approx(whole.metrics.score, abs=0.05)
    assert found.as_json() == {**whole.as_json(), "calibration": found.calibration.as_json()}
    assert "calibration" not in whole.as_json()
    assert "probabilities" not in whole.predictions[0].as_json()


def test_samples_have_the_probabilities_of_their_labels(
    trained: Model, task: Task, prompt: Prompt, whole: Evaluation
) -> None:
    from gatespace.rollout import Draws

    draws = Draws(count=20, seed=3)
    found = evaluate(trained, task, prompt, split="test", probabilities=True, draws=draws, batch_size=200)
    assert [row.raw for row in found.predictions] == [row.raw for row in whole.predictions]
    expected, variance, met = 0.0, 0.0, 0
    for row in found.predictions:
        assert row.samples is not None
        assert row.probabilities is not None
        assert row.mass is not None
        right = row.probabilities[row.gold] * row.mass
        expected += 20 * right
        variance += 20 * right * (1 - right)
        met += row.samples.count(row.gold)
        assert len(row.samples) == 20
    assert abs(met - expected) < 4 * math.sqrt(variance)
    assert variance > 100  # enough of chance for the comparison to fail
    sampled = found.sampled
    assert sampled is not None
    each = [fmean((row.samples or ())[k] == row.gold for row in found.predictions) for k in range(20)]
    assert all(row.sample_scores == tuple(one == row.gold for one in row.samples or ()) for row in found.predictions)
    assert (sampled.samples, sampled.accuracy, sampled.sd) == (
        20,
        pytest.approx(met / 1600),
        pytest.approx(stdev(each)),
    )
    # A sample is a function of its stream, whatever is decoded beside it.
    few = evaluate(trained, task, prompt, split="test", draws=replace(draws, count=3), limit=9, batch_size=4)
    assert [row.samples for row in few.predictions] == [(row.samples or ())[:3] for row in found.predictions[:9]]
    assert found.as_json()["sampled"]["seed"] == 3
    assert "samples" not in whole.predictions[0].as_json()


def test_the_best_constant_is_that_of_the_split(trained: Model, task: Task, prompt: Prompt) -> None:
    rare = Counter(row.label for row in task.train).most_common()[-1][0]
    only = [row for row in task.test if row.label == rare][:3]
    found = evaluate(trained, replace(task, test=only), prompt).metrics.labels
    assert found is not None
    assert found.best_constant == (rare, 1.0)


def test_batches_and_encoder_change_nothing(trained: Model, task: Task, prompt: Prompt, whole: Evaluation) -> None:
    from gatespace.models.encode import Encoder

    asked: list[str] = []

    class Noting(Encoder):
        def suffix(self, text: str) -> list[int]:
            asked.append(text)
            return super().suffix(text)

    encoder = Noting(prompt, trained.tokenizer, [row.text for row in (*task.train, *task.test)])
    plain = Encoder(prompt, trained.tokenizer, [], share=False)
    calls: list[tuple[int, int]] = []
    seven = evaluate(trained, task, prompt, batch_size=7, encoder=encoder, progress=lambda *at: calls.append(at))
    assert seven == whole
    assert sorted(asked) == sorted(row.text for row in task.test)
    assert evaluate(trained, task, prompt, encoder=plain) == whole
    done = [count for count, _ in calls]
    assert done == sorted(set(done))
    assert calls[-1] == (80, 80)


@pytest.mark.parametrize("limit", [1, 9, 80, 1000])
def test_limit_takes_the_first_rows(limit: int, trained: Model, task: Task, prompt: Prompt, whole: Evaluation) -> None:
    part = evaluate(trained, task, prompt, limit=limit)
    assert part.predictions == whole.predictions[:limit]
    assert part.metrics.count == min(limit, 80)
    assert part.available == 80


def test_rows_that_also_stand_in_train(trained: Model, task: Task, prompt: Prompt, whole: Evaluation) -> None:
    test = [*task.train[:3], *task.test[:10], *task.train[3:5], *task.test[10:]]
    mixed = replace(task, test=test)
    found = evaluate(trained, mixed, prompt)
    assert found.duplicates == 5
    assert found.metrics.count == 85
    # what is left are the rows of the task as it was
    assert found.without_duplicates == whole.metrics
    first = evaluate(trained, mixed, prompt, limit=4)
    assert (first.metrics.count, first.duplicates) == (4, 3)
    assert first.without_duplicates is not None
    assert first.without_duplicates.count == 1
    none_left = evaluate(trained, mixed, prompt, limit=3)
    assert none_left.without_duplicates is None
    assert none_left.as_json()["without_duplicates"] == {"status": "n/a", "reason": "every text also occurs in train"}


@pytest.mark.parametrize("split", ["train", "val"])
def test_other_splits_are_not_held_against_train(split: str, trained: Model, task: Task, prompt: Prompt) -> None:
    found = evaluate(trained, task, prompt, split=split, limit=6)
    assert [said.text for said in found.predictions] == [row.text for row in task.rows(split)[:6]]
    assert (found.duplicates, found.without_duplicates) == (0, None)
    assert found.as_json()["without_duplicates"] == {"status": "n/a", "reason": f"{split} is not compared with train"}


def test_an_answer_that_is_cut_off_is_wrong(trained: Model, task: Task, prompt: Prompt) -> None:
    # every label of the task has two words, so none of them is whole after one token
    found = evaluate(trained, task, prompt, max_new_tokens=1, limit=20)
    assert [said.response for said in found.predictions] == [None] * 20
    assert not any(said.ended for said in found.predictions)
    assert {said.raw for said in found.predictions} <= {"good", "bad", "open"}
    assert found.metrics.labels is not None
    assert (found.metrics.labels.parse_failures, found.metrics.labels.parsed, found.metrics.score) == (20, 0.0, 0.0)
    assert found.metrics.count == 20
    assert found.max_new_tokens == found.as_json()["max_new_tokens"] == 1


def test_a_model_that_has_learnt_nothing(blank: Model, task: Task, prompt: Prompt) -> None:
    found = evaluate(blank, task, prompt, max_new_tokens=12, limit=10)
    for said in found.predictions:
        check_raw(said.raw, blank, prompt, said.text, 12)
    failures = sum(said.response is None for said in found.predictions)
    assert failures > 0
    assert found.metrics.labels is not None
    assert found.metrics.labels.parse_failures == failures
    assert found.metrics.count == 10


@pytest.mark.parametrize(
    "options, message",
    [
        ({"split": "tests"}, "unknown split 'tests'"),
        ({"split": "val"}, "has no val rows"),
        ({"prompt": Prompt("x", ("good news", "bad news"))}, "asks for other labels"),
    ],
)
def test_errors(options: dict[str, object], message: str, blank: Model, task: Task, prompt: Prompt) -> None:
    values: dict[str, object] = {"model": blank, "task": replace(task, val=[]), "prompt": prompt, **options}
    with pytest.raises(UsageError, match=message):
        evaluate(**values)  # type: ignore[arg-type]


def test_an_encoder_of_another_prompt(blank: Model, task: Task, prompt: Prompt) -> None:
    from gatespace.models.encode import Encoder

    other = Encoder(Prompt.of(task, "", brief=True), blank.tokenizer, [])
    with pytest.raises(UsageError, match="another prompt"):
        evaluate(blank, task, prompt, encoder=other)


@pytest.mark.slow
def test_real_tweets_and_a_real_model(short_smollm2: Path, tweeteval: Path) -> None:
    from gatespace.models import load_model

    task = load_task("tweeteval/emotion", tweeteval)
    model = load_model(str(short_smollm2))
    for prefill in ('{"label": "', ""):
        prompt = Prompt.of(task, prefill)
        found = evaluate(model, task, prompt, limit=3, max_new_tokens=10, batch_size=2)
        assert found.available == 1421
        for row, said in zip(task.test, found.predictions, strict=False):
            check_raw(said.raw, model, prompt, row.text, 10)
        labels = [parse_label(prefill + said.raw, task.labels) for said in found.predictions]
        assert [said.response for said in found.predictions] == labels
        assert found.metrics.labels == measure([row.label for row in task.test[:3]], labels, task.labels).labels
