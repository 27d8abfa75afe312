"""The verdict: an ordinary study of the winner on fresh seeds, and what its paired test differences support."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from statistics import fmean, variance
from typing import Any, Literal

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from gatespace.addons.tune.plan import Candidate, Spec
from gatespace.addons.tune.search import Search
from gatespace.addons.tune.settings import HALF
from gatespace.config import StudyConfig, dump_config, parse_config
from gatespace.config.study import PublishedConfig
from gatespace.errors import UsageError
from gatespace.evidence.paired import POWER, paired, seeds_needed
from gatespace.evidence.reach import ALPHA, least_differences
from gatespace.gating.coefficients import Gate, NotApplicable
from gatespace.seeding import stream
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
    """Whether the tuned gate is better than all references, no better than one of them, or neither is shown."""
    use: str
    """The simplest candidate that nothing was shown to beat: constants, then published methods, then the gate."""
    settings: Mapping[str, Any]
    why: str
    unit: str
    gate: str | None
    """The tuned gate's coefficients; None if no gate was left."""
    against: tuple[Against, ...] = ()
    more: int = 0
    curse: Mapping[str, float] | None = None
    """Validation score of the winner at the seeds of the search, at fresh seeds, and the first minus the second."""
    lr: float | None = None
    """The learning rate of all sides, if that was searched over."""
    power: str = ""

    @property
    def sentence(self) -> str:
        """The advice, in one sentence."""
        kind = " (a constant λ)" * self.use.startswith("static:")
        return f"Use {self.use}{kind}: the simplest candidate that nothing was shown to beat."


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
    """Label in the verdict's study → description, simplest first: constants, then a published method."""
    best, published = search.best("static"), search.best("published")
    known = {} if best is None else {_label(best): "the best constant λ of the search"}
    known.setdefault(Gate.static(HALF).label, "λ = 0.5")
    known[f"twin-rkl({TUNED})"] = "the constant λ that it had on average over reverse KL"
    known[f"twin({TUNED})"] = "the constant λ that it had on average over tokens"
    return known if published is None else known | {_label(published): "the best published method of the search"}


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
    kept = [search.candidates[name] for name in search.decisions[-1]["kept"]]
    use = min(kept, key=lambda one: one.complexity)  # the best of them comes first
    why = (
        f"On validation every gate was worse than {search.leader.label} by the paired test, so that no gate was taken "
        "to fresh seeds, and test was not read."
    )
    return Verdict("no better", use.label, _settings(use, use.lr), why, _unit(search), None, lr=use.lr)


def judge(search: Search, results: StudyResults) -> Verdict:
    """The verdict from the results of its study."""
    winner, known, looks = search.winner, references(search), max(1, len(results.looks))
    assert winner is not None

    def scores(label: str, split: str) -> dict[int, float]:
        return {run.spec.seed: _score(run, split) for run in results.done if run.spec.point == label}

    def against(left: str, right: str) -> Against:
        test = paired(scores(left, "test"), scores(right, "test"), confidence=1 - ALPHA / looks)
        assert not isinstance(test, NotApplicable), "all runs of the study are done"
        return compare(right, known.get(right, ""), test, search.spec.config.margin)

    pairs = tuple(against(TUNED, label) for label in known)
    states = {pair.state for pair in pairs}
    state: State = "better" if states == {"better"} else "no better" if "no better" in states else "undecided"
    more = max(pair.more for pair in pairs) if state == "undecided" else 0
    arms = [*known, TUNED]
    use = next(arm for arm in arms if all(against(other, arm).state != "better" for other in arms if other != arm))
    simplest = next((one for one in search.candidates.values() if _label(one) == use), winner)
    if use.startswith("twin"):
        use = Gate.static(round(fmean(run.lam or 0.0 for run in results.done if run.spec.point == use), 4)).label
        simplest = replace(simplest, gate=use)
    chosen, fresh = search.scores[winner.id][-1], fmean(scores(TUNED, "val").values())
    curse, unit = {"search": chosen, "fresh": fresh, "difference": chosen - fresh}, _unit(search)
    why = in_words(state, pairs, unit)
    if looks > 1:
        why += f" This is look {looks} at these test results: intervals are adjusted for it (level .05 / {looks})."
    use, lr = f"the gate {winner.label}" if use == TUNED else use, winner.lr
    settings, power = _settings(simplest, lr), power_text(search)
    return Verdict(state, use, settings, why, unit, winner.gate, pairs, more, curse, lr, power)


def _settings(candidate: Candidate, lr: float | None) -> dict[str, Any]:
    """What to paste into a file for `gatespace train`."""
    method, gate = candidate.method, candidate.gate
    found: dict[str, Any] = {"objective": candidate.objective if gate is None else {"gate": Gate.parse(gate).label}}
    found |= {"rollout": method["rollout"]} if method is not None and method["rollout"] else {}
    return found if lr is None else found | {"optimizer": {"lr": lr}}


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


def in_words(state: State, against: Sequence[Against], unit: str) -> str:
    """Why: the reference that decides, or that leaves it open."""
    least = min(against, key=lambda pair: pair.mean)
    if state == "no better":
        least = min((pair for pair in against if pair.state == "no better"), key=lambda pair: pair.mean)
    elif state == "undecided":
        least = max(against, key=lambda pair: pair.more)
    name = f"{least.reference} ({least.about})"
    said = {
        "better": f"The tuned gate is better than all {len(against)} references; least so than {name}",
        "no better": f"The tuned gate is no better than {name}",
        "undecided": f"Whether the tuned gate is better than {name} is undecided",
    }[state]
    more = f" About {least.more} more seeds would decide." if state == "undecided" else ""
    return (
        f"{said}: {least.mean:+.4f} {least.interval} {unit} on test at {least.seeds} fresh seeds, "
        f"where positive means that the gate is better.{more}"
    )


# ---------------------------------------------------------------------------------------------------- power


def power_text(search: Search) -> str:
    """What the verdict can be expected to show, by the SD of paired differences in the search; "" if unknown."""
    n, known = len(search.spec.config.fresh), search.decisions[-1]["score"]
    assert search.winner is not None
    own, others = search.by_seed[search.winner.id], [name for name in known if not search.candidates[name].is_gate]
    if len(own) < 2 or not others:
        return ""
    sd = math.sqrt(fmean(variance([own[seed] - search.by_seed[name][seed] for seed in own]) for name in others))
    if (least := detectable(n, len(references(search)))) is None:
        return f"{n} fresh seeds cannot show that a gate is better: that needs at least {least_differences()}."
    return f"{n} fresh seeds will show a gain of about {sd * least:.1g} {_unit(search)} here (power .8)."


@lru_cache
def detectable(seeds: int, references: int, draws: int = 2000) -> float | None:
    """The gain over every reference, in SDs of a paired difference, that is called better with probability .8.

    Simulated with the rule of `compare`. Differences to several references share the gate's runs: they correlate by .5.
    From nine seeds on the sign-flip test is taken to agree with t.
    """
    if seeds < least_differences():
        return None
    rng = np.random.default_rng(stream(0, "tune", "power", seeds, references))
    noise = rng.standard_normal((draws, 1, seeds)) + rng.standard_normal((draws, references, seeds))
    signs = np.array([*product((-1, 1), repeat=seeds)]) if seeds < 9 else np.empty((0, seeds))

    def power(gain: float) -> float:
        cells = noise / math.sqrt(2) + gain
        means = cells.mean(-1)
        better = means > stats.t.ppf(1 - ALPHA / 2, seeds - 1) * cells.std(-1, ddof=1) / math.sqrt(seeds)
        if len(signs):
            flipped = np.abs(cells @ signs.T) / seeds
            better &= (flipped >= np.abs(means)[..., None] - 1e-12).mean(-1) < ALPHA
        return float(better.all(-1).mean())

    return next((gain for gain in np.arange(0.5, 6, 0.05).tolist() if power(gain) >= POWER), None)
