"""What a study supports and what it does not, in sentences derived from its statistics.

A group of comparisons is supported only if its interval excludes 0 with and without the selection seed, p without that
seed is below the level after Holm's adjustment over all planned groups, the exact sign-flip test (which needs at least
six blocks) agrees, and no single point decides it. The level is .05 at the first look at the results and lower at later
ones. A claim is about the points that were run, not about the family. Single cells are never claimed. What a mean would
hide comes first: points that end below their start, tasks that do not separate the points, and groups decided by one
point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from gatespace.evidence.reach import ALPHA
from gatespace.evidence.records import ALL_TASKS, BlockClaim, Detectable, GroupEvidence, Summary, WinCount
from gatespace.gating.coefficients import NotApplicable
from gatespace.report.beside import sentences
from gatespace.report.table import shown
from gatespace.report.view import KINDS, View, axis_of, confidence_text, leaves_out_zero
from gatespace.study.plan import ending, train_config
from gatespace.study.records import StudyResults

Verdict = Literal["supported", "lead", "none", "descriptive", "missing"]
VERDICTS: Mapping[str, str] = {
    "supported": "supported",
    "lead": "not confirmed",
    "none": "no detectable difference",
    "descriptive": "descriptive only",
    "missing": "not run yet",
}
_LOOKS = ("", "", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
_NAMED_POINTS = 8
_NULL_LEADS = {True: 0.058, False: 0.04}
"""Whether there is a selection seed → chance that a group without any difference is a lead, from simulated studies."""


@dataclass(frozen=True)
class Finding:
    """A sentence about one group of comparisons, with its verdict."""

    verdict: Verdict
    axis: str
    restriction: str | None
    about: str
    """Its subject in a few words."""
    text: str
    look: int = 1
    claim: BlockClaim | None = None
    fresh: BlockClaim | None = None
    why: str = ""
    """Why the difference is not supported."""
    decisive: str = ""
    """The point that decides the mean, if any."""

    @property
    def verdict_text(self) -> str:
        """The verdict in words; a claim that is supported after earlier looks says so."""
        return VERDICTS[self.verdict] + (_at_look(self.look) if self.verdict == "supported" else "")


@dataclass(frozen=True)
class Findings:
    """The first screen."""

    headline: str
    """The verdicts in one sentence."""
    state: str
    """How much of the study is done."""
    notable: tuple[str, ...]
    """What group means would hide."""
    warnings: tuple[str, ...]
    """Problems of single runs, and what usually helps."""
    training: tuple[str, ...]
    """Outcome of training, per task."""
    claims: tuple[Finding, ...]
    """One per group of comparisons."""
    limits: tuple[str, ...]
    """Why no more can be claimed."""
    beside: tuple[str, ...] = ()
    """Comparisons that a reference has replicated and this study has run: summary, then one by one."""


def find(view: View) -> Findings:
    """Return the sentences of the first screen."""
    claims = tuple(_claims(view))
    return Findings(
        headline=_headline(claims),
        state=_state(view),
        notable=(*_below_start(view), *_alike(view), *_decided(view, claims)),
        warnings=tuple(view.results.warning_lines(without=[one[:2] for one in view.analysis.below_start])),
        training=tuple(_training(view)),
        claims=claims,
        limits=tuple(_limits(view)),
        beside=tuple(sentences(view)),
    )


# ---------------------------------------------------------------------------------------------------- the study


def _headline(claims: Sequence[Finding]) -> str:
    """The verdicts in one sentence."""
    of = {verdict: [claim for claim in claims if claim.verdict == verdict] for verdict in VERDICTS}
    asked = len(claims)
    if not asked:
        return "The study compares nothing."
    if len(of["missing"]) == asked:
        return "No comparison can be made yet."
    if of["descriptive"] and not (of["supported"] or of["lead"] or of["none"]):
        return "One seed: the numbers describe these runs, and support no claim about others."
    held = len(of["supported"])
    groups = f"{asked} group comparison{'s' * (asked > 1)}"
    text = f"Of {groups}, {held or 'none'} show{'s' * (held < 2)} a statistically supported difference"
    if of["supported"]:
        text += f"{_at_look(claims[0].look)} ({', '.join(claim.about for claim in of['supported'])})"
    rest = []
    if of["lead"]:
        rest.append(f"{len(of['lead'])} not confirmed ({', '.join(claim.about for claim in of['lead'])})")
    if of["none"]:
        rest.append(f"{len(of['none'])} without a detectable difference")
    if of["descriptive"] or of["missing"]:
        rest.append(f"{len(of['descriptive']) + len(of['missing'])} without enough runs")
    return f"{text}; {', '.join(rest)}." if rest else f"{text}."


def _state(view: View) -> str:
    counts, whole = view.counts, len(view.results.runs)
    if counts["done"] == whole and not view.results.problems:
        return f"All {whole} runs are done."
    rest = [
        f"{counts[state]} {word}"
        for state, word in (("failed", "failed"), ("running", "running"), ("waiting", "not begun"))
        if counts[state]
    ]
    missing = ", ".join(rest) or "results are not complete"
    return f"{counts['done']} of {whole} runs are done ({missing}): this report is partial."


def _below_start(view: View) -> Iterator[str]:
    """Points that ended below the untrained student, with what usually helps."""
    causes = view.results.causes()
    for task, point, start, shares, gain in view.analysis.below_start:
        kind = KINDS[view.kind(task, point)]
        text = f"{view.said(task)}: {point} ({kind}) ends below its start: {_percent(fmean(shares))}"
        if len(shares) > 1:
            text += f" on average over {len(shares)} seeds ({_percent(min(shares))} to {_percent(max(shares))})"
        text += f", the student before training {_percent(start)}"
        helps = f" {causes[task, point].helps}" if (task, point) in causes else ""
        if gain.low is None:
            yield f"{text}. With one seed, noise is not known.{helps}"
            continue
        where = "Beyond noise" if gain.high is not None and gain.high < 0 else "Within the noise of its seeds"
        yield f"{text}. {where}: {_pp(gain.mean)}, {_interval(gain)}; {gain.losses} of {gain.n} runs are below.{helps}"


def _alike(view: View) -> Iterator[str]:
    """Tasks on which most runs have the same accuracy, e.g. because all are right on every text."""
    for task in view.labelled():
        runs = [run for run in view.results.done if run.spec.task == task and "test" in run.scores]
        points = {run.spec.point for run in runs}
        if len(points) < 2 or len(runs) < 2 * len(points):
            continue
        correct, same = Counter(run.scores["test"].correct for run in runs).most_common(1)[0]
        if 2 * same > len(runs):
            score, constant = runs[0].scores["test"], view.analysis.baselines[task].best_constant
            why, helps = "", "more or harder test texts help, or fewer steps"
            if constant is not None and correct <= round(constant * score.count):
                why, helps = (
                    ", as if all had the most frequent label",
                    "more steps or a higher learning rate help",
                )
            yield (
                f"{task}: {same} of {len(runs)} runs are right on {correct} of {score.count} test texts{why}: "
                f"it hardly tells the {len(points)} points apart. Usually {helps}."
            )


def _decided(view: View, claims: Sequence[Finding]) -> Iterator[str]:
    """Groups whose mean is decided by one point."""
    for claim in claims:
        group = view.analysis.group(claim.axis, restriction=claim.restriction)
        if group is not None and group.decisive is not None and claim.claim is not None:
            yield f"{claim.about}: {_lower(_driven(group))}"


def _driven(group: GroupEvidence) -> str:
    """A group with and without the point that decides it."""
    assert group.decisive is not None
    assert isinstance(group.all, BlockClaim)
    point, rest = group.decisive
    return (
        f"The average is driven by {point} alone: {_pp(group.all.mean)} with {point}, and {_pp(rest.mean)}, "
        f"{_interval(rest)}, without it."
    )


def _training(view: View) -> list[str]:
    found = []
    for task, known in view.analysis.baselines.items():
        if known.trained is None:
            found.append(f"{task}: no run of the family is done.")
            continue
        runs = f"{known.runs} runs are" if known.runs > 1 else "one run is"
        text = f"{view.said(task)}: the family's {runs} at {_percent(known.trained)}{' on average' * (known.runs > 1)}"
        if known.start is not None and known.gain is not None:
            text += f", from {_percent(known.start)} before training ({_pp(known.gain)})"
        beside = []
        if known.teacher is not None:
            beside.append(f"the teacher is at {_percent(known.teacher)}")
        if known.best_constant is not None:
            beside.append(f"giving {known.best_constant_label!r} to all at {_percent(known.best_constant)}")
        text += f"; {', '.join(beside)}." if beside else "."
        if known.below_best_constant:
            text += (
                f" {known.below_best_constant} of {known.done} runs are below that label for all: look at "
                "balanced accuracy, not at accuracy."
            )
        found.append(text + _ending(view, task))
    return found


def _ending(view: View, task: str) -> str:
    """How many runs ended early, for tasks with early stopping or checkpoint selection."""
    study = view.results.config
    if not (rule := ending(study, task)):
        return ""
    planned = train_config(study, task, study.seeds[0], {}).steps
    steps = [run.cost.steps for run in view.results.done if run.spec.task == task and run.cost is not None]
    early = [count for count in steps if count < planned]
    after = f", after {' to '.join(map(str, sorted({min(early), max(early)})))} of {planned} steps" if early else ""
    return f" {rule[0].upper()}{rule[1:]}. {len(early) or 'None'} of {len(steps)} runs ended early{after}."


# ---------------------------------------------------------------------------------------------------- claims


def _claims(view: View) -> list[Finding]:
    groups = [group for axis in view.axes for group in view.analysis.groups if group.axis == axis and group.claimed]
    claims = []
    for group in groups:
        verdict, text, why = _verdict(view, group, len(groups))
        whole, fresh = (c if isinstance(c, BlockClaim) else None for c in (group.all, group.fresh))
        decisive = group.decisive.point if group.decisive is not None else ""
        about = axis_of(group.axis, group.restriction).about
        if group.axis == "static":
            about = f"Constant {_right(view, group)}"
        if scope := _scope(group):
            about += f" ({scope})"
        look = max(1, len(view.results.looks))
        claims.append(Finding(verdict, group.axis, group.restriction, about, text, look, whole, fresh, why, decisive))
    return [_joined(claim, claims) for claim in claims]


def _joined(claim: Finding, claims: Sequence[Finding]) -> Finding:
    """A supported difference from a constant λ, with what the matched constants say about its cause."""
    if claim.axis != "static" or claim.verdict != "supported" or claim.claim is None:
        return claim
    above = claim.claim.mean > 0
    word = "gain" if above else "loss"
    twins = [c for c in claims if c.axis == "isolation" and c.verdict in ("supported", "lead", "none")]
    same = [c for c in twins if c.verdict == "supported" and c.claim is not None and (c.claim.mean > 0) == above]
    if not twins:
        cause = (
            f"Whether the {word} comes with the mean of λ or from varying it is open: no matched constant was tested."
        )
    elif not same:
        cause = f"The {word} comes with the mean of λ; no {word} from varying it was detected."
    else:
        shown_by, not_by = (
            _and([axis_of(c.axis, c.restriction).right for c in twins if (c in same) == is_same])
            for is_same in (True, False)
        )
        cause = f"A {word} from varying λ is supported too, against {shown_by}."
        if not_by:
            cause = (
                f"A {word} is supported against {shown_by} and not against {not_by}: that λ varies is not shown to be "
                "the cause."
            )
    return replace(claim, text=f"{claim.text} {cause}")


def _verdict(view: View, group: GroupEvidence, family: int) -> tuple[Verdict, str, str]:
    """Verdict, sentence and doubts of one of `family` planned groups."""
    seed, level = view.results.selection_seed, view.analysis.level
    whole, fresh = group.all, group.fresh if isinstance(group.fresh, BlockClaim) else None
    if not isinstance(whole, BlockClaim):
        return "missing", f"{axis_of(group.axis, group.restriction).title}: no pair of runs is done.", ""
    points, right = _points(whole), _right(view, group)
    if len({block.seed for block in whole.blocks}) == 1:
        cells = f"{group.comparable} comparison{'s' * (group.comparable != 1)}"
        unknown = "What another seed would give is not known: no interval, no test."
        mean = f"{_capital(points)} minus {right}: {_pp(whole.mean)} on average over {cells} at one seed."
        return "descriptive", f"{mean} {unknown}", "one seed"
    if whole.low is None or whole.high is None:
        mean = f"{_capital(points)} minus {right}: {_pp(whole.mean)} in all {_blocks(whole)}"
        return "none", f"{mean}: no variance to test it by.", "no variance"
    scope = _scope(group)
    part = f" for the {scope} that have all of them" if scope else ""
    numbers = f"mean {_pp(whole.mean)}, {_interval(whole)} over {_blocks(whole)}{part}"
    again = ""
    if fresh is not None and fresh.n < whole.n:
        again = f" Without the selection seed {seed}: {_pp(fresh.mean)}"
        # The interval of two blocks has one degree of freedom and says nothing.
        again += f", {_interval(fresh)}." if fresh.low is not None and fresh.n > 2 else f" ({_blocks(fresh)})."
    driven = _driven(group) if group.decisive is not None else ""
    several = len({cell.left for cell in whole.cells}) > 1
    if not leaves_out_zero(whole) and not (fresh is not None and leaves_out_zero(fresh)):
        text = f"No detectable difference between {points}{', on average,' * several} and {right}: {numbers}."
        return "none", f"{text} {_detectable(view, group)}{again} {driven}".rstrip(), driven
    where = "above" if whole.mean > 0 else "below"
    ahead = f"{_capital(points)}, on average, are {where} {right}" if several else f"{points} is {where} {right}"
    doubts = [*_doubts(whole, fresh, group.judged, group.holm, seed, level)]
    if driven:
        doubts.append(_lower(driven).removesuffix("."))
    if doubts:
        why = f"{'; '.join(doubts)}."
        lead = f"{ahead} in these runs{_agree(whole)}: {numbers}."
        return "lead", f"{lead} Treat this as a lead, not a finding: {why}{again}", why
    tests = (
        f"{_p(group.holm)} after Holm's adjustment for the {family} planned group comparisons, exact sign-flip "
        f"{_p(group.judged.sign_flip_p if group.judged else None)}"
    )
    return "supported", f"{ahead}{_agree(whole)}: {numbers}; {tests}.{again}", ""


def _points(claim: BlockClaim) -> str:
    """The points that a claim is about."""
    names = list(dict.fromkeys(cell.left for cell in claim.cells))
    if len(names) == 1:
        return names[0]
    more = ", …" if len(names) > _NAMED_POINTS else ""
    return f"these {len(names)} points ({', '.join(names[:_NAMED_POINTS])}{more})"


def _agree(claim: BlockClaim) -> str:
    """How many of the points are on the side of their average."""
    means: dict[str, list[float]] = {}
    for cell in claim.cells:
        means.setdefault(cell.left, []).append(cell.mean)
    same = sum(fmean(of_point) * claim.mean > 0 for of_point in means.values())
    return f"; {same} of {len(means)} are" if len(means) > 1 else ""


def _right(view: View, group: GroupEvidence) -> str:
    """What the points of a group are compared with; constants and published methods by name."""
    names = [c.right for c in view.comparisons(group.axis, comparable=False) if c.status != "n/a"]
    if isinstance(group.all, BlockClaim):
        names = [cell.right for cell in group.all.cells]
    names = list(dict.fromkeys(names))
    if group.axis == "static":
        return f"λ = {_and([name.removeprefix('static:') for name in names])}"
    right = axis_of(group.axis, group.restriction).right
    return f"{right} ({', '.join(names)})" if group.axis == "published" else right


def _detectable(view: View, group: GroupEvidence) -> str:
    """The true difference that would be supported; per task where noise differs by more than twice."""
    whole = group.all
    assert isinstance(whole, BlockClaim)
    if whole.mde is None:
        judged = group.judged or whole
        return f"{_capital(_blocks(judged))} cannot support a difference, however large."
    text = (
        f"With {_blocks(whole, brief=True)}, a true difference of about {whole.mde:.1f} pp would be supported in 80 %"
    )
    text += " of repetitions"
    of_task = {
        task: found.all
        for task in dict.fromkeys(block.task for block in whole.blocks)
        if (found := view.analysis.group(group.axis, task=task, restriction=group.restriction)) is not None
        and isinstance(found.all, BlockClaim)
    }
    sds = [claim.sd or 0.0 for claim in of_task.values()]
    if len(sds) < 2 or max(sds) <= 2 * min(sds):
        return f"{text}."
    alone = [
        f"about {claim.mde:.1f} pp on {task}" if claim.mde is not None else f"none on {task} ({claim.n} blocks)"
        for task, claim in of_task.items()
    ]
    return f"{text}; for one task alone, whose noise differs: {', '.join(alone)}."


def _p(value: float | None) -> str:
    text = shown(value, "p")
    return f"p {text.replace('<', '< ')}" if text.startswith("<") else f"p = {text}"


def _doubts(
    whole: BlockClaim,
    fresh: BlockClaim | None,
    judged: BlockClaim | None,
    adjusted: float | None,
    seed: int | None,
    level: float = ALPHA,
) -> Iterator[str]:
    """Reasons why a difference is not supported."""
    if fresh is None or judged is not fresh:
        yield f"it rests on the selection seed {seed}, and there are not enough others to confirm it"
    elif not leaves_out_zero(fresh) or (fresh.mean > 0) != (whole.mean > 0):
        yield "the interval without the selection seed contains 0"
    if not leaves_out_zero(whole):
        yield "the interval of all seeds contains 0"
    if adjusted is None or adjusted >= level:
        limit = f", not below {level:.2g}" if level < ALPHA else ""
        yield f"p is {shown(adjusted, 'p')} after adjustment for all planned group comparisons{limit}"
    if judged is not None and judged.sign_flip_floor >= ALPHA:
        floor = f"its p cannot be below {judged.sign_flip_floor:.2g}"
        yield f"{_blocks(judged)} are too few for a test without assumptions ({floor})"
    elif judged is not None and (judged.sign_flip_p or 1.0) >= (level if judged.sign_flip_floor < level else ALPHA):
        yield f"the exact sign-flip test gives {_p(judged.sign_flip_p)}"


# ---------------------------------------------------------------------------------------------------- limits


def looks_text(results: StudyResults) -> str:
    """Return a caveat about earlier looks at the results; empty for a first look."""
    if len(results.looks) < 2:
        return ""
    *before, _ = results.looks
    earlier = ", ".join(str(look.runs) for look in before)
    return (
        f"Look {len(results.looks)} at the test results of this study; at earlier looks {earlier} runs were done. "
        "Intervals and p of single comparisons are not adjusted for looking: if a look decided whether to go on, they "
        "claim too much."
    )


def _unlike(results: StudyResults) -> Iterator[str]:
    """Differences among a task's runs other than the gate, e.g. from several machines."""
    for task in results.tasks:
        runs = [run for run in results.done if run.spec.task == task]
        for name in sorted({name for run in runs for name in run.content}):
            seeds: dict[int, set[str]] = {}
            for run in runs:
                seeds.setdefault(run.spec.seed, set()).add(run.content.get(name, ""))
            kinds = set[str]().union(*seeds.values())
            if len(kinds) < 2:
                continue
            text = f"{task}: the runs have {len(kinds)} different values of {name}"
            text += f" ({', '.join(sorted(kinds))})" if name == "precision" else " by their fingerprints"
            if mixed := [str(seed) for seed, own in seeds.items() if len(own) > 1]:
                yield f"{text}, also within seed {', '.join(mixed)}: differences there are not of the gate alone."
            else:
                yield f"{text}, never within a seed: paired differences are of the gate alone."


def _limits(view: View) -> list[str]:
    found = []
    if text := looks_text(view.results):
        level, looks = view.analysis.level, len(view.results.looks)
        found.append(
            f"{text} Claims about groups are adjusted: at look {looks} their level is .05 / {looks}² = {level:.2g}, "
            f"and their intervals have a confidence of {confidence_text(1 - level)}."
        )
    tested = [group for group in view.analysis.groups if group.claimed and group.holm is not None]
    if len(tested) > 1:
        chance = _NULL_LEADS[view.results.selection_seed is not None] * view.analysis.level / ALPHA
        found.append(
            f"If nothing differed at all, about {100 * (1 - (1 - chance) ** len(tested)):.0f} % of studies with "
            f"{len(tested)} group comparisons would still show at least one as '{VERDICTS['lead']}'."
        )
    found += _unlike(view.results)
    pairs = [c.all for c in view.analysis.comparisons if c.all is not None]
    most = max((pair.n for pair in pairs), default=0)
    if most == 1:
        found.append(
            "One seed: a difference between two trainings cannot be told from what another seed would do. Nothing is "
            "tested."
        )
    elif isinstance(least := view.analysis.detectable[ALL_TASKS], Detectable):
        reach = f"detects about {least.pp:.1f} pp" if least.sd else "has no variance to test it by"
        typical = f"An unadjusted t-test of a typical one, over {least.seeds} seeds, {reach}."
        found.append(f"No single comparison is claimed. {typical}")
        floor = 2 / 2**most
        if floor >= ALPHA:
            found.append(
                f"With {most} seeds the exact sign-flip test of a comparison cannot give p below {floor:.2g}, whatever "
                "the data."
            )
    for group in view.analysis.groups:
        of_axis = group.restriction is None if group.axis == "restriction" else group.axis == "isolation"
        if group.task == ALL_TASKS and of_axis and isinstance(count := group.wins, WinCount) and count.cells > 1:
            found.append(_count_text(axis_of(group.axis, group.restriction).right, count, tested=most > 1))
    for task, anova in view.analysis.anova.items():
        if not isinstance(anova, NotApplicable):
            verdict = "no difference" if anova.p >= ALPHA else "some difference"
            found.append(
                f"{task}: the analysis of variance detects {verdict} among the {anova.points} points "
                f"(F({anova.df[0]}, {anova.df[1]}) = {anova.f:.2f}, permutation p {_is(anova.p)}); the SD of one run "
                f"is {anova.sd:.2f} pp."
            )
    for task, selection in view.analysis.selection.items():
        chosen, observed = selection.chosen, selection.observed
        if isinstance(chosen, NotApplicable) or isinstance(observed, NotApplicable):
            continue
        text = f"{view.said(task)}: best on validation is {chosen.label}, with {_percent(chosen.test)} on test."
        if observed.label != chosen.label and selection.optimism:
            text += (
                f" {observed.label} is {abs(selection.optimism):.2f} pp higher on test, but selecting and scoring on "
                "the same data is biased upward."
            )
        found.append(text)
    for task, known in view.analysis.baselines.items():
        if known.duplicates:
            found.append(
                f"{task}: {known.duplicates} of {known.rows} test texts also occur in train; {view.metric(task)} "
                "without them is in a table."
            )
    return found


def _count_text(right: str, count: WinCount, *, tested: bool) -> str:
    text = f"Points are above {right} in {count.wins} of {count.cells} comparisons"
    text += f", {count.ties} tied" if count.ties else ""
    if not tested or count.effective_n is None or count.correlated_p is None or count.naive_p is None:
        return text + "."
    if abs(count.effective_n - (count.cells - count.ties)) < 0.5:
        return text + f" (p {_is(count.correlated_p)})."
    naive = shown(count.naive_p, "p")
    instead = f", not {naive}" if naive != shown(count.correlated_p, "p") else ""
    worth = f". Comparisons share runs: the count is worth about {count.effective_n:.1f} independent ones"
    return text + f"{worth} (p {_is(count.correlated_p)}{instead})."


# ---------------------------------------------------------------------------------------------------- words


def _at_look(look: int) -> str:
    """Empty for the first look."""
    if look < 2:
        return ""
    return f" at a {_LOOKS[look] if look < len(_LOOKS) else f'{look}th'} look"


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _blocks(claim: BlockClaim, *, brief: bool = False) -> str:
    tasks, seeds = {block.task for block in claim.blocks}, {block.seed for block in claim.blocks}
    if len(tasks) == 1:
        return f"{len(seeds)} seed{'s' * (len(seeds) != 1)}"
    if brief:
        return f"{claim.n} blocks"
    if len(tasks) * len(seeds) == claim.n:
        return f"{claim.n} blocks ({len(tasks)} tasks × {len(seeds)} seeds)"
    return f"{claim.n} (task, seed) blocks"


def _scope(group: GroupEvidence) -> str:
    """Which comparisons the blocks cover, if not all: only those with every seed, e.g. the replicated ones."""
    if not isinstance(group.all, BlockClaim):
        return ""
    used = sum({block.task: block.cells for block in group.all.blocks}.values())
    return "" if used == group.comparable else f"{used} of {group.comparable} comparisons"


def _interval(claim: Summary) -> str:
    assert claim.low is not None
    assert claim.high is not None
    low, high = (shown(end, "signed_pp").removeprefix("+").replace("-", "−") for end in (claim.low, claim.high))
    return f"{confidence_text(claim.confidence)} CI [{low}, {high}]"


def _is(p: float) -> str:
    text = shown(p, "p")
    return text.replace("<", "< ") if text.startswith("<") else f"= {text}"


def _pp(value: float) -> str:
    return f"{shown(value, 'signed_pp')} pp".replace("-", "−")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]
