"""Evaluate a model's greedy responses on a split, and write predictions and metrics to files.

Imports without torch, so that results can be read without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from gatespace.errors import UsageError
from gatespace.evaluation.calibration import Calibration, LabelProbabilities, Rows, calibrate
from gatespace.evaluation.metrics import Metrics, Prediction
from gatespace.files import atomic_write
from gatespace.runs import RunFolder
from gatespace.tasks.data import Example, Task
from gatespace.tasks.prompt import Prompt

if TYPE_CHECKING:
    from gatespace.config import EvaluationConfig
    from gatespace.models.encode import Encoder
    from gatespace.models.load import Model
    from gatespace.rollout import Answer, Draws

    Generate = Callable[..., list[Answer]]


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
    def of(cls, task: Task, predictions: Sequence[Prediction], draws: Draws) -> Sampled:
        """Compute from predictions."""
        scores = [row.sample_scores or () for row in predictions]
        means = [fmean(of_row[k] for of_row in scores) for k in range(draws.count)]
        missing = [response is None for row in predictions for response in row.samples or ()]
        return cls(
            samples=draws.count,
            temperature=draws.temperature,
            seed=draws.seed,
            accuracy=fmean(means),
            sd=stdev(means) if len(means) > 1 else None,
            no_label=fmean(missing) if task.labels else None,
        )


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
    metrics: Metrics
    duplicates: int
    without_duplicates: Metrics | None
    predictions: Sequence[Prediction]
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


def _rows(predictions: Sequence[Prediction]) -> Rows:
    likely = [LabelProbabilities(row.probabilities or {}, row.mass or 0.0) for row in predictions]
    return [row.gold for row in predictions], likely


def evaluate(
    model: Model,
    task: Task,
    prompt: Prompt,
    settings: EvaluationConfig | None = None,
    *,
    split: str = "test",
    probabilities: bool = False,
    draws: Draws | None = None,
    encoder: Encoder | None = None,
    generate: Generate | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Generate greedy responses to the rows of a split and score them.

    Args:
        model: The model.
        task: Provides and judges the rows.
        prompt: Formats the prompt and parses the answer.
        settings: `max_new_tokens`, `batch_size` and `limit` (the first rows may not be representative); None: defaults.
        split: ``train``, ``val`` or ``test``.
        probabilities: Also compute label probabilities and calibration; label tasks only.
        draws: Also sample answers, which share the forward pass over the prompt, and score them.
        encoder: Encoded prompt, if the caller already has one that covers these texts.
        generate: Answers texts in place of `rollout.greedy`, with its arguments: a vLLM server, or several processes.
        progress: Called with the number of texts done and the total.
    """
    available = task.rows(split)
    if not available:
        raise UsageError(f"{task.name} has no {split} rows to evaluate on", got=task.source or None)
    if prompt.labels != task.labels:
        raise UsageError(
            "the prompt asks for other labels than the task has",
            got=f"{', '.join(prompt.labels)}; {task.name} has {', '.join(task.labels)}",
            instead="Prompt.of(task)",
        )
    if probabilities and not task.labels:
        raise UsageError("only labels have probabilities", got=f"{task.name}, whose responses are free text")
    if encoder is not None and encoder.prompt != prompt:
        raise UsageError("the encoder was made for another prompt", instead="encoder=None")

    from gatespace.config import EvaluationConfig
    from gatespace.models.encode import Encoder
    from gatespace.rollout import greedy

    settings = settings or EvaluationConfig()
    rows = available[: settings.limit_of(split)]
    texts = [prompt.text(row) for row in rows]
    encoder = encoder or Encoder(prompt, model.tokenizer, texts)
    if not prompt.closes:
        encoder.check(rows, model.window, settings.max_new_tokens)
    answers = (generate or greedy)(
        model,
        encoder,
        texts,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        progress=progress,
        labels=probabilities,
        draws=draws,
    )
    predictions = [
        _prediction(task, prompt, index, row, answer, sampled=draws is not None)
        for index, (row, answer) in enumerate(zip(rows, answers, strict=True))
    ]
    compared = split == "test"
    duplicates = {index for index in task.test_in_train if index < len(rows)} if compared else set()
    fresh = [row for row in predictions if row.index not in duplicates]
    calibration = None
    if probabilities:
        likely = _rows(predictions)
        calibration = calibrate(*likely, likely if split == "val" else None)
    return Evaluation(
        task=task.name,
        task_digest=task.digest,
        split=split,
        available=len(available),
        max_new_tokens=settings.max_new_tokens,
        metrics=Metrics.of(task, predictions),
        duplicates=len(duplicates),
        without_duplicates=Metrics.of(task, fresh) if compared and fresh else None,
        predictions=predictions,
        calibration=calibration,
        sampled=None if draws is None else Sampled.of(task, predictions, draws),
    )


def _prediction(task: Task, prompt: Prompt, index: int, row: Example, answer: Answer, *, sampled: bool) -> Prediction:
    response = prompt.parse(answer.text)
    likely = None if answer.labels is None else LabelProbabilities.of(prompt.labels, answer.labels)
    samples = tuple(map(prompt.parse, answer.samples)) if sampled else None
    return Prediction(
        index=index,
        text=row.text,
        references=row.references,
        response=response,
        score=task.judge(row, response),
        raw=answer.text,
        ended=answer.ended,
        tokens=len(answer.ids),
        also=task.judge_also(row, response),
        probabilities=None if likely is None else likely.probabilities,
        mass=None if likely is None else likely.mass,
        samples=samples,
        sample_scores=None if samples is None else tuple(task.judge(row, sample) for sample in samples),
    )


def write(evaluation: Evaluation, folder: str | Path) -> tuple[Path, Path]:
    """Write the predictions, then the metrics, each atomically. The same evaluation gives the same bytes."""
    run = RunFolder(folder)
    predictions, summary = run.predictions_file(evaluation.split), run.evaluation_file(evaluation.split)
    lines = [json.dumps(row.as_json(), sort_keys=True) + "\n" for row in evaluation.predictions]
    atomic_write(predictions, "".join(lines))
    # no sort_keys: labels keep the task's order
    atomic_write(summary, json.dumps(evaluation.as_json(), indent=2) + "\n")
    return predictions, summary
