"""Evaluate a model's greedy responses on a split, and write predictions and metrics to files.

Imports without torch, so that results can be read without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from gatespace.errors import UsageError
from gatespace.evaluation.calibration import Calibration, LabelProbabilities, Rows, calibrate
from gatespace.evaluation.metrics import Metrics, measure
from gatespace.evaluation.text import TextMetrics, TextPrediction, measure_text
from gatespace.files import atomic_write
from gatespace.runs import RunFolder
from gatespace.tasks.data import AnyTask, Task
from gatespace.tasks.prompt import AnyPrompt
from gatespace.tasks.text import TextTask

if TYPE_CHECKING:
    from gatespace.models.encode import Encoder
    from gatespace.models.load import Model
    from gatespace.rollout import Answer, Draws, Sampler

    Share = Callable[[Sequence[str], Callable[[Sequence[str]], list[Answer]]], list[Answer]]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer to one text.

    Args:
        index: Row index in the split.
        text: The text.
        gold: Gold label.
        label: Label in the answer; None if there is no legal one.
        raw: The response, without the prefill.
        ended: Whether the model ended the response itself, before the cap.
        probabilities: Label → probability among the labels, if requested.
        mass: Total probability of the labels.
        samples: Labels in sampled answers, if requested.
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
        """Return plain values, without what was not requested."""
        return {key: value for key, value in asdict(self).items() if value is not None or key not in _ASKED}


_ASKED = ("probabilities", "mass", "samples")
AnyPrediction = Prediction | TextPrediction


def _judged(row: AnyPrediction) -> list[float]:
    """Scores of the sampled responses."""
    if isinstance(row, TextPrediction):
        return [*(row.samples or ())]
    return [float(label == row.gold) for label in row.samples or ()]


@dataclass(frozen=True)
class Sampled:
    """Metrics of sampled answers.

    Args:
        samples: Samples per text.
        temperature: Sampling temperature.
        seed: Seed of the random streams.
        accuracy: Mean over texts and samples; for free text, mean score.
        sd: Standard deviation, across samples, of the mean over all texts; None for a single sample.
        no_label: Share of answers without a legal label; None for free text.
    """

    samples: int
    temperature: float
    seed: int
    accuracy: float
    sd: float | None
    no_label: float | None

    @classmethod
    def of(cls, predictions: Sequence[AnyPrediction], draws: Draws) -> Sampled:
        """Compute from predictions."""
        found = [_judged(row) for row in predictions]
        right = [fmean(scores[k] for scores in found) for k in range(draws.count)]
        labels = [label for row in predictions if isinstance(row, Prediction) for label in row.samples or ()]
        missing = fmean(label is None for label in labels) if labels else None
        sd = stdev(right) if len(right) > 1 else None
        return cls(draws.count, draws.temperature, draws.seed, fmean(right), sd, missing)


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation.

    Args:
        task: Task name.
        task_digest: Hash of the task's rows, to tell whether two evaluations are of the same rows.
        split: ``train``, ``val`` or ``test``.
        available: Rows of the split; the first `metrics.count` of them were evaluated.
        max_new_tokens: Cap on response tokens.
        metrics: Over all evaluated rows.
        duplicates: Evaluated test rows whose text also occurs in train; 0 for other splits.
        without_duplicates: Metrics over the remaining rows. None for other splits, and if no rows remain.
        predictions: In row order.
        calibration: Calibration over all evaluated rows, if requested.
        sampled: Metrics of sampled answers over all evaluated rows, if requested.
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

    def judged_with(self, validation: Evaluation | None) -> Evaluation:
        """The same with a calibration whose label bias and thresholds of coverage come from the validation rows."""
        if self.calibration is None or validation is None or validation.calibration is None:
            return self
        calibration = calibrate(*_rows(self.predictions), _rows(validation.predictions))
        return replace(self, calibration=calibration)

    @property
    def not_applicable(self) -> str:
        """Why `without_duplicates` is None; empty if it is not."""
        if self.without_duplicates is not None:
            return ""
        return "every text also occurs in train" if self.duplicates else f"{self.split} is not compared with train"

    def as_json(self) -> dict[str, Any]:
        """Return everything except the predictions."""
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


def _rows(predictions: Sequence[Any]) -> Rows:
    likely = [LabelProbabilities(row.probabilities, row.mass) for row in predictions]
    return [row.gold for row in predictions], likely


def _calibrated(predictions: Sequence[Any], *, validates: bool) -> Calibration:
    rows = _rows(predictions)
    return calibrate(*rows, rows if validates else None)


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
    writer: Sampler | None = None,
    share: Share | None = None,
    probabilities: bool = False,
    draws: Draws | None = None,
) -> Evaluation:
    """Generate greedy responses to the rows of a split and score them.

    Args:
        model: The model.
        task: Provides and judges the rows.
        prompt: Formats the prompt and parses the answer.
        split: ``train``, ``val`` or ``test``.
        limit: Evaluate only the first `limit` rows, which may not be representative of the split.
        max_new_tokens: Cap on response tokens.
        batch_size: Texts decoded per batch.
        encoder: Encoded prompt, if the caller already has one that covers these texts.
        progress: Called with the number of texts done and the total.
        writer: Generates with the model's weights in its place, e.g. a vLLM server. Its answers may differ where two
            tokens are tied up to rounding.
        share: Splits texts among processes that evaluate the same model; None: single process.
        probabilities: Also compute label probabilities and calibration; label tasks only.
        draws: Also sample answers, which share the forward pass over the prompt, and score them.
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
        calibration=_calibrated(predictions, validates=split == "val") if likely else None,
        sampled=None if draws is None else Sampled.of(predictions, draws),
    )


def write(evaluation: Evaluation, folder: str | Path) -> tuple[Path, Path]:
    """Write ``predictions-<split>.jsonl``, then ``evaluation-<split>.json``, each atomically.

    The same evaluation gives the same bytes.
    """
    lines = [json.dumps(row.as_json(), sort_keys=True) + "\n" for row in evaluation.predictions]
    run, split = RunFolder(folder), evaluation.split
    predictions, summary = run.predictions_file(split), run.evaluation_file(split)
    atomic_write(predictions, "".join(lines))
    # no sort_keys: labels keep the task's order
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
