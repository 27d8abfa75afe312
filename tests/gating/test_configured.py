"""Settings become the objective they name, and what is wrong is said with its dotted path."""

from __future__ import annotations

import inspect
import re
from typing import Any, get_args

import pytest

from gatespace.config import ObjectiveConfig, TrainConfig, parse_config
from gatespace.errors import UsageError
from gatespace.gating import OBJECTIVES, Gate, Gated, Static, objective
from gatespace.gating.configured import build_gate, build_objective
from gatespace.gating.inputs import ENTROPIES
from gatespace.gating.supports import SUPPORTS


def build(**settings: Any) -> Any:
    return build_objective(parse_config(ObjectiveConfig, settings))


@pytest.mark.parametrize(
    "gate", ["G5", "4,0,-1,0", " (4, 0, -1, 0) ", [4, 0, -1, 0], {"a": 4, "c": -1}, {"c": -1.0, "a": 4, "b": 0}]
)
def test_every_spelling_of_a_gate(gate: object) -> None:
    built = build(gate=gate)
    assert type(built) is Gated
    assert built.gate == Gate.named("G5")
    assert (built.support, built.support_k, built.stop_gradient) == ("full", None, False)


def test_settings_of_a_gate_arrive() -> None:
    built = build(gate={"a": 1, "student_entropy": 2}, support="bucket", support_k=4, stop_gradient=True)
    assert built.gate == Gate(a=1, extra={"student_entropy": 2})
    assert (built.support, built.support_k, built.stop_gradient) == ("bucket", 4, True)
    assert build().gate == Gate.named("G5")
    assert build(gate="static:0.388").gate == Gate.static(0.388)


@pytest.mark.parametrize("gate", ["G5", [0, 1, 0, 0], [0, 0, 0, -2], {"student_entropy": 2}])
def test_any_gate_that_depends_on_a_signal_can_be_shuffled(gate: object) -> None:
    assert build(gate=gate, shuffle=True).gate == build(gate=gate).gate


def test_static() -> None:
    built = build(method="static", params={"lam": 0.388}, support="renorm", support_k=3)
    assert type(built) is Static
    assert (built.gate, built.support, built.support_k) == (Gate.static(0.388), "renorm", 3)
    assert build(method="static").gate == Gate.static(0.5)
    assert build(method="static", params={"lam": 1}).gate == Gate.static(1.0)


@pytest.mark.parametrize("method", [method for method in OBJECTIVES if method not in ("gated", "static")])
def test_published_methods(method: str) -> None:
    assert build(method=method) == objective(method)
    defaults = {name: p.default for name, p in inspect.signature(OBJECTIVES[method]).parameters.items()}
    assert build(method=method, params=defaults) == objective(method)
    assert build_gate(ObjectiveConfig(method=method)) is None  # type: ignore[arg-type]


def test_names_are_those_of_gating() -> None:
    fields = ObjectiveConfig.model_fields
    assert get_args(fields["support"].annotation) == (*SUPPORTS, "labels")  # the last is of a run
    assert set(get_args(fields["entropy"].annotation)) == set(ENTROPIES)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"gate": "G9"}, "objective.gate: unknown gate 'G9'"),
        ({"method": "tody"}, "objective.method: unknown objective 'tody'\n  instead: did you mean 'todi'?"),
        ({"gate": "1,2,3"}, "objective.gate: a gate has four coefficients"),
        ({"gate": "static:2"}, "objective.gate: a static λ lies in [0, 1]"),
        ({"gate": {"a": 1, "gap": 2}}, "objective.gate: 'gap' cannot name a further signal"),
        ({"gate": {"student_entropi": 2}}, "objective.gate: unknown signal 'student_entropi'"),
        ({"gate": "0,0,0,0,student_entropi=2"}, "did you mean 'student_entropy'?"),
        ({"method": "static", "params": {"lam": 2}}, "objective.params: a static λ lies in [0, 1]"),
        (
            {"method": "static", "params": {"support": "bucket"}},
            "objective.params.support: unknown parameter of static",
        ),
        ({"method": "todi", "params": {"bta": 1}}, "objective.params.bta: unknown parameter of todi 'bta'"),
        ({"method": "todi", "params": {"beta": "x"}}, "objective.params.beta: must be a valid number\n  got: 'x'"),
        ({"method": "todi", "params": {"beta": True}}, "objective.params.beta: must be a valid number"),
        ({"method": "eopd", "params": {"top_k": 1.5}}, "objective.params.top_k: must be a valid integer"),
        ({"method": "eopd", "params": {"pg": "none"}}, "objective.params: unknown policy-gradient term"),
        (
            {"method": "srkl", "params": {"detach_mixture": 1}},
            "objective.params.detach_mixture: must be a valid boolean",
        ),
        ({"gate": "static:0.5", "shuffle": True}, "objective.shuffle: a static gate has one λ and nothing to shuffle"),
        ({"gate": [0, 0, 3, 0], "shuffle": True}, "objective.shuffle: a static gate"),
        ({"gate": {"c": 1}, "shuffle": True}, "objective.shuffle: a static gate"),
        ({"method": "akl", "params": {"mass": 2}}, "objective.params: mass of AKL lies between 0 and 1"),
    ],
)
def test_errors_name_the_setting(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(**settings)
    assert message in str(caught.value)


def test_errors_name_the_place_of_the_section() -> None:
    with pytest.raises(UsageError, match=r"^points\.3\.gate: unknown gate"):
        build_objective(ObjectiveConfig(gate="G9"), path="points.3.")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "objective.support: the support full needs the teacher's full distribution"),
        ({"support": "student"}, "objective.support: the support student needs the teacher's full distribution"),
        ({"method": "todi"}, "objective.method: the method todi needs the teacher's full distribution"),
        ({"method": "taid"}, "objective.method: the method taid needs the teacher's full distribution"),
        ({"support": "bucket"}, None),
        ({"method": "iw_opd"}, None),
    ],
)
def test_what_a_top_k_payload_cannot_serve(settings: dict[str, Any], message: str | None) -> None:
    pair = {"student": "tiny", "teacher": "tiny"}
    run = parse_config(TrainConfig, {"pair": pair, "objective": settings, "teacher": {"payload": "top_k"}})
    if message is None:
        build_objective(run.objective, run=run)
    else:
        with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
            build_objective(run.objective, run=run)
