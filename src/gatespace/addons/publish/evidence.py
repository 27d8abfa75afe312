"""A study's evidence about one of its runs, as sentences for a model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from gatespace.addons.publish.card import Evidence
from gatespace.errors import UsageError
from gatespace.evidence.analysis import analyse
from gatespace.evidence.records import ComparisonEvidence
from gatespace.gating.coefficients import NotApplicable
from gatespace.report.findings import find
from gatespace.report.table import shown
from gatespace.report.view import View, sd_of
from gatespace.runs import RunFolder
from gatespace.study.records import RunResult, StudyResults
from gatespace.study.results import read_results

__all__ = ["evidence_of", "point_evidence", "run_in"]

_WORDS: Mapping[str, str] = {
    "restriction": "one channel of it alone",
    "isolation": "a constant λ of the same mean",
    "control": "the same λ at shuffled tokens",
    "static": "a constant λ",
    "published": "a published method",
    "gap": "without the gap signal",
}
"""Axis → what the right side is relative to the left one."""


def evidence_of(run: RunFolder, study: Path) -> Evidence:
    """Evidence of the study in the folder `study` about the point of `run`; raises if it has no such run."""
    results = read_results(study)
    found = run_in(results, run)
    if found is None:
        raise UsageError(
            "this run is not part of the study",
            got=f"{run}, and the study in {study}",
            why="neither its folder nor its identity is that of a run of the study that is done",
            instead="a run with the settings of one of the study's, or no --study",
        )
    return point_evidence(results, found)


def run_in(results: StudyResults, run: RunFolder) -> RunResult | None:
    """The study's run that is in the same folder or has the same identity as `run`."""
    own = _identity(run)
    for result in results.done:
        other = RunFolder(result.folder)
        if other.path.resolve() == run.path.resolve() or (own is not None and _identity(other) == own):
            return result
    return None


def point_evidence(results: StudyResults, run: RunResult) -> Evidence:
    """Evidence of the study about the point of `run`.

    Comparisons with the point are only described. Tests are of groups of comparisons, never of a single one.
    """
    view = View(results, analyse(results))
    findings = find(view)
    task, point = run.spec.task, run.spec.point
    mine = [found for found in view.analysis.comparisons if found.task == task and point in (found.left, found.right)]
    compared = [found for found in mine if found.all is not None]
    about = {(found.axis, found.restriction) for found in compared}
    axes = {axis for axis, _ in about}
    groups = [
        f"{claim.about}: {claim.verdict_text}. {claim.text}"
        for claim in findings.claims
        if (claim.axis, claim.restriction) in about or (claim.restriction is None and claim.axis in axes)
    ]
    sentences = [*_accuracy(view, run), *_chosen(view, run), *(_difference(found, point) for found in compared)]
    others = tuple(f"{other}: " for other in results.tasks if other != task)
    limits = [text for text in findings.limits if not text.startswith(others)]
    return Evidence(results.name, findings.state, tuple(sentences), tuple(groups), tuple(limits))


def _accuracy(view: View, run: RunResult) -> list[str]:
    task, point, seed = run.spec.task, run.spec.point, run.spec.seed
    scores = view.scores(task, point)
    if seed not in scores:
        return []
    shares = [score.accuracy for score in scores.values()]
    text = (
        f"{point} on {task}: {_percent(scores[seed].accuracy)} of the test texts are right at this model's seed {seed}"
    )
    if (metric := scores[seed].metric) != "accuracy":
        text = f"{point} on {task}: {metric} {_percent(scores[seed].accuracy)} on test at this model's seed {seed}"
    spread = sd_of(shares)
    if spread is not None:
        seeds = f"{len(shares)} seeds ({', '.join(map(str, scores))})"
        text += f", and {_percent(fmean(shares))} on average over {seeds}, SD {100 * spread:.2f} pp"
    known = view.analysis.baselines[task]
    beside = []
    if known.start is not None:
        beside.append(f"the student before training is at {_percent(known.start)}")
    if known.teacher is not None:
        beside.append(f"the teacher is at {_percent(known.teacher)}")
    if known.best_constant is not None:
        beside.append(f"giving {known.best_constant_label!r} to all is at {_percent(known.best_constant)}")
    return [f"{text}; {', '.join(beside)}." if beside else f"{text}."]


def _chosen(view: View, run: RunResult) -> list[str]:
    """State whether this model may have been selected on the numbers it is judged by."""
    found = []
    if run.spec.kind == "point" and not isinstance(
        chosen := view.analysis.selection[run.spec.task].chosen, NotApplicable
    ):
        is_it = chosen.label == run.spec.point
        found.append(
            f"It is the point of the family with the best mean {view.metric(run.spec.task)} on validation."
            if is_it
            else f"It is not the point of the family that is best on validation, which is {chosen.label}."
        )
    if run.spec.seed == view.results.selection_seed and len(view.seeds) > 1:
        found.append(f"Its seed {run.spec.seed} is the one that choices were made by; claims are confirmed without it.")
    return found


def _difference(found: ComparisonEvidence, point: str) -> str:
    """One comparison from the point's perspective."""
    pair = found.all
    assert pair is not None
    sign = 1.0 if found.left == point else -1.0
    other = found.right if found.left == point else found.left
    words = _WORDS.get(found.axis, found.axis)
    words = words if found.left == point else f"to which it is {words}"
    text = f"Against {other} ({words}): {_pp(sign * pair.mean)}"
    seeds = f"{pair.n} seed{'s' * (pair.n != 1)}"
    if pair.low is None or pair.high is None:
        return f"{text} at {seeds}."
    low, high = sorted((sign * pair.low, sign * pair.high))
    interval = f"[{_signed(low)}, {_signed(high)}]"
    return f"{text} over {seeds}, {100 * pair.confidence:.0f} % CI {interval}; described, not claimed."


def _identity(run: RunFolder) -> str | None:
    try:
        return str(run.identity()["identity"])
    except (OSError, ValueError, KeyError):
        return None


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _signed(value: float) -> str:
    return shown(value, "signed_pp").replace("-", "−")


def _pp(value: float) -> str:
    return f"{_signed(value)} pp"
