"""`gatespace methods`: list the objectives with their losses, requirements and sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatespace.cli.console import console, print_json, table
from gatespace.cli.run_options import AsJson, Plugins
from gatespace.errors import unknown_name
from gatespace.plugins import load_plugins

if TYPE_CHECKING:
    from gatespace.gating.objectives import Objective

_NEEDS = {
    "uses_sampled": "the sampled token",
    "selects": "random choice or ranking of tokens",
    "by_source": "responses of student and teacher",
    "skips_special": "the tokenizer's special tokens",
    "state": "a state over steps",
}
"""Hook of `Objective` → what the method needs from a run besides both distributions."""


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="METHOD", show_default=False, help="One method, in full; default: list all.")
    ] = None,
    plugins: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """List the objectives: the family and published methods.

    Each is a value of `objective.method` of a run, and an entry of
    `axes.published` of a study.

    \b
    gatespace methods                     one line each
    gatespace methods taid                formula, parameters, citation
    gatespace train --set objective.method=taid --set objective.params.alpha=1e-3
    gatespace run methods                 a study that compares them all

    JSON, alone on standard output:

    \b
    {"methods": \\[{"name", "summary", "formula", "parameters": {},
      "needs": \\[], "citation", "departures"}]}
    """
    from gatespace.gating import objectives

    load_plugins(plugins or [])
    objectives.get("gated")  # registers the published methods
    kinds = objectives.OBJECTIVES
    if name is not None:
        if name not in kinds:
            raise unknown_name("method", name, kinds)
        kinds = {name: kinds[name]}
    found = [_about(kind) for kind in kinds.values()]
    if as_json:
        print_json({"methods": found})
    elif name is not None:
        _print_one(found[0])
    else:
        rows = table("Objectives", "method", "what it minimises")
        for one in found:
            rows.add_row(one["name"], one["summary"])
        console().print(rows)


def _about(kind: type[Objective]) -> dict[str, Any]:
    import inspect

    parameters = {
        name: None if one.default is one.empty else one.default if _plain(one.default) else str(one.default)
        for name, one in inspect.signature(kind).parameters.items()
    }
    try:
        made = kind()
    except TypeError:  # a plugin's method with a required parameter
        needs = []
    else:
        needs = [words for hook, words in _NEEDS.items() if getattr(made, hook)()]
    return {
        "name": kind.name,
        "summary": kind.summary or (inspect.getdoc(kind) or kind.formula).splitlines()[0].rstrip("."),
        "formula": kind.formula,
        "parameters": parameters,
        "needs": needs,
        "citation": kind.citation,
        "departures": kind.departures,
    }


def _plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _print_one(about: dict[str, Any]) -> None:
    given = ", ".join(f"{name}={value}" for name, value in about["parameters"].items())
    parts = {
        about["name"]: about["summary"],
        "formula": about["formula"],
        "parameters": given or "none",
        "needs": ", ".join(about["needs"]) or "only both distributions",
        "source": about["citation"],
        "beside the family": about["departures"],
    }
    for title, text in parts.items():
        if text:
            console().print(f"{title}: {text}")
