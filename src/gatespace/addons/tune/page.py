"""Output of a search: lines for a terminal, JSON, and one page."""

from __future__ import annotations

from dataclasses import asdict
from importlib import resources
from typing import Any

from gatespace.addons.tune.gates import LEAST_SD
from gatespace.addons.tune.plan import Candidate
from gatespace.addons.tune.search import Search
from gatespace.addons.tune.verdict import Verdict
from gatespace.config.text import write_yaml
from gatespace.files import atomic_write
from gatespace.report.page import templates
from gatespace.report.table import Table, count, lam, number, p_value, text


def summary(search: Search, verdict: Verdict) -> dict[str, Any]:
    """The whole result, as --json prints it."""
    spec, arms = search.spec, len(verdict.against) + 1 if verdict.against else 0
    check = arms * len(spec.config.fresh) * spec.rungs[-1].steps
    grid = spec.grid_steps(len(search.candidates))
    return {
        "folder": str(spec.folder),
        "task": spec.task,
        "verdict": {"sentence": verdict.sentence} | asdict(verdict),
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
    cost, curse = found["cost"], verdict.curse
    lines = [verdict.power] if verdict.power else []
    lines.append(
        f"Cost: {cost['search_steps']} training steps for {len(search.candidates)} candidates, "
        f"{cost['search_to_grid']:.0%} of a full grid's ({cost['with_verdict']:.0%} with the {cost['verdict_steps']} "
        "verdict steps added to both)."
    )
    if curse is not None:
        before, after = _plain(search, curse["search"]), _plain(search, curse["fresh"])
        lines.append(
            f"Winner's curse: on validation the tuned gate had {before} at the seeds of the search, {after} at fresh "
            f"ones: {curse['difference']:+.4f}, due to selection and seed noise."
        )
    if search.winner is not None and search.leader.id != search.winner.id:
        lines.append(f"The best candidate on validation was no gate: {search.leader.label}.")
    if verdict.lr is not None:
        lines.append(f"All sides of the verdict have the winner's learning rate, {verdict.lr:g}.")
    channels = search.warm_up["channels"].items()
    if gone := [f"{name} (SD {sd:.2g})" for name, (_, sd) in channels if name not in found["channels"]]:
        why = f"hardly vary over the warm-up's tokens (SD below {LEAST_SD}) or equal another one"
        lines.append(f"Channels left out, since they {why}: {', '.join(gone)}.")
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
        paste=write_yaml(verdict.settings),
        notes=notes(search, verdict),
        against=_against(verdict),
        trials=_trials(search),
    )
    atomic_write(spec.folder.page, html.lstrip() + "\n")


def _against(verdict: Verdict) -> Table:
    """Table of the verdict's comparisons."""
    columns = (
        text("reference"),
        text("about", "what it is"),
        text("state", "the tuned gate is"),
        text("difference", f"tuned minus reference, {verdict.unit} (positive: the gate is better)"),
        text("interval"),
        p_value("sign_flip_p", "sign-flip p"),
        count("seeds"),
        count("more", "more seeds to decide"),
    )
    records = [{**vars(one), "difference": f"{one.mean:+.4f}", "interval": one.interval} for one in verdict.against]
    return Table.of("against", "The tuned gate on test at fresh seeds", columns, records)


def _trials(search: Search) -> Table:
    """All candidates, those that advanced farthest first."""

    def rank(one: Candidate) -> tuple[float, ...]:
        return (-len(known), -known[-1]) if (known := search.scores.get(one.id)) else (0.0, 0.0)

    columns = [text("label", "candidate"), text("kind"), lam("lam", "λ̄ at the start"), number("spread")]
    columns += [number(name, f"to {name}") for name in search.warm_up["used"]]
    columns += [text(f"rung{i}", f"{r.steps} steps × {r.seeds} seeds") for i, r in enumerate(search.spec.rungs)]
    records = []
    for one in sorted(search.candidates.values(), key=rank):
        place = {} if one.place is None else {**one.place, **one.place["direction"]}
        shown = [f"{abs(value):.4f}" for value in search.scores.get(one.id, ())]
        shown += ["failed"] * (one.id in search.errors)
        records.append({**vars(one), **place, **{f"rung{rung}": value for rung, value in enumerate(shown)}})
    better = "higher" if search.spec.is_text else "lower"
    title = f"Candidates, by {search.warm_up['metric']} on validation, mean over rows and seeds; {better} is better"
    return Table.of("trials", title, columns, records)
