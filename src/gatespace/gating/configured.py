"""The objective that a configuration names: the place where settings become mathematics."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from gatespace.config import ObjectiveConfig, in_setting
from gatespace.errors import UsageError, unknown_name
from gatespace.gating.coefficients import Gate

if TYPE_CHECKING:
    from gatespace.gating.objectives import Objective

_OWN_SETTINGS = ("support", "support_k")  # settings beside `params`, not parameters of the method static


def build_gate(config: ObjectiveConfig, *, path: str = "objective.") -> Gate | None:
    """The gate, or None where the method has none. Needs no torch; whether signals are known is left to the objective.

    Args:
        config: The section `objective`.
        path: Where that section stands, up to its last dot, for errors.

    Example:
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


def build_objective(config: ObjectiveConfig, *, path: str = "objective.") -> Objective:
    """The objective of `gatespace.gating` that the section names.

    Args:
        config: The section `objective`. Its `top_k`, `temperature` and `entropy` are arguments of the loss and not part
            of the objective.
        path: Where that section stands, up to its last dot, for errors.

    Example:
        >>> build_objective(ObjectiveConfig(method="eopd", params={"tau": 0.5})).tau
        0.5
    """
    from gatespace.gating.objectives import Gated, Static
    from gatespace.gating.published import OBJECTIVES

    gate = build_gate(config, path=path)
    if gate is not None:
        with in_setting(f"{path}gate"):
            return Gated(gate, config.support, config.support_k, config.stop_gradient)
    kind = OBJECTIVES[config.method]
    parameters = _parameters(config, kind, path=f"{path}params.")
    with in_setting(f"{path}params"):
        if kind is Static:
            parameters |= {"support": config.support, "support_k": config.support_k}
        return kind(**parameters)


def _parameters(config: ObjectiveConfig, kind: type[Objective], *, path: str) -> dict[str, Any]:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(kind).parameters.items()
        if name not in _OWN_SETTINGS
    }
    given: dict[str, Any] = {}
    for name, value in config.params.items():
        with in_setting(f"{path}{name}"):
            if name not in defaults:
                raise unknown_name(f"parameter of {config.method}", name, defaults)
            given[name] = _as(type(defaults[name]), value)
    return given


def _as(wanted: type, value: bool | int | float | str) -> bool | int | float | str:
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        words = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}
        raise UsageError(f"must be {words[wanted]}", got=repr(value))
    return value
