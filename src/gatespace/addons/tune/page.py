"""What a search has found, for readers: lines for a terminal, JSON, and one page with the gate plane and the funnel."""

from __future__ import annotations

from importlib import resources
from typing import Any

from gatespace.addons.tune.search import Candidate, Outcome
from gatespace.addons.tune.settings import Rung
from gatespace.addons.tune.verdict import Verdict
from gatespace.files import atomic_write
from gatespace.gating.coefficients import Gate
from gatespace.report.drawing import (
    AMBER,
    BLUE,
    GREEN,
    GRID,
    INK,
    MUTED,
    ORANGE,
    Chart,
    canvas,
    draw_key,
    key_height,
    panel,
    render,
    rows_figure,
)
from gatespace.report.page import templates
from gatespace.report.table import Table, count, lam, number, p_value, text

_MARKS = {"proposal": ("o", BLUE), "point": ("D", ORANGE), "static": ("s", GREEN), "published": ("^", AMBER)}
_KEY = (("● proposal", BLUE), ("◆ point of the family", ORANGE), ("■ constant λ", GREEN))


def paste(verdict: Verdict) -> str:
    """The settings that train the winner; "" where there is none."""
    if verdict.gate is None:
        return ""
    gate = Gate.parse(verdict.gate)
    found = dict(zip("abcd", gate.abcd, strict=True)) | dict(gate.extra)
    lines = ["objective:", f"  gate: {{{', '.join(f'{name}: {value!r}' for name, value in found.items())}}}"]
    return "\n".join([*lines, *([] if verdict.lr is None else ["optimizer:", f"  lr: {verdict.lr!r}"])])


def summary(found: Outcome, verdict: Verdict) -> dict[str, Any]:
    """All of it for programs: what --json prints."""
    spec, arms = found.spec, len(verdict.against) + 1 if verdict.against else 0
    check = arms * len(spec.config.fresh) * spec.rungs[-1].steps
    grid = spec.grid_steps(len(found.candidates))
    return {
        "folder": str(spec.folder),
        "task": spec.task,
        "verdict": verdict.as_json(),
        "winner": None if found.winner is None else {"id": found.winner.id, **found.winner.as_json()},
        "leader": found.leader.label,
        "start": found.warm_up["score"],
        "metric": found.warm_up["metric"],
        "channels": found.warm_up["used"],
        "cost": {
            "search_steps": found.steps,
            "verdict_steps": check,
            "grid_steps": grid,
            "search_to_grid": found.steps / grid,
            "with_verdict": (found.steps + check) / (grid + check),
        },
        "pairing": _pairing(found),
        "trials": [
            {
                "id": one.id,
                **one.as_json(),
                "scores": list(found.scores.get(one.id, ())),
                "error": found.errors.get(one.id),
            }
            for one in found.candidates.values()
        ],
        "rungs": [
            {"steps": rung.steps, "seeds": rung.seeds, **{key: made[key] for key in ("incumbent", "kept")}}
            for rung, made in zip(spec.rungs, found.decisions, strict=True)
        ],
    }


def _pairing(found: Outcome) -> dict[str, Any]:
    """Of the first rung that has several seeds, which has the most candidates."""
    seeds = [made["pairing"]["seeds"] for made in found.decisions if made["pairing"]["seeds"] is not None]
    rows = [made["pairing"]["rows"] for made in found.decisions if made["pairing"]["rows"] is not None]
    return {"seeds": seeds[0] if seeds else None, "rows": rows[0] if rows else None}


def notes(found: Outcome, verdict: Verdict) -> list[str]:
    """What to know beside the verdict, a sentence each."""
    told = summary(found, verdict)
    cost, pairing, lines = told["cost"], told["pairing"], []
    dead = [name for name in found.spec.config.channels if name not in told["channels"]]
    lines.append(
        f"Cost: {cost['search_steps']} training steps of the search, {cost['search_to_grid']:.0%} of a full grid over "
        f"{len(found.candidates)} candidates; with the verdict's {cost['verdict_steps']} in both, "
        f"{cost['with_verdict']:.0%}."
    )
    if pairing["seeds"] is not None:
        lines.append(
            f"Pairing: the variance of a difference is {pairing['seeds']:.2f} of what unpaired seeds would have"
            + (f", and {pairing['rows']:.2f} of unpaired rows." if pairing["rows"] is not None else ".")
        )
    if verdict.curse is not None:
        curse = verdict.curse
        lines.append(
            f"Winner's curse: on validation the winner had {_plain(found, curse['search'])} at the seeds of the search "
            f"and {_plain(found, curse['fresh'])} at fresh ones; the search flattered it by {curse['difference']:+.4f}."
        )
    if found.winner is not None and found.leader.id != found.winner.id:
        lines.append(f"The best candidate on validation was no gate: {found.leader.label}.")
    if verdict.lr is not None:
        lines.append(f"All sides of the verdict have the winner's learning rate, {verdict.lr:g}.")
    if dead:
        lines.append(f"Channels without an effect of their own in the warm-up: {', '.join(dead)}.")
    if found.errors:
        lines.append(f"Failed and left out: {', '.join(found.candidates[name].label for name in found.errors)}.")
    return lines


def _plain(found: Outcome, score: float) -> str:
    """A score as its metric has it."""
    return f"{score:.4f}" if found.spec.is_text else f"a log-loss of {-score:.4f}"


def against(verdict: Verdict) -> Table:
    """The comparisons of the verdict."""
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
    records = [
        {
            **vars(one),
            "difference": f"{one.mean:+.4f}",
            "interval": None if one.low is None else f"{one.low:+.4f} to {one.high:+.4f}",
        }
        for one in verdict.against
    ]
    return Table.of("against", "The winner on test at fresh seeds", columns, records)


def trials(found: Outcome) -> Table:
    """All candidates, those that came farthest first."""
    order = sorted(found.candidates.values(), key=lambda one: _rank(found, one))
    rungs = [_rung(rung) for rung in found.spec.rungs]
    columns = [text("label", "candidate"), text("kind"), lam("lam", "λ̄ at the start"), number("spread", "spread")]
    columns += [number(name, f"to {name}") for name in found.warm_up["used"]]
    columns += [text(f"rung{place}", title) for place, title in enumerate(rungs)]
    records = []
    for one in order:
        known = found.scores.get(one.id, ())
        record: dict[str, Any] = {"label": one.label, "kind": one.kind}
        if one.place is not None:
            record |= {"lam": one.place.lam, "spread": one.place.spread, **one.place.direction}
        if one.id in found.errors:
            record["rung0"] = "failed"
        record |= {f"rung{place}": f"{abs(value):.4f}" for place, value in enumerate(known)}
        records.append(record)
    metric = found.warm_up["metric"]
    better = "higher" if found.spec.is_text else "lower"
    note = f"Scores are {metric} on validation, the mean over rows and seeds; {better} is better."
    return Table.of("trials", "Candidates", columns, records, note=note)


def _rung(rung: Rung) -> str:
    return f"{rung.steps} step{'s' * (rung.steps > 1)} × {rung.seeds} seed{'s' * (rung.seeds > 1)}"


def _rank(found: Outcome, one: Candidate) -> tuple[float, ...]:
    known = found.scores.get(one.id, ())
    return (-len(known), -known[-1]) if known else (0.0, 0.0)


def charts(found: Outcome) -> list[Chart]:
    """The gate plane with all trials, and the rungs as a funnel."""
    return [_plane(found), _funnel(found)]


def _plane(found: Outcome) -> Chart:
    """λ̄ across and spread upwards; how far a trial came is its size."""
    shown = [one for one in found.candidates.values() if one.place is not None]
    highest = max((one.place.spread for one in shown if one.place is not None), default=1.0)
    winner = found.winner

    def draw() -> Any:
        key = [*_KEY, *([("○ winner", INK)] if winner is not None else [])]
        top = key_height(key)
        figure = canvas(top + 3.4)
        axes = panel(figure, left=0.6, right=0.15, top=top, bottom=0.45)
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        for one in shown:
            assert one.place is not None
            mark, colour = _MARKS[one.kind]
            size = 18 + 45 * (len(found.scores.get(one.id, ())) - 1)
            axes.scatter(
                one.place.lam, one.place.spread, s=max(size, 8), marker=mark, c=colour, linewidths=0, alpha=0.85
            )
            if winner is not None and one.id == winner.id:
                axes.scatter(one.place.lam, one.place.spread, s=260, marker="o", facecolors="none", edgecolors=INK)
        axes.set_xlim(0, 1)
        axes.set_ylim(-0.05 * highest, 1.08 * highest)
        axes.set_xlabel("mean gate λ̄ at the tokens of the warm-up")
        axes.set_ylabel("spread of the gate's logit")
        draw_key(figure, key)
        return figure

    columns = [text("label", "candidate"), lam("lam", "λ̄"), number("spread"), count("rungs", "rungs reached")]
    records = [
        {
            "label": one.label,
            "lam": one.place.lam,
            "spread": one.place.spread,
            "rungs": len(found.scores.get(one.id, ())),
        }
        for one in shown
        if one.place is not None
    ]
    best = "" if winner is None or winner.place is None else (
        f" The winner has λ̄ = {winner.place.lam:.2f} and a spread of {winner.place.spread:.2f}, "
        f"to {', '.join(f'{name} {value:+.2f}' for name, value in winner.place.direction.items())}."
    )  # fmt: skip
    finding = f"Where {len(shown)} gates are; a larger mark came farther.{best}"
    return Chart(
        "plane", "The gate plane with all trials", finding, Table.of("plane", "Trials", columns, records), draw
    )


def _funnel(found: Outcome) -> Chart:
    rungs = found.spec.rungs
    tried = [sum(len(known) > place for known in found.scores.values()) for place in range(len(rungs))]
    labels = [_rung(rung) for rung in rungs]
    kept = [len(made["kept"]) for made in found.decisions]

    def draw() -> Any:
        figure, axes = rows_figure(labels, [("■ tried", BLUE), ("■ kept", ORANGE)], row=0.42)
        for place, (all_, some) in enumerate(zip(tried, kept, strict=True)):
            axes.barh(place - 0.15, all_, height=0.3, color=BLUE)
            axes.barh(place + 0.15, some, height=0.3, color=ORANGE)
            axes.text(all_, place - 0.15, f" {all_}", va="center", color=MUTED)
            axes.text(some, place + 0.15, f" {some}", va="center", color=MUTED)
        axes.set_xlim(0, 1.1 * max(tried))
        axes.set_xlabel("candidates")
        return figure

    columns = [text("rung"), count("tried"), count("kept"), text("incumbent", "best")]
    records = [
        {
            "rung": label,
            "tried": tried[place],
            "kept": kept[place],
            "incumbent": found.candidates[made["incumbent"]].label,
        }
        for place, (label, made) in enumerate(zip(labels, found.decisions, strict=True))
    ]
    finding = f"{tried[0]} candidates began, and {tried[-1]} were trained to the end at all seeds of the search."
    return Chart("funnel", "Rungs of the search", finding, Table.of("funnel", "Rungs", columns, records), draw)


def write_page(found: Outcome, verdict: Verdict) -> None:
    """Write tune.html."""
    place = resources.files("gatespace.addons.tune") / "page.html.j2"
    template = templates().from_string(place.read_text(encoding="utf-8"))
    spec = found.spec
    html = template.render(
        name=spec.study.name,
        status=f"task {spec.task} · seeds of the search {', '.join(map(str, spec.config.seeds))} · "
        f"fresh seeds {', '.join(map(str, spec.config.fresh))}",
        verdict=verdict,
        paste=paste(verdict),
        notes=notes(found, verdict),
        against=against(verdict),
        figures=render(charts(found), png=False),
        tables=[trials(found)],
        opened={"against", "trials"},
    )
    atomic_write(spec.folder.page, html.lstrip() + "\n")
