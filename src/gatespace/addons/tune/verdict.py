"""The verdict: an ordinary study of the winner on fresh seeds, and what its paired differences on test may claim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from gatespace.addons.tune.search import HALF, Candidate, Outcome, Spec
from gatespace.config import StudyConfig, dump_config, parse_config
from gatespace.evidence.paired import paired, seeds_needed
from gatespace.evidence.reach import least_differences
from gatespace.gating.coefficients import Gate, NotApplicable
from gatespace.study.records import RunResult, StudyResults

TUNED = "tuned"
"""The winner's name in the verdict's study."""
State = Literal["better", "no better", "undecided"]


@dataclass(frozen=True)
class Against:
    """The winner against one reference, on test at the fresh seeds, in the unit of the objective; positive is better.

    Args:
        reference: Its label in the study.
        about: What it is.
        state: What is shown.
        mean: Of the paired differences.
        low: Of their 95 % interval; None where they do not vary.
        high: Of it.
        sign_flip_p: Of the exact test.
        seeds: How many.
        more: Seeds that would decide it, beside those; 0 where it is decided.
    """

    reference: str
    about: str
    state: State
    mean: float
    low: float | None
    high: float | None
    sign_flip_p: float | None
    seeds: int
    more: int


@dataclass(frozen=True)
class Verdict:
    """What a search ends with.

    Args:
        state: Better than all references, no better than one of them, or undecided.
        sentence: In words.
        unit: Of the differences.
        gate: The winner's coefficients; None where no gate was left.
        against: The comparisons.
        more: Fresh seeds that would decide it.
        curse: Validation score of the winner at the seeds of the search, at fresh seeds, and the first minus the
            second; None without a verdict's runs.
        lr: The learning rate of all of them where that was searched for too.
    """

    state: State
    sentence: str
    unit: str
    gate: str | None
    against: tuple[Against, ...] = ()
    more: int = 0
    curse: Mapping[str, float] | None = None
    lr: float | None = None

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def references(found: Outcome) -> dict[str, str]:
    """Label in the verdict's study → what it is: twin, λ = 0.5, and the best constant and published method found."""
    assert found.winner is not None
    half = Gate.static(HALF).label
    known = {f"twin({TUNED})": "the constant λ that it had on average", half: "λ = 0.5"}
    for kind, about in (("static", "the best constant λ of the search"), ("published", "the best published method")):
        if (best := found.best(kind)) is not None:
            known.setdefault(_reference(best), about)
    return known


def _reference(candidate: Candidate) -> str:
    return candidate.method.point if candidate.method is not None else str(candidate.gate and candidate.gate.label)


def verdict_study(found: Outcome) -> StudyConfig:
    """The study of the winner against its references on fresh seeds: comparisons were fixed before it."""
    spec, winner = found.spec, found.winner
    assert winner is not None
    published = found.best("published")
    settings = dump_config(spec.study)
    task = settings["tasks"][spec.task]
    own = {**task["train"], "steps": spec.rungs[-1].steps}
    own["evaluation"] = {**own.get("evaluation", {}), "probabilities": not spec.is_text}
    if winner.lr is not None:
        own["optimizer"] = {**own.get("optimizer", {}), "lr": winner.lr}
    task |= {"points": None, "sweep": False, "train": own}
    method = None if published is None or published.method is None else dump_config(published.method)
    settings |= {
        "about": f"The gate that a search has chosen for {spec.task}, on seeds that had no part in the choice.",
        "points": {TUNED: str(winner.gate)},
        "axes": {"static": [], "published": [] if method is None else [method]},
        "seeds": list(spec.config.fresh),
        "selection_seed": None,
        "replication": {
            "comparisons": [{"task": spec.task, "left": TUNED, "right": label} for label in references(found)],
            "seeds": [],
        },
        "tune": {},
        "output": None,
    }
    return parse_config(StudyConfig, settings, where="tune: verdict")


def without_gate(found: Outcome) -> Verdict:
    """The verdict where every gate was clearly worse than something else on validation."""
    leader = found.leader
    sentence = (
        f"No better: on validation every gate was worse than {leader.label} by the paired test, so that no gate was "
        "taken to fresh seeds, and test was not read."
    )
    return Verdict("no better", sentence, _unit(found.spec, found), None)


def judge(found: Outcome, results: StudyResults) -> Verdict:
    """The verdict from the results of its study."""
    spec, winner, unit = found.spec, found.winner, _unit(found.spec, found)
    assert winner is not None
    runs = {(run.spec.point, run.spec.seed): run for run in results.done}

    def scores(label: str, split: str) -> dict[int, float]:
        return {seed: _score(run, split) for (point, seed), run in runs.items() if point == label}

    against = []
    for label, about in references(found).items():
        test = paired(scores(TUNED, "test"), scores(label, "test"))
        assert not isinstance(test, NotApplicable), "all runs of the study are done"
        against.append(_against(label, about, test, spec.config.margin, spec.config.alpha))
    state: State = "undecided"
    if all(one.state == "better" for one in against):
        state = "better"
    elif any(one.state == "no better" for one in against):
        state = "no better"
    chosen, fresh = found.scores[winner.id][-1], fmean(scores(TUNED, "val").values())
    made = Verdict(
        state,
        "",
        unit,
        str(winner.gate),
        tuple(against),
        max(one.more for one in against) if state == "undecided" else 0,
        {"search": chosen, "fresh": fresh, "difference": chosen - fresh},
        winner.lr,
    )
    return replace(made, sentence=_sentence(made))


def _score(run: RunResult, split: str) -> float:
    score = run.scores[split]
    return score.accuracy if score.calibration is None else -score.calibration.log_loss


def _unit(spec: Spec, found: Outcome) -> str:
    return f"{found.warm_up['metric']}" if spec.is_text else "nats of log-loss"


def _against(label: str, about: str, test: Any, margin: float, alpha: float) -> Against:
    """No better: the interval is below the margin. Better: it is above 0, and the exact test agrees."""
    low, high = (test.mean, test.mean) if test.low is None else (test.low, test.high)
    state: State = "undecided"
    if high < margin:
        state = "no better"
    elif low > 0 and test.sign_flip_p is not None and test.sign_flip_p < alpha:
        state = "better"
    more = 0
    if state == "undecided":
        needed = [least_differences()]
        if test.sd:  # what would be shown soonest if the mean is the true difference: that it is there, or too small
            goals = [goal for goal in (test.mean, margin - test.mean) if goal > 0]
            needed.append(min(seeds_needed(test.sd, goal) for goal in goals))
        more = max(1, max(needed) - test.n)
    return Against(label, about, state, test.mean, test.low, test.high, test.sign_flip_p, test.n, more)


def _sentence(verdict: Verdict) -> str:
    least = min(verdict.against, key=lambda one: one.mean)
    where = f"on test at {least.seeds} fresh seeds"
    if verdict.state == "better":
        return (
            f"Better by {least.mean:.4f} {_interval(least)} {verdict.unit} {where} than {least.reference}, the "
            f"strongest of {len(verdict.against)} references, and better than the others."
        )
    if verdict.state == "no better":
        worst = min((one for one in verdict.against if one.state == "no better"), key=lambda one: one.mean)
        return (
            f"No better than {worst.reference} ({worst.about}): {worst.mean:+.4f} {_interval(worst)} {verdict.unit} "
            f"{where}."
        )
    open_ = max(verdict.against, key=lambda one: one.more)
    return (
        f"Undecided: {open_.mean:+.4f} {_interval(open_)} {verdict.unit} {where} against {open_.reference}; "
        f"about {verdict.more} more seeds would decide (power .8, if these are typical)."
    )


def _interval(one: Against) -> str:
    return "[no spread]" if one.low is None or one.high is None else f"[{one.low:+.4f}, {one.high:+.4f}]"
