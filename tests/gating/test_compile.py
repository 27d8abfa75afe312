"""What the fused loss does to a chunk compiles as one graph: nothing in it waits for a number or takes its shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gatespace.gating import Gate, Gated, LossInputs
from gatespace.gating.divergences import (
    AbsoluteDifference,
    AlphaBeta,
    JSDDivergence,
    ReverseKL,
    SkewForwardKL,
    SkewReverseKL,
    ToDiDivergence,
)
from gatespace.gating.inputs import Batch
from gatespace.gating.projection import Head, Projection, logits_buffer
from gatespace.gating.tape import ChunkTokens, Outside, Selected, Sum, Tape
from gatespace.gating.tokens import LogitsTeacher, TeacherTopK, TopKTeacher

N, V, TILE = 5, 300, 100
BATCH = Batch.of(torch.Size((1, N)), torch.device("cpu"), V, LossInputs(sampled=torch.full((1, N), 7)))


def logits(seed: int) -> Tensor:
    """(N, V) as the fused loss has them: vocabulary first."""
    return torch.randn(V, N, generator=torch.Generator().manual_seed(seed)).t() * 3


def ids(count: int) -> Tensor:
    return logits(9).argsort(-1)[:, :count]


def check(function: Callable[..., Tensor], *given: Tensor) -> None:
    torch._dynamo.reset()
    compiled: Any = torch.compile(function, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected, found = (run(*(tensor.clone() for tensor in given)) for run in (function, compiled))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("support", "known"), [("full", "logits"), ("bucket", "logits"), ("hybrid", "top-k"), ("renorm", "top-k")]
)
def test_the_objective_of_a_chunk(support: str, known: str) -> None:
    objective = Gated(Gate(1, -1, 0, 2), support, 8)
    top = logits(2).log_softmax(-1).topk(9)
    sent = TeacherTopK(top.indices[None], top.values[None], torch.full((1, N), -9.0))
    sender = TopKTeacher.of(sent, BATCH, torch.float32)

    def value(student: Tensor, teacher: Tensor) -> Tensor:
        source = LogitsTeacher(teacher, TILE) if known == "logits" else sender.part(slice(0, N), strict=False)
        tokens = ChunkTokens(student, source, BATCH, slice(0, N), tile=TILE, firsts={}, infinite=None)
        return objective(tokens).loss

    check(value, logits(1), logits(2))


def test_the_gradient_of_a_slice() -> None:
    kinds = (
        ReverseKL(),
        JSDDivergence(),
        ToDiDivergence(),
        AlphaBeta(),
        SkewForwardKL(),
        SkewReverseKL(),
        AbsoluteDifference(),
    )
    tape = Tape({1.0: torch.zeros(N), 2.0: torch.zeros(N)}, {1.0: torch.zeros(N)})
    tape.leaves = [Sum(1.0, torch.ones(N), kind, torch.ones(N)) for kind in kinds]
    tape.leaves += [Selected(2.0, torch.ones(N, 7), ids(7)), Outside(1.0, torch.ones(N), ids(7))]
    for place, leaf in enumerate(tape.leaves):
        leaf.grad = torch.full_like(leaf.value, place + 1.0)
    head = Head(torch.randn(V, 4), torch.randn(V), scale=2.0, softcap=30.0)

    def gradient(hidden: Tensor, teacher: Tensor) -> Tensor:
        projection = Projection(hidden, head, V)
        out = projection.into(logits_buffer(hidden, N, TILE, torch.float32), slice(0, N), TILE, 2 * TILE)
        return projection.pull_back(tape.gradient(out, teacher[:, TILE : 2 * TILE], TILE, 2 * TILE), out)

    check(gradient, torch.randn(N, 4), logits(2).log_softmax(-1))
