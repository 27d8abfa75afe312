"""Metrics of responses: a score from 0 to 1 for each, by name; a plugin can register its own."""

from __future__ import annotations

import importlib
import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

from gatespace.errors import RunError, UsageError, missing_extra, unknown_name

Score = Callable[[str, Sequence[str], Mapping[str, str]], float]
"""(response, references, columns of the row) → score from 0 to 1."""


def _any_reference(reference: str) -> str:
    return ""


@dataclass(frozen=True)
class Metric:
    """How responses are compared with references.

    Args:
        name: As in `task.text.metric`.
        score: Of one response.
        refuses: Why a reference cannot be compared with; "" if it can.
        figures: Name → figure of a whole split, which is not the mean of the responses' scores.
    """

    name: str
    score: Score
    refuses: Callable[[str], str] = _any_reference
    figures: Callable[[Sequence[str], Sequence[Sequence[str]]], dict[str, float]] | None = None

    def __call__(self, response: str, references: Sequence[str], columns: Mapping[str, str]) -> float:
        """The score, checked."""
        found: Any = self.score(response, references, _Columns(columns))
        try:
            score = float(found)
        except (TypeError, ValueError):
            score = math.nan
        if not 0.0 <= score <= 1.0:  # nan too
            raise RunError(f"metric {self.name}: a score is a number from 0 to 1", got=repr(found)[:80])
        return score


class _Columns(dict[str, str]):
    """The columns of a row, with an error for a metric that reads another."""

    def __missing__(self, name: str) -> str:
        raise UsageError(
            f"a metric reads a column that it is not given: {name!r}",
            got=f"columns {', '.join(map(repr, self))}",
            instead="name it in task.text.columns",
        )


_known: dict[str, Metric] = {}


def register_metric(name: str) -> Callable[[Score], Score]:
    """Make a function usable as ``task.text.metric`` in a configuration that lists its file under ``plugins``.

    The function gets the response, the references, and the row's columns (those of the template, of `answer`, and
    those that ``task.text.columns`` names), and returns a score from 0 to 1.

    Examples:
        >>> @register_metric("polite")
        ... def polite(response, references, columns):
        ...     return float("please" in response.casefold())
        >>> find_metric("polite")("Come in, please.", [], {})
        1.0
        >>> del _known["polite"]
    """

    def wrap(function: Score) -> Score:
        if name in _known:
            raise UsageError(f"the metric name {name!r} is taken", instead="another name")
        _known[name] = Metric(name, function)
        return function

    return wrap


def find_metric(name: str) -> Metric:
    """A metric by its name.

    Examples:
        >>> find_metric("number")("... so it is $1,250.", ["#### 1250"], {})
        1.0
        >>> round(find_metric("token_f1")("The cat sat.", ["a cat"], {}), 4)
        0.6667
    """
    if name not in _known:
        error = unknown_name("metric", name, _known)
        error.instead += "; if a plugin registers it, --plugin FILE"
        raise error
    found = _known[name]
    if name in _PACKAGES:
        _package(name)  # before anything is computed
    return found


def _built_in(name: str, **more: Any) -> Callable[[Callable[[str, str], float]], Callable[[str, str], float]]:
    """Register (response, reference) → score; the best of several references counts."""

    def wrap(function: Callable[[str, str], float]) -> Callable[[str, str], float]:
        def best(response: str, references: Sequence[str], columns: Mapping[str, str]) -> float:
            return max(function(response, reference) for reference in references)

        _known[name] = Metric(name, best, **more)
        return function

    return wrap


_PACKAGES = {"rouge_l": "rouge_score.rouge_scorer", "bleu": "sacrebleu", "chrf": "sacrebleu", "regex": "regex"}


@cache
def _package(metric: str) -> Any:
    name = _PACKAGES[metric]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        module = name.partition(".")[0].replace("_", "-")
        raise missing_extra(f"the metric {metric}", module=module, extra="text") from error


# ---------------------------------------------------------------------------------------------------- right or wrong

PATTERN_SECONDS = 1.0
"""A pattern can take for ever: `re` has no limit, `regex` has."""


@_built_in("accuracy")
def _accuracy(response: str, reference: str) -> float:
    """The same label."""
    return float(response == reference)


def _plain(text: str) -> str:
    return " ".join(text.split())


@_built_in("exact")
def _exact(response: str, reference: str) -> float:
    """Equal up to white space."""
    return float(_plain(response) == _plain(reference))


@_built_in("contains")
def _contains(response: str, reference: str) -> float:
    """The response contains the reference, up to case and white space."""
    return float(_plain(reference).casefold() in _plain(response).casefold())


def _no_pattern(reference: str) -> str:
    package = _package("regex")
    try:
        package.compile(reference)
    except (package.error, ValueError, OverflowError, RecursionError) as error:
        return f"it is not a regular expression: {error}"
    return ""


@_built_in("regex", refuses=_no_pattern)
def _regex(response: str, reference: str) -> float:
    """The reference is a regular expression that is found in the response, within a second."""
    try:
        return float(_package("regex").search(reference, response, timeout=PATTERN_SECONDS) is not None)
    except (TimeoutError, MemoryError, RecursionError):
        warnings.warn(
            f"metric regex: a response counts as wrong, because looking for {reference[:80]!r} in it takes more than "
            f"{PATTERN_SECONDS:g} s",
            RuntimeWarning,
            stacklevel=2,
        )
        return 0.0


_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")
_MARK = "####"


def number_in(text: str) -> Decimal | None:
    """The first number after the last ``####``, or else the last number; None without a number.

    Examples:
        >>> number_in("3 + 4 = 7, so #### 7 apples, not 9"), number_in("1,000.50 or -2"), number_in("none")
        (Decimal('7'), Decimal('-2'), None)
    """
    before, mark, after = text.rpartition(_MARK)
    found = _NUMBER.findall(after)
    if not found and mark:
        found = _NUMBER.findall(before)[-1:]
    if not found:
        return None
    try:
        return Decimal(found[0 if mark else -1].replace(",", ""))
    except InvalidOperation:  # far too many digits
        return None


@_built_in("number", refuses=lambda reference: "it has no number" if number_in(reference) is None else "")
def _number(response: str, reference: str) -> float:
    """The same number, however it is written."""
    return float(number_in(response) == number_in(reference))


# ---------------------------------------------------------------------------------------------------- overlap


def _words(text: str) -> list[str]:
    """Words as in SQuAD's evaluation: lower case, without punctuation and articles."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


@_built_in("token_f1")
def _token_f1(response: str, reference: str) -> float:
    """F1 of the words, each counted as often as it occurs."""
    own, right = _words(response), _words(reference)
    common = sum((Counter(own) & Counter(right)).values())
    if not own or not right:
        return float(own == right)
    return 2 * common / (len(own) + len(right))


@cache
def _rouge_scorer() -> Any:
    return _package("rouge_l").RougeScorer(["rougeL"], use_stemmer=False)


@_built_in("rouge_l")
def _rouge_l(response: str, reference: str) -> float:
    """ROUGE-L F1 of the package rouge-score, whose words are runs of ASCII letters and digits."""
    return float(_rouge_scorer().score(reference, response)["rougeL"].fmeasure)


def _sentence(name: str) -> Score:
    def score(response: str, references: Sequence[str], columns: Mapping[str, str]) -> float:
        found = getattr(_package(name), f"sentence_{name}")(response, list(references)).score
        return float(min(1.0, max(0.0, found / 100)))

    return score


def _corpus(name: str) -> Callable[[Sequence[str], Sequence[Sequence[str]]], dict[str, float]]:
    def figures(responses: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        most = max(map(len, references))
        # None where a row has fewer references than others
        streams = [[row[place] if place < len(row) else None for row in references] for place in range(most)]
        found = getattr(_package(name), f"corpus_{name}")(list(responses), streams).score
        return {f"corpus_{name}": min(1.0, max(0.0, found / 100))}

    return figures


for _name in ("bleu", "chrf"):
    _known[_name] = Metric(_name, _sentence(_name), figures=_corpus(_name))

METRICS = tuple(_known)
"""The built-in metrics."""


def mean(scores: Sequence[float]) -> float:
    """The mean, independent of score order."""
    return math.fsum(scores) / len(scores)
