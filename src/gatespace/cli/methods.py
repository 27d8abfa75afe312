"""`gatespace methods`: list the objectives with their losses, requirements and sources."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatespace.cli.console import console, print_json, table
from gatespace.cli.run_options import AsJson, Plugins
from gatespace.errors import unknown_name
from gatespace.plugins import load_plugins

if TYPE_CHECKING:
    from gatespace.gating.objectives import Objective


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
    gatespace methods taid                its docstring: loss, parameters, source
    gatespace train --set objective.method=taid --set objective.params.alpha=1e-3
    gatespace run methods                 a study that compares them all

    JSON, alone on standard output:

    \b
    {"methods": \\[{"name", "summary", "formula", "citation",
      "departures", "parameters": {}, "needs": \\[]}]}
    """
    from gatespace.gating import objectives

    load_plugins(plugins or [])
    kinds = objectives.OBJECTIVES
    if name is not None:
        if name not in kinds:
            raise unknown_name("method", name, kinds)
        kinds = {name: kinds[name]}
    about = [_about(kind) for kind in kinds.values()]
    if as_json:
        print_json({"methods": about})
    elif name is not None:
        text = re.sub(r"(?<=\S)\n(?=\S)", " ", inspect.getdoc(kinds[name]) or "")  # paragraphs in one line
        console().print(f"{name}: {text}\n", highlight=False, markup=False)
        given = ", ".join(f"{key}={value}" for key, value in about[0]["parameters"].items())
        console().print(f"parameters: {given or 'none'}", markup=False)
        console().print(f"needs: {', '.join(about[0]['needs']) or 'only the log-probabilities of a top-k'}")
    else:
        rows = table("Objectives", "method", "what it minimises")
        for method in about:
            rows.add_row(method["name"], method["summary"])
        console().print(rows)


def _about(kind: type[Objective]) -> dict[str, Any]:
    from gatespace.gating.objectives import NEEDS, described

    parameters = {
        name: None if one.default is one.empty else one.default if _plain(one.default) else str(one.default)
        for name, one in inspect.signature(kind).parameters.items()
    }
    try:
        needs = kind().needs
    except TypeError:  # a plugin's method with a required parameter
        needs = frozenset()
    needed = [words for need, words in NEEDS.items() if need in needs]
    return {"name": kind.name, **described(kind), "parameters": parameters, "needs": needed}


def _plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
