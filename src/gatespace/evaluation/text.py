"""How good free-text responses are: the mean score of a split, and what a user should know beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from gatespace.errors import UsageError
from gatespace.tasks.scores import find_metric, mean


@dataclass(frozen=True, slots=True)
class TextPrediction:
    """The response to one prompt.

    Args:
        index: The row's place in its split.
        text: The user's turn, or the conversation as JSON.
        references: The responses that would be right.
        raw: What the model wrote after the prefill.
        response: What of it was judged.
        score: By the task's metric, from 0 to 1.
        also: Further metric → score.
        tokens: The length of the response.
        ended: Whether it stopped by itself, not at the cap.
        samples: The scores of sampled responses, where these were asked for.
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
        """Plain values; without what was not asked for."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class TextMetrics:
    """The measures of a list of responses.

    Args:
        metric: The name of the task's metric.
        score: The mean of its scores.
        count: Responses.
        truncated: The share of responses that the cap on new tokens ended.
        length: Mean tokens of a response.
        also: Further metric → mean of its scores.
        figures: Figures of the split as a whole, e.g. corpus_bleu.
    """

    metric: str
    score: float
    count: int
    truncated: float
    length: float
    also: dict[str, float]
    figures: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """Plain dictionaries and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TextMetrics:
        """From what `as_json` gave."""
        return cls(**{field.name: record[field.name] for field in fields(cls)})


def measure_text(metric: str, predictions: Sequence[TextPrediction]) -> TextMetrics:
    """Summarise responses that were judged by `metric`, and by the further metrics that each of them has."""
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
    )
