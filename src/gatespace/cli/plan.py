"""`gatespace plan`: a study's runs and comparisons."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from gatespace.cli import run_options as options
from gatespace.cli import study_file

if TYPE_CHECKING:
    from rich.table import Table

    from gatespace.evidence.reach import Claim, Reach
    from gatespace.study.plan import Plan
    from gatespace.study.records import RunSpec

_SUPPORT = """\
A claim needs p < .05 in the exact sign-flip test, whose p is at least 2/2ⁿ. For
a group n counts fresh (task, seed) blocks; for a single comparison it counts
fresh seeds, with Holm's adjustment for the other comparisons. The report says
whether a difference is large enough to be detected."""


def plan(
    study: study_file.Study,
    sets: study_file.Sets = None,
    quick: study_file.Quick = False,
    yes: study_file.Yes = False,
    plugins: options.Plugins = None,
    trust_plugins: options.TrustPlugins = False,
    trust_remote_code: options.TrustRemoteCode = False,
    everything: Annotated[bool, typer.Option("--all", help="List every run and comparison, of all seeds.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show the runs and comparisons of a study before training anything.

    Runs that several comparisons need are trained once. A cell that cannot
    exist by construction is N/A with its reason, and is not missing data.
    It also says whether there are enough seeds to support a claim.

    \b
    gatespace plan demo
    gatespace plan paper --all
    gatespace plan my.yaml --set seeds=[42,2,3,4,5] --json
    """
    from gatespace.cli.console import console, print_json
    from gatespace.study.plan import ending

    config = study_file.load_study(
        study,
        sets or [],
        quick=quick,
        plugins=plugins,
        trust_plugins=trust_plugins,
        trust_remote_code=trust_remote_code,
    )
    found = study_file.checked_plan(config, yes=yes)
    support = study_file.support(found)
    endings = {task: ending(config, task) for task in config.tasks}
    if as_json:
        print_json({**found.as_json(), "support": support.as_json(), "ending": endings})
        return
    out = console()
    out.print(f"{config.name}: {len(found.runs)} runs on {', '.join(config.tasks)}", style="bold", soft_wrap=True)
    for task in config.tasks:
        out.print(_runs(found, task, everything=everything))
        out.print(_comparisons(found, task, everything=everything))
    out.print(_counts(found))
    for line in (*_reasons(found), *(f"{task}: {text}" for task, text in endings.items() if text)):
        out.print(line, soft_wrap=True)
    out.print(_support(support))
    out.print(_SUPPORT, soft_wrap=True)
    if support.is_empty:
        out.print(study_file.out_of_reach(support), style="bold", soft_wrap=True)


def _runs(plan: Plan, task: str, *, everything: bool) -> Table:
    points: dict[str, list[RunSpec]] = {}
    for run in plan.runs.values():
        if run.task == task:
            points.setdefault(run.id if everything else run.point, []).append(run)
    seeds = {key: " ".join(str(run.seed) for run in runs) for key, runs in points.items()}
    # Seeds shared by all points go into the title.
    common = seeds.popitem()[1] if len(set(seeds.values())) == 1 else ""
    title = f"runs on {task}" + (f", each at the seed{'s' * (' ' in common)} {common}" if common else "")
    table = _table(title, "point", "kind", "a,b,c,d", *([] if common else ["seeds"]))
    for key, runs in points.items():
        first = runs[0]
        gate = "" if first.gate is None else ",".join(f"{value:g}" for value in first.gate)
        if first.kind == "twin":
            gate = f"the {'RKL-weighted' if first.point.startswith('twin-rkl') else 'mean'} λ of {first.of}"
        elif first.needs:
            gate = f"the base that validation chooses, d = {first.point.partition('d')[2]}"
        table.add_row(first.point, first.kind, gate, *([] if common else [seeds[key]]))
    return table


def _comparisons(plan: Plan, task: str, *, everything: bool) -> Table:
    cells = [cell for cell in plan.comparisons if cell.task == task]
    if everything:
        table = _table(f"comparisons on {task}", "axis", "left", "right", "seed", "role")
        for cell in cells:
            right = cell.right if cell.status == "comparable" else f"{cell.right}: N/A"
            table.add_row(cell.axis, cell.left, right, str(cell.seed), cell.role)
        return table
    table = _table(f"comparisons on {task}", "point", "against", "N/A")
    rows: dict[str, dict[str, dict[str, None]]] = {}
    for cell in cells:
        rows.setdefault(cell.left, {}).setdefault(cell.status, {})[cell.right] = None
    for left, row in rows.items():
        table.add_row(left, *("  ".join(row.get(status, ())) for status in ("comparable", "n/a")))
    return table


def _support(found: Reach) -> Table:
    """The claims that could be supported, by axis."""
    about = "one by itself" if any(claim.kind == "single" for claim in found.claims) else ""
    table = _table(
        f"can it be supported? ({_chooses(found.selection_seed)})",
        "against",
        "comparisons",
        "as a group",
        *filter(None, [about]),
    )
    rows: dict[tuple[str, str | None], dict[str, Claim]] = {}
    for claim in found.claims:
        rows.setdefault((claim.axis, claim.restriction), {})[claim.kind] = claim
    for (axis, restriction), claims in rows.items():
        texts = [_possible(claims[kind]) if kind in claims else "" for kind in ("group", "single")]
        table.add_row(restriction or axis, str(claims["group"].comparisons), *texts[: 1 + bool(about)])
    return table


def _chooses(seed: int | None) -> str:
    return "no selection seed: all are fresh" if seed is None else f"seed {seed} is the selection seed, not fresh"


def _possible(claim: Claim) -> str:
    if not claim.possible:
        return f"no: takes {claim.seeds_needed} seeds"
    what = "block" if claim.kind == "group" else "seed"
    return f"yes: {claim.fresh} fresh {what}{'s' * (claim.fresh != 1)}"


def _reasons(plan: Plan) -> list[str]:
    """Why cells are N/A, each reason once."""
    cells = Counter((cell.task, cell.reason) for cell in plan.comparisons if cell.reason and cell.status == "n/a")
    return [f"{task}: {count} cells N/A: {reason}" for (task, reason), count in cells.items()]


def _counts(plan: Plan) -> Table:
    table = _table("counts", "task", "axis", "comparable", "N/A")
    counts = Counter((cell.task, cell.axis, cell.restriction or "", cell.status) for cell in plan.comparisons)
    for task, axis, restriction in dict.fromkeys(key[:3] for key in counts):
        both = [counts[task, axis, restriction, status] for status in ("comparable", "n/a")]
        table.add_row(task, f"{axis} {restriction}".strip(), *map(str, both))
    return table


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", min_width=len(column))
    return table
