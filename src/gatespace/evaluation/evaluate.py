"""A model's greedy responses to the rows of a split, what they are worth, and both as files.

Importing this needs no torch: reading results does not need what made them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from gatespace.errors import UsageError
from gatespace.evaluation.calibration import Calibration, LabelProbabilities, calibrate
from gatespace.evaluation.metrics import Metrics, measure
from gatespace.evaluation.text import TextMetrics, TextPrediction, measure_text
from gatespace.files import atomic_write
from gatespace.tasks.data import AnyTask, Task
from gatespace.tasks.prompt import AnyPrompt
from gatespace.tasks.text import TextTask

if TYPE_CHECKING:
    from gatespace.models.encode import Encoder
    from gatespace.models.load import Model
    from gatespace.rollout.greedy import Answer, Draws, Writer

    Share = Callable[[Sequence[str], Callable[[Sequence[str]], list[Answer]]], list[Answer]]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer to one text.

    Args:
        index: The row's place in its split.
        text: The text.
        gold: Its right label.
        label: The label in the answer; None if there is no legal one.
        raw: What the model wrote after the prefill.
        ended: Whether it stopped by itself, not at the cap.
        probabilities: Label → its probability among the labels, where that was asked for.
        mass: The probability that the model gives to the labels together.
        samples: The labels in sampled answers, where these were asked for.
    """

    index: int
    text: str
    gold: str
    label: str | None
    raw: str
    ended: bool
    probabilities: Mapping[str, float] | None = None
    mass: float | None = None
    samples: tuple[str | None, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values; without what was not asked for."""
        return {key: value for key, value in asdict(self).items() if value is not None or key not in _ASKED}


_ASKED = ("probabilities", "mass", "samples")
AnyPrediction = Prediction | TextPrediction


def _judged(row: AnyPrediction) -> list[float]:
    """The scores of sampled responses."""
    if isinstance(row, TextPrediction):
        return [*(row.samples or ())]
    return [float(label == row.gold) for label in row.samples or ()]


@dataclass(frozen=True)
class Sampled:
    """What sampled answers are worth.

    Args:
        samples: Of every text.
        temperature: Of sampling.
        seed: Of the random streams.
        accuracy: The mean over texts and samples; of free text, of the scores.
        sd: Standard deviation of the mean from one sample of all texts to another; None of one sample.
        no_label: The share of answers without a legal label; None of free text.
    """

    samples: int
    temperature: float
    seed: int
    accuracy: float
    sd: float | None
    no_label: float | None

    @classmethod
    def of(cls, predictions: Sequence[AnyPrediction], draws: Draws) -> Sampled:
        """Counted over predictions."""
        found = [_judged(row) for row in predictions]
        right = [fmean(scores[k] for scores in found) for k in range(draws.count)]
        labels = [label for row in predictions if isinstance(row, Prediction) for label in row.samples or ()]
        missing = fmean(label is None for label in labels) if labels else None
        sd = stdev(right) if len(right) > 1 else None
        return cls(draws.count, draws.temperature, draws.seed, fmean(right), sd, missing)


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation has found.

    Args:
        task: The task's name.
        task_digest: The hash of its rows, so that two evaluations can be seen to be of the same ones.
        split: ``train``, ``val`` or ``test``.
        available: Rows of the split; `metrics.count` of them, from the first, were evaluated.
        max_new_tokens: The cap on an answer.
        metrics: Over all evaluated rows.
        duplicates: The evaluated test rows whose text also stands in train; 0 for another split.
        without_duplicates: Over the other rows. None for another split than test, and if there are no others.
        predictions: In the order of the rows.
        calibration: What the probabilities of labels are worth, over all evaluated rows, where they were asked for.
        sampled: What sampled answers are worth, over all evaluated rows, where they were asked for.
    """

    task: str
    task_digest: str
    split: str
    available: int
    max_new_tokens: int
    metrics: Metrics | TextMetrics
    duplicates: int
    without_duplicates: Metrics | TextMetrics | None
    predictions: Sequence[AnyPrediction]
    calibration: Calibration | None = None
    sampled: Sampled | None = None

    @property
    def not_applicable(self) -> str:
        """Why there is no `without_duplicates`; empty if there is."""
        if self.without_duplicates is not None:
            return ""
        return "every text also occurs in train" if self.duplicates else f"{self.split} is not compared with train"

    def as_json(self) -> dict[str, Any]:
        """All but the predictions."""
        without = self.without_duplicates
        clean = {"status": "n/a", "reason": self.not_applicable} if without is None else without.as_json()
        return {
            "task": self.task,
            "task_digest": self.task_digest,
            "split": self.split,
            "available": self.available,
            "max_new_tokens": self.max_new_tokens,
            "ended": sum(row.ended for row in self.predictions),
            "metrics": self.metrics.as_json(),
            "duplicates": self.duplicates,
            "without_duplicates": clean,
            **({} if self.calibration is None else {"calibration": self.calibration.as_json()}),
            **({} if self.sampled is None else {"sampled": asdict(self.sampled)}),
        }


def evaluate(
    model: Model,
    task: AnyTask,
    prompt: AnyPrompt,
    *,
    split: str = "test",
    limit: int | None = None,
    max_new_tokens: int = 32,
    batch_size: int = 64,
    encoder: Encoder | None = None,
    progress: Callable[[int, int], None] | None = None,
    writer: Writer | None = None,
    share: Share | None = None,
    probabilities: bool = False,
    draws: Draws | None = None,
) -> Evaluation:
    """Let a model respond to the rows of a split, greedily, and judge its responses.

    Args:
        model: The model.
        task: Gives the rows, and judges.
        prompt: Asks, and reads the answer.
        split: ``train``, ``val`` or ``test``.
        limit: Only the first so many rows. The first rows of a split need not be like the rest.
        max_new_tokens: The cap on an answer.
        batch_size: Texts that are decoded together.
        encoder: The prompt in the ids of the model, if the caller has one that covers these texts.
        progress: Called with the number of texts done and of all.
        writer: Answers in place of the model, with its weights; a vLLM server, for one. Where two tokens are equally
            probable but for rounding, its answer may be another one.
        share: Divides texts among processes that all evaluate the same model; None: there are no others.
        probabilities: Look up the probability of every label too, and what these are worth; of labels only.
        draws: Sample answers too, which share the pass over their prompt, and count how often these are right.
    """
    if limit is not None and limit < 1:
        raise UsageError("limit is at least 1", got=limit, instead="None for all rows")
    if batch_size < 1:
        raise UsageError("batch_size is at least 1", got=batch_size)
    available = task.rows(split)
    if not available:
        raise UsageError(f"{task.name} has no {split} rows to evaluate on", got=task.source or None)
    if isinstance(task, Task) and prompt.labels != task.labels:
        raise UsageError(
            "the prompt asks for other labels than the task has",
            got=f"{', '.join(prompt.labels)}; {task.name} has {', '.join(task.labels)}",
            instead="Prompt.of(task)",
        )
    if probabilities and not isinstance(task, Task):
        raise UsageError("only labels have probabilities", got=f"{task.name}, whose responses are free text")
    if encoder is not None and encoder.prompt != prompt:
        raise UsageError("the encoder was made for another prompt", instead="encoder=None")

    from gatespace.models.encode import Encoder
    from gatespace.rollout import greedy

    rows = available[:limit]
    texts = [prompt.text(row) for row in rows]
    known_encoder = encoder or Encoder(prompt, model.tokenizer, texts)
    if not prompt.closes:
        known_encoder.check(rows, model.window, max_new_tokens)

    def answered(some: Sequence[str]) -> list[Answer]:
        return greedy(
            model,
            known_encoder,
            some,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            progress=progress,
            writer=writer,
            labels=probabilities,
            draws=draws,
        )

    answers = answered(texts) if share is None else share(texts, answered)
    likely = [LabelProbabilities.of(prompt.labels, one.labels) for one in answers if one.labels is not None]
    predictions = _predictions(task, prompt, rows, answers, likely, sampled=draws is not None)
    held_against_train = split == "test"
    known: set[int] = {index for index in task.test_in_train if index < len(rows)} if held_against_train else set()
    fresh = [row for row in predictions if row.index not in known]
    return Evaluation(
        task=task.name,
        task_digest=task.digest,
        split=split,
        available=len(available),
        max_new_tokens=max_new_tokens,
        metrics=_measured(predictions, task),
        duplicates=len(known),
        without_duplicates=_measured(fresh, task) if held_against_train and fresh else None,
        predictions=predictions,
        calibration=calibrate([row.gold for row in rows], likely) if likely else None,
        sampled=None if draws is None else Sampled.of(predictions, draws),
    )


def write(evaluation: Evaluation, folder: str | Path) -> tuple[Path, Path]:
    """Write ``predictions-<split>.jsonl`` and then ``evaluation-<split>.json``, each whole or not at all.

    The same evaluation gives the same bytes.
    """
    place = Path(folder)
    lines = [json.dumps(row.as_json(), sort_keys=True) + "\n" for row in evaluation.predictions]
    predictions = place / f"predictions-{evaluation.split}.jsonl"
    summary = place / f"evaluation-{evaluation.split}.json"
    atomic_write(predictions, "".join(lines))
    # The labels of a task have an order, so the keys stay in theirs.
    atomic_write(summary, json.dumps(evaluation.as_json(), indent=2) + "\n")
    return predictions, summary


def _predictions(
    task: AnyTask,
    prompt: AnyPrompt,
    rows: Sequence[Any],
    answers: Sequence[Answer],
    likely: Sequence[LabelProbabilities],
    *,
    sampled: bool,
) -> Sequence[AnyPrediction]:
    pairs = list(enumerate(zip(rows, answers, strict=True)))
    if isinstance(task, TextTask):
        responses = [prompt.parse(answer.text) or "" for answer in answers]
        return [
            TextPrediction(
                index=index,
                text=row.text,
                references=row.references,
                raw=answer.text,
                response=responses[index],
                score=task.judge(row, responses[index]),
                also=task.judge_all(row, responses[index]),
                tokens=len(answer.ids),
                ended=answer.ended,
                samples=tuple(task.judge(row, prompt.parse(one)) for one in answer.samples) if sampled else None,
            )
            for index, (row, answer) in pairs
        ]
    found = [
        Prediction(index, row.text, row.gold, prompt.parse(answer.text), answer.text, answer.ended)
        for index, (row, answer) in pairs
    ]
    if likely:
        known = zip(found, likely, strict=True)
        found = [replace(one, probabilities=of.probabilities, mass=of.mass) for one, of in known]
    if sampled:
        found = [
            replace(one, samples=tuple(prompt.parse(text) for text in answer.samples))
            for one, answer in zip(found, answers, strict=True)
        ]
    return found


def _measured(predictions: Sequence[Any], task: AnyTask) -> Metrics | TextMetrics:
    if not isinstance(task, Task):
        return measure_text(task.metric, predictions)
    gold = [row.gold for row in predictions]
    return measure(gold, [row.label for row in predictions], task.labels)
