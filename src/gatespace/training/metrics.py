"""Metrics of the steps of a run: lines of metrics.jsonl and timings.jsonl, and on some steps of tokens.jsonl.

A line of metrics.jsonl depends on the step's tokens alone. Sums are exactly rounded (`math.fsum`), so neither the order
of the tokens nor their division into micro-batches and processes changes them. What depends on machine or time
(seconds, cache hits) is in timings.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gatespace.config import ObjectiveConfig, TraceConfig
from gatespace.gating.coefficients import SATURATION, Gate
from gatespace.gating.configured import build_gate
from gatespace.gating.loss import LossInputs, LossOutput, distillation_loss
from gatespace.gating.objectives import Gated, Objective
from gatespace.gating.tokens import TeacherTopK
from gatespace.gating.vocabulary import among, top_entries
from gatespace.training.clock import Clock
from gatespace.training.optimizer import Update
from gatespace.training.processes import ONE, Processes
from gatespace.training.rollouts import MicroBatch

if TYPE_CHECKING:
    from gatespace.training.supervised import SupervisedOutput

Floats = NDArray[np.float64]
Lines = dict[str, list[dict[str, Any]]]
"""New lines by log."""

BINS = 20
"""Bins of the λ histograms, of equal width over [0, 1]."""
LOGITS_BYTES = 64 << 20
"""The logits that are in memory at once for tokens.jsonl; those of all its tokens would take gigabytes."""
_COLUMNS = ("weight", "forward_kl", "reverse_kl", "h", "u", "gap", "tail_mass")
_SPREAD = ("lam", "h", "u", "gap")
_AT_TIMES = ("student_entropy_nats", "teacher_entropy_nats", "teacher_entropy_share", "top_k_overlap")
"""Measured only on the steps that tokens.jsonl has."""


@dataclass(frozen=True)
class TokenColumns:
    """Numbers of N response tokens by name, (N,) each."""

    counts: Floats
    """How often each token counts: more than once if equal responses were merged, 0 if it is left out."""
    values: Mapping[str, Floats]

    @classmethod
    def of(cls, out: LossOutput, weights: Iterable[float] | None = None) -> TokenColumns:
        """The tokens of a micro-batch: loss, lam if the objective has one, divergences and signals."""
        columns = {"loss": out.per_token, "lam": out.lam, **{name: getattr(out, name) for name in _COLUMNS}}
        tensors = {name: tensor for name, tensor in {**columns, **out.signals}.items() if tensor is not None}
        values = {
            name: tensor.detach().reshape(-1).to("cpu", torch.float64).numpy() for name, tensor in tensors.items()
        }
        return cls(np.ones(out.per_token.numel()) if weights is None else np.array([*weights]), values)

    @classmethod
    def join(cls, parts: Iterable[TokenColumns]) -> TokenColumns:
        """All tokens of several parts."""
        parts = [part for part in parts if part.counts.size]
        if not parts:
            return cls(np.zeros(0), {})
        values = {name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values}
        return cls(np.concatenate([part.counts for part in parts]), values)

    def total(self, values: Floats) -> float:
        """Sum of values of the tokens, each as often as it counts."""
        return _sum((values * self.counts).tolist())

    def mean(self, name: str) -> float | None:
        """Mean of a column; None if there is none."""
        return self.total(self.values[name]) / _sum(self.counts.tolist()) if name in self.values else None

    def sd(self, name: str) -> float | None:
        """Population standard deviation of a column: divided by N."""
        mean = self.mean(name)
        return None if mean is None else math.sqrt(self._squares(name, mean) / _sum(self.counts.tolist()))

    def spread(self, name: str) -> tuple[float, float]:
        """Mean of a column and the sum of squares around it. A constant column has squares of exactly 0."""
        values = self.values[name]
        least = float(values[self.counts != 0].min())
        mean = least + self.total(values - least) / _sum(self.counts.tolist())
        return mean, self._squares(name, mean)

    def lam_by_reverse_kl(self) -> tuple[float, float]:
        """Σ λ·RKL and Σ RKL."""
        reverse = self.values["reverse_kl"] * self.counts
        return _sum((self.values["lam"] * reverse).tolist()), _sum(reverse.tolist())

    def lam_histogram(self) -> list[int | float]:
        """Tokens by λ, in `BINS` bins; a λ that is not finite is in none."""
        lam = self.values["lam"]
        finite = np.isfinite(lam)
        bins = np.clip((lam[finite] * BINS).astype(int), 0, BINS - 1)
        return [_whole(count) for count in np.bincount(bins, self.counts[finite], BINS).tolist()]

    def lam_saturated(self) -> int | float:
        """Tokens whose λ is within `SATURATION` of 0 or 1."""
        lam = self.values["lam"]
        return _whole(_sum(self.counts[np.minimum(lam, 1.0 - lam) <= SATURATION].tolist()))

    def record(self) -> dict[str, Any]:
        """Their entries in a line of metrics.jsonl; None: not measured, e.g. λ of an objective that has none."""
        known, tokens = "lam" in self.values, _whole(_sum(self.counts.tolist()))
        further = sorted(set(self.values).difference(_COLUMNS, ("loss", "lam")))
        tail = self.values.get("tail_mass", np.zeros(0))[self.counts != 0]
        return {
            "tokens": tokens,
            "loss": self.mean("loss"),
            "lam_mean": self.mean("lam"),
            "lam_rkl_mean": _ratio(*self.lam_by_reverse_kl()) if known else None,
            "tail_mass_max": max(tail.tolist(), default=0.0),
            **{name: self.mean(name) for name in (*_COLUMNS, *further)},
            **{f"{name}_sd": self.sd(name) for name in _SPREAD},
            "lam_hist": self.lam_histogram() if known else None,
            "lam_saturated": self.lam_saturated() / tokens if known else None,
        }

    def _squares(self, name: str, centre: float) -> float:
        return self.total(np.array([(value - centre) ** 2 for value in self.values[name].tolist()]))


class Texts(NamedTuple):
    """How the ids of a response are read."""

    response: Callable[[Sequence[int]], str]
    token: Callable[[int], str]
    parse: Callable[[str], str | None]
    """A response's text → its label; None if it has none."""
    judged: bool
    """Whether the share of responses with a label is logged."""


class StepMetrics:
    """Metrics of the steps of a distillation, over all processes.

    For every step: `begin`, `add` per micro-batch, `record`.

    Args:
        objective: Its state is logged as it was in the step.
        settings: The section `objective`.
        trace: The section `trace`.
        vocab_size: Of the logits.
        logits: (micro-batch, tokens) → (N, V) logits of student and teacher, or the teacher's top-k.
        texts: How responses are read.
        counts: Counters of the run whose increase per step is in timings.jsonl.
        processes: Those of the run.
    """

    def __init__(
        self,
        *,
        objective: Objective,
        settings: ObjectiveConfig,
        trace: TraceConfig,
        vocab_size: int,
        logits: Callable[[MicroBatch, slice], tuple[Tensor, Tensor | TeacherTopK]],
        texts: Texts,
        counts: Callable[[], dict[str, int]] = dict,
        processes: Processes = ONE,
    ) -> None:
        self._objective, self._settings, self._trace, self._texts = objective, settings, trace, texts
        self._gate = build_gate(settings)
        self._at_once = max(1, LOGITS_BYTES // (4 * vocab_size))
        self._logits, self._counts, self._processes = logits, counts, processes
        self._run: dict[str, Any] = {
            **dict.fromkeys(("steps", "rows", "tokens", "lam_tokens", "lam_saturated"), 0),
            **dict.fromkeys(("lam_sum", "lam_centre", "lam_squares", "lam_rkl", "rkl"), 0.0),
            "lam_hist": [0] * BINS,
            "teachers": {},
        }
        """Sums over the run, those of every teacher too if there are several."""
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start step `step`, counted from 0."""
        self._step = step + 1
        self.tokens: float = 0
        """Response tokens of this process in the step so far, or the sum of their weights."""
        self.batches: list[MicroBatch] = []
        """Micro-batches of the step so far."""
        self._parts: list[TokenColumns] = []
        self._losses: list[float] = []
        self._teachers: list[tuple[str, dict[str, float]]] = []
        self._lines: list[dict[str, Any]] = []
        self._measured: dict[str, float | None] = dict.fromkeys(("kappa_share", *_AT_TIMES))
        self._before = self._counts()

    def add(self, batch: MicroBatch, out: LossOutput) -> None:
        """Add a micro-batch."""
        self.tokens += out.tokens
        columns = TokenColumns.of(out, None if batch.weights is None else (w for row in batch.weights for w in row))
        if name := batch.rows[0].teacher:  # one per micro-batch
            means = {"lam_mean": "lam", "forward_kl": "forward_kl", "reverse_kl": "reverse_kl"}
            sums = {key: columns.total(columns.values[of]) for key, of in means.items() if of in columns.values}
            self._teachers.append((name, {"rows": len(batch.samples), "tokens": out.tokens, **sums}))
        every = self._trace.tokens_every
        if batch.places[0] == 0 and every and (self._step - 1) % every == 0:  # the first step is one of them
            self._record_tokens(batch, columns)
        self.batches.append(batch)
        self._parts.append(columns)
        self._losses.append(float(out.loss.detach()))

    def record(self, update: Update, clock: Clock) -> Lines:
        """New lines by log, once the step is done in all processes."""
        own = TokenColumns.join(self._parts)
        gathered = self._processes.gather(
            {
                "responses": self._responses(),
                "teachers": self._teachers,
                "timing": {name: count - self._before[name] for name, count in self._counts().items()},
                "counts": own.counts.tolist(),
                "values": {name: column.tolist() for name, column in own.values.items()},
            }
        )
        columns = TokenColumns.join(
            TokenColumns(np.array(part["counts"]), {name: np.array(c) for name, c in part["values"].items()})
            for part in gathered
        )
        responses = {name: [v for part in gathered for v in part["responses"][name]] for name in self._responses()}
        teachers: dict[str, dict[str, float]] = {}
        for name, sums in (entry for part in gathered for entry in part["teachers"]):
            for totals in (teachers.setdefault(name, {}), self._run["teachers"].setdefault(name, {})):
                for key, value in sums.items():
                    totals[key] = totals.get(key, 0) + value
        moving = {name: value for name, value in self._objective.state.items() if name != "loss"}
        metrics = {
            "step": self._step,
            "rows": len(responses["response_length"]),
            "grad_norm": update.grad_norm,
            "lr": update.lr,
            "legal_answers": None,
            **{name: _mean(values) for name, values in responses.items()},
            **columns.record(),
            **self._measured,
            **{f"{self._objective.name}_{name}": value for name, value in moving.items()},
            **({"teachers": _per_token(teachers)} if teachers else {}),
        }
        self._count(columns, metrics["rows"], metrics["tokens"])
        seconds = sum(clock.wall.values())
        timing = {
            "step": self._step,
            "wall": clock.wall,
            "cpu": clock.cpu,
            "tokens_per_second": metrics["tokens"] / seconds if seconds else None,
            **{name: sum(part["timing"][name] for part in gathered) for name in gathered[0]["timing"]},
        }
        return {"tokens": self._lines, "metrics": [metrics], "timings": [timing]}

    def evidence(self, batches: Sequence[MicroBatch]) -> dict[str, Any]:
        """What a failed step saw: its micro-batches, and the losses of those before the failure."""
        rows = []
        for batch in batches:
            responses = batch.rollout.responses or [[]] * len(batch.rows)  # there may be none yet
            for row, ids in ((batch.rows[sample], responses[sample]) for sample in batch.samples):
                entry = {"index": row.index, "text": row.example.text, "gold": row.example.gold}
                rows.append({**entry, "response": self._texts.response(ids)})
        return {"rows": rows, "losses": self._losses}

    # ------------------------------------------------------------------ the run

    def state(self) -> dict[str, Any]:
        """The sums of the run, for a checkpoint between two steps."""
        return {**self._run, "teachers": {name: dict(sums) for name, sums in self._run["teachers"].items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._run = {**state, "teachers": {name: dict(sums) for name, sums in state["teachers"].items()}}

    def summary(self) -> dict[str, Any]:
        """The run so far: steps, rows, tokens, and statistics of λ over all tokens; also by teacher if several.

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
            "lam_hist": run["lam_hist"] if tokens else None,
            **({"teachers": _per_token(run["teachers"])} if run["teachers"] else {}),
        }

    def _count(self, columns: TokenColumns, rows: int, tokens: int | float) -> None:
        """Add a step to the sums of the run."""
        run, before = self._run, self._run["lam_tokens"]
        run["steps"] += 1
        run["rows"] += rows
        run["tokens"] += tokens
        if "lam" in columns.values:
            # Means and squares are merged: Σλ² - (Σλ)²/N would lose the digits of a small spread.
            mean, squares = columns.spread("lam")
            apart, share = mean - run["lam_centre"], tokens / (before + tokens)
            run["lam_squares"] += squares + apart**2 * before * share
            run["lam_centre"] += apart * share
            weighted, reverse = columns.lam_by_reverse_kl()
            run["lam_rkl"] += weighted
            run["rkl"] += reverse
            run["lam_tokens"] += tokens
            run["lam_sum"] += columns.total(columns.values["lam"])
            run["lam_saturated"] += columns.lam_saturated()
            run["lam_hist"] = [old + new for old, new in zip(run["lam_hist"], columns.lam_histogram(), strict=True)]

    # ------------------------------------------------------------------ responses and single tokens

    def _responses(self) -> dict[str, list[float]]:
        """Numbers of this process's responses, by the name of their mean."""
        samples = [(batch, row, batch.rollout.responses[row]) for batch in self.batches for row in batch.samples]
        sampled = [batch.rollout.log_probs[row] for batch, row, _ in samples if batch.sources[row] == "student"]
        numbers: dict[str, list[float]] = {
            "response_length": [len(ids) for _, _, ids in samples],
            "ended": [batch.rollout.ended[row] for batch, row, _ in samples],
            "sampled_log_prob": [value for row in sampled for value in row],
            "repeated_ngrams": [repeated(ids) for _, _, ids in samples],
        }
        if self._texts.judged:
            numbers["legal_answers"] = [self._label(ids) is not None for _, _, ids in samples]
        return numbers

    def _label(self, ids: Sequence[int]) -> str | None:
        return self._texts.parse(self._texts.response(ids))

    def _record_tokens(self, batch: MicroBatch, columns: TokenColumns) -> None:
        """Add lines of tokens.jsonl for the step's first samples, and measure what takes the logits of both models."""
        samples = batch.samples[: self._trace.rollouts]
        responses = batch.rollout.responses[: max(samples) + 1]  # rows are in the order of their first samples
        sampled = [token for ids in responses for token in ids]
        tops: tuple[list[list[Any]], list[list[Any]]] = ([], [])
        measured: dict[str, list[float]] = {}
        for start in range(0, len(sampled), self._at_once):
            span = slice(start, min(start + self._at_once, len(sampled)))
            student, teacher = self._logits(batch, span)
            for top, logits in zip(tops, (student, teacher), strict=True):
                top += [[[self._texts.token(token), p] for token, p in tokens] for tokens in top_tokens(logits)]
            found = agreement(student, teacher, self._settings.top_k)
            if self._gate is not None and not self._settings.shuffle:
                inputs = LossInputs(
                    top_k=min(self._settings.top_k, student.shape[-1]),
                    temperature=self._settings.temperature,
                    entropy=self._settings.entropy,
                    sampled=torch.tensor([sampled[span]], device=student.device),
                    u=torch.tensor(columns.values["u"][None, span], dtype=torch.float32, device=student.device),
                    segment_ids=batch.segments[None, span].to(student.device) if self._objective.prepass() else None,
                    total_tokens=1.0,  # the same for any division of the tokens
                )
                support = "full" if self._settings.over_labels else self._settings.support
                squares = kappa_squares(
                    student, teacher, self._gate, inputs=inputs, support=support, support_k=self._settings.support_k
                )
                found |= dict(zip(("through", "all"), squares, strict=True))
            for name, values in found.items():
                measured.setdefault(name, []).extend(values)
        ends = [*pairwise([0, *accumulate(map(len, responses))])]
        tokens = [token for row in samples for token in range(*ends[row])]
        measured = {name: [values[token] for token in tokens] for name, values in measured.items()}
        through, overall = measured.pop("through", []), measured.pop("all", [])
        self._measured |= {name: _mean(values) for name, values in measured.items()}
        if self._gate is not None:  # 0 if λ is shuffled and thus constant
            self._measured["kappa_share"] = kappa_share(through, overall)
        for sample, row in enumerate(samples):
            ids, span, source = responses[row], slice(*ends[row]), batch.rows[row]
            self._lines.append(
                {
                    "step": self._step,
                    "row": sample,
                    "text": source.example.text,
                    "gold": source.example.gold,
                    "label": self._label(ids),
                    "ended": batch.rollout.ended[row],
                    "ids": ids,
                    "tokens": [self._texts.token(token) for token in ids],
                    "values": {name: [_short(v) for v in column[span]] for name, column in columns.values.items()},
                    "student_top": tops[0][span],
                    "teacher_top": tops[1][span],
                    "source": batch.sources[row],
                    "index": source.index,
                    **({"teacher": source.teacher} if source.teacher else {}),
                }
            )


class SupervisedMetrics:
    """Metrics of the steps of supervised fine-tuning, over all processes."""

    def __init__(self, processes: Processes = ONE) -> None:
        self._processes = processes
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start step `step`, counted from 0."""
        self._step, self._sum, self._right = step + 1, 0.0, 0
        self.tokens: float = 0

    def add(self, batch: Any, out: SupervisedOutput) -> None:
        """Add a micro-batch."""
        self._sum += float(out.loss.detach())
        self.tokens += out.tokens
        self._right += out.right

    def record(self, update: Update, clock: Clock) -> Lines:
        """New lines by log."""
        total = self._processes.total
        tokens = int(total(self.tokens))
        metrics = {
            "step": self._step,
            "loss": total(self._sum) / tokens,
            "tokens": tokens,
            "token_accuracy": int(total(self._right)) / tokens,
            "grad_norm": update.grad_norm,
            "lr": update.lr,
        }
        return {"metrics": [metrics], "timings": [{"step": self._step, "wall": clock.wall, "cpu": clock.cpu}]}


# ---------------------------------------------------------------------------------------------------- measures


def kappa_share(through: Sequence[float], overall: Sequence[float]) -> float:
    """Share of the gradient at the logits that flows through the gate: ‖g - g_stop‖ / ‖g‖ over tokens.

    g is the gradient of the gated loss, g_stop the one with λ held constant. 0 if the gate does not depend on the
    student (d = 0). It may exceed 1: the two parts of g can oppose each other. `through` and `overall` are the outputs
    of `kappa_squares` for all tokens.
    """
    norm = math.sqrt(_sum(overall))
    return math.sqrt(_sum(through)) / norm if norm else 0.0


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
        gate: The gate; `support` and `support_k` as in `Gated`.
        inputs: What else the loss needs; its tensors have shape (1, N), `total_tokens` is the same in all parts.
    """
    if student_logits.shape[0] == 0:
        return [], []
    teacher = teacher_logits if isinstance(teacher_logits, TeacherTopK) else teacher_logits.detach().float()[None]

    def gradient(stop: bool) -> Tensor:
        logits = student_logits.detach().float()[None].requires_grad_()
        objective = Gated(gate, support, support_k, stop)
        out = distillation_loss(logits, teacher, objective=objective, inputs=inputs or LossInputs())
        return torch.autograd.grad(out.loss, logits)[0][0].double()

    def squares(rows: Tensor) -> list[float]:
        # A row is summed by one thread and the rows exactly, so the number of threads does not matter.
        sums: list[float] = rows.square().sum(-1).tolist()
        return sums

    with torch.enable_grad():
        through = gradient(False)
        return squares(through - gradient(True)), squares(through)


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
        >>> measured = agreement(torch.tensor([[0.0, 0.0, -99.0]]), torch.tensor([[0.0, -99.0, 0.0]]), 2)
        >>> measured["top_k_overlap"], round(measured["student_entropy_nats"][0], 4)
        ([0.5], 0.6931)
    """
    size = student_logits.shape[-1]
    if isinstance(teacher_logits, TeacherTopK):
        known = teacher_logits.log_probs.reshape(-1, teacher_logits.log_probs.shape[-1]).double().exp()
        order = known.argsort(dim=-1, descending=True, stable=True)
        teacher_top = teacher_logits.ids.reshape(known.shape).gather(-1, order)[:, : min(top_k, size)]
        rest = (1 - known.sum(-1, keepdim=True)).clamp(min=0)
        teacher = torch.cat([known, rest], -1)
        outside = rest[:, 0] * math.log(max(1, size - known.shape[-1]))
    else:
        teacher_top = top_entries(teacher_logits, min(top_k, size))[1]
        teacher = teacher_logits.float().softmax(-1)
        outside = teacher.new_zeros(len(teacher))
    student_top = top_entries(student_logits, teacher_top.shape[-1])[1]
    entropy = _entropy(teacher)
    return {
        "student_entropy_nats": _entropy(student_logits.float().softmax(-1)),
        "teacher_entropy_nats": entropy,
        "teacher_entropy_share": [
            (nats + more) / math.log(size) for nats, more in zip(entropy, outside.tolist(), strict=True)
        ],
        "top_k_overlap": among(student_top, teacher_top).double().mean(-1).tolist(),
    }


def repeated(response: Sequence[int], n: int = 4) -> float:
    """Share of a response's n-grams that occurred earlier in it; 0 if it is shorter than n.

    Examples:
        >>> repeated([1, 2, 3, 4, 5]), repeated([7] * 7)
        (0.0, 0.75)
    """
    grams = [tuple(response[start : start + n]) for start in range(len(response) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def top_tokens(logits: Tensor | TeacherTopK, top: int = 5) -> list[list[tuple[int, float]]]:
    """The top tokens at each position with their probabilities in six digits, likeliest first, ties by id.

    Args:
        logits: (T, V), or a `TeacherTopK` of (T, K).
        top: How many.

    Examples:
        >>> top_tokens(torch.tensor([[0.0, 1.0, 0.0]]).log(), 1)
        [[(1, 1.0)]]
    """
    if isinstance(logits, TeacherTopK):
        ids = logits.ids.reshape(-1, logits.ids.shape[-1])
        rows = [*zip(ids, logits.log_probs.detach().reshape(ids.shape).float().exp(), strict=True)]
    else:
        # topk breaks ties arbitrarily: everything at or above the last one's value is a candidate.
        probabilities = logits.detach().float().softmax(-1)
        rows = [
            (above := (row >= row.topk(min(top, row.numel())).values[-1]).nonzero()[:, 0], row[above])
            for row in probabilities
        ]
    pairs = (zip(ids.tolist(), p.tolist(), strict=True) for ids, p in rows)
    return [
        [(token, _short(p)) for token, p in sorted(row, key=lambda pair: (-pair[1], pair[0]))[:top]] for row in pairs
    ]


def _per_token(teachers: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Rows, tokens, and per-token means of all else, for every teacher by name."""
    return {
        name: {key: value if key in ("rows", "tokens") else value / sums["tokens"] for key, value in sums.items()}
        for name, sums in sorted(teachers.items())
        if sums["tokens"]
    }


def _entropy(probabilities: Tensor) -> list[float]:
    """Entropy of each row."""
    nats: list[float] = torch.special.entr(probabilities).sum(-1, dtype=torch.float64).tolist()
    return nats


def _ratio(weighted: float, total: float) -> float | None:
    """A weighted mean from its sums; None unless they are finite and the weights positive."""
    return weighted / total if math.isfinite(weighted) and 0 < total < math.inf else None


def _mean(values: Sequence[float]) -> float | None:
    return _sum(values) / len(values) if values else None


def _sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # overflow, or both +inf and -inf
        return math.nan


def _whole(number: float) -> int | float:
    """A token count as logged: an integer unless weights are fractional."""
    return int(number) if number.is_integer() else number


def _short(value: float) -> float:
    """Six significant digits: the numbers of single tokens are for viewing only."""
    return float(f"{value:.6g}")
