"""Metrics of free-text responses: the mean score of a split, truncation, length and corpus-level figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import stdev
from typing import Any

from gatespace.errors import UsageError
from gatespace.tasks.scores import find_metric, mean


@dataclass(frozen=True, slots=True)
class TextPrediction:
    """The response to one prompt.

    Args:
        index: Row index in the split.
        text: The user turn, or the conversation as JSON.
        references: Reference responses.
        raw: The response, without the prefill.
        response: The part of it that was scored.
        score: By the task's metric, from 0 to 1.
        also: Additional metric → score.
        tokens: Length of the response.
        ended: Whether the model ended the response itself, before the cap.
        samples: Scores of sampled responses, if requested.
    """

    index: int
    text: str
    references: tuple[str, ...]
    raw: str
    response: str
    score: float
    also: Mapping[str, float]
    tokens: int
    ended: bool
    samples: tuple[float, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return plain values, without what was not requested."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class TextMetrics:
    """Metrics of a list of responses.

    Args:
        metric: Name of the task's metric.
        score: Mean score.
        count: Responses.
        truncated: Share of responses truncated at the cap on new tokens.
        length: Mean response length in tokens.
        also: Additional metric → mean score.
        figures: Corpus-level figures of the split, e.g. corpus_bleu.
        sd: SD of the score over responses; None for a single one.
    """

    metric: str
    score: float
    count: int
    truncated: float
    length: float
    also: dict[str, float]
    figures: dict[str, float]
    sd: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return plain dictionaries and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TextMetrics:
        """Build from the output of `as_json`."""
        return cls(**{field.name: record[field.name] for field in fields(cls) if field.name in record})


def measure_text(metric: str, predictions: Sequence[TextPrediction]) -> TextMetrics:
    """Aggregate responses scored by `metric` and by the additional metrics that each of them has."""
    if not predictions:
        raise UsageError("there is nothing to measure", got="no rows", why="a mean of no rows is not a number")
    also = list(predictions[0].also)
    figures: dict[str, float] = {}
    for name in (metric, *also):
        if (corpus := find_metric(name).figures) is not None:
            figures |= corpus([row.response for row in predictions], [row.references for row in predictions])
    return TextMetrics(
        metric=metric,
        score=mean([row.score for row in predictions]),
        count=len(predictions),
        truncated=mean([not row.ended for row in predictions]),
        length=mean([row.tokens for row in predictions]),
        also={name: mean([row.also[name] for row in predictions]) for name in also},
        figures=figures,
        sd=stdev([row.score for row in predictions]) if len(predictions) > 1 else None,
    )
