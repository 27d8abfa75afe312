"""The verdict: an ordinary study of the winner on fresh seeds, and what its paired test differences support."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from gatespace.addons.tune.plan import Candidate, Spec
from gatespace.addons.tune.search import Search
from gatespace.addons.tune.settings import HALF
from gatespace.config import StudyConfig, dump_config, parse_config
from gatespace.config.study import PublishedConfig
from gatespace.errors import UsageError
from gatespace.evidence.paired import paired, seeds_needed
from gatespace.evidence.reach import ALPHA, least_differences
from gatespace.gating.coefficients import Gate, NotApplicable
from gatespace.report.findings import looks_text
from gatespace.study.records import RunResult, StudyResults

TUNED = "tuned"
"""The winner's name in the verdict's study."""
State = Literal["better", "no better", "undecided"]


@dataclass(frozen=True)
class Against:
    """The winner against one reference on test at the fresh seeds; positive differences are better."""

    reference: str
    """Its label in the study."""
    about: str
    state: State
    mean: float
    low: float | None
    """Lower end of the 95 % interval; None if the differences do not vary."""
    high: float | None
    sign_flip_p: float | None
    seeds: int
    more: int
    """Further seeds that would decide it; 0 if decided."""

    @property
    def interval(self) -> str:
        """The interval as text."""
        return "[no spread]" if self.low is None or self.high is None else f"[{self.low:+.4f}, {self.high:+.4f}]"


@dataclass(frozen=True)
class Verdict:
    """The result of a search."""

    state: State
    """Better than all references, no better than one of them, or undecided."""
    sentence: str
    unit: str
    """Unit of the differences."""
    gate: str | None
    """The winner's coefficients; None if no gate was left."""
    against: tuple[Against, ...] = ()
    more: int = 0
    """Further fresh seeds that would decide it."""
    curse: Mapping[str, float] | None = None
    """Validation score of the winner at the seeds of the search, at fresh seeds, and the first minus the second."""
    lr: float | None = None
    """The learning rate of all sides, if that was searched over."""


def check_looks(spec: Spec) -> None:
    """Raise if a fresh seed whose test results were seen is left out: that would be selecting seeds on test."""
    seen = {seed for look in spec.folder.looks() for seed in look.get("seeds", {}).get(spec.task, ())}
    if gone := sorted(seen - {*spec.config.fresh}):
        raise UsageError(
            f"tune.fresh: {gone} are left out, and their test results were seen",
            why="seeds that are chosen after a look at test are not fresh",
            instead=f"more seeds beside {sorted(seen)}; or another --output",
        )


def references(search: Search) -> dict[str, str]:
    """Label in the verdict's study → description: twin, λ = 0.5, and the best constant and published method found."""
    known = {f"twin({TUNED})": "the constant λ that it had on average", Gate.static(HALF).label: "λ = 0.5"}
    for kind, about in (("static", "the best constant λ of the search"), ("published", "the best published method")):
        if (best := search.best(kind)) is not None:
            known.setdefault(_label(best), about)
    return known


def _label(candidate: Candidate) -> str:
    """Label in the verdict's study, where all points have the same learning rate."""
    if candidate.method is not None:
        return parse_config(PublishedConfig, candidate.method).point
    return Gate.parse(str(candidate.gate)).label


def verdict_study(search: Search) -> StudyConfig:
    """The study of the winner against its references on fresh seeds, with comparisons fixed in advance."""
    spec, winner, published = search.spec, search.winner, search.best("published")
    assert winner is not None
    settings = dump_config(spec.study)
    task = settings["tasks"][spec.task]
    own = {**task["train"], "steps": spec.rungs[-1].steps}
    own["evaluation"] = {**own.get("evaluation", {}), "probabilities": not spec.is_text}
    if winner.lr is not None:
        own["optimizer"] = {**own.get("optimizer", {}), "lr": winner.lr}
    task |= {"points": None, "sweep": False, "train": own}
    pairs = [{"task": spec.task, "left": TUNED, "right": label} for label in references(search)]
    settings |= {
        "about": f"The gate that a search has chosen for {spec.task}, on seeds that had no part in the choice.",
        "points": {TUNED: winner.gate},
        "axes": {"static": [], "published": [] if published is None else [published.method]},
        "seeds": list(spec.config.fresh),
        "selection_seed": None,
        "replication": {"comparisons": pairs, "seeds": []},
        "tune": {},
        "output": None,
    }
    return parse_config(StudyConfig, settings, where="tune: verdict")


def without_gate(search: Search) -> Verdict:
    """The verdict if every gate was significantly worse than another candidate on validation."""
    sentence = (
        f"No better: on validation every gate was worse than {search.leader.label} by the paired test, so that no gate "
        "was taken to fresh seeds, and test was not read."
    )
    return Verdict("no better", sentence, _unit(search), None)


def judge(search: Search, results: StudyResults) -> Verdict:
    """The verdict from the results of its study."""
    winner = search.winner
    assert winner is not None

    def scores(label: str, split: str) -> dict[int, float]:
        return {run.spec.seed: _score(run, split) for run in results.done if run.spec.point == label}

    against = []
    for label, about in references(search).items():
        test = paired(scores(TUNED, "test"), scores(label, "test"))
        assert not isinstance(test, NotApplicable), "all runs of the study are done"
        against.append(compare(label, about, test, search.spec.config.margin))
    state: State = "undecided"
    if all(one.state == "better" for one in against):
        state = "better"
    elif any(one.state == "no better" for one in against):
        state = "no better"
    more = max(one.more for one in against) if state == "undecided" else 0
    chosen, fresh = search.scores[winner.id][-1], fmean(scores(TUNED, "val").values())
    curse = {"search": chosen, "fresh": fresh, "difference": chosen - fresh}
    made = Verdict(state, "", _unit(search), winner.gate, tuple(against), more, curse, winner.lr)
    return replace(made, sentence=" ".join(filter(None, [in_words(made), looks_text(results)])))


def _score(run: RunResult, split: str) -> float:
    score = run.scores[split]
    return score.accuracy if score.calibration is None else -score.calibration.log_loss


def _unit(search: Search) -> str:
    return str(search.warm_up["metric"]) if search.spec.is_text else "nats of log-loss"


def compare(label: str, about: str, test: Any, margin: float) -> Against:
    """Compare with one reference. No better: interval below the margin. Better: above 0, and the exact test agrees."""
    low, high = (test.mean, test.mean) if test.low is None else (test.low, test.high)
    state: State = "undecided"
    if high < margin:
        state = "no better"
    elif low > 0 and test.sign_flip_p is not None and test.sign_flip_p < ALPHA:
        state = "better"
    more = 0
    if state == "undecided":
        needed = [least_differences()]
        if test.sd:  # seeds to show the mean to be above 0 or below the margin, whichever needs fewer
            goals = [goal for goal in (test.mean, margin - test.mean) if goal > 0]
            needed.append(min(seeds_needed(test.sd, goal) for goal in goals))
        more = max(1, max(needed) - test.n)
    return Against(label, about, state, test.mean, test.low, test.high, test.sign_flip_p, test.n, more)


def in_words(verdict: Verdict) -> str:
    """The verdict in one sentence."""
    least = min(verdict.against, key=lambda one: one.mean)
    where = f"on test at {least.seeds} fresh seeds"
    if verdict.state == "better":
        return (
            f"Better by {least.mean:.4f} {least.interval} {verdict.unit} {where} than {least.reference}, the "
            f"strongest of {len(verdict.against)} references, and better than the others."
        )
    if verdict.state == "no better":
        worst = min((one for one in verdict.against if one.state == "no better"), key=lambda one: one.mean)
        found = f"{worst.mean:+.4f} {worst.interval} {verdict.unit} {where}"
        return f"No better than {worst.reference} ({worst.about}): {found}."
    unsure = max(verdict.against, key=lambda one: one.more)
    return (
        f"Undecided: {unsure.mean:+.4f} {unsure.interval} {verdict.unit} {where} against {unsure.reference}; "
        f"about {verdict.more} more seeds would decide (power .8, if these are typical)."
    )
