"""Build a study's report: tables, figures, and one self-contained page that works on phones and in print."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING

from gatespace.errors import missing_extra
from gatespace.evidence.analysis import analyse
from gatespace.evidence.records import StudyAnalysis
from gatespace.files import atomic_write
from gatespace.gating.coefficients import NotApplicable
from gatespace.report.charts import all_charts
from gatespace.report.drawing import Rendered, render
from gatespace.report.findings import Findings, find
from gatespace.report.table import ABSENT, Column, Table, Value, csv_text, latex_text, markdown_text, shown, signed
from gatespace.report.tables import file_tables, page_tables
from gatespace.report.view import AXES, View, confidence_text
from gatespace.runs import pages_of
from gatespace.study.records import StudyResults

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

_FORMS = {"md": markdown_text, "tex": latex_text, "csv": csv_text}
_TOGETHER = (
    r"(?<=\d) (?=pp\b|%)|(?<=[≥=<]) (?=\d)|(?<=[\dp)]) (?=[=<] )"
    r"|(?<=%) (?=CI)|(?<=CI) (?=\[)|(?<=,) (?=[−\d.]+[\])])"
)
"""Spaces that become non-breaking: between a number and its unit, and inside an interval."""
_WRAPPED = 40
"""Characters beyond which a cell may wrap."""
_LONG_ABOUT = 400
"""Characters of a study's `about` beyond which all but its first sentence is collapsed."""
_OPEN = {"failures", "baselines", "best-observed", "wrong-texts", "cost"}
"""Tables that are expanded by default."""
CALIBRATION = (
    "The labels of a task as whole responses, normalised over the labels; the model's answer is the most probable one. "
    "In a calibrated model four in five of the answers with a confidence of 80 % are right. A threshold on the "
    "confidence gives fewer answers (coverage), of which more are right; choose it on validation."
)
GLOSSARY: tuple[tuple[str, str], ...] = (
    ("gate", "λ = σ(a·h + b·u + c + d·gap), at every response token; λ weighs reverse KL and 1-λ forward KL."),
    ("h, u, gap", "The teacher's entropy at the token; at the first response token; one minus the student's probability of the teacher's top-1 token. Each in [0, 1]."),  # noqa: E501
    ("point", "One choice of (a, b, c, d), e.g. G5 = (4, 0, -1, 0). The family is all points of the study."),
    ("run", "One training at one point and seed."),
    ("pp", "Percentage points: the difference of two accuracies in %."),
    ("seed", "What fixes all randomness of a run. Two sides of a comparison have the same seeds and are subtracted seed by seed."),  # noqa: E501
    ("selection seed, fresh", "Choices were made on the selection seed, so its results are biased upward. Fresh seeds are the others."),  # noqa: E501
    ("block", "All cells of one task at one seed. Cells of a block share runs, so that tests count blocks."),
    ("95 % CI", "An interval that holds the true mean in 95 of 100 repetitions of the study. From the second look at the results on, intervals of groups have a higher confidence."),  # noqa: E501
    ("p", "How often a difference as large would come out if there were none. Adjusted (Holm, BH): for the number of comparisons made."),  # noqa: E501
    ("sign-flip", "An exact test without assumptions about the shape of errors. With n seeds its p is at least 2/2ⁿ, its floor."),  # noqa: E501
    ("detectable", "About the smallest true difference that would be found in 80 % of repetitions, with so many seeds and their SD: for a group, by the rule that prints 'supported'; for one comparison, by an unadjusted t-test at .05."),  # noqa: E501
    ("best constant", "The accuracy of giving the split's most frequent label to every text, without reading any."),
    ("balanced accuracy", "The mean over labels of the share of their texts that are right. One label for all gives 1 / labels."),  # noqa: E501
    ("macro-F1", "The mean over labels of F1: a label that is rare counts as much as one that is frequent."),
    ("N/A", "Not missing: by construction there is no such comparison."),
    ("saturated", "λ within 0.02 of 0 or 1."),
)  # fmt: skip


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report, and its findings."""

    html: Path
    tables: tuple[Path, ...]
    figures: tuple[Path, ...]
    findings: Findings
    """The first screen."""
    partial: bool
    """Whether part of the plan is missing."""
    analysis: StudyAnalysis


def build_report(results: StudyResults | Path, out: Path | None = None, *, png: bool = True) -> ReportFiles:
    """Write report.html, tables/ and figures/.

    Stale files of an earlier report are removed from tables/ and figures/. Equal results give equal bytes in tables/.

    Args:
        results: A study's results, or its folder or archive.
        out: Output folder; None: the folder of the study, or a folder next to its archive.
        png: Also draw every figure as PNG.
    """
    if isinstance(results, Path):
        from gatespace.study.results import look_at

        out, results = out or pages_of(results), look_at(results)
    place = Path(out) if out is not None else results.folder
    view = View(results, analyse(results))
    findings = find(view)
    tables = file_tables(view)
    drawn = render(all_charts(view), png=png)
    html = page(view, findings, tables, page_tables(view), drawn)

    table_files: dict[Path, str] = {}
    for table in tables:
        table_files |= {place / "tables" / f"{table.name}.{form}": write(table) for form, write in _FORMS.items()}
    figure_files: dict[Path, bytes] = {}
    for one in drawn:
        figure_files[place / "figures" / f"{one.chart.name}.svg"] = one.svg
        if one.png is not None:
            figure_files[place / "figures" / f"{one.chart.name}.png"] = one.png
    files: dict[Path, str | bytes] = {**table_files, **figure_files}
    for path, content in files.items():
        atomic_write(path, content)
    for folder, suffixes in (("tables", (".md", ".tex", ".csv")), ("figures", (".svg", ".png"))):
        for path in (place / folder).glob("*"):
            if path.suffix in suffixes and path not in files:
                path.unlink()
    atomic_write(place / "report.html", html)  # last, so that an existing page has its files
    return ReportFiles(
        place / "report.html", tuple(table_files), tuple(figure_files), findings, view.is_partial, view.analysis
    )


# ---------------------------------------------------------------------------------------------------- the page


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    id: str
    title: str
    figures: Sequence[Rendered] = ()
    tables: Sequence[Table] = ()
    text: str = ""


def page(
    view: View, findings: Findings, tables: Sequence[Table], extra: Sequence[Table], drawn: Sequence[Rendered]
) -> str:
    """Return the HTML of the page; `extra` are tables that are only on the page."""
    template = templates().get_template("report.html.j2")
    results = view.results
    if len(results.tasks) == 1:
        tables, extra = ([_without_task(table) for table in part] for part in (tables, extra))
    text = template.render(
        name=results.name,
        about=_about(results.config.about),
        status=_status(view),
        partial=view.is_partial,
        findings=findings,
        selects=results.selection_seed is not None,
        beside=[one for one in drawn if one.chart.name.startswith("beside-")],
        ranking=[one for one in drawn if one.chart.name.startswith("ranking-")],
        confidence=confidence_text(1 - view.analysis.level),
        problems=_problems(view),
        sections=_sections(view, {table.name: table for table in (*tables, *extra)}, drawn),
        files={table.name for table in tables},
        opened=_OPEN,
        glossary=GLOSSARY,
    )
    return text.lstrip() + "\n"


def templates() -> jinja2.Environment:
    """Return the template environment: `parts.html.j2` has tables and figures; `css` and `version` are globals."""
    try:
        import jinja2
    except ModuleNotFoundError as error:
        if error.name != "jinja2":
            raise
        raise missing_extra("a report", module="jinja2", extra="study") from None
    place = resources.files("gatespace.report") / "templates"

    def text(name: str) -> str:
        return (place / name).read_text(encoding="utf-8")

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=jinja2.FunctionLoader(text)
    )
    environment.filters |= {"show": _shown, "look": _look, "tail": _tail, "kept": _kept, "pp": signed}
    environment.globals |= {"css": text("report.css"), "version": _version()}
    return environment


def _about(text: str) -> tuple[str, str]:
    """A study's `about`; if it is long enough to hide the findings, its first sentence and the rest."""
    first, rest = [*re.split(r"(?<=[.?!])\s+", text, maxsplit=1), ""][:2]
    return (first, rest) if len(text) > _LONG_ABOUT else (text, "")


def _without_task(table: Table) -> Table:
    """Drop the task column from the page, for a study with one task."""
    columns = tuple(replace(c, forms=c.forms - {"html"}) if c.key == "task" else c for c in table.columns)
    place = next((i for i, column in enumerate(table.columns) if column.key == "task"), len(columns))
    return replace(table, columns=columns, stub=table.stub - 1 if place < table.stub > 1 else table.stub)


def _sections(view: View, tables: Mapping[str, Table], drawn: Sequence[Rendered]) -> list[Section]:
    def figures(*starts: str) -> list[Rendered]:
        """Figures whose name equals one of `starts`, or begins with it if it ends in a hyphen, task by task."""
        return [
            one
            for task in ("", *view.results.tasks)
            for start in starts
            for one in drawn
            if one.chart.task == task
            and (one.chart.name == start or (start.endswith("-") and one.chart.name.startswith(start)))
        ]

    def section(id: str, title: str, names: Sequence[str], starts: Sequence[str] = (), text: str = "") -> Section:
        return Section(
            id, title, figures(*starts), [tables[name] for name in names if name in tables and tables[name].rows], text
        )

    found = [
        section("failures", "Runs that are not done", ["failures"]),
        section("groups", "Groups of comparisons", ["groups"], ["overview"]),
    ]
    for name in view.axes:
        axis = AXES[name]
        found.append(
            section(f"axis-{name}", axis.title, [f"comparisons-{name}"], [f"forest-{name}-", f"{name}-"], axis.text)
        )
    found += [
        section("replication", "Replication on fresh seeds", ["replication", "secondary"]),
        section("points", "Points", ["baselines", "responses", "best-observed", "points", "per-seed"]),
        section("lambda", "λ: where the gates are", ["lambda"], ["against-lambda-", "lambda-"]),
        section("training", "Training", [], ["curves-"]),
        section("errors", "Errors", ["wrong-texts", "confusion", "examples"], ["confusion-"]),
        section("probabilities", "Probabilities of labels", ["calibration"], ["reliability-"], CALIBRATION),
        section("cost", "Cost", ["cost"]),
        section("provenance", "Provenance", ["runs"]),
    ]
    return [part for part in found if part.figures or part.tables]


def _status(view: View) -> str:
    results = view.results
    parts = [
        f"{len(results.tasks)} task{'s' * (len(results.tasks) != 1)}: {', '.join(results.tasks)}",
        f"seeds {', '.join(map(str, results.seeds))} ({_selection(results.selection_seed)})"
        if len(results.seeds) > 1
        else f"one seed: {results.seeds[0]}",
    ]
    if results.replication_seeds:
        parts.append(f"replicated on {', '.join(map(str, results.replication_seeds))}")
    parts.append(f"{view.counts['done']} of {len(results.runs)} runs done")
    if len(results.looks) > 1:
        parts.append(f"look {len(results.looks)} at its results")
    return " · ".join(parts)


def _selection(seed: int | None) -> str:
    return "all fresh: comparisons were fixed before" if seed is None else f"selection seed {seed}"


def _problems(view: View) -> list[str]:
    """Why results are incomplete: the first few reasons; the table of runs has all."""
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
    """Text with non-breaking spaces between numbers and their units."""
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
