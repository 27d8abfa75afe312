"""Every method × value and gradient by definition, fused = plain, limits, what it needs; then what each one claims."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gatespace import Gate, gated_kl
from gatespace.errors import UsageError
from gatespace.gating import (
    ABKD,
    AKL,
    EOPD,
    IWOPD,
    JSD,
    OBJECTIVES,
    SKL,
    SRKL,
    TAID,
    TIP,
    VOPD,
    DistiLLM2,
    Gated,
    Head,
    LossInputs,
    RevisitingOPD,
    SampledReverseKL,
    Static,
    StudentTopK,
    ToDi,
    distillation_loss,
    fused_distillation_loss,
    objective,
)
from gatespace.gating.objectives import NEEDS, described
from gatespace.gating.supports import SUPPORTS

from . import oracle
from .compare import assert_close, fixed, leaf, numbers, top_k_of
from .strategies import distinct_logits, rows

B, T, V = 3, 6, 23
IDS = ((5, "student"), (5, "teacher"), (12, "union"), (12, "intersection"))


class World(NamedTuple):
    """Logits of both sides, and inputs in which responses have holes, differ in length and share rows."""

    student: np.ndarray
    teacher: np.ndarray
    mask: np.ndarray
    segments: np.ndarray
    sampled: np.ndarray
    noise: np.ndarray
    from_teacher: np.ndarray
    log_old: np.ndarray | None

    def inputs(self, **more: Any) -> LossInputs:
        return LossInputs(
            mask=torch.as_tensor(self.mask),
            segment_ids=torch.as_tensor(self.segments),
            sampled=torch.as_tensor(self.sampled),
            noise=torch.as_tensor(self.noise),
            from_teacher=torch.as_tensor(self.from_teacher),
            sampled_log_probs=None if self.log_old is None else fixed(self.log_old),
            **more,
        )


def world(seed: int = 0, *, off_policy: bool = False, shape: tuple[int, int] = (B, T), v: int = V) -> World:
    rng = np.random.default_rng(seed)
    mask, segments = np.ones(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    mask[0, 2] = mask[1, 5] = mask[-1, 0] = 0
    segments[1, 3:] = 1  # two responses in one row
    student, teacher = rng.normal(size=(*shape, v)) * 1.5, rng.normal(size=(*shape, v)) * 1.5
    teacher[0, 3] *= 6  # a confident teacher: below EOPD's threshold
    old = np.log(rng.uniform(0.02, 0.6, size=shape)) if off_policy else None
    source = np.arange(shape[0]) % 2
    return World(student, teacher, mask, segments, rng.integers(0, v, size=shape), rng.random(shape), source, old)


class Token(NamedTuple):
    """One position: both sides' probabilities at the loss's temperature (s, t) and at 1 (s1, t1), and the rest."""

    world: World
    at: tuple[int, int]
    temperature: float
    s: np.ndarray
    t: np.ndarray
    s1: np.ndarray
    t1: np.ndarray
    y: int
    log_old: float | None


def by_definition(row: Callable[[Token], oracle.Term], x: World, temperature: float = 1.0) -> Any:
    def term(s: np.ndarray, t: np.ndarray, bt: tuple[int, int]) -> oracle.Term:
        s1, t1 = oracle.probabilities(x.student[bt]), oracle.probabilities(x.teacher[bt])
        old = None if x.log_old is None else float(x.log_old[bt])
        return row(Token(x, bt, temperature, s, t, s1, t1, int(x.sampled[bt]), old))

    return oracle.batch_of(x.student, x.teacher, term, mask=x.mask, temperature=temperature)


def times(weight: float, term: oracle.Term) -> oracle.Term:
    return oracle.Term(weight * term.value, weight * term.grad)


def mixture(s: np.ndarray, t: np.ndarray, lam: float) -> oracle.Term:
    forward, reverse = times(1 - lam, oracle.forward_kl(s, t)), times(lam, oracle.reverse_kl(s, t))
    return oracle.Term(forward.value + reverse.value, forward.grad + reverse.grad)


def at_one(x: Token, rule: Callable[..., oracle.Term], **options: Any) -> oracle.Term:
    """A policy gradient is that of T = 1, where y was drawn: it undoes the caller's 1/T."""
    term = rule(x.s1, x.t1, y=x.y, log_old=x.log_old, **options)
    return oracle.Term(term.value, term.grad * x.temperature)


def eopd(x: Token, **options: Any) -> oracle.Term:
    student, teacher = x.world.student[x.at], x.world.teacher[x.at]
    return oracle.eopd(student, teacher, y=x.y, log_old=x.log_old, temperature=x.temperature, **options)


def drift(x: World) -> np.ndarray:
    """(B, T) share of the response's Σ|A| before the token, A = log t(y) - log s(y)."""
    out = np.zeros(x.mask.shape)
    for places in oracle.samples(x.mask != 0, x.segments):
        size = []
        for bt in places:
            s, t = oracle.probabilities(x.student[bt]), oracle.probabilities(x.teacher[bt])
            size.append(abs(math.log(t[x.sampled[bt]]) - math.log(s[x.sampled[bt]])))
        for i, bt in enumerate(places):
            out[bt] = sum(size[:i]) / sum(size)
    return out


def kept(x: Token, share: float, score: Callable[[np.ndarray, np.ndarray, float], float]) -> float:
    """1 if the token is in the share of masked tokens with the highest scores of (s, t, noise), else 0."""
    w = x.world
    places = list(zip(*np.nonzero(w.mask), strict=True))
    s, t = oracle.probabilities(w.student), oracle.probabilities(w.teacher)
    scores = {bt: score(s[bt], t[bt], w.noise[bt]) for bt in places}
    return float(x.at in sorted(places, key=scores.__getitem__)[-max(1, int(len(places) * share)) :])


def tip_score(alpha: float, gamma: float) -> Callable[[np.ndarray, np.ndarray, float], float]:
    return lambda s, t, noise: (
        math.log(noise)
        / ((oracle.shannon(s) / math.log(len(s))) ** alpha * (oracle.jsd(s, t).value / math.log(2)) ** gamma)
    )


METHODS: dict[str, tuple[Any, Callable[[Token], oracle.Term]]] = {
    "static .3": (Static(0.3), lambda x: mixture(x.s, x.t, 0.3)),
    "static 0": (Static(0.0), lambda x: oracle.forward_kl(x.s, x.t)),
    "static 1": (Static(1.0), lambda x: oracle.reverse_kl(x.s, x.t)),
    "todi": (ToDi(), lambda x: oracle.todi(x.s, x.t)),
    "todi beta 2.5": (ToDi(beta=2.5), lambda x: oracle.todi(x.s, x.t, 2.5)),
    "akl": (AKL(), lambda x: oracle.akl(x.s, x.t)),
    "akl mass .8": (AKL(mass=0.8), lambda x: oracle.akl(x.s, x.t, 0.8)),
    "jsd": (JSD(), lambda x: oracle.jsd(x.s, x.t)),
    "jsd .1": (JSD(beta=0.1), lambda x: oracle.jsd(x.s, x.t, 0.1)),
    "skl": (SKL(), lambda x: oracle.skl(x.s, x.t)),
    "skl .5": (SKL(alpha=0.5), lambda x: oracle.skl(x.s, x.t, 0.5)),
    "srkl": (SRKL(), lambda x: oracle.srkl(x.s, x.t)),
    "srkl detached": (SRKL(alpha=0.3, detach_mixture=True), lambda x: oracle.srkl(x.s, x.t, 0.3, True)),
    "abkd": (ABKD(), lambda x: oracle.abkd(x.s, x.t)),
    "abkd .6 .5": (ABKD(alpha=0.6, beta=0.5), lambda x: oracle.abkd(x.s, x.t, 0.6, 0.5)),
    "eopd": (EOPD(), lambda x: eopd(x)),
    "eopd alpha 2, top 5": (EOPD(alpha=2.0, top_k=5), lambda x: eopd(x, alpha=2.0, top_k=5)),
    "eopd tau 2, clip .5": (EOPD(tau=2.0, clip=0.5), lambda x: eopd(x, tau=2.0, clip=0.5)),
    "eopd exact": (EOPD(pg="exact"), lambda x: eopd(x, pg="exact")),
    "sampled k1": (SampledReverseKL(), lambda x: at_one(x, oracle.sampled_reverse_kl)),
    "sampled k3": (SampledReverseKL(estimator="k3"), lambda x: at_one(x, oracle.sampled_reverse_kl, estimator="k3")),
    "vopd": (VOPD(), lambda x: at_one(x, oracle.vopd)),
    "iw_opd": (
        IWOPD(gamma=0.7),
        lambda x: times(1 + 0.7 * (1 - drift(x.world)[x.at]), at_one(x, oracle.sampled_reverse_kl)),
    ),
    "student_top_k": (StudentTopK(), lambda x: oracle.student_top_k(x.s, x.t)),
    **{
        f"student_top_k {k} of {ids}, {form}": (
            StudentTopK(top_k=k, ids=ids, form=form),
            lambda x, k=k, ids=ids, form=form: oracle.student_top_k(x.s, x.t, k, ids, form),
        )
        for form in ("release", "equation", "bucket")
        for k, ids in IDS
    },
    "revisiting_opd": (RevisitingOPD(top_k=5), lambda x: oracle.renormalised_reverse_kl(x.s, x.t, 5)),
    "revisiting_opd, a fifth": (
        RevisitingOPD(top_k=5, share=0.2),
        lambda x: times(
            kept(x, 0.2, lambda s, t, noise: oracle.shannon(s)), oracle.renormalised_reverse_kl(x.s, x.t, 5)
        ),
    ),
    "tip": (TIP(), lambda x: times(kept(x, 0.5, tip_score(1.0, 0.0)), oracle.reverse_kl(x.s, x.t))),
    "tip with jsd": (
        TIP(share=0.3, alpha=2.0, gamma=0.5),
        lambda x: times(kept(x, 0.3, tip_score(2.0, 0.5)), oracle.reverse_kl(x.s, x.t)),
    ),
    "distillm2": (
        DistiLLM2(alpha=0.2),
        lambda x: oracle.skl(x.s, x.t, 0.2) if x.world.from_teacher[x.at[0]] else oracle.srkl(x.s, x.t, 0.2, True),
    ),
    "taid": (TAID(), lambda x: oracle.taid(x.s, x.t)),
    "taid .9": (TAID(t_start=0.9), lambda x: oracle.taid(x.s, x.t, 0.9)),
}
DETACHED = ("todi", "akl", "eopd", "sampled", "vopd", "iw_opd", "srkl detached", "tip", "distillm2", "taid")
"""Methods, by how they begin, that hold a part of the loss constant in the gradient; so does the form `release`."""


def run(student: np.ndarray, teacher: Any, method: Any, inputs: LossInputs | None = None, **options: Any) -> Any:
    """(output, gradient at the student's logits) of the plain path."""
    z = leaf(student)
    teacher = fixed(teacher) if isinstance(teacher, np.ndarray) else teacher
    out = distillation_loss(z, teacher, objective=method, inputs=inputs or LossInputs(**options))
    out.loss.backward()
    assert z.grad is not None
    return out, z.grad.numpy()


# ---------------------------------------------------------------------------------------------- the matrix


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", METHODS)
def test_value_and_gradient(name: str, temperature: float, off_policy: bool) -> None:
    method, row = METHODS[name]
    x = world(1, off_policy=off_policy)
    out, grad = run(x.student, x.teacher, method, x.inputs(temperature=temperature))
    loss, per_token, expected = by_definition(row, x, temperature)
    assert_close(out.loss, loss)
    assert_close(out.per_token, per_token)
    assert_close(grad, expected)
    assert out.tokens == int(x.mask.sum())


@pytest.mark.usefixtures("narrow_slices")
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", [*METHODS, "gated", "signals", "support student"])
def test_fused_equals_plain(name: str, recompute: bool) -> None:
    """Slices that cut the head of AKL and every top-k, chunks that cut responses, a bias, padding, off policy."""
    gates = {
        "gated": Gated(Gate.named("H1")),
        "signals": Gated(Gate(a=1, d=2, extra={"drift": -2, "trust": 1, "student_entropy_full": 1, "overlap": 2})),
        "support student": Gated(Gate.named("H1"), "student", 4),
    }
    method = gates[name] if name in gates else METHODS[name][0]
    v, used = 150, 147
    x = world(22, off_policy=recompute, shape=(2, 50), v=used)
    rng = np.random.default_rng(22)
    hidden, weight, bias = rng.normal(size=(2, 50, 6)), rng.normal(size=(v, 6)) * 0.5, rng.normal(size=v)
    teacher_hidden, teacher_weight = fixed(rng.normal(size=(2, 50, 4)) * 0.5), fixed(rng.normal(size=(v, 4)))
    inputs = x.inputs(temperature=2.0 if recompute else 1.0, vocab_size=used)
    call: dict[str, Any] = {"objective": method, "inputs": inputs}
    h, w = leaf(hidden), leaf(weight)
    plain = distillation_loss(h @ w.T + fixed(bias), teacher_hidden @ teacher_weight.T, **call)
    plain.loss.backward()
    fh, fw = leaf(hidden), leaf(weight)
    options = {"recompute": recompute, "chunk_mb": 0.05}
    fused = fused_distillation_loss(fh, Head(fw, fixed(bias)), teacher_hidden, teacher_weight, **options, **call)
    fused.loss.backward()
    assert_close(fused.loss, plain.loss)
    assert_close(fused.per_token, plain.per_token)
    assert np.abs(h.grad.numpy()).max() > 0
    assert_close(fh.grad, h.grad)
    assert_close(fw.grad, w.grad)
    assert (fw.grad[used:] == 0).all()


PULLS_AT_AGREEMENT = {
    "eopd": "its forward KL renormalises the teacher on its top-k but not the student, which is drawn into the top-k",
    "support hybrid": "it is 0 in the mean over sampled tokens: the sampled one stands for all outside the top-K",
}
"""Cases of the test below by how they begin → why the gradient is not 0 at student = teacher."""
AGREEMENT = {
    **{name: objective(name) for name in OBJECTIVES},
    **{f"{name}, as above": method for name, (method, _) in METHODS.items()},
    **{f"support {support}": Gated(Gate(a=1, c=-1, d=1), support) for support in SUPPORTS},
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", AGREEMENT)
def test_a_student_that_equals_its_teacher_is_left_alone(name: str, fused: bool) -> None:
    """Every objective, by default and as in the cases above: the gradient is 0 at s = t, or there is a reason."""
    x = world(5, v=50)
    rng = np.random.default_rng(5)
    hidden, head = rng.normal(size=(B, T, 6)), rng.normal(size=(50, 6)) * 0.7
    h, w, call = leaf(hidden), leaf(head), {"objective": AGREEMENT[name], "inputs": x.inputs()}
    if fused:
        out = fused_distillation_loss(h, w, fixed(hidden), fixed(head), **call)
    else:
        out = distillation_loss(h @ w.T, fixed(hidden) @ fixed(head).T, **call)
    out.loss.backward()
    pull = max(float(h.grad.abs().max()), float(w.grad.abs().max()))
    if any(name.startswith(case) for case in PULLS_AT_AGREEMENT):
        assert pull > 1e-3
    else:
        assert pull < 1e-12
        assert_close(out.per_token, np.zeros((B, T)), atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_masks_counts_and_padding(name: str) -> None:
    method, _ = METHODS[name]
    x = world(3)
    clean, clean_grad = run(x.student, x.teacher, method, x.inputs())
    student, teacher = (np.concatenate([z, np.full((B, T, 3), 60.0)], -1) for z in (x.student, x.teacher))
    student[x.mask == 0], teacher[x.mask == 0] = math.nan, math.inf
    out, grad = run(student, teacher, method, x.inputs(total_tokens=10 * clean.tokens, vocab_size=V))
    assert_close(out.loss, float(clean.loss.detach()) / 10)
    assert_close(grad[..., :V], clean_grad / 10)
    assert (grad[..., V:] == 0).all()
    assert (numbers(out.per_token)[x.mask == 0] == 0).all()
    empty, zero = run(student, teacher, method, x._replace(mask=np.zeros((B, T))).inputs(vocab_size=V))
    assert float(empty.loss.detach()) == 0.0
    assert (zero == 0).all()


@pytest.mark.parametrize("name", [n for n in METHODS if n == "eopd exact" or not n.startswith(DETACHED)])
def test_gradcheck_where_nothing_is_detached(name: str) -> None:
    x = world(6)
    teacher, method = fixed(x.teacher[:1, :2]), METHODS[name][0]
    if getattr(method, "form", "") != "release":
        assert torch.autograd.gradcheck(
            lambda z: distillation_loss(z, teacher, objective=method).loss, leaf(x.student[:1, :2])
        )


@pytest.mark.parametrize("name", METHODS)
def test_extreme_and_half_precision_logits(name: str) -> None:
    method, row = METHODS[name]
    x = world(8)
    rng = np.random.default_rng(7)
    extreme = [rng.choice([-1e3, 0.0, 1.0, 1e3], size=(B, T, V)) + rng.normal(size=(B, T, V)) for _ in range(2)]
    likely = x._replace(sampled=extreme[0].argmax(-1))
    for dtype in (torch.float64, torch.float32):
        z = leaf(extreme[0], dtype)
        out = distillation_loss(z, fixed(extreme[1], dtype), objective=method, inputs=likely.inputs())
        out.loss.backward()
        assert torch.isfinite(out.loss)
        assert torch.isfinite(z.grad).all()
    z, zt = leaf(x.student, torch.bfloat16), fixed(x.teacher, torch.bfloat16)
    out = distillation_loss(z, zt, objective=method, inputs=x.inputs())
    out.loss.backward()
    loss, _, grad = by_definition(row, x._replace(student=numbers(z), teacher=numbers(zt)))
    assert_close(out.loss, loss, rtol=1e-4, atol=1e-5)
    assert_close(z.grad, grad, rtol=1e-2, atol=1e-5)


# ---------------------------------------------------------------------------------------------- what they need and say

NEEDED = {
    "gated": "full",
    "static": "full",
    "eopd": "full sampled",
    "sampled_reverse_kl": "sampled",
    "revisiting_opd": "special",
    "tip": "full selection",
    "iw_opd": "sampled",
    "vopd": "full sampled",
    "distillm2": "full source",
    "taid": "full state",
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_a_method_needs_is_what_it_asks_for(name: str) -> None:
    """A top-K teacher, no sampled tokens, no sources, no noise: an error if and only if the method needs them."""
    method = objective(name, **({"top_k": 5} if name == "revisiting_opd" else {}))
    assert method.needs == set(NEEDED.get(name, "full").split()) <= NEEDS.keys()
    x = world(3)
    every = {"sampled": torch.as_tensor(x.sampled), "noise": fixed(x.noise), "from_teacher": torch.tensor([0, 1, 0])}
    teacher = fixed(x.teacher)
    lacks = {
        "full": (top_k_of(x.teacher, 8, x.sampled), every),
        "sampled": (teacher, every | {"sampled": None}),
        "source": (teacher, every | {"from_teacher": None}),
        "selection": (teacher, every | {"noise": None}),
    }
    for need, (known, inputs) in lacks.items():
        if need in method.needs:
            with pytest.raises(UsageError, match="instead"):
                run(x.student, known, method, **inputs)
        else:
            run(x.student, known, method, **inputs)
    assert bool(method.state) is ("state" in method.needs)


@pytest.mark.parametrize(
    ("method", "needs"),
    [
        (EOPD(pg="exact"), "full"),
        (RevisitingOPD(share=0.5), "special selection"),
        (RevisitingOPD(mask_special=False), ""),
        (Gated(Gate.named("G5"), "hybrid"), "sampled"),
        (Gated(Gate(extra={"trust": 1.0}), "bucket"), "sampled"),
        (Gated(Gate(extra={"position": 1.0}), "student"), "full"),
        (Static(0.5, "renorm"), ""),
    ],
)
def test_needs_that_depend_on_parameters(method: Any, needs: str) -> None:
    assert method.needs == set(needs.split())


def test_published_defaults() -> None:
    defaults = {name: vars(objective(name)) for name in OBJECTIVES if name not in ("gated", "static")}
    assert {name: {k: v for k, v in values.items() if k != "moving"} for name, values in defaults.items()} == {
        "todi": {"beta": 1.0},
        "eopd": {"tau": 0.8, "alpha": 1.0, "pg": "sampled", "clip": 0.2, "top_k": 16},
        "akl": {"mass": 0.5},
        "jsd": {"beta": 0.5},
        "skl": {"alpha": 0.1},
        "srkl": {"alpha": 0.1, "detach_mixture": False},
        "abkd": {"alpha": 0.2, "beta": 0.7},
        "sampled_reverse_kl": {"estimator": "k1", "coefficient": 1.0},
        "student_top_k": {"top_k": 16, "ids": "student", "form": "release"},
        "revisiting_opd": {"top_k": 32, "share": 1.0, "mask_special": True},
        "tip": {"share": 0.5, "alpha": 1.0, "gamma": 0.0},
        "iw_opd": {"gamma": 0.5},
        "vopd": {},
        "distillm2": {"alpha": 0.1},
        "taid": {"t_start": 0.4, "t_end": 1.0, "alpha": 5e-4, "beta": 0.99, "adaptive": True},
    }
    assert objective("ToDi", beta=2.0) == ToDi(2.0)
    assert objective("static", lam=0.25).gate == Gate.static(0.25)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_docstring_has_loss_and_source(name: str) -> None:
    about = described(OBJECTIVES[name])
    assert re.search(r"\(20\d\d\)", about["citation"])
    assert 0 < len(about["summary"]) <= 57  # a line of `gatespace methods`
    greek = {"alpha": "α", "beta": "β", "gamma": "γ", "tau": "τ", "lam": "λ"}
    for parameter in inspect.signature(OBJECTIVES[name]).parameters:
        assert greek.get(parameter, "") in about["formula"], parameter
    departs = {"todi": "one weight per position", "eopd": "switches at a threshold"}
    assert departs.get(name, "") in about["departures"]
    assert bool(about["departures"]) is (name in departs)


ERRORS = [
    *[(TIP, {"share": share}, "share of") for share in (0.0, -0.1, 1.5)],
    (RevisitingOPD, {"share": 0.0}, "share of"),
    *[(TAID, wrong, "of TAID") for wrong in ({"t_start": 1.0}, {"t_end": 0.3}, {"alpha": 2.0}, {"beta": 1.0})],
    (StudentTopK, {"form": "tail"}, "form of student_top_k"),
    (StudentTopK, {"ids": "both"}, "ids of student_top_k"),
    (EOPD, {"clip": 1.0}, "clip of EOPD"),
    (JSD, {"beta": 1.5}, "β of JSD"),
    (SKL, {"alpha": 1.5}, "α of SKL"),
    (SRKL, {"alpha": -0.1}, "α of SRKL"),
    *[(AKL, {"mass": mass}, "mass of AKL") for mass in (1.5, 0.0)],
    (ABKD, {"alpha": 0.5, "beta": -0.5}, "of ABKD"),
    *[(Static, {"lam": lam}, r"\[0, 1\]") for lam in (1.5, -0.1)],
]


@pytest.mark.parametrize(("kind", "parameters", "message"), ERRORS)
def test_parameters_out_of_range(kind: Any, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kind(**parameters)


# ---------------------------------------------------------------------------------------------- limits and identities


def mild(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """No probability below 1e-4: the limits are approached at a rate of parameter / probability."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, 5, V)), rng.normal(size=(2, 5, V))


@pytest.mark.parametrize(
    ("method", "factor", "lam"),
    [
        (JSD(beta=1e-6), 1e6, 0.0),
        (JSD(beta=1 - 1e-6), 1e6, 1.0),
        (SKL(alpha=1e-9), 1, 0.0),
        (SKL(alpha=0.0), 1, 0.0),
        (SRKL(alpha=1e-9), 1, 1.0),
        (SRKL(alpha=0.0), 1, 1.0),
        (ABKD(alpha=1.0, beta=0.0), 1, 0.0),
        (ABKD(alpha=1.0, beta=1e-7), 1, 0.0),
        (ABKD(alpha=0.0, beta=1.0), 1, 1.0),
        (ABKD(alpha=1e-7, beta=1.0), 1, 1.0),
        (EOPD(tau=math.inf, pg="exact"), 1, 1.0),
    ],
)
def test_methods_tend_to_the_kls(method: Any, factor: float, lam: float) -> None:
    out, grad = run(*mild(16), method)
    plain, plain_grad = run(*mild(16), Static(lam))
    assert_close(factor * out.loss, plain.loss, rtol=1e-3 if factor > 1 else 1e-5)
    np.testing.assert_allclose(factor * grad, plain_grad, atol=1e-3 if factor > 1 else 1e-6)


@given(rows(), st.sampled_from([0.5, 1.0, 2.0]))
def test_todi_value_is_forward_plus_reverse_and_jsd_symmetric(pair: Any, temperature: float) -> None:
    student, teacher = (x[None, None] for x in pair)

    def loss(left: np.ndarray, right: np.ndarray, method: Any) -> float:
        return float(run(left, right, method, temperature=temperature, top_k=2)[0].loss.detach())

    todi, jsd = loss(student, teacher, ToDi(beta=1.0)), loss(student, teacher, JSD())
    assert_close(todi, 2 * loss(student, teacher, Static(0.5)))
    assert_close(todi, loss(teacher, student, ToDi(beta=1.0)))
    assert_close(jsd, loss(teacher, student, JSD()))
    assert 0 <= jsd <= math.log(2)


@pytest.mark.parametrize("beta", [0.5, 1.0, 3.0])
def test_todi_near_agreement(beta: float) -> None:
    """Its gradient is (1 + β/2) times that of 0.5 F + 0.5 R: the loss scale to report beside any comparison."""
    teacher, far = mild(10)
    student = teacher + np.random.default_rng(0).normal(size=teacher.shape) * 1e-4
    _, todi = run(student, teacher, ToDi(beta=beta))
    _, half = run(student, teacher, Static(0.5))
    np.testing.assert_allclose(todi, (1 + beta / 2) * half, rtol=1e-2, atol=np.abs(half).max() * 1e-3)
    assert np.abs(run(far, teacher, ToDi(1.0))[1] - 2 * run(far, teacher, Static(0.5))[1]).max() > 1e-3


@pytest.mark.parametrize(("form", "least"), [("release", 0.975), ("equation", 0.975), ("bucket", 0.985)])
def test_student_top_k_near_its_teacher_follows_reverse_kl(form: str, least: float) -> None:
    """The truncated sum Σ s·(log s - log t), which is none of the forms, has a cosine of .78 here."""
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(1, 50, 200)) * 2.5
    student = teacher + rng.normal(size=teacher.shape) * 0.3
    _, full = run(student, teacher, Static(1.0))
    _, grad = run(student, teacher, StudentTopK(form=form))
    assert (grad * full).sum() / np.linalg.norm(grad) / np.linalg.norm(full) > least


def test_forms_of_student_top_k_at_their_edges() -> None:
    """The student has little on its top-1, the teacher more; the rest is out of sight. Then no id is in both."""
    student, teacher = np.log([[[0.4, 0.3, 0.3]]]), np.log([[[0.6, 0.2, 0.2]]])
    forms = ("release", "equation", "bucket")
    loss = [float(run(student, teacher, StudentTopK(1, form=f), top_k=2)[0].loss.detach()) for f in forms]
    assert loss[0] < 0 == loss[1] < loss[2]
    student, teacher = np.log([[[0.5, 0.3, 0.2]]]), np.log([[[0.2, 0.3, 0.5]]])
    for form in ("release", "equation"):
        out, grad = run(student, teacher, StudentTopK(1, "intersection", form), top_k=2)
        assert float(out.loss.detach()) == 0
        assert (grad == 0).all()


def test_student_top_k_where_the_teacher_forbids_ids() -> None:
    x = world(7)
    teacher = x.teacher.copy()
    np.put_along_axis(teacher, np.argsort(-x.student, -1)[..., :2], -np.inf, -1)
    for form in ("release", "equation"):
        with pytest.raises(UsageError, match="reverse KL is infinite"):
            run(x.student, teacher, StudentTopK(top_k=2, form=form))
    out, grad = run(x.student, teacher, StudentTopK(top_k=20, form="bucket"))  # they belong to the tail
    assert np.isfinite(numbers(out.per_token)).all()
    assert np.isfinite(grad).all()
    known = top_k_of(x.teacher, 8)
    out, _ = run(x.student, known, StudentTopK(top_k=8, ids="teacher", form="bucket"))
    assert_close(out.loss, run(x.student, known, Static(1.0, "bucket"))[0].loss)


@pytest.mark.parametrize("k", [1, 5, V])
def test_support_student_in_value_and_gradient(k: int) -> None:
    x = world(5)
    out, grad = run(x.student, x.teacher, Static(0.3, "student", k), x.inputs())

    def row(token: Token) -> oracle.Term:
        f, r = oracle._bucket(token.s, token.t, np.isin(np.arange(V), oracle.top_ids(token.s, k)))
        return oracle.Term(0.3 * r.value + 0.7 * f.value, 0.3 * r.grad + 0.7 * f.grad)

    loss, per_token, expected = by_definition(row, x)
    assert_close(out.loss, loss)
    assert_close(out.per_token, per_token)
    assert_close(grad, expected)
    full, _ = run(x.student, x.teacher, Static(0.3), x.inputs())
    for name in ("forward_kl", "reverse_kl"):
        assert (numbers(getattr(full, name)) - numbers(getattr(out, name)) > -1e-12).all()


# ---------------------------------------------------------------------------------------------- means over the token


@given(distinct_logits(5), distinct_logits(5))
def test_mean_policy_gradients(student: np.ndarray, teacher: np.ndarray) -> None:
    """That of reverse KL, with less noise for vOPD; k3, as an advantage, follows ∇R - ∇F."""
    s, t = oracle.probabilities(student), oracle.probabilities(teacher)
    forward, reverse = oracle.forward_kl(s, t), oracle.reverse_kl(s, t)
    squares = {}
    for method, value, grad in (
        (EOPD(tau=math.inf, top_k=3), reverse.value, reverse.grad),
        (SampledReverseKL(), reverse.value, reverse.grad),
        (VOPD(), 0.0, reverse.grad),
        (SampledReverseKL(estimator="k3"), reverse.value, reverse.grad - forward.grad),
    ):
        outs = [
            run(student[None, None], teacher[None, None], method, sampled=torch.tensor([[y]]), top_k=2)
            for y in range(5)
        ]
        losses, grads = np.array([float(out.loss.detach()) for out, _ in outs]), np.array([g[0, 0] for _, g in outs])
        np.testing.assert_allclose(s @ grads, grad, atol=1e-10)
        assert s @ losses == pytest.approx(value, abs=1e-10)
        factors = np.array([g[y] / (1 - s[y]) for y, g in enumerate(grads)])  # of ∇log s(y)
        squares[str(method)] = s @ factors**2
    assert (losses >= -1e-12).all()  # k3
    assert squares[str(VOPD())] <= squares[str(SampledReverseKL())] + 1e-12


@pytest.mark.parametrize("shift", [-1.0, -0.1, 0.1, 1.0])
@pytest.mark.parametrize("good", [True, False])
def test_eopd_clips_the_ratio_off_policy(shift: float, good: bool) -> None:
    """ρ = e^-shift inside and outside [0.8, 1.2], for tokens that the teacher likes and dislikes."""
    rng = np.random.default_rng(12)
    student, teacher, y = rng.normal(size=(1, 1, 20)), rng.normal(size=(1, 1, 20)), 3
    teacher[0, 0, y] = 4.0 if good else -6.0
    log_old = math.log(oracle.probabilities(student[0, 0])[y]) + shift
    given = {"sampled": torch.tensor([[y]]), "sampled_log_probs": fixed([[log_old]])}
    out, grad = run(student, teacher, EOPD(), **given)
    expected = oracle.eopd(student[0, 0], teacher[0, 0], y=y, log_old=log_old)
    assert_close(out.loss, expected.value)
    assert_close(grad[0, 0], expected.grad)
    _, pg_grad = run(student, teacher, EOPD(tau=math.inf), **given)
    held = (good and shift == -1.0) or (not good and shift == 1.0)
    assert bool(np.abs(pg_grad).max() < 1e-12) is held


def test_eopd_gates_each_position_by_its_own_entropy_in_nats() -> None:
    """Not position t+1 by the entropy at t; and over the full vocabulary: here most of it is in the tail."""
    student, teacher = np.random.default_rng(14).normal(size=(1, 3, 101)), np.zeros((1, 3, 101))
    teacher[0, 1, 0] = 50.0  # only the middle position is certain
    teacher[0, 2] = np.log([0.7, *[0.003] * 100])  # 1.99 nats in all, 0.61 with the tail lumped
    extra = {}
    for tau in (0.8, 1.99, 2.0):
        out, _ = run(student, teacher, EOPD(pg="exact", top_k=101, tau=tau))
        extra[tau] = (numbers(out.per_token) - numbers(out.reverse_kl)) / numbers(out.forward_kl)
    assert_close(extra[0.8], [[1.0, 0.0, 1.0]], atol=1e-8)
    assert_close(extra[1.99], [[1.0, 0.0, 1.0]], atol=1e-8)
    assert_close(extra[2.0], [[1.0, 0.0, 0.0]], atol=1e-8)


@pytest.mark.parametrize(
    ("teacher", "head"),
    [
        ([0.3, 0.19, 0.26, 0.25], [0]),  # 0.56 with the second best: it crosses the threshold and is tail
        ([0.3, 0.1, 0.2, 0.4], [3]),  # 0.4, then 0.7
        ([0.1, 0.3, 0.15, 0.15, 0.2, 0.1], [1, 4]),  # 0.3, 0.5 (not above it), then 0.65
        ([0.7, 0.1, 0.2], [0]),  # the first is in the head even where it crosses alone
    ],
)
def test_head_of_akl(teacher: list[float], head: list[int]) -> None:
    """The authors' rule: cumulative mass at most 0.5, and always the first."""
    t = np.array(teacher)
    s = oracle.probabilities(np.random.default_rng(0).normal(size=len(t)))
    gaps = np.abs(t - s)
    # A hair above one half would be decided by rounding; the mass is moved by less than any id's probability.
    out, _ = run(np.log(s)[None, None], np.log(t)[None, None], AKL(mass=0.5 + 1e-9), top_k=2)
    assert_close(out.lam, [[1 - gaps[head].sum() / gaps.sum()]])


@pytest.mark.parametrize(("alpha", "gamma"), [(1.0, 0.0), (0.5, 1.0)])
def test_tip_draws_without_replacement_by_weight(alpha: float, gamma: float) -> None:
    """How often each pair of three tokens is kept, against the probabilities of drawing them one after the other."""
    rng = np.random.default_rng(11)
    student, teacher = rng.normal(size=(1, 3, V)) * [[[0.3], [2.0], [4.0]]], rng.normal(size=(1, 3, V))
    s, t = oracle.probabilities(student[0]), oracle.probabilities(teacher[0])
    weights = np.array([1 / tip_score(alpha, gamma)(s[i], t[i], math.e) for i in range(3)])
    weights /= weights.sum()
    pairs = {frozenset(pair): 0.0 for pair in itertools.combinations(range(3), 2)}
    for first, second in itertools.permutations(range(3), 2):
        pairs[frozenset((first, second))] += weights[first] * weights[second] / (1 - weights[first])
    counts = dict.fromkeys(pairs, 0)
    draws, method = 500, TIP(share=0.67, alpha=alpha, gamma=gamma)
    for noise in rng.random((draws, 1, 3)):  # a draw is over the tokens of a call
        out, _ = run(student, teacher, method, noise=fixed(noise), top_k=2)
        counts[frozenset(np.nonzero(numbers(out.weight)[0])[0].tolist())] += 1
    for pair, probability in pairs.items():
        assert counts[pair] / draws == pytest.approx(probability, abs=4 * math.sqrt(0.25 / draws))


# ---------------------------------------------------------------------------------------------- TAID's state


def taus_by_definition(losses: list[float], steps: int) -> list[float]:
    """τ of every step, as the authors' code has it."""
    tau, mean, last, taus = 0.4, 0.0, math.inf, [0.4]
    for step, loss in enumerate(losses):
        if not math.isinf(last):
            mean = 0.99 * mean + 0.01 * (last - loss) / (last + 1e-15)
            tau = min(1.0, max(0.4 + 0.6 * step / steps, tau + 5e-4 / (1 + math.exp(-mean)) * (1 - tau)))
        last = loss
        taus.append(tau)
    return taus


def test_schedule_of_taid() -> None:
    losses = (np.exp(-np.arange(40) / 15) + np.random.default_rng(15).normal(size=40) * 0.02).tolist()
    method, line = TAID(), TAID(adaptive=False)
    taus = [method.state["tau"]]
    for step, loss in enumerate(losses):
        method.advance(loss, step / 200)
        taus.append(method.state["tau"])
        line.advance(loss, step / 40)
    np.testing.assert_allclose(taus, taus_by_definition(losses, 200), rtol=1e-12)
    assert taus == sorted(taus)
    assert line.state["tau"] == pytest.approx(0.4 + 0.6 * 39 / 40)


def test_state_of_taid_resumes_to_the_bit_and_ends_at_forward_kl() -> None:
    straight, first, second = TAID(), TAID(), TAID()
    for step in range(10):
        straight.advance(1 / (step + 1), step / 500)
        (first if step < 6 else second).advance(1 / (step + 1), step / 500)
        if step == 5:
            second.state.update(dict(first.state))
    assert second.state == straight.state
    assert straight == TAID()  # the state is no part of what the method is
    assert TAID().state["tau"] == 0.4  # and no two share it
    straight.state["tau"] = 1.0
    out, grad = run(*mild(16), straight)
    plain, plain_grad = run(*mild(16), Static(0.0))
    assert_close(out.loss, plain.loss)
    assert_close(grad, plain_grad)


def test_fused_names_what_a_top_k_teacher_does_not_know() -> None:
    """The sampled token lies outside of the top-K at some place, and its log-probability was not sent."""
    rng = np.random.default_rng(20)
    hidden, head = fixed(rng.normal(size=(1, 40, 6))), fixed(rng.normal(size=(V, 6)))
    teacher = top_k_of(rng.normal(size=(1, 40, V)), 3)
    inputs = LossInputs(sampled=torch.as_tensor(rng.integers(0, V, size=(1, 40))), top_k=2)
    for method in (IWOPD(), Gated(Gate(extra={"drift": 1.0}), "bucket")):
        with pytest.raises(UsageError, match="response token outside its top-K"):
            fused_distillation_loss(hidden, head, teacher, None, objective=method, inputs=inputs, chunk_mb=0.005)


@pytest.mark.parametrize("gate", ["G5", "H1", "static:0.388"])
def test_gated_objective_is_gated_kl(gate: str) -> None:
    x = world(2)
    out, grad = run(x.student, x.teacher, Gated(Gate.parse(gate)), x.inputs())
    z = leaf(x.student)
    plain = gated_kl(z, fixed(x.teacher), gate=Gate.parse(gate), **vars(x.inputs()))
    plain.loss.backward()
    assert torch.equal(out.loss, plain.loss)
    assert_close(grad, z.grad)
