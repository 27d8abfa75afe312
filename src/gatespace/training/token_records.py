"""Records of single responses by token, for viewing: sampled tokens, top tokens of both models, λ and signals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gatespace.errors import UsageError
from gatespace.gating.tokens import TeacherTopK

__all__ = ["due", "token_record", "top_tokens"]

DIGITS = 6
"""Significant digits of the numbers, which are for viewing only."""
_VALUES = ("loss", "lam", "h", "u", "gap", "forward_kl", "reverse_kl", "tail_mass", "weight")


def due(step: int, *, every: int) -> bool:
    """Whether the step's tokens are recorded: the first step, and every `every`-th after it.

    Examples:
        >>> [step for step in range(1, 30) if due(step, every=10)]
        [1, 11, 21]
    """
    return every > 0 and step % every == 1 % every


def token_record(
    *,
    step: int,
    row: int,
    text: str,
    gold: str | None,
    label: str | None,
    response: Sequence[int],
    ended: bool,
    values: Mapping[str, Sequence[float]],
    student_top: Sequence[Sequence[tuple[int, float]]],
    teacher_top: Sequence[Sequence[tuple[int, float]]],
    token_text: Callable[[int], str],
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One row's line of tokens.jsonl.

    Args:
        step: The step.
        row: The row within the step.
        text: The text that was classified.
        gold: Its label in the data.
        label: The label parsed from the response; None if there is none.
        response: Ids of the T response tokens.
        ended: Whether the response ended by itself.
        values: Numbers per token, as returned by `Trace.row`; unknown names are recorded too.
        student_top: The student's top tokens at each token with their probabilities, see `top_tokens`.
        teacher_top: The teacher's.
        token_text: The text of an id.
        more: Further entries, e.g. where the response came from.
    """
    count = len(response)
    sizes = {name: len(column) for name, column in values.items()}
    sizes |= {"student_top": len(student_top), "teacher_top": len(teacher_top)}
    if wrong := {name: size for name, size in sizes.items() if size != count}:
        raise UsageError("a token record needs a number for each token of the response", got=f"{count}: {wrong}")
    order = [name for name in _VALUES if name in values] + sorted(set(values).difference(_VALUES))
    return {
        "step": step,
        "row": row,
        "text": text,
        "gold": gold,
        "label": label,
        "ended": ended,
        "ids": [int(token) for token in response],
        "tokens": [token_text(int(token)) for token in response],
        "values": {name: [_short(value) for value in values[name]] for name in order},
        "student_top": [[[token_text(token), _short(p)] for token, p in one] for one in student_top],
        "teacher_top": [[[token_text(token), _short(p)] for token, p in one] for one in teacher_top],
        **(more or {}),
    }


def top_tokens(logits: Tensor | TeacherTopK, top: int = 5) -> list[list[tuple[int, float]]]:
    """The top tokens at each position with their probabilities, likeliest first, ties by id.

    Args:
        logits: (T, V), or a `TeacherTopK` of (T, K).
        top: How many.

    Examples:
        >>> import torch
        >>> top_tokens(torch.tensor([[0.0, 1.0, 0.0]]).log(), 1)
        [[(1, 1.0)]]
    """
    if isinstance(logits, TeacherTopK):
        ids = logits.ids.reshape(-1, logits.ids.shape[-1])
        probabilities = logits.log_probs.detach().reshape(ids.shape).float().exp()
        return [_first(one, p, top) for one, p in zip(ids.tolist(), probabilities.tolist(), strict=True)]
    found = []
    for row in logits.detach().float().softmax(-1):
        # topk breaks ties arbitrarily: everything at or above the last one's value is a candidate.
        least = row.topk(min(top, row.numel())).values[-1]
        where = (row >= least).nonzero()[:, 0]
        found.append(_first(where.tolist(), row[where].tolist(), top))
    return found


def _first(ids: list[int], probabilities: list[float], count: int) -> list[tuple[int, float]]:
    return sorted(zip(ids, probabilities, strict=True), key=lambda pair: (-pair[1], pair[0]))[:count]


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
