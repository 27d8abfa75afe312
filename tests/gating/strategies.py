"""What Hypothesis draws: small batches with ties, masks in every shape, gates of every sign."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

COEFFICIENT = st.floats(-6, 6, allow_nan=False).map(lambda x: round(x, 3))
ABCD = st.tuples(COEFFICIENT, COEFFICIENT, COEFFICIENT, COEFFICIENT)
TEMPERATURE = st.sampled_from([0.5, 1.0, 2.0])
ANY_FLOAT = st.floats(allow_nan=False, allow_infinity=False)
SIGNAL_NAME = st.sampled_from(["student_entropy", "jsd", "log_ratio", "position", "my_signal", "_x9"])


def logits(*shape: int, bound: float = 6.0) -> st.SearchStrategy[np.ndarray]:
    """Values on a grid of 1/8, so that equal logits (ties of the teacher's choice) really occur."""
    steps = int(bound * 8)
    return hnp.arrays(np.float64, shape, elements=st.integers(-steps, steps).map(lambda i: i / 8))


def distinct_logits(*shape: int, bound: float = 3.0) -> st.SearchStrategy[np.ndarray]:
    """Values that differ along the last axis: the teacher's top-K is one set."""
    return st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).normal(size=shape) * bound / 2)


@dataclass(frozen=True)
class Case:
    student: np.ndarray  # (B, T, V)
    teacher: np.ndarray
    mask: np.ndarray  # (B, T)
    abcd: tuple[float, float, float, float]
    top_k: int
    temperature: float


@st.composite
def cases(draw: st.DrawFn, *, ties: bool = True, some_token: bool = True) -> Case:
    b, t, v = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(2, 7))
    mask = draw(hnp.arrays(np.int64, (b, t), elements=st.integers(0, 1)))
    if some_token and not mask.any():
        mask[draw(st.integers(0, b - 1)), draw(st.integers(0, t - 1))] = 1
    array = logits if ties else distinct_logits
    return Case(
        student=draw(array(b, t, v)),
        teacher=draw(array(b, t, v)),
        mask=mask,
        abcd=draw(ABCD),
        top_k=draw(st.integers(1, v)),
        temperature=draw(TEMPERATURE),
    )


@st.composite
def rows(draw: st.DrawFn, *, ties: bool = True, most: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """One token's (student, teacher) logits."""
    v = draw(st.integers(2, most))
    array = logits if ties else distinct_logits
    return draw(array(v)), draw(array(v))
