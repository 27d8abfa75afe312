"""The page: one file that needs nothing else, on a phone, in print, in light and in dark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata, resources
from typing import TYPE_CHECKING

from gatespace.errors import missing_extra
from gatespace.gating.coefficients import NotApplicable
from gatespace.report.drawing import Rendered
from gatespace.report.findings import VERDICTS, Findings
from gatespace.report.table import ABSENT, Column, Table, Value, shown
from gatespace.report.view import AXIS_NAMES, View

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = ["page"]

_TOGETHER = (
    r"(?<=\d) (?=pp\b|%)|(?<=[≥=<]) (?=\d)|(?<=[\dp)]) (?=[=<] )"
    r"|(?<=%) (?=CI)|(?<=CI) (?=\[)|(?<=,) (?=[−\d.]+[\])])"
)
"""Blanks at which a sentence must not break: between a number and its unit, and inside of an interval."""
_WRAPPED = 60
"""Characters beyond which a cell may break into lines."""
_AXIS_TEXT: Mapping[str, str] = {
    "restriction": "Each point of the family against the points that keep one of its channels at the same magnitude: "
    "entropy-only (-|a|, 0, 0, 0) and gap-only (0, 0, 0, d). They share a direction with EOPD and ToDi and are not "
    "those methods.",
    "isolation": "Each point against a training at the constant λ that it had on average: what remains is due to λ "
    "varying over tokens, not to its mean. A matched mean does not match the weight that reverse KL has where it is "
    "large; a twin matched on RKL does.",
    "control": "Each gate against a training with the same values of λ in every step, dealt out to tokens at random: "
    "what remains is due to where the gate puts λ.",
    "static": "Each point against one constant λ for all.",
    "published": "Each point against published methods as their authors define them.",
    "gap": "Each point with a gap coefficient d against the same point without: on G2, and on the base of the task.",
}
_AXIS_FIGURES: Mapping[str, tuple[str, ...]] = {
    "restriction": ("restrictions-", "forest-restriction-"),
    "isolation": ("isolation-",),
    "control": ("forest-control-",),
    "static": ("forest-static-",),
    "published": ("forest-published-",),
    "gap": ("gap-",),
}
_AXIS_TABLES: Mapping[str, tuple[str, ...]] = {
    "restriction": ("not-applicable",),
    "control": ("controls",),
    "gap": ("d-on-g2",),
}
GLOSSARY: tuple[tuple[str, str], ...] = (
    ("gate", "λ = σ(a·h + b·u + c + d·gap), at every response token; λ weighs reverse KL and 1-λ forward KL."),
    ("h, u, gap", "The teacher's entropy at the token; at the first response token; one minus the student's probability of the teacher's first choice. Each in [0, 1]."),  # noqa: E501
    ("point", "One choice of (a, b, c, d), e.g. G5 = (4, 0, -1, 0). The family is all points of the study."),
    ("run", "One training at one point and seed."),
    ("pp", "Percentage points: the difference of two accuracies in %."),
    ("seed", "What fixes all randomness of a run. Two sides of a comparison have the same seeds and are subtracted seed by seed."),  # noqa: E501
    ("selection seed, fresh", "Whatever was chosen was chosen looking at the selection seed, and looks better there than it is. Fresh seeds are the others."),  # noqa: E501
    ("block", "All cells of one task at one seed. Cells of a block share runs, so that tests count blocks."),
    ("95 % CI", "An interval that holds the true mean in 95 of 100 repetitions of the study."),
    ("p", "How often a difference as large would come out if there were none. Adjusted (Holm, BH): for how many were looked at."),  # noqa: E501
    ("sign-flip", "An exact test without assumptions about the shape of errors. With n seeds its p is at least 2/2ⁿ, its floor."),  # noqa: E501
    ("detectable", "The smallest true difference that the test finds in 80 % of repetitions with so many seeds."),
    ("majority", "The accuracy of giving train's most frequent label to every text."),
    ("macro-F1", "The mean over labels of F1: a label that is rare counts as much as one that is frequent."),
    ("N/A", "Not missing: by construction there is no such comparison."),
    ("saturated", "λ within 0.02 of 0 or 1."),
)  # fmt: skip


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    id: str
    title: str
    figures: Sequence[Rendered] = ()
    tables: Sequence[Table] = ()
    text: str = ""


def page(
    view: View, findings: Findings, tables: Sequence[Table], extra: Sequence[Table], drawn: Sequence[Rendered]
) -> str:
    """The whole page.

    Args:
        view: The study.
        findings: The first screen.
        tables: Those that are files too.
        extra: Those that are on the page only.
        drawn: The figures.
    """
    try:
        import jinja2
    except ModuleNotFoundError as error:
        if error.name != "jinja2":
            raise
        raise missing_extra("a report", module="jinja2", extra="study") from None
    place = resources.files("gatespace.report") / "templates"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"show": _shown, "look": _look, "tail": _tail, "kept": _kept}
    template = environment.from_string((place / "report.html.j2").read_text(encoding="utf-8"))
    results = view.results
    if len(results.tasks) == 1:
        tables, extra = ([_without_task(table) for table in part] for part in (tables, extra))
    text = template.render(
        name=results.name,
        about=results.config.about,
        status=_status(view),
        partial=view.is_partial,
        findings=findings,
        verdicts=VERDICTS,
        problems=_problems(view),
        sections=_sections(view, {table.name: table for table in (*tables, *extra)}, drawn),
        files={table.name for table in tables},
        glossary=GLOSSARY,
        css=(place / "report.css").read_text(encoding="utf-8"),
        version=_version(),
    )
    return text.lstrip() + "\n"


def _without_task(table: Table) -> Table:
    """A study with one task needs no column for it."""
    columns = tuple(replace(c, forms=c.forms - {"html"}) if c.key == "task" else c for c in table.columns)
    place = next((i for i, column in enumerate(table.columns) if column.key == "task"), len(columns))
    return replace(table, columns=columns, stub=table.stub - 1 if place < table.stub > 1 else table.stub)


def _sections(view: View, tables: Mapping[str, Table], drawn: Sequence[Rendered]) -> list[Section]:
    def figures(*starts: str) -> list[Rendered]:
        return [one for task in ("", *view.results.tasks) for start in starts for one in drawn
                if one.chart.task == task and (one.chart.name == start or (start.endswith("-") and one.chart.name.startswith(start)))]  # fmt: skip  # noqa: E501

    found = []
    if tables["failures"].rows:
        found.append(Section("failures", "Runs that are not done", tables=[tables["failures"]]))
    found.append(
        Section("overview", "At a glance", figures("overview"), [tables["baselines"], tables["groups"], tables["wins"]])
    )
    for axis in view.axes:
        names = (*_AXIS_TABLES.get(axis, ()), f"comparisons-{axis}")
        found.append(
            Section(
                f"axis-{axis}", AXIS_NAMES[axis], figures(*_AXIS_FIGURES[axis]), [tables[name] for name in names],
                _AXIS_TEXT[axis],
            )
        )  # fmt: skip
    found += [
        Section("replication", "Replication on fresh seeds", tables=[tables["replication"]]),
        Section(
            "points", "Points of the family", figures("abc-"),
            [tables[name] for name in ("best-observed", "anova", "points", "per-seed")],
        ),
        Section("lambda", "λ: where the gates are", figures("lambda-"), [tables["lambda"]]),
        Section("training", "Training", figures("curves-")),
        Section("errors", "Errors by label, and texts seen in training", figures("confusion-"),
                [tables["confusion"], tables["duplicates"], tables["examples"]]),
        Section("power", "Power", figures("power"), [tables["power"]]),
        Section("cost", "Cost", figures("cost"), [tables["cost"]]),
        Section("test-reads", "Reads of the test split", tables=[tables["test-reads"]]),
        Section("provenance", "Provenance", tables=[tables["runs"], tables["provenance"]]),
    ]  # fmt: skip
    return [part for part in found if part.figures or part.tables]


def _status(view: View) -> str:
    results = view.results
    parts = [
        f"{len(results.tasks)} task{'s' * (len(results.tasks) != 1)}: {', '.join(results.tasks)}",
        f"seeds {', '.join(map(str, results.seeds))} (selection seed {results.selection_seed})",
    ]
    if results.replication_seeds:
        parts.append(f"replicated on {', '.join(map(str, results.replication_seeds))}")
    parts.append(f"{view.counts['done']} of {len(results.runs)} runs done")
    return " · ".join(parts)


def _problems(view: View) -> list[str]:
    """Why results are not complete; of many the first few, since the table of runs has all."""
    found = list(view.results.problems)
    most = 8
    return found if len(found) <= most else [*found[:most], f"and {len(found) - most} more: see the table of runs"]


def _version() -> str:
    try:
        return metadata.version("gatespace")
    except metadata.PackageNotFoundError:
        return ""


def _tail(run: str) -> str:
    """The hash at the end of a run's id."""
    return run.rpartition("-")[2]


def _kept(text: str) -> str:
    """A sentence whose numbers stay on one line with their units."""
    return re.sub(_TOGETHER, "\u00a0", text)


def _shown(value: Value, column: Column) -> str | Markup:
    from markupsafe import Markup

    if value is None:
        return Markup('<span class="absent">{}</span>').format(ABSENT)
    if isinstance(value, NotApplicable):
        return Markup('<span class="absent" title="{}">N/A</span>').format(value.reason)
    text = shown(value, column.kind)
    return text.replace("-", "−") if column.numeric and isinstance(value, int | float) else text


def _look(value: Value, column: Column) -> Markup:
    from markupsafe import Markup

    if column.numeric:
        return Markup(' class="n"')
    return Markup(' class="wrap"') if isinstance(value, str) and len(value) > _WRAPPED else Markup("")
