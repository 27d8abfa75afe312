"""Objectives and signals of a user's own, by name: registered in a process, or offered by an installed package."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gatespace import objectives
from gatespace.config import ObjectiveConfig, parse_config
from gatespace.errors import UsageError
from gatespace.gating import Head, Tokens, distillation_loss, fused_distillation_loss, objective
from gatespace.gating.configured import build_objective
from gatespace.gating.divergences import ForwardKL, ReverseKL

from . import oracle
from .compare import assert_close, fixed, leaf


@pytest.fixture
def even() -> Iterator[type[objectives.Objective]]:
    """weight·(R + F): what a plugin file would hold."""

    @objectives.register("even_kl")
    @dataclass(frozen=True)
    class EvenKL(objectives.Objective):
        weight: float = 1.0

        def divergence(self, tokens: Tokens) -> torch.Tensor:
            reverse, forward = tokens.divergences(ReverseKL(), ForwardKL())
            return self.weight * (reverse + forward)

    yield EvenKL
    objectives.unregister("even_kl")


def named(method: str, **params: Any) -> ObjectiveConfig:
    return parse_config(ObjectiveConfig, {"method": method, "params": params})


def test_an_own_objective_plain_and_fused(even: type[objectives.Objective]) -> None:
    rng = np.random.default_rng(0)
    hidden, weight = rng.normal(size=(2, 3, 5)), rng.normal(size=(11, 5))
    teacher_hidden, teacher_weight = rng.normal(size=(2, 3, 4)), rng.normal(size=(11, 4))

    def even_kl(s: np.ndarray, t: np.ndarray, _: Any) -> oracle.Term:
        forward, reverse = oracle.forward_kl(s, t), oracle.reverse_kl(s, t)
        return oracle.Term(3 * (forward.value + reverse.value), 3 * (forward.grad + reverse.grad))

    student, teacher = hidden @ weight.T, teacher_hidden @ teacher_weight.T
    loss, per_token, grad = oracle.batch_of(student, teacher, even_kl)
    made = build_objective(named("even_kl", weight=3))
    assert made == even(weight=3.0) == objective("even_kl", weight=3.0)
    z, h = leaf(student), leaf(hidden)
    plain = distillation_loss(z, fixed(teacher), objective=made)
    fused = fused_distillation_loss(
        h, Head(fixed(weight)), fixed(teacher_hidden), fixed(teacher_weight), objective=made, chunk_mb=0.0005
    )
    plain.loss.backward()
    fused.loss.backward()
    for out in (plain, fused):
        assert_close(out.loss, loss)
        assert_close(out.per_token, per_token)
        assert out.lam is None
    assert_close(z.grad, grad)
    assert_close(h.grad, grad @ weight)


def test_names_are_registered_once_and_are_those_of_objectives(even: type[objectives.Objective]) -> None:
    assert even.name == "even_kl"
    for taken in ("even_kl", "todi", "gated"):
        with pytest.raises(UsageError, match=f"the objective name '{taken}' is taken"):
            objectives.register(taken)(even)
    with pytest.raises(UsageError, match="must be a Python identifier"):
        objectives.register("even kl")(even)
    with pytest.raises(UsageError, match="must be a subclass of Objective"):
        objectives.register("number")(float)  # type: ignore[type-var]


def test_an_unregistered_objective_is_gone(even: type[objectives.Objective]) -> None:
    objectives.unregister("even_kl")
    with pytest.raises(UsageError, match="unknown objective 'even_kl'"):
        objectives.get("even_kl")
    objectives.register("even_kl")(even)


def test_an_unknown_method_is_an_error_with_all_known_ones(even: type[objectives.Objective]) -> None:
    with pytest.raises(UsageError, match=r"^objective\.method: unknown objective 'evan_kl'") as caught:
        build_objective(named("evan_kl"))
    assert "did you mean 'even_kl'?" in caught.value.instead
    assert all(name in caught.value.instead for name in ("gated", "static", "todi", "sampled_reverse_kl"))


def test_a_parameter_without_a_default_has_to_be_given() -> None:
    @objectives.register("needs_factor")
    @dataclass(frozen=True)
    class NeedsFactor(objectives.Objective):
        factor: float
        support: str = "own"  # a parameter like any other, where the method is not static

        def divergence(self, tokens: Tokens) -> torch.Tensor:
            return self.factor * tokens.divergences(ReverseKL())[0]

    try:
        with pytest.raises(UsageError, match=r"^objective\.params\.factor: the method needs_factor needs it"):
            build_objective(named("needs_factor"))
        assert build_objective(named("needs_factor", factor=2, support="x")) == NeedsFactor(2, "x")
    finally:
        objectives.unregister("needs_factor")


# ---------------------------------------------------------------------------------------------- of installed packages


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder as pip leaves it: modules, and the entry points of a distribution."""
    (tmp_path / "offered.py").write_text(
        textwrap.dedent("""
            from dataclasses import dataclass
            from gatespace import objectives, signals
            from gatespace.gating.divergences import ReverseKL

            @signals.register("offered_margin", range=(0.0, 1.0))
            def margin(tokens):
                first, second = tokens.teacher_top(2).log_probs.exp().unbind(-1)
                return first - second

            @dataclass(frozen=True)
            class Offered(objectives.Objective):
                factor: float = 2.0
                def divergence(self, tokens):
                    return self.factor * tokens.divergences(ReverseKL())[0]

            @objectives.register("decorated")
            class Decorated(Offered):
                pass
        """)
    )
    info = tmp_path / "offered-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[gatespace.objectives]\noffered = offered:Offered\ndecorated = offered:Decorated\n"
        "[gatespace.signals]\nany_name = offered\n"
    )
    return tmp_path


def run(code: str, *folders: Path) -> str:
    path = [str(folder) for folder in folders]
    whole = f"import sys; sys.path[:0] = {path!r}\n{textwrap.dedent(code)}"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_of_installed_packages_are_found(package: Path) -> None:
    found = run(
        """
        import torch
        from gatespace import Gate, gated_kl, objective
        student, teacher = torch.zeros(1, 1, 3), torch.tensor([[[0.0, 0.0, 9.0]]])
        out = gated_kl(student, teacher, gate=Gate(extra={"offered_margin": 1}), top_k=2)
        print(f"{float(out.signals['offered_margin']):.2f}")
        print(objective("offered").factor, objective("decorated", factor=3.0).factor, objective("offered").name)
        try:
            objective("offerd")
        except ValueError as error:
            print(error)
        """,
        package,
    ).splitlines()
    assert found[:2] == ["1.00", "2.0 3.0 offered"]
    assert "did you mean 'offered'?" in found[-1]


def test_packages_are_not_imported_where_the_name_is_known(package: Path) -> None:
    found = run(
        """
        import sys
        from gatespace import Gate, gating, objective, signals
        objective("todi"); gating.Gated(Gate(extra={"jsd": 1.0}))
        print("offered" in sys.modules)
        try:
            signals.get("no_such_signal")
        except ValueError as error:
            print("offered_margin" in str(error))
        """,
        package,
    )
    assert found.split() == ["False", "True"]
