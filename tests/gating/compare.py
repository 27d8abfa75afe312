"""Small things that the tests share: tensors in, comparisons against the oracle out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gatespace.gating import TeacherTopK

from . import oracle

RTOL, ATOL = 1e-8, 1e-10
TELEMETRY = ("per_token", "lam", "forward_kl", "reverse_kl", "h", "u", "gap", "tail_mass")


def leaf(array: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A tensor that collects gradient."""
    return torch.as_tensor(np.asarray(array)).to(dtype).clone().requires_grad_()


def fixed(array: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.as_tensor(np.asarray(array)).to(dtype).clone()


def numbers(tensor: Any) -> np.ndarray:
    return tensor.detach().double().numpy() if isinstance(tensor, torch.Tensor) else np.asarray(tensor)


def assert_close(actual: Any, expected: Any, *, rtol: float = RTOL, atol: float = ATOL, what: str = "") -> None:
    np.testing.assert_allclose(numbers(actual), numbers(expected), rtol=rtol, atol=atol, err_msg=what)


def assert_matches(out: Any, expected: oracle.Batch, *, rtol: float = RTOL, atol: float = ATOL) -> None:
    """Loss and all telemetry."""
    assert_close(out.loss, expected.loss, rtol=rtol, atol=atol, what="loss")
    for name in TELEMETRY:
        assert_close(getattr(out, name), getattr(expected, name), rtol=rtol, atol=atol, what=name)
    for name, values in expected.signals.items():
        assert_close(out.signals[name], values, rtol=rtol, atol=atol, what=name)


def top_k_of(teacher: np.ndarray, k: int, sampled: np.ndarray | None = None) -> TeacherTopK:
    """What a server would send: the teacher's k best ids with their full-vocabulary log-probabilities."""
    p = oracle.probabilities(teacher)
    ids = np.argsort(-p, axis=-1, kind="stable")[..., :k]
    of_sampled = None
    if sampled is not None:
        of_sampled = fixed(np.log(np.take_along_axis(p, sampled[..., None], -1)[..., 0]))
    return TeacherTopK(
        ids=torch.as_tensor(ids.copy()),
        log_probs=fixed(np.log(np.take_along_axis(p, ids, -1))),
        sampled_log_probs=of_sampled,
    )
