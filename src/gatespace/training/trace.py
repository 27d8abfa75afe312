"""The metrics record of a step, collected from its tokens over micro-batches.

A record depends on the step's tokens alone. Sums are exactly rounded (`math.fsum`), so neither the order of the tokens
nor their division into micro-batches changes them. What depends on machine or time (seconds, cache hits) does not
belong here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gatespace.errors import UsageError
from gatespace.gating.coefficients import SATURATION, Gate
from gatespace.gating.loss import LossInputs, LossOutput, distillation_loss
from gatespace.gating.objectives import Gated
from gatespace.gating.tokens import TeacherTopK
from gatespace.gating.vocabulary import among, top_entries

__all__ = ["BINS", "NGRAM", "Trace", "agreement", "kappa_share", "kappa_squares", "repeated"]

BINS = 20
"""Bins of the λ histograms, of equal width over [0, 1]."""
NGRAM = 4
"""Length of the n-grams whose repetition is counted."""
_COLUMNS = ("weight", "forward_kl", "reverse_kl", "h", "u", "gap", "tail_mass")
_SPREAD = ("lam", "h", "u", "gap")
_RUN = {
    "steps": 0,
    "rows": 0,
    "tokens": 0,
    "lam_tokens": 0,
    "lam_sum": 0.0,
    "lam_centre": 0.0,  # mean of λ, and the sum of squares around it
    "lam_squares": 0.0,
    "lam_rkl": 0.0,  # Σ λ·RKL and Σ RKL over the tokens that have a λ
    "rkl": 0.0,
    "lam_saturated": 0,
}


class Trace:
    """Collects the metrics of one step at a time, and sums over the run.

    For every step: `begin`, `rollout` once, `add` per micro-batch, optionally `row` for single rows, `record`.

    Examples:
        >>> from gatespace import Gate, gated_kl
        >>> trace = Trace()
        >>> trace.begin(1)
        >>> trace.rollout(lengths=[2], ended=[True])
        >>> student, teacher = torch.zeros(1, 2, 4), torch.tensor([[[2.0, 0, 0, 0], [0.0, 0, 0, 0]]])
        >>> trace.add(gated_kl(student, teacher, gate=Gate.named("G5"), top_k=4), rows=[0, 0])
        >>> record = trace.record(grad_norm=0.5, lr=1e-6)
        >>> round(record["lam_mean"], 3), record["tokens"], trace.summary()["tokens"]
        (0.896, 2, 2)
    """

    def __init__(self) -> None:
        self._run: dict[str, Any] = {**_RUN, "lam_hist": [0] * BINS}
        self._step: int | None = None
        self._rows: list[int] = []
        self._weights: list[float] = []
        self._values: dict[str, list[float]] = {}
        self._lengths: list[int] = []
        self._ended: list[bool] = []
        self._log_probs: list[float] = []

    # ------------------------------------------------------------------ one step

    def begin(self, step: int) -> None:
        """Start step `step`, discarding what was collected before."""
        self._step = step
        self._clear()

    def rollout(
        self,
        *,
        lengths: Sequence[int],
        ended: Sequence[bool],
        log_probs: Sequence[Sequence[float] | None] | None = None,
    ) -> None:
        """Set the step's responses, all rows in order.

        Args:
            lengths: Tokens of each response.
            ended: Whether it ended by itself and not at the cap.
            log_probs: Of the sampled tokens under the sampler; None for a row that was not sampled from the student.
        """
        if len(lengths) != len(ended) or (log_probs is not None and len(log_probs) != len(lengths)):
            raise UsageError("lengths, ended and log_probs must be of the same rows", got=(len(lengths), len(ended)))
        self._lengths = list(lengths)
        self._ended = list(ended)
        self._log_probs = [float(value) for row in log_probs or () if row is not None for value in row]

    def add(
        self,
        out: LossOutput,
        *,
        rows: Tensor | Sequence[int],
        mask: Tensor | None = None,
        weights: Tensor | Sequence[float] | None = None,
        more: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add the tokens of a micro-batch.

        Args:
            out: Of the loss. Packed tokens have shape (1, N).
            rows: The row of each token within the step, in the shape of `out`'s tokens or flat. A row's tokens come
                in the order of its response and in one micro-batch.
            mask: The mask that the loss was given.
            weights: Those that the loss was given: a token counts as if repeated that often. None: once each.
            more: Further numbers per token whose mean is recorded, e.g. ``{"student_entropy": …}``.
        """
        if self._step is None:
            raise UsageError("Trace.add before Trace.begin")
        keep = None if mask is None else mask.reshape(-1).bool().cpu()
        index = torch.as_tensor(rows).reshape(-1).cpu()
        if index.numel() != out.per_token.numel():
            raise UsageError("rows must name a row for each token", got=f"{index.numel()}, {out.per_token.numel()}")
        columns: dict[str, Tensor | None] = {"loss": out.per_token, "lam": out.lam}
        columns |= {name: getattr(out, name) for name in _COLUMNS}
        columns |= {**out.signals, **(more or {})}
        often = torch.ones(index.numel()) if weights is None else torch.as_tensor(weights)
        self._rows.extend(_numbers(index, keep, torch.int64))
        self._weights.extend(_numbers(often, keep, torch.float64))
        for name, values in columns.items():
            if values is not None:
                self._values.setdefault(name, []).extend(_numbers(values, keep, torch.float64))
        for name, column in self._values.items():
            if len(column) != len(self._rows):
                raise UsageError(f"{name} is known for a part of the step's tokens only")

    def tokens(self) -> dict[str, Any]:
        """The step's tokens so far, for the trace of another process to `take`."""
        return {"rows": self._rows, "weights": self._weights, "values": self._values}

    def take(self, tokens: Mapping[str, Any]) -> None:
        """Add the step's tokens from another process, which has other rows."""
        if set(tokens["values"]) != set(self._values):
            raise UsageError("two processes know different numbers of a step's tokens", got=sorted(tokens["values"]))
        self._rows.extend(tokens["rows"])
        self._weights.extend(tokens["weights"])
        for name, column in self._values.items():
            column.extend(tokens["values"][name])

    def row(self, row: int) -> dict[str, list[float]]:
        """Per-token values of one row by name (loss, lam, h, …), until the next `begin`."""
        where = [place for place, one in enumerate(self._rows) if one == row]
        return {name: [column[place] for place in where] for name, column in self._values.items()}

    def record(
        self, *, grad_norm: float | None = None, lr: float | None = None, kappa_share: float | None = None, **more: Any
    ) -> dict[str, Any]:
        """Return the step's line of metrics.jsonl, and add the step to the run's sums.

        A number that does not exist is None, e.g. λ of an objective that has none.

        Args:
            grad_norm: Before clipping.
            lr: Learning rate of the step.
            kappa_share: See `kappa_share`; None if it was not measured.
            more: Further entries; they must not differ between two runs of the same configuration.
        """
        if self._step is None:
            raise UsageError("Trace.record before Trace.begin, or twice for a step")
        values, weights = self._values, self._weights
        lam = values.get("lam") or None
        tokens = _whole(_sum(weights))
        record: dict[str, Any] = {
            "step": self._step,
            "tokens": tokens,
            "rows": len(self._lengths),
            "loss": _mean(values.get("loss"), weights),
            "response_length": _mean(self._lengths),
            "ended": _mean(self._ended),
            "sampled_log_prob": _mean(self._log_probs),
            "grad_norm": grad_norm,
            "lr": lr,
            "kappa_share": kappa_share,
            "lam_mean": _mean(lam, weights),
            "lam_rkl_mean": _ratio(*self._by_reverse_kl(lam)) if lam else None,
            "tail_mass_max": max(_counting(values.get("tail_mass"), weights) or [0.0]),
        }
        for name in (*_COLUMNS, *sorted(set(values).difference(_COLUMNS, ("loss", "lam")))):
            record[name] = _mean(values.get(name), weights)
        for name in _SPREAD:
            record[f"{name}_sd"] = _sd(values.get(name), weights)
        record["lam_hist"] = _histogram(lam, weights) if lam else None
        saturated = _whole(_sum(_counting(weights, map(_saturated, lam)))) if lam else None
        record["lam_saturated"] = saturated / tokens if saturated is not None else None
        if clash := sorted(set(record).intersection(more)):
            raise UsageError("an entry of the record is given twice", got=", ".join(clash))
        self._count(lam, tokens, saturated or 0)
        self._step = None
        return {**record, **more}

    # ------------------------------------------------------------------ the whole run

    def summary(self) -> dict[str, Any]:
        """The run so far: steps, rows, tokens, and statistics of λ over all tokens.

        lam_rkl_mean weights each token by its reverse KL: Σ λ·RKL / Σ RKL, the constant λ that would have given reverse
        KL the same total. None unless Σ RKL is positive and finite.
        """
        run = self._run
        tokens = run["lam_tokens"]
        return {
            "steps": run["steps"],
            "rows": run["rows"],
            "tokens": run["tokens"],
            "lam_mean": run["lam_sum"] / tokens if tokens else None,
            "lam_sd": math.sqrt(run["lam_squares"] / tokens) if tokens else None,
            "lam_rkl_mean": _ratio(run["lam_rkl"], run["rkl"]),
            "lam_saturated": run["lam_saturated"] / tokens if tokens else None,
            "lam_hist": list(run["lam_hist"]) if tokens else None,
        }

    def state(self) -> dict[str, Any]:
        """Sums of the run, for a checkpoint; call it between `record` and the next `begin`."""
        return {**self._run, "lam_hist": list(self._run["lam_hist"])}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        if set(state) != set(self._run) or len(state["lam_hist"]) != BINS:
            raise UsageError(
                "this is not the state of a trace that this gatespace can resume from",
                got=", ".join(sorted(state)),
                instead="resume with the gatespace that wrote it, or remove the run's checkpoints to start it again",
            )
        self._run = {**state, "lam_hist": list(state["lam_hist"])}
        self._step = None
        self._clear()

    def _count(self, lam: list[float] | None, tokens: float, saturated: float) -> None:
        run, weights = self._run, self._weights
        run["steps"] += 1
        run["rows"] += len(self._lengths)
        run["tokens"] += tokens
        if lam:
            self._count_spread(lam, tokens)
            weighed, reverse = self._by_reverse_kl(lam)
            run["lam_rkl"] += weighed
            run["rkl"] += reverse
            run["lam_tokens"] += tokens
            run["lam_sum"] += _weighted(lam, weights)
            run["lam_saturated"] += saturated
            run["lam_hist"] = [old + new for old, new in zip(run["lam_hist"], _histogram(lam, weights), strict=True)]

    def _by_reverse_kl(self, lam: list[float]) -> tuple[float, float]:
        """Σ λ·RKL and Σ RKL over the step's tokens."""
        reverse = [one * weight for one, weight in zip(self._values["reverse_kl"], self._weights, strict=True)]
        return _sum([one * weight for one, weight in zip(lam, reverse, strict=True)]), _sum(reverse)

    def _count_spread(self, lam: list[float], count: float) -> None:
        """Merge the step's mean and squares into the run's: Σλ² - (Σλ)²/N would lose the digits of a small spread."""
        run, before, weights = self._run, self._run["lam_tokens"], self._weights
        # relative to the smallest λ, a constant λ has spread exactly 0, and token order does not matter
        least = min(_counting(lam, weights))
        centre = least + _weighted([one - least for one in lam], weights) / count
        apart, share = centre - run["lam_centre"], count / (before + count)
        run["lam_squares"] += _weighted([(one - centre) ** 2 for one in lam], weights) + apart**2 * before * share
        run["lam_centre"] += apart * share

    def _clear(self) -> None:
        self._rows = []
        self._weights = []
        self._values = {}
        self._lengths = []
        self._ended = []
        self._log_probs = []


def _ratio(weighed: float, total: float) -> float | None:
    """A weighted mean from its sums; None unless they are finite and the weights positive."""
    return weighed / total if math.isfinite(weighed) and 0 < total < math.inf else None


def kappa_share(parts: Iterable[tuple[Sequence[float], Sequence[float]]]) -> float:
    """Share of the gradient at the logits that flows through the gate: ‖g - g_stop‖ / ‖g‖ over tokens.

    g is the gradient of the gated loss, g_stop the one with λ held constant. 0 if the gate does not depend on the
    student (d = 0). It may exceed 1: the two parts of g can oppose each other.

    Args:
        parts: Outputs of `kappa_squares`, for any division of the tokens.
    """
    through: list[float] = []
    whole: list[float] = []
    for some, all_of in parts:
        through += some
        whole += all_of
    total = math.sqrt(_sum(whole))
    return math.sqrt(_sum(through)) / total if total else 0.0


def kappa_squares(
    student_logits: Tensor,
    teacher_logits: Tensor | TeacherTopK,
    gate: Gate,
    *,
    inputs: LossInputs | None = None,
    support: str = "full",
    support_k: int | None = None,
) -> tuple[list[float], list[float]]:
    """‖g - g_stop‖² and ‖g‖² of every token, see `kappa_share`.

    Args:
        student_logits: (N, V) of a few tokens.
        teacher_logits: (N, V), or a `TeacherTopK` of (1, N, K).
        gate: The gate.
        inputs: What else the loss needs; its tensors have shape (1, N), `total_tokens` is the same in all parts.
        support: As in `Gated`.
        support_k: As in `Gated`.
    """
    if student_logits.shape[0] == 0:
        return [], []
    if isinstance(teacher_logits, TeacherTopK):
        teacher: Tensor | TeacherTopK = teacher_logits
    else:
        teacher = teacher_logits.detach().float()[None]

    def gradient(stop: bool) -> Tensor:
        logits = student_logits.detach().float()[None].requires_grad_()
        objective = Gated(gate, support, support_k, stop)
        out = distillation_loss(logits, teacher, objective=objective, inputs=inputs or LossInputs())
        return torch.autograd.grad(out.loss, logits)[0][0]

    def squares(rows: Tensor) -> list[float]:
        # A row is summed by one thread and the rows exactly, so the number of threads does not matter.
        found: list[float] = rows.double().square().sum(-1).tolist()
        return found

    with torch.enable_grad():
        through = gradient(False)
        return squares(through.double() - gradient(True)), squares(through)


@torch.no_grad()
def agreement(student_logits: Tensor, teacher_logits: Tensor | TeacherTopK, top_k: int) -> dict[str, list[float]]:
    """Entropies of both models at each of N tokens, and the overlap of their top-k tokens.

    Entropies are in nats, at temperature 1; for a `TeacherTopK`, all tokens outside its top-k are one outcome.
    teacher_entropy_share is the teacher's entropy over ln V, with the mass outside a top-k spread evenly.

    Args:
        student_logits: (N, V).
        teacher_logits: (N, V), or a `TeacherTopK` of (…, N, K).
        top_k: How many top tokens are compared, or as many as are known.

    Examples:
        >>> found = agreement(torch.tensor([[0.0, 0.0, -99.0]]), torch.tensor([[0.0, -99.0, 0.0]]), 2)
        >>> found["top_k_overlap"], round(found["student_entropy_nats"][0], 4)
        ([0.5], 0.6931)
    """
    k = min(top_k, student_logits.shape[-1])
    if isinstance(teacher_logits, TeacherTopK):
        known = teacher_logits.log_probs.reshape(-1, teacher_logits.log_probs.shape[-1]).double().exp()
        order = known.argsort(dim=-1, descending=True, stable=True)
        theirs = teacher_logits.ids.reshape(known.shape).gather(-1, order)[:, :k]
        rest = (1 - known.sum(-1, keepdim=True)).clamp(min=0)
        teacher = torch.cat([known, rest], -1)
        outside = rest[:, 0] * math.log(max(1, student_logits.shape[-1] - known.shape[-1]))
    else:
        theirs, teacher = top_entries(teacher_logits, k)[1], teacher_logits.float().softmax(-1)
        outside = teacher.new_zeros(len(teacher))
    ours = top_entries(student_logits, theirs.shape[-1])[1]
    entropy, most = _entropy(teacher), math.log(student_logits.shape[-1])
    return {
        "student_entropy_nats": _entropy(student_logits.float().softmax(-1)),
        "teacher_entropy_nats": entropy,
        "teacher_entropy_share": [(nats + more) / most for nats, more in zip(entropy, outside.tolist(), strict=True)],
        "top_k_overlap": among(ours, theirs).double().mean(-1).tolist(),
    }


def repeated(response: Sequence[int], n: int = NGRAM) -> float:
    """Share of a response's n-grams that occurred earlier in it; 0 if it is shorter than n.

    Examples:
        >>> repeated([1, 2, 3, 4, 5]), repeated([7] * 7)
        (0.0, 0.75)
    """
    grams = [tuple(response[start : start + n]) for start in range(len(response) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


# ---------------------------------------------------------------------------------------------------- helpers


def _entropy(probabilities: Tensor) -> list[float]:
    """Entropy of each row."""
    found: list[float] = torch.special.entr(probabilities).sum(-1, dtype=torch.float64).tolist()
    return found


def _numbers(values: Tensor, keep: Tensor | None, dtype: torch.dtype) -> list[Any]:
    flat = values.detach().reshape(-1).to("cpu", dtype)
    found: list[Any] = (flat if keep is None else flat[keep]).tolist()
    return found


def _sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # overflow, or both +inf and -inf
        return math.nan


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    return _sum([value * weight for value, weight in zip(values, weights, strict=True)])


def _counting(values: Iterable[float] | None, weights: Iterable[float]) -> list[float]:
    """The values whose weight is not 0."""
    return [value for value, weight in zip(values or (), weights, strict=False) if weight]


def _whole(number: float) -> int | float:
    """A token count as logged: an integer unless weights are fractional."""
    return int(number) if float(number).is_integer() else number


def _mean(values: Sequence[float] | None, weights: Sequence[float] | None = None) -> float | None:
    if not values:
        return None
    return _sum(values) / len(values) if weights is None else _weighted(values, weights) / _sum(weights)


def _sd(values: Sequence[float] | None, weights: Sequence[float]) -> float | None:
    """Population standard deviation: divided by N."""
    mean = _mean(values, weights)
    if values is None or mean is None:
        return None
    return math.sqrt(_weighted([(value - mean) ** 2 for value in values], weights) / _sum(weights))


def _saturated(lam: float) -> bool:
    return min(lam, 1.0 - lam) <= SATURATION


def _histogram(lam: Sequence[float], weights: Sequence[float]) -> list[int | float]:
    counts: list[float] = [0.0] * BINS
    for one, weight in zip(lam, weights, strict=True):
        if math.isfinite(one):
            counts[min(max(int(one * BINS), 0), BINS - 1)] += weight
    return [_whole(count) for count in counts]
