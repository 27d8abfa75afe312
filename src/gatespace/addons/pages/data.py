"""What the page knows: runs, points with their accuracies, and recorded tokens in columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, stdev
from typing import Any

from gatespace.addons.pages.sources import TOKENS, Found, Run
from gatespace.files import read
from gatespace.gating.coefficients import SATURATION, Gate, named_points

__all__ = ["MOST_TOKENS", "SCHEMA", "payload", "wilson"]

SCHEMA = 1
"""Of the page's data; `web/src/explorer/data.ts` reads the same one."""
MOST_TOKENS = 50_000
"""Tokens that a page holds unless it is told otherwise: about 8 MB."""
BINS = 20
_PAPER = ("h", "u", "gap")
_OTHER = ("lam", "forward_kl", "reverse_kl")
_NO_SIGNALS = frozenset({*_PAPER, *_OTHER, "loss", "tail_mass", "weight"})
_COURSE = ("loss", "lam_mean", "lam_sd", "lam_saturated", "forward_kl", "reverse_kl", "h", "u", "gap", "grad_norm")
_COURSE_POINTS = 240
_NONE = -1
_CONFIDENCE = 0.95


def payload(found: Found, *, gates: Sequence[Gate] = (), most_tokens: int = MOST_TOKENS, version: str = "") -> Any:
    """All that the page is made of, as values that JSON knows.

    Args:
        found: The runs.
        gates: Where the page starts; none: at the gate of the first run that has one.
        most_tokens: Of more, responses are left out, as many of each run and evenly over its steps.
        version: Of gatespace.
    """
    recorded = [read(run.folder / TOKENS) for run in found.runs]
    kept = [_thinned(records, share) for records, share in zip(recorded, _shares(recorded, most_tokens), strict=True)]
    table = _Table(_further(kept))
    for index, records in enumerate(kept):
        for record in records:
            table.add(index, record)
    return {
        "schema": SCHEMA,
        "version": version,
        "title": found.title,
        "kind": found.kind,
        "saturation": SATURATION,
        "bins": BINS,
        "points": {name: _gate(gate) for name, gate in named_points().items()},
        "start": [_gate(gate) for gate in gates],
        "runs": [
            _run(run, shown=len(few), of=len(all_)) for run, few, all_ in zip(found.runs, kept, recorded, strict=True)
        ],
        "marks": _marks(found.runs),
        **table.columns(),
    }


# ---------------------------------------------------------------------- runs and points


def _run(run: Run, *, shown: int, of: int) -> dict[str, Any]:
    return {
        "id": run.id,
        "label": run.label,
        "task": run.task,
        "kind": run.kind,
        "seed": run.seed,
        "gate": None if run.gate is None else _gate(run.gate),
        "top_k": run.top_k,
        "entropy": run.entropy,
        "steps": run.steps,
        "done": run.done,
        "shown": shown,
        "recorded": of,
        "lam": _lam(run.lam),
        "scores": {split: _score(score) for split, score in run.scores.items()},
        "course": _course(read(run.folder / "metrics.jsonl")),
    }


def _gate(gate: Gate) -> dict[str, Any]:
    """JSON lacks infinity, which c of a static λ of 0 or 1 has: it is text then."""
    values = [value if math.isfinite(value) else str(value) for value in gate.abcd]
    return {"abcd": values, "extra": dict(gate.extra)}


def _lam(lam: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if lam is None or lam.get("lam_mean") is None:
        return None
    return {
        "mean": lam["lam_mean"],
        # Runs of earlier releases lack some of these.
        **{name: lam.get(f"lam_{name}") for name in ("sd", "saturated", "rkl_mean")},
        "tokens": lam.get("tokens"),
    }


def _score(score: Any) -> dict[str, Any]:
    low, high = wilson(score.correct, score.count)
    return {
        "accuracy": score.accuracy,
        "correct": score.correct,
        "count": score.count,
        "low": low,
        "high": high,
        "macro_f1": score.macro_f1,
        "majority": score.majority,
    }


def wilson(correct: int, count: int, *, confidence: float = _CONFIDENCE) -> tuple[float, float]:
    """Wilson's interval of a share.

    Example:
        >>> [round(end, 3) for end in wilson(9, 20)]
        [0.258, 0.658]
    """
    if count == 0:
        return 0.0, 1.0
    z, share = NormalDist().inv_cdf((1 + confidence) / 2), correct / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return max(0.0, centre - reach), min(1.0, centre + reach)


def _marks(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The points that runs were trained at, with what came of it: all seeds of a point are one mark."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((run.task, run.label, run.kind), []).append(index)
    found = []
    for (task, label, kind), members in groups.items():
        # A twin has the mean λ of its own seed, so its runs are at places of their own: the first stands for all.
        gate = next((runs[i].gate for i in members if runs[i].gate is not None), None)
        found.append(
            {
                "label": label,
                "task": task,
                "kind": kind,
                "gate": None if gate is None else _gate(gate),
                "runs": members,
                **_accuracy([runs[i] for i in members]),
            }
        )
    return found


def _accuracy(runs: Sequence[Run]) -> dict[str, Any]:
    done = [run for run in runs if run.scores]
    split = next((split for split in ("test", "val") if done and all(split in run.scores for run in done)), None)
    if split is None:
        return {"split": None, "accuracy": None, "low": None, "high": None, "interval": ""}
    scores = [run.scores[split] for run in done]
    shares = [score.accuracy for score in scores]
    if len(scores) == 1:
        (low, high), how = wilson(scores[0].correct, scores[0].count), f"over {scores[0].count} texts, one seed"
    else:
        ends = _t_interval(shares)
        how = f"over {len(shares)} seeds"
        if ends is None:
            return {"split": split, "accuracy": fmean(shares), "low": None, "high": None, "interval": how}
        low, high = ends
    return {"split": split, "accuracy": fmean(shares), "low": low, "high": high, "interval": how}


def _t_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's interval of a mean; None where scipy, which comes with studies, is not installed."""
    try:
        from scipy import stats  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        return None
    reach = float(stats.t.ppf((1 + _CONFIDENCE) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return max(0.0, fmean(values) - reach), min(1.0, fmean(values) + reach)


def _course(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Numbers of the steps; of a long run, steps at even distances and the last."""
    stride = max(1, math.ceil(len(records) / _COURSE_POINTS))
    few = [record for place, record in enumerate(records) if place % stride == 0 or place == len(records) - 1]
    names = [name for name in _COURSE if any(record.get(name) is not None for record in few)]
    return {"step": [record["step"] for record in few], **{n: [_short(record.get(n)) for record in few] for n in names}}


# ---------------------------------------------------------------------- tokens


def _shares(recorded: Sequence[Sequence[Mapping[str, Any]]], most: int) -> list[float]:
    """The share of each run's tokens that has room: runs that have little keep all of it."""
    sizes = [sum(len(record["ids"]) for record in records) for records in recorded]
    left, room = most, {}
    for place, index in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        room[index] = min(sizes[index], left // (len(sizes) - place))
        left -= room[index]
    return [room[index] / size if size else 1.0 for index, size in enumerate(sizes)]


def _thinned(records: Sequence[Mapping[str, Any]], share: float) -> list[Mapping[str, Any]]:
    """So many of the responses, at even distances."""
    if share >= 1.0:
        return list(records)
    return [one for place, one in enumerate(records) if int((place + 1) * share) > int(place * share)]


def _further(kept: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    names = {name for records in kept for record in records for name in record["values"]}
    return sorted(names - _NO_SIGNALS)


class _Table:
    """Responses and tokens as columns. A text is kept once and known by its number."""

    def __init__(self, further: Sequence[str]) -> None:
        self._further = further
        self._strings: dict[str, int] = {}
        self._responses: dict[str, list[Any]] = {
            name: []
            for name in ("run", "step", "row", "text", "gold", "label", "source", "ended", "start")
        }  # fmt: skip
        self._tokens: dict[str, list[Any]] = {name: [] for name in ("text", *_PAPER, *_OTHER, *further)}
        self._top: dict[str, list[Any]] = {"teacher": [], "teacher_p": [], "student": [], "student_p": []}
        self._most = 0

    def add(self, run: int, record: Mapping[str, Any]) -> None:
        """One line of tokens.jsonl."""
        of = self._responses
        of["run"].append(run)
        of["step"].append(record["step"])
        of["row"].append(record["row"])
        of["text"].append(self._string(record.get("text")))
        of["gold"].append(self._string(record.get("gold")))
        of["label"].append(self._string(record.get("label")))
        of["source"].append(self._string(record.get("source", "student")))
        of["ended"].append(int(bool(record.get("ended"))))
        of["start"].append(len(self._tokens["text"]))
        count, values = len(record["tokens"]), record["values"]
        self._tokens["text"] += [self._string(text) for text in record["tokens"]]
        for name in (*_PAPER, *_OTHER, *self._further):
            self._tokens[name] += values.get(name) or [None] * count
        for who in ("teacher", "student"):
            for choices in record[f"{who}_top"]:
                self._most = max(self._most, len(choices))
                self._top[who].append([self._string(text) for text, _ in choices])
                self._top[f"{who}_p"].append([p for _, p in choices])

    def columns(self) -> dict[str, Any]:
        """Everything that was added."""

        def flat(rows: Sequence[Sequence[Any]], fill: Any) -> list[Any]:
            return [value for row in rows for value in (*row, *[fill] * (self._most - len(row)))]

        top = {who: flat(rows, None if who.endswith("_p") else _NONE) for who, rows in self._top.items()}
        return {
            "signals": [*_PAPER, *self._further],
            "strings": list(self._strings),
            "responses": self._responses,
            "tokens": self._tokens,
            "top": {"count": self._most, **top},
        }

    def _string(self, text: str | None) -> int:
        return _NONE if text is None else self._strings.setdefault(text, len(self._strings))


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else value
