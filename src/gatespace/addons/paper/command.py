"""`gatespace paper`: the paper's tables recomputed from its per-seed accuracies, and an audit of its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gatespace.cli import run_options as options
from gatespace.cli.console import console, print_json

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]

_GROUPS = {
    "emotion_gap": "emotion, gap-only",
    "emotion_entropy": "emotion, entropy-only",
    "hate_gap": "hate, gap-only",
    "hate_entropy": "hate, entropy-only",
    "emotion_total": "emotion",
    "hate_total": "hate",
    "wins": "both tasks",
    "mean_match": "dynamic vs static twin",
}
_FRESH_NOTE = """fresh: mean of seeds 2 and 3. flip p: exact sign-flip test, never below 0.25
with three seeds. MDE: the smallest difference that a t-test with this SD and
three seeds finds in 80 % of repetitions.
"""
_COUNTS_NOTE = """won*: so many more are won, and it is not known which. open: nothing that is
printed decides them. so: what the count can be. paper: as published.
"""
_MEANS_NOTE = """mean: as printed, in pp. known, sum: cells whose difference is known, and their
sum. left: what the mean leaves for the open ones. least: what they sum to at
least if each is a lead, as the published count says; -: it does not say so.
"""
_VERDICTS = {True: "yes", False: "NO", None: "-"}


def paper(as_json: options.AsJson = False) -> None:
    """Recompute the paper's tables from its per-seed accuracies, and audit its numbers.

    Shows every printed figure next to the computed one; a dash means that
    nothing else in the paper determines it. Also shows what can and cannot
    be derived from the published win counts, and an audit: fresh seeds,
    what chance alone would give, power, ANOVA, majority class, duplicates,
    shared comparators, an infeasible aggregate, the mean of λ, and what of
    the paper survives.

    \b
    gatespace paper
    gatespace paper --json | jq '.nine[0]'
    gatespace paper --json | jq -r '.audit[].says'

    The figures ship with gatespace, each with its place in the paper. No
    model is needed and nothing is downloaded.
    """
    found = _recompute()
    if as_json:
        print_json(found)
        return
    out = console()
    out.print("The paper, checked against its own numbers", style="bold")
    out.print(_nine_table(found["nine"]))
    out.print(_fresh_table(found["nine"]))
    out.print(_FRESH_NOTE)
    for title, rows in _checks(found):
        out.print(_check_table(title, rows))
    out.print(_counts_table(found["win_counts"]))
    out.print(_COUNTS_NOTE)
    out.print(_means_table(found["mean_deltas"]))
    out.print(_MEANS_NOTE)
    out.print("Audit", style="bold")
    for number, entry in enumerate(found["audit"].values(), start=1):
        _print_item(out, f"{number:2d}. ", entry["says"])
    out.print()
    out.print(_verdict(found))


def _recompute() -> dict[str, Any]:
    from gatespace.errors import missing_extra

    try:
        from gatespace.addons.paper.audit import recompute
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("numpy", "pandas", "scipy", "statsmodels"):
            raise
        raise missing_extra("gatespace paper", module=package, extra="evidence") from None
    return recompute()


def _table(title: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of text; the first column is bold, the others are right-aligned."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column(names[0], style="bold")
    for name in names[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _nine_table(rows: Sequence[Row]) -> Table:
    def cells(row: Row) -> Iterable[str]:
        old = row["printed"]
        yield f"{row['task']}, {row['axis']}\n{_label(row['a'])} - {_label(row['b'])}"
        yield f"{old['mean']:+.2f}  \n{row['mean']:+.4f}"
        yield f"{old['sd']:.2f}  \n{row['sd']:.4f}"
        yield f"[{old['ci'][0]:+.2f}, {old['ci'][1]:+.2f}]\n[{row['ci'][0]:+.4f}, {row['ci'][1]:+.4f}]"
        yield f"{old['p']:.2f}  \n{row['p']:.4f}"
        yield f"\n{_VERDICTS[row['match']]}"

    title = "The nine over seeds 42, 2, 3, in pp: printed above, computed below (tab:3seed)"
    names = ("task, axis / a - b", "mean", "SD", "95 % CI", "p", "match")
    return _table(title, names, [[*cells(row)] for row in rows])


def _fresh_table(rows: Sequence[Row]) -> Table:
    def cells(row: Row) -> Iterable[str]:
        yield f"{row['task']} {_label(row['a'])} - {_label(row['b'])}"
        yield from (f"{value:+.2f}" for value in row["differences"])
        yield _signed(row["fresh_mean"], 3)
        yield f"{row['sign_flip']['p']:.2f}"
        yield f"{row['mde']:.1f}"

    title = "By seed: 42 chose them, 2 and 3 are fresh; and what three seeds can show, in pp"
    return _table(title, ("task, a - b", "42", "2", "3", "fresh", "flip p", "MDE"), [[*cells(row)] for row in rows])


def _checks(found: dict[str, Any]) -> Iterable[tuple[str, list[tuple[str, str, str, bool | None]]]]:
    yield (
        "SD across seeds, in pp (tab:3seed-percfg)",
        [
            (f"{r['task']} {_label(r['point'])}", f"{r['printed']:.2f}", f"{r['recomputed']:.4f}", r["match"])
            for r in found["seed_sds"]
        ],
    )
    yield (
        "Cells of the comparison with restrictions (sec:best-vs-best)",
        [(r["what"], str(r["printed"]), str(r["recomputed"]), r["match"]) for r in found["not_applicable"]["checks"]],
    )
    yield (
        "d on G2, in pp, with G2 from the grid's range (tab:d-on-g2)",
        [
            (
                f"{r['task']} d = {r['d']} ({r['point']})",
                f"{r['printed']:+.2f}",
                "defines " + r["point"] if r["recomputed"] is None else f"{r['recomputed']:+.2f}",
                r["match"],
            )
            for r in found["d_on_g2"]
        ],
    )
    yield (
        "Best observed at seed 42 (tab:best-observed)",
        [
            (f"{r['task']}, {r['side']}", f"{r['printed']:.4f}", _best_known(r), r["match"])
            for r in found["best_observed"]
        ],
    )
    yield (
        "Cells that the text names, seed 42, in pp",
        [
            (f"{r['task']} {r['cell']}", f"{r['printed']:+.2f}", _signed(r["recomputed"]), r["match"])
            for r in found["named_cells"]
        ],
    )
    yield (
        "Sampling SE of one model, in pp (sec:seeds)",
        [
            (f"{r['task']}, n = {r['n']}", f"{r['printed']:g}", f"{r['recomputed']:.3f}", r["match"])
            for r in found["sampling_errors"]
        ],
    )
    yield (
        "Figures in the text",
        [(r["what"], _short(r["printed"]), _short(r["recomputed"]), r["match"]) for r in found["statements"]],
    )


def _check_table(title: str, rows: Iterable[tuple[str, str, str, bool | None]]) -> Table:
    cells = [(what, printed, computed, _VERDICTS[match]) for what, printed, computed, match in rows]
    return _table(title, ("what", "printed", "computed", "match"), cells)


def _counts_table(rows: Sequence[Row]) -> Table:
    def cells(row: Row) -> Iterable[str]:
        yield _GROUPS[row["group"]]
        yield from (str(row[key]) for key in ("cells", "won", "won_unnamed", "lost", "undecided"))
        yield f"{row['at_least']} to {row['at_most']}"
        yield str(row["published"])
        yield row["verdict"]

    title = "Published win counts: what follows from printed accuracies of seed 42"
    names = ("cells", "of", "won", "won*", "lost", "open", "so", "paper", "verdict")
    return _table(title, names, [[*cells(row)] for row in rows])


def _means_table(rows: Sequence[Row]) -> Table:
    def cells(row: Row) -> Iterable[str]:
        yield _GROUPS[row["group"]]
        yield f"{row['printed']:+.2f}"
        yield from (str(row[key]) for key in ("known_cells", "known_sum", "open_cells"))
        yield f"{row['needed'][0]} to {row['needed'][1]}"
        yield "-" if row["minimum"] is None else str(row["minimum"])
        yield "yes" if row["feasible"] else "with ties" if row["feasible_with_ties"] else "NO"

    title = "Published mean differences: what they leave for open cells, in responses"
    names = ("cells", "mean", "known", "sum", "open", "left", "least", "possible")
    return _table(title, names, [[*cells(row)] for row in rows])


def _verdict(found: dict[str, Any]) -> str:
    keys = ("nine", "seed_sds", "d_on_g2", "best_observed", "named_cells", "sampling_errors", "statements")
    matches = [row["match"] for key in keys for row in found[key]]
    matches += [row["match"] for row in found["not_applicable"]["checks"]]
    yes, no, unknown = (sum(match is kind for match in matches) for kind in (True, False, None))
    whole = found["whole_counts"]
    return (
        f"{yes} of {yes + no} figures that can be computed match what is printed; {unknown} are determined by "
        f"nothing else. {whole['accuracies'] - whole['not_a_count']} of {whole['accuracies']} per-seed accuracies are "
        "whole numbers of correct responses."
    )


def _print_item(out: Any, mark: str, text: str) -> None:
    from rich.padding import Padding
    from rich.text import Text

    lines = Text(text).wrap(out, max(out.width - len(mark), 20))
    for i, line in enumerate(lines):
        out.print(Padding(Text(mark if i == 0 else " " * len(mark)) + line, 0), soft_wrap=True)


def _label(point: str) -> str:
    return point.replace("static0", "static:0")


def _best_known(row: Row) -> str:
    best = row["best_known"]
    if best is None:
        return "-"
    sign = "" if row["match"] else "≥ "
    return f"{sign}{best['accuracy']:.4f} {best['point']}"


def _signed(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value + 0.0:+.{digits}f}"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return " / ".join(map(_short, value))
    return str(value) if isinstance(value, int) else f"{value:.4g}"
