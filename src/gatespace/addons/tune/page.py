"""Output of a search: lines for a terminal, JSON, and one page with the gate plane and the funnel."""

from __future__ import annotations

from dataclasses import asdict
from importlib import resources
from typing import Any

from gatespace.addons.tune.gates import Place
from gatespace.addons.tune.plan import Candidate
from gatespace.addons.tune.search import Search
from gatespace.addons.tune.verdict import Verdict
from gatespace.files import atomic_write
from gatespace.gating.coefficients import COEFFICIENTS, Gate
from gatespace.report import drawing
from gatespace.report.drawing import BLUE, GREEN, GRID, INK, MUTED, ORANGE, Chart
from gatespace.report.page import templates
from gatespace.report.table import Table, count, lam, number, p_value, text

_MARKS = {"proposal": ("o", BLUE), "point": ("D", ORANGE), "static": ("s", GREEN)}
_KEY = (("● proposal", BLUE), ("◆ point of the family", ORANGE), ("■ constant λ", GREEN), ("○ winner", INK))


def paste(verdict: Verdict) -> str:
    """The settings that train the winner, or "" if there is none."""
    if verdict.gate is None:
        return ""
    gate = Gate.parse(verdict.gate)
    found = dict(zip(COEFFICIENTS, gate.abcd, strict=True)) | dict(gate.extra)
    lines = ["objective:", f"  gate: {{{', '.join(f'{name}: {value!r}' for name, value in found.items())}}}"]
    return "\n".join([*lines, *([] if verdict.lr is None else ["optimizer:", f"  lr: {verdict.lr!r}"])])


def summary(search: Search, verdict: Verdict) -> dict[str, Any]:
    """The whole result, as --json prints it."""
    spec, arms = search.spec, len(verdict.against) + 1 if verdict.against else 0
    check = arms * len(spec.config.fresh) * spec.rungs[-1].steps
    grid = spec.grid_steps(len(search.candidates))
    pairing = {  # from the first rung where defined, which has the most candidates
        what: next((found for made in search.decisions if (found := made["pairing"][what]) is not None), None)
        for what in ("seeds", "rows")
    }
    return {
        "folder": str(spec.folder),
        "task": spec.task,
        "verdict": asdict(verdict),
        "winner": None if search.winner is None else vars(search.winner),
        "leader": search.leader.label,
        "start": search.warm_up["score"],
        "metric": search.warm_up["metric"],
        "channels": search.warm_up["used"],
        "cost": {
            "search_steps": search.steps,
            "verdict_steps": check,
            "grid_steps": grid,
            "search_to_grid": search.steps / grid,
            "with_verdict": (search.steps + check) / (grid + check),
        },
        "pairing": pairing,
        "trials": [
            {**vars(one), "scores": search.scores.get(one.id, []), "error": search.errors.get(one.id)}
            for one in search.candidates.values()
        ],
        "rungs": [
            {"steps": rung.steps, "seeds": rung.seeds, "incumbent": made["incumbent"], "kept": made["kept"]}
            for rung, made in zip(spec.rungs, search.decisions, strict=True)
        ],
    }


def notes(search: Search, verdict: Verdict) -> list[str]:
    """Notes besides the verdict, one sentence each."""
    found = summary(search, verdict)
    cost, pairing, curse = found["cost"], found["pairing"], verdict.curse
    lines = [
        f"Cost: {cost['search_steps']} training steps of the search, {cost['search_to_grid']:.0%} of a full grid over "
        f"{len(search.candidates)} candidates; with the verdict's {cost['verdict_steps']} in both, "
        f"{cost['with_verdict']:.0%}."
    ]
    if pairing["seeds"] is not None:
        rows = "" if pairing["rows"] is None else f", and {pairing['rows']:.2f} of unpaired rows"
        share = f"{pairing['seeds']:.2f} of what unpaired seeds would have{rows}"
        lines.append(f"Pairing: the variance of a difference is {share}.")
    if curse is not None:
        before, after = _plain(search, curse["search"]), _plain(search, curse["fresh"])
        lines.append(
            f"Winner's curse: on validation the winner had {before} at the seeds of the search and {after} at fresh "
            f"ones: {curse['difference']:+.4f}, by the luck of the choice and of the seeds."
        )
    if search.winner is not None and search.leader.id != search.winner.id:
        lines.append(f"The best candidate on validation was no gate: {search.leader.label}.")
    if verdict.lr is not None:
        lines.append(f"All sides of the verdict have the winner's learning rate, {verdict.lr:g}.")
    if dead := [name for name in search.spec.config.channels if name not in found["channels"]]:
        lines.append(f"Channels without an effect of their own in the warm-up: {', '.join(dead)}.")
    if search.errors:
        lines.append(f"Failed and left out: {', '.join(search.candidates[name].label for name in search.errors)}.")
    return lines


def _plain(search: Search, score: float) -> str:
    """Format a score in terms of its metric."""
    return f"{score:.4f}" if search.spec.is_text else f"a log-loss of {-score:.4f}"


def write_page(search: Search, verdict: Verdict) -> None:
    """Write tune.html."""
    source = resources.files("gatespace.addons.tune") / "page.html.j2"
    template = templates().from_string(source.read_text(encoding="utf-8"))
    spec = search.spec
    html = template.render(
        name=spec.study.name,
        status=f"task {spec.task} · seeds of the search {', '.join(map(str, spec.config.seeds))} · "
        f"fresh seeds {', '.join(map(str, spec.config.fresh))}",
        verdict=verdict,
        paste=paste(verdict),
        notes=notes(search, verdict),
        against=_against(verdict),
        figures=drawing.render([_plane(search), _funnel(search)], png=False),
    )
    atomic_write(spec.folder.page, html.lstrip() + "\n")


def _against(verdict: Verdict) -> Table:
    """Table of the verdict's comparisons."""
    columns = (
        text("reference"),
        text("about", "what it is"),
        text("state", "the winner is"),
        text("difference", f"difference, {verdict.unit}"),
        text("interval", "95 % interval"),
        p_value("sign_flip_p", "sign-flip p"),
        count("seeds"),
        count("more", "more seeds to decide"),
    )
    records = [{**vars(one), "difference": f"{one.mean:+.4f}", "interval": one.interval} for one in verdict.against]
    return Table.of("against", "The winner on test at fresh seeds", columns, records)


def _rungs(search: Search) -> list[str]:
    def some(amount: int, what: str) -> str:
        return f"{amount} {what}{'s' * (amount > 1)}"

    return [f"{some(rung.steps, 'step')} × {some(rung.seeds, 'seed')}" for rung in search.spec.rungs]


def _trials(search: Search) -> Table:
    """All candidates, those that advanced farthest first."""

    def rank(one: Candidate) -> tuple[float, ...]:
        known = search.scores.get(one.id, ())
        return (-len(known), -known[-1]) if known else (0.0, 0.0)

    columns = [text("label", "candidate"), text("kind"), lam("lam", "λ̄ at the start"), number("spread")]
    columns += [number(name, f"to {name}") for name in search.warm_up["used"]]
    columns += [text(f"rung{place}", title) for place, title in enumerate(_rungs(search))]
    records = []
    for one in sorted(search.candidates.values(), key=rank):
        place = {} if one.place is None else {**one.place, **one.place["direction"]}
        shown = [f"{abs(value):.4f}" for value in search.scores.get(one.id, ())]
        shown += ["failed"] * (one.id in search.errors)
        records.append({**vars(one), **place, **{f"rung{rung}": value for rung, value in enumerate(shown)}})
    return Table.of("trials", "Candidates", columns, records)


def _plane(search: Search) -> Chart:
    """Plot spread against λ̄; larger marks advanced farther."""
    shown = [(one, Place(**one.place)) for one in search.candidates.values() if one.place is not None]
    winner = search.winner
    key = _KEY if winner is not None else _KEY[:-1]

    def draw() -> Any:
        top = drawing.key_height(key)
        figure = drawing.canvas(top + 3.4)
        axes = drawing.panel(figure, left=0.6, right=0.15, top=top, bottom=0.45)
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        for one, (x, y, _) in shown:
            mark, colour = _MARKS[one.kind]
            size = max(8, 45 * len(search.scores.get(one.id, ())) - 27)
            axes.scatter(x, y, s=size, marker=mark, c=colour, linewidths=0, alpha=0.85)
            if one == winner:
                axes.scatter(x, y, s=260, marker="o", facecolors="none", edgecolors=INK)
        highest = max(place.spread for _, place in shown)
        axes.set_xlim(0, 1)
        axes.set_ylim(-0.05 * highest, 1.08 * highest or 1.0)
        axes.set_xlabel("mean gate λ̄ at the tokens of the warm-up")
        axes.set_ylabel("spread of the gate's logit")
        drawing.draw_key(figure, key)
        return figure

    better = "higher" if search.spec.is_text else "lower"
    finding = f"Where {len(shown)} gates are; a larger mark came farther."
    for place in [place for one, place in shown if one == winner]:
        direction = ", ".join(f"{name} {value:+.2f}" for name, value in place.direction.items())
        finding += f" The winner has λ̄ = {place.lam:.2f}, a spread of {place.spread:.2f} and the direction {direction}."
    finding += f" Below: {search.warm_up['metric']} on validation, mean over rows and seeds; {better} is better."
    return Chart("plane", "The gate plane with all candidates", finding, _trials(search), draw)


def _funnel(search: Search) -> Chart:
    records: list[dict[str, Any]] = [
        {
            "rung": title,
            "tried": sum(len(known) > place for known in search.scores.values()),
            "kept": len(made["kept"]),
            "incumbent": search.candidates[made["incumbent"]].label,
        }
        for place, (title, made) in enumerate(zip(_rungs(search), search.decisions, strict=True))
    ]
    first, last = records[0]["tried"], records[-1]["tried"]

    def draw() -> Any:
        key = [("■ tried", BLUE), ("■ kept", ORANGE)]
        figure, axes = drawing.rows_figure([one["rung"] for one in records], key, row=0.42)
        for place, one in enumerate(records):
            for what, colour, at in (("tried", BLUE, place - 0.15), ("kept", ORANGE, place + 0.15)):
                axes.barh(at, one[what], height=0.3, color=colour)
                axes.text(one[what], at, f" {one[what]}", va="center", color=MUTED)
        axes.set_xlim(0, 1.1 * first)
        axes.set_xlabel("candidates")
        return figure

    columns = [text("rung"), count("tried"), count("kept"), text("incumbent", "best")]
    finding = f"{first} candidates began, and {last} were trained to the end at all seeds of the search."
    return Chart("funnel", "Rungs of the search", finding, Table.of("funnel", "Rungs", columns, records), draw)
