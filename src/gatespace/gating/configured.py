"""Build gates and objectives from the configuration section `objective`."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from gatespace.config import ObjectiveConfig, in_setting
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
        found = Gate.of(config.gate)
    if config.shuffle and found.is_static:
        with in_setting(f"{path}shuffle"):
            raise UsageError(
                "a static gate has one λ and nothing to shuffle",
                got=f"gate {found}",
                instead="false, or a gate with a, b or d",
            )
    return found


def build_objective(config: ObjectiveConfig, *, path: str = "objective.", sources: Collection[str] = ()) -> Objective:
    """Return the objective of `gatespace.gating` that the section names.

    Args:
        config: The section `objective`. Its `top_k`, `temperature` and `entropy` are arguments of the loss, not of the
            objective.
        path: Prefix of that section's settings in error messages, with the trailing dot.
        sources: Whose responses are trained on (student, teacher, gold), if known.

    Examples:
        >>> build_objective(ObjectiveConfig(method="eopd", params={"tau": 0.5})).tau
        0.5
    """
    objective = _build(config, path)
    with in_setting(path.removesuffix(".")):
        if config.over_labels and objective.uses_sampled():
            raise UsageError(
                "this objective uses the response token, and over labels none is sampled",
                got=f"gate {config.gate}, support {config.support}",
                instead="another support, or a gate without signals of the sampled token",
            )
        if sources and objective.by_source() and ("student" not in sources or len(sources) == 1):
            raise UsageError(
                f"the method {config.method} needs responses of the student and of the teacher",
                got=f"rollout.from: {', '.join(sources)}",
                why="it has one divergence for the one and another for the other",
                instead="rollout.from: {student: 0.5, teacher: 0.5}",
            )
    return objective


def _build(config: ObjectiveConfig, path: str) -> Objective:
    from gatespace.gating.objectives import Gated, Static, get

    gate = build_gate(config, path=path)
    support = "full" if config.over_labels else config.support  # all of the labels
    if gate is not None:
        with in_setting(f"{path}gate"):
            return Gated(gate, support, config.support_k, config.stop_gradient)
    with in_setting(f"{path}method"):
        kind = get(config.method)
    settings = {"support": support, "support_k": config.support_k} if kind is Static else {}
    parameters = _parameters(config, kind, settings, path=f"{path}params.")
    with in_setting(f"{path}params"):
        return kind(**parameters, **settings)


def _parameters(
    config: ObjectiveConfig, kind: type[Objective], settings: Mapping[str, object], *, path: str
) -> dict[str, Any]:
    """`params`, checked against the class's parameters, except those in `settings`."""
    known = {name: one.default for name, one in inspect.signature(kind).parameters.items() if name not in settings}
    given: dict[str, Any] = {}
    for name, value in config.params.items():
        with in_setting(f"{path}{name}"):
            if name not in known:
                raise unknown_name(f"parameter of {config.method}", name, known)
            given[name] = _like(known[name], value)
    for name, default in known.items():
        if default is inspect.Parameter.empty and name not in given:
            with in_setting(f"{path}{name}"):
                raise UsageError(f"the method {config.method} needs it and has no default for it")
    return given


def _like(default: object, value: bool | int | float | str) -> bool | int | float | str:
    """The value, checked against the type of the parameter's default; an int is accepted for a float."""
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}
    wanted = type(default)
    if wanted is float and type(value) is int:
        return float(value)
    if wanted in words and type(value) is not wanted:
        raise UsageError(f"must be {words[wanted]}", got=repr(value))
    return value
