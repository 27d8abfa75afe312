"""Build gates and objectives from the configuration section `objective`."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from gatespace.config import ObjectiveConfig, TrainConfig, in_setting
from gatespace.errors import UsageError, unknown_name
from gatespace.gating.coefficients import Gate

if TYPE_CHECKING:
    from gatespace.gating.objectives import Objective


def build_gate(config: ObjectiveConfig, *, path: str = "objective.") -> Gate | None:
    """Return the gate, or None if the method has none. Needs no torch; the objective checks the signals' names.

    Args:
        config: The section `objective`.
        path: Prefix of that section's settings in error messages, with the trailing dot.

    Examples:
        >>> build_gate(ObjectiveConfig(gate="G5")) == build_gate(ObjectiveConfig(gate={"a": 4, "c": -1}))
        True
    """
    if config.gate is None:
        return None
    with in_setting(f"{path}gate"):
        gate = Gate.parse(config.gate)
    if config.shuffle and gate.is_static:
        what, instead = "a static gate has one λ and nothing to shuffle", "false, or a gate with a, b or d"
        raise UsageError(f"{path}shuffle: {what}", got=f"gate {gate}", instead=instead)
    return gate


def build_objective(config: ObjectiveConfig, *, path: str = "objective.", run: TrainConfig | None = None) -> Objective:
    """Return the objective of `gatespace.gating` that the section names.

    Args:
        config: The section `objective`. Its `top_k`, `temperature` and `entropy` are arguments of the loss, not of the
            objective.
        path: Prefix of that section's settings in error messages, with the trailing dot.
        run: The run that it is part of, which has to give the objective what it needs.

    Examples:
        >>> build_objective(ObjectiveConfig(method="eopd", params={"tau": 0.5})).tau
        0.5
    """
    from gatespace.gating.objectives import Gated, Static, get

    gate = build_gate(config, path=path)
    support: dict[str, Any] = {"support": "full" if config.over_labels else config.support}  # all of the labels
    support["support_k"] = config.support_k
    if gate is not None:
        with in_setting(f"{path}gate"):
            objective: Objective = Gated(gate, **support, stop_gradient=config.stop_gradient)
    else:
        with in_setting(f"{path}method"):
            kind = get(config.method)
        fixed = support if kind is Static else {}
        params = _parameters(config, kind, without=fixed, path=f"{path}params")
        with in_setting(f"{path}params"):
            objective = kind(**params, **fixed)
    _check_needs(objective, config, path, run)
    return objective


def _check_needs(objective: Objective, config: ObjectiveConfig, path: str, run: TrainConfig | None) -> None:
    from gatespace.gating.objectives import Gated

    needs, method = objective.needs, f"the method {config.method}"
    if config.over_labels and "sampled" in needs:
        raise UsageError(
            f"{path}support: this objective uses the response token, and over labels none is sampled",
            got=f"gate {config.gate}, support {config.support}",
            instead="another support, or a gate without signals of the sampled token",
        )
    if run is None:
        return
    sources, payload = run.rollout.source.shares(), run.teacher.payload
    if "source" in needs and ("student" not in sources or len(sources) == 1):
        raise UsageError(
            f"{path}method: {method} needs responses of the student and of the teacher",
            got=f"rollout.from: {', '.join(sources)}",
            instead="rollout.from: {student: 0.5, teacher: 0.5}",
        )
    if payload != "hidden" and "full" in needs:
        setting, what, instead = "method", method, ""
        if isinstance(objective, Gated):
            setting, what, instead = "support", f"the support {config.support}", "bucket, or "
        raise UsageError(
            f"{path}{setting}: {what} needs the teacher's full distribution",
            got=f"teacher.payload: {payload}",
            instead=f"{instead}teacher.payload: hidden",
        )


def _parameters(
    config: ObjectiveConfig, kind: type[Objective], *, without: Collection[str], path: str
) -> dict[str, Any]:
    """`params`, checked against the names and types of the class's parameters."""
    known = {name: one.default for name, one in inspect.signature(kind).parameters.items() if name not in without}
    types, given = get_type_hints(kind.__init__), {}
    for name, value in config.params.items():
        with in_setting(f"{path}.{name}"):
            if name not in known:
                raise unknown_name(f"parameter of {config.method}", name, known)
            try:
                given[name] = TypeAdapter(types.get(name, Any)).validate_python(value, strict=True)
            except ValidationError as error:
                raise UsageError(error.errors()[0]["msg"].replace("Input should", "must"), got=repr(value)) from None
    for name, default in known.items():
        if default is inspect.Parameter.empty and name not in given:
            raise UsageError(f"{path}.{name}: the method {config.method} needs it and has no default for it")
    return given
