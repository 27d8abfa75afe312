"""All tables of a report: measurements, and the claims they support."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import fsum
from statistics import fmean, median
from typing import Any

from gatespace.evaluation.calibration import BINS, TARGETS
from gatespace.evaluation.metrics import Metrics, Prediction
from gatespace.evidence.accuracy import accuracy_interval
from gatespace.evidence.paired import summarise
from gatespace.evidence.records import ALL_TASKS, GroupEvidence, Paired
from gatespace.gating.coefficients import Gate, NotApplicable
from gatespace.report.beside import beside_tables
from gatespace.report.table import (
    CSV_ONLY,
    FILES_ONLY,
    NOT_IN_PRINT,
    OTHERS,
    Column,
    Record,
    Runs,
    Table,
    count,
    lam,
    number,
    p_value,
    percent,
    pp,
    signed_pp,
    text,
)
from gatespace.report.view import AXES, KINDS, View, mean_of, sd_of
from gatespace.study.records import RunResult, Score

TASK, POINT, AXIS, SEEDS = text("task"), text("point"), text("axis"), count("seeds")
PAIR = (TASK, text("left"), text("right"))
NOTE = text("note", "note", NOT_IN_PRINT)
RUN = Column("run", "run", "runs")
RUNS = Column("runs", "runs", "runs", NOT_IN_PRINT)
NO_LABEL = "(none)"
_WRONG_TEXTS = 10
_SIDES = ("family", "entropy-only", "gap-only", "static", "published")


def file_tables(view: View) -> list[Table]:
    """Return the tables that are written to files; rerunning a study gives identical ones.

    Empty tables are included, with the reason, except optional ones.
    """
    measured = (_baselines, _points, _per_seed, _runs, _lam, _confusion, _wrong_texts, _groups)
    optional = (*beside_tables(view), _responses(view), _calibration(view), _secondary(view))
    tables = [
        *(build(view) for build in measured),
        *(table for table in optional if table.rows),
        *(_comparisons(view, axis) for axis in view.axes),
        *(build(view) for build in (_replication, _best, _examples)),
    ]
    return [_with_metrics(view, table) for table in tables]


def _with_metrics(view: View, table: Table) -> Table:
    """Name the metric next to the task if tasks have different ones."""
    keys = [column.key for column in table.columns]
    if not view.metrics or "task" not in keys or "judged_by" in keys:
        return table
    at = keys.index("task")
    rows = tuple((*row[: at + 1], view.metrics.get(str(row[at])), *row[at + 1 :]) for row in table.rows)
    columns = (*table.columns[: at + 1], text("metric"), *table.columns[at + 1 :])
    return replace(table, columns=columns, rows=rows, stub=table.stub + 1)


def page_tables(view: View) -> list[Table]:
    """Return the tables that are only on the page: seconds depend on the machine, and errors may name paths."""
    return [_cost(view), _failures(view)]


Builder = Callable[[View], Table]


def _table(
    name: str, title: str, columns: Sequence[Column], *, note: str = "", stub: int = 1, empty: str = ""
) -> Callable[[Callable[[View], Iterable[Record]]], Builder]:
    """Decorator that turns a function of records into a table builder; {metric} in titles is the study's metric."""

    def decorate(records: Callable[[View], Iterable[Record]]) -> Builder:
        def build(view: View) -> Table:
            caption, *titles = (
                words.replace("{metric}", view.metric_name) for words in (title, *(column.title for column in columns))
            )
            named = [replace(column, title=words) for column, words in zip(columns, titles, strict=True)]
            return Table.of(name, caption, named, records(view), note=note, stub=stub, empty=empty)

        return build

    return decorate


def _row(*parts: Record, **cells: Any) -> dict[str, Any]:
    """Merge parts of a record; later cells win."""
    return {key: value for part in (*parts, cells) for key, value in part.items()}


def _cells(found: object) -> dict[str, Any]:
    """The fields of a value as cells; a `NotApplicable` fills all columns."""
    if isinstance(found, NotApplicable):
        return {OTHERS: found, "note": found.reason}
    fields = {} if found is None else dict(vars(found))
    return fields | {"note": fields.get("note") or None}


def _get(found: object, name: str) -> Any:
    """A field of a value; the value itself if it is None or `NotApplicable`."""
    return found if found is None or isinstance(found, NotApplicable) else getattr(found, name)


def _ids(*runs: RunResult) -> Runs:
    return Runs(tuple(run.spec.id for run in runs))


def _task_points(view: View) -> list[tuple[str, str]]:
    return [(task, point) for task in view.results.tasks for point in view.points(task)]


def _sd_pp(shares: Sequence[float]) -> float | None:
    sd = sd_of(shares)
    return None if sd is None else 100 * sd


# ---------------------------------------------------------------------------------------------------- scores


@_table(
    "baselines", "Start, teacher and best constant",
    (
        TASK, text("data"), count("rows", "test rows"), percent("best_constant", "best constant, %"),
        percent("start", "start, %"), percent("trained", "family, mean %"), signed_pp("gain", "gain, pp"),
        percent("teacher", "teacher, %"), percent("start_macro_f1", "start F1, %"),
        percent("trained_macro_f1", "family F1, %"), percent("teacher_macro_f1", "teacher F1, %"),
        count("below_best_constant", "runs below best constant"), count("done", "runs done"),
        count("duplicates", "test rows in train"), text("base", "base of HG points"),
    ),
    note="Test split. The best constant gives the most frequent label of the split to all rows; start is the student "
    "before training; family is the mean over all runs of the family's points; F1 is macro-F1.",
)  # fmt: skip
def _baselines(view: View) -> Iterator[Record]:
    for task, found in view.analysis.baselines.items():
        known, base = view.results.baselines.get(task), view.results.bases.get(task)
        chosen = f"{base.point} ({base.chosen_by})" if base is not None else None
        yield _row(_cells(found), task=task, data=_get(known, "name"), base=chosen)


def point_records(view: View, task: str, *kinds: str) -> Iterator[dict[str, Any]]:
    """Yield one record per point of these kinds (default: all): its measurements over the seeds of the sweep."""
    beside = view.analysis.baselines[task]
    for point in view.points(task, *kinds):
        scores, kind, gate = view.sweep(task, point), view.kind(task, point), view.gate(task, point)
        shares = [score.accuracy for score in scores.values()]
        low, high = accuracy_interval([*scores.values()]) or (None, None)
        mean, runs = mean_of(shares), [run for seed, run in view.done(task, point).items() if seed in scores]
        yield _row(
            task=task, point=point, kind=KINDS[kind], seeds=len(shares), accuracy=mean, sd=_sd_pp(shares),
            low=low, high=high, each=shares, runs=_ids(*runs),
            gate=None if gate is None or kind in ("static", "twin") else str(gate),
            macro_f1=mean_of([score.macro_f1 for score in scores.values() if score.macro_f1 is not None]),
            val_accuracy=mean_of([score.accuracy for score in view.sweep(task, point, "val").values()]),
            lam=_mean_known([_get(run.lam_stats, "mean") for run in runs]),
            lam_rkl=_mean_known([_get(run.lam_stats, "rkl_mean") for run in runs]),
            above_start=_difference(mean, beside.start), above_constant=_difference(mean, beside.best_constant),
            to_teacher=_difference(mean, beside.teacher),
            without_duplicates=mean_of(
                [s.without_duplicates.score for s in scores.values() if s.without_duplicates is not None]
            ) if beside.duplicates else None,
        )  # fmt: skip


@_table(
    "points", "Points: {metric} over seeds, with start, best constant and teacher",
    (
        TASK, POINT, text("kind"), text("gate", "a,b,c,d"), SEEDS, percent("accuracy", "{metric}, mean %"),
        percent("low", "95 % from"), percent("high", "to"), pp("sd", "SD, pp"),
        percent("macro_f1", "macro-F1, mean %"), percent("val_accuracy", "val, mean %"), lam("lam", "E[λ]"),
        lam("lam_rkl", "RKL-weighted λ"), signed_pp("above_start", "over start, pp"),
        signed_pp("above_constant", "over best constant, pp"),
        signed_pp("to_teacher", "to teacher, pp"),
        percent("without_duplicates", "without test texts in train, %", NOT_IN_PRINT), RUNS,
    ),
    stub=2,
    note="Means over the seeds of the sweep, test split unless it says val. The interval is over seeds, or over texts "
    "where there is one seed. E[λ] is the mean over all response tokens of the training; RKL-weighted λ is "
    "Σ λ·RKL / Σ RKL, the weight of reverse KL that the loss had. Without test texts in train: accuracy, or the metric "
    "of free text.",
)  # fmt: skip
def _points(view: View) -> Iterator[Record]:
    for task in view.results.tasks:
        yield from point_records(view, task)


def _difference(left: float | None, right: float | None) -> float | None:
    """Difference of two shares, in pp."""
    return None if left is None or right is None else 100 * (left - right)


def _per_seed(view: View) -> Table:
    columns = [TASK, POINT, *(percent(f"seed_{seed}", f"s{seed}, %") for seed in view.seeds), pp("sd", "SD, pp")]
    for name, reference in view.references.items():
        columns += [percent(f"{name}_seed_{seed}", f"{name} s{seed}, %") for seed in reference.seeds]
        columns.append(pp(f"{name}_sd", f"{name} SD, pp"))
    records = []
    for task, point in _task_points(view):
        shares = {seed: score.accuracy for seed, score in view.scores(task, point).items()}
        record = _row(task=task, point=point, sd=_sd_pp([*shares.values()]))
        record |= {f"seed_{seed}": share for seed, share in shares.items()}
        for name, reference in view.references.items():
            printed = reference.accuracies(view.data(task)).get(point, {})
            record |= {f"{name}_seed_{seed}": share for seed, share in printed.items()}
            record[f"{name}_sd"] = _sd_pp([printed[seed] for seed in reference.seeds if seed in printed])
        records.append(record)
    note = _with_sources(view, "Test split, %.")
    return Table.of("per-seed", f"Test {view.metric_name} per seed", columns, records, stub=2, note=note)


def _with_sources(view: View, note: str, names: Iterable[str] | None = None) -> str:
    """A note, followed by the sources of the published numbers."""
    return " ".join([note, *(view.references[name].note for name in (view.references if names is None else names))])


def confusion_models(view: View, task: str) -> list[tuple[str, tuple[Score, ...]]]:
    """Return the models whose confusions are shown: start, the point chosen on validation (all seeds), teacher."""
    baseline, chosen = view.results.baselines.get(task), view.analysis.selection[task].chosen
    found: list[tuple[str, tuple[Score, ...]]] = []
    if baseline is not None and "test" in baseline.start:
        found.append(("start", (baseline.start["test"],)))
    if not isinstance(chosen, NotApplicable):
        found.append((chosen.label, tuple(view.scores(task, chosen.label).values())))
    if baseline is not None and "test" in baseline.teacher:
        found.append(("teacher", (baseline.teacher["test"],)))
    return [(model, scores) for model, scores in found if scores]


def confusion(scores: Sequence[Score]) -> dict[str, dict[str, int]]:
    """Return gold → predicted → rows, summed; responses without a legal label as ``(none)``."""
    statistics = [score.labels for score in scores if score.labels is not None]
    names = [row.label for row in statistics[0].per_label]
    summed: dict[str, dict[str, int]] = {}
    for gold in names:
        counts = {name: sum(one.confusion.get(gold, {}).get(name, 0) for one in statistics) for name in names}
        support = sum(row.support for one in statistics for row in one.per_label if row.label == gold)
        summed[gold] = {**counts, NO_LABEL: support - sum(counts.values())}
    return summed


def confusion_records(view: View, task: str) -> Iterator[Record]:
    """Yield one record per model, gold label and predicted label of a task."""
    for model, scores in confusion_models(view, task):
        for gold, counts in confusion(scores).items():
            total = sum(counts.values())
            for said, rows in counts.items():
                share = rows / total if total else None
                yield _row(task=task, model=model, gold=gold, predicted=said, rows=rows, share=share)


@_table(
    "confusion", "Confusions on the test split",
    (
        TASK, text("model"), text("gold", "gold label"), text("predicted"), count("rows"),
        percent("share", "of the gold label's, %"),
    ),
    stub=3, empty="Nothing was evaluated yet.",
    note="Start, teacher, and the family's point that is best on validation, summed over its seeds. "
    "(none): no legal label in the answer.",
)  # fmt: skip
def _confusion(view: View) -> Iterator[Record]:
    for task in view.labelled():
        yield from confusion_records(view, task)


@_table(
    "calibration", "Probabilities of labels on the test split",
    (
        TASK, text("model", "point"), SEEDS, percent("accuracy", "accuracy, %"),
        percent("prior_corrected", "prior-corrected, %"), percent("auc", "macro AUC, %"),
        percent("confidence", "confidence, %"), lam("log_loss", "log-loss"), lam("brier", "Brier"),
        percent("ece", "ECE, %"), percent("aurc", "AURC, %"),
        *(
            column
            for target in TARGETS
            for column in (
                percent(f"coverage_{target:g}", f"coverage for {100 * target:g} %"),
                percent(f"reached_{target:g}", "accuracy there, %"),
            )
        ),
        percent("mass", "mass of labels, %"),
    ),
    stub=2,
    note="Means over seeds. Accuracy is that of the most probable label and confidence its probability; "
    "prior-corrected is that accuracy after a bias per label, fitted on the validation rows; macro AUC is each label "
    "against the rest, 50 % by chance; log-loss in nats; Brier over all labels, 0 to 2; "
    f"ECE in {BINS} bins of equal width; AURC is the mean error over coverages. Coverage is the share of test texts "
    "above the threshold that answers the most validation texts with at least that accuracy, beside the accuracy on "
    "those test texts; mass is what the model gives to the responses of all labels, the rest goes to other responses.",
)  # fmt: skip
def _calibration(view: View) -> Iterator[Record]:
    for task in view.results.tasks:
        for model, scores in _by_model(view, task).items():
            found = [score.calibration for score in scores if score.calibration is not None]
            if found:
                names = (
                    "accuracy", "prior_corrected", "auc", "confidence", "log_loss", "brier", "ece", "aurc", "mass"
                )  # fmt: skip
                means = {name: _mean_known([getattr(one, name) for one in found]) for name in names}
                for place, target in enumerate(TARGETS):
                    at = [one.coverage_at[place] for one in found]
                    means[f"coverage_{target:g}"] = fmean(one.coverage for one in at)
                    means[f"reached_{target:g}"] = _mean_known([one.reached for one in at])
                yield _row(task=task, model=model, seeds=None if model in _BESIDE else len(found), **means)


def _mean_known(values: Sequence[float | None]) -> float | None:
    return mean_of([value for value in values if value is not None])


_BESIDE = ("start", "teacher")


def _by_model(view: View, task: str) -> dict[str, list[Score]]:
    """Test scores by model: the student before training, the teacher, then every point over seeds."""
    baseline = view.results.baselines.get(task)
    beside = {} if baseline is None else {"start": baseline.start, "teacher": baseline.teacher}
    models = {model: [scores["test"]] for model, scores in beside.items() if "test" in scores}
    return models | {point: [*view.scores(task, point).values()] for point in view.points(task)}


def _responses(view: View) -> Table:
    """Free-text responses: length, share truncated, and every metric of their evaluations."""
    records: list[Record] = []
    names: dict[str, None] = {}
    for task in view.results.tasks:
        for model, scores in _by_model(view, task).items():
            found = [score.metrics for score in scores if score.labels is None]
            if not found:
                continue
            metrics = {name: fmean({**one.also, **one.figures}[name] for one in found) for name in _further(found[0])}
            names |= dict.fromkeys(metrics)
            records.append(
                _row(
                    task=task, model=model, seeds=None if model in _BESIDE else len(found), judged_by=found[0].metric,
                    score=fmean(one.score for one in found), length=fmean(one.length or 0.0 for one in found),
                    truncated=fmean(one.truncated or 0.0 for one in found), **metrics,
                )
            )  # fmt: skip
    columns = (
        TASK, text("model", "point"), SEEDS, text("judged_by", "judged by"), percent("score", "mean score, %"),
        *(percent(name, f"{name}, %") for name in names), number("length", "tokens"),
        percent("truncated", "cut off, %"),
    )  # fmt: skip
    return Table.of(
        "responses", "Responses in free text on the test split", columns, records, stub=2,
        note="Means over seeds. Cut off: ended by evaluation.max_new_tokens. A corpus figure is of the whole split and "
        "no mean of its responses' scores.",
    )  # fmt: skip


def _further(found: Metrics) -> list[str]:
    return [*found.also, *found.figures]


def _wrong_texts(view: View) -> Table:
    """Texts that the point chosen on validation gets wrong at most of its seeds, with the models' predictions."""
    records: list[Record] = []
    counts = []
    for task in view.labelled():
        chosen, baseline = view.analysis.selection[task].chosen, view.results.baselines.get(task)
        if isinstance(chosen, NotApplicable) or baseline is None:
            continue
        students = [run.predictions("test") for run in view.done(task, chosen.label).values()]
        teacher, start = baseline.predictions("teacher"), baseline.predictions("start")
        if not teacher or any(len(rows) != len(teacher) for rows in (start, *students)):
            continue
        wrong = [
            (own, row, before, mine)
            for row, before, *mine in zip(teacher, start, *students, strict=True)
            if 2 * (own := sum(one.response != row.gold for one in mine)) > len(mine)
        ]
        wrong.sort(key=lambda found: -found[0])  # stable: ties stay in the order of the split
        right = [found for found in wrong if found[1].response == found[1].gold]
        both = [found for found in wrong if found[1].response != found[1].gold]
        half = _WRONG_TEXTS // 2
        shown = right[: max(half, _WRONG_TEXTS - len(both))]
        shown += both[: _WRONG_TEXTS - len(shown)]
        seeds = f"at most of its {len(students)} seeds" if len(students) > 1 else "at its one seed"
        counts.append(
            f"{task}: {chosen.label}, the family's best on validation, is wrong on {len(wrong)} of {len(teacher)} test "
            f"texts {seeds}; so is the teacher on {len(both)} of these. Shown are those that are wrong at most seeds, "
            "half of them with a teacher that is right."
        )
        records += [
            _row(
                task=task, text=_cut(row.text), gold=row.gold, teacher=row.response or NO_LABEL,
                start=before.response or NO_LABEL, student=_said(mine),
            )
            for _, row, before, mine in shown
        ]  # fmt: skip
    columns = (
        TASK, text("text"), text("gold", "gold label"), text("teacher", "teacher said"),
        text("student", "student said (seeds)"), text("start", "before training"),
    )  # fmt: skip
    return Table.of(
        "wrong-texts", "Ten texts that the trained student gets wrong", columns, records, stub=2, note=" ".join(counts),
        empty="Nothing was evaluated yet.",
    )  # fmt: skip


def _said(rows: Sequence[Prediction]) -> str:
    """The labels of a text over seeds, most frequent first."""
    said = [row.response or NO_LABEL for row in rows]
    return ", ".join(f"{label} ({said.count(label)})" for label in sorted(set(said), key=lambda x: (-said.count(x), x)))


def _cut(text: str, most: int = 400) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


# ---------------------------------------------------------------------------------------------------- runs


@_table(
    "runs", "All runs",
    (
        TASK, POINT, count("seed"), text("state"), percent("accuracy", "{metric}, %"), count("correct"),
        count("count", "rows"), percent("macro_f1", "macro-F1, %"), count("parse_failures", "no legal label"),
        percent("val_accuracy", "val, %"), lam("lam", "E[λ]"), lam("lam_rkl", "RKL-weighted λ", CSV_ONLY),
        text("gate", "a,b,c,d as trained"), lam("constant", "constant λ"), text("weights", "weights", FILES_ONLY),
        text("commit"), RUNS,
    ),
    stub=3, note="Test split unless it says val. An answer without a legal label is wrong. Weights: fingerprint of the "
    "trained weights, in the files; the versions of all packages are in the run's environment.json.",
)  # fmt: skip
def _runs(view: View) -> Iterator[Record]:
    for run in view.ordered:
        val, found = _get(run.scores.get("val"), "accuracy"), run.scores.get("test")
        lams = {"lam": _get(run.lam_stats, "mean"), "lam_rkl": _get(run.lam_stats, "rkl_mean")}
        score = {name: _get(found, name) for name in ("accuracy", "count", "macro_f1", "correct")}
        score["parse_failures"] = _get(_get(found, "labels"), "parse_failures")
        if found is not None and found.metric != "accuracy":
            score["correct"] = None  # not a count
        gate = None if run.gate is None or run.spec.kind in ("twin", "static") else str(Gate(*run.gate))
        yield _row(
            _cells(run.spec), score, lams, state=run.state, val_accuracy=val, gate=gate, constant=run.lam,
            weights=run.fingerprint or None, commit=_commit(run), runs=_ids(run),
        )  # fmt: skip


def lam_records(view: View, task: str, *kinds: str) -> Iterator[dict[str, Any]]:
    """Yield λ statistics over the training tokens, one record per point of these kinds."""
    for point in view.points(task, *kinds):
        runs = [run for run in view.done(task, point).values() if run.lam_stats is not None]
        stats = [run.lam_stats for run in runs if run.lam_stats is not None]
        gate = view.gate(task, point)
        low, high = gate.lam_range() if gate is not None else (None, None)
        if stats:
            yield _row(
                task=task, point=point, seeds=len(stats), low=low, high=high, runs=_ids(*runs),
                mean=fmean(s.mean for s in stats), sd=fmean(s.sd for s in stats),
                saturated=fmean(s.saturated for s in stats), tokens=sum(s.tokens for s in stats),
                rkl_mean=mean_of([s.rkl_mean for s in stats if s.rkl_mean is not None]),
                hist=[float(sum(bins)) for bins in zip(*(s.hist for s in stats), strict=True)],
            )  # fmt: skip


@_table(
    "lambda", "λ over the tokens of training",
    (
        TASK, POINT, SEEDS, lam("mean", "E[λ]"), lam("sd", "SD over tokens"), percent("saturated", "saturated, %"),
        lam("rkl_mean", "RKL-weighted E[λ]"), count("tokens"), lam("low", "least possible λ"),
        lam("high", "greatest possible λ"), RUNS,
    ),
    stub=2, empty="No run with a λ is done.",
    note="Means over seeds of each run's own figures. Saturated: λ within 0.02 of 0 or 1, where a gate hardly moves. "
    "RKL-weighted: Σ λ·RKL / Σ RKL.",
)  # fmt: skip
def _lam(view: View) -> Iterator[Record]:
    for task in view.results.tasks:
        yield from lam_records(view, task, "point", "restriction", "control", "static", "twin")


def _commit(run: RunResult) -> str | None:
    """Abbreviated commit, keeping its -dirty suffix."""
    commit, dirty, _ = str(run.environment.get("commit") or "").partition("-dirty")
    return commit[:12] + dirty or None


@_table("failures", "Runs that are not done", (RUN, text("state"), text("error")))
def _failures(view: View) -> Iterator[Record]:
    for run in view.ordered:
        if run.state != "done":
            yield _row(run=_ids(run), state=run.state, error=run.error or None)


@_table(
    "cost", "Test {metric} and what it took, per run",
    (
        TASK, POINT, text("kind"), percent("accuracy", "{metric}, mean %"), pp("sd", "SD, pp"),
        number("seconds", "s per run, median"), number("cpu_seconds", "CPU s, median"), count("steps"),
        count("response_tokens", "response tokens per run"), count("teacher_tokens", "teacher tokens per run"),
        percent("cached", "scores from cache, %"),
    ),
    stub=2, empty="No run is done.",
    note="Teacher tokens are those of the teacher's forward passes; a score that another step or run needed before "
    "comes from the cache. Seconds belong to this machine and moment: the table is in no file of tables/.",
)  # fmt: skip
def _cost(view: View) -> Iterator[Record]:
    for task in view.results.tasks:
        for record in point_records(view, task):
            costs = [run.cost for run in view.done(task, record["point"]).values() if run.cost is not None]
            if not costs:
                continue
            asked = sum(cost.scores_asked for cost in costs)
            yield _row(
                record, seconds=median(cost.seconds for cost in costs),
                cpu_seconds=median(cost.cpu_seconds for cost in costs),
                cached=sum(cost.scores_cached for cost in costs) / asked if asked else None,
                **{
                    key: round(fmean(getattr(cost, key) for cost in costs))
                    for key in ("steps", "response_tokens", "teacher_tokens")
                },
            )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- comparisons

_SUMMARY = ("n", "mean", "sd", "low", "high", "p", "sign_flip_p", "mde", "sign_flip_floor")


def _summary(found: object, prefix: str = "") -> dict[str, Any]:
    """The cells of a `Summary`, None or `NotApplicable`."""
    return {prefix + name: _get(found, name) for name in _SUMMARY}


def _summary_columns(what: str = "", interval: str = "95 %") -> tuple[Column, ...]:
    prefix, title = (f"{what}_", f"{what} ") if what else ("", "")
    return (
        count(f"{prefix}n", f"{title}n"), signed_pp(f"{prefix}mean", f"{title}mean, pp"),
        pp(f"{prefix}sd", f"{title}SD"), signed_pp(f"{prefix}low", f"{title}{interval} from"),
        signed_pp(f"{prefix}high", f"{title}to"), p_value(f"{prefix}p", f"{title}p (t)"),
        p_value(f"{prefix}sign_flip_p", f"{title}p (sign-flip)"), pp(f"{prefix}mde", f"{title}detectable, pp"),
    )  # fmt: skip


def _comparisons(view: View, axis: str) -> Table:
    references = view.references if axis == "gap" else {}
    columns = (
        *PAIR, text("role", "role", FILES_ONLY), *_summary_columns(), p_value("sign_flip_floor", "sign-flip floor"),
        count("fresh_n", "fresh n"), signed_pp("fresh_mean", "fresh mean, pp"),
        signed_pp("fresh_low", "fresh from", NOT_IN_PRINT), signed_pp("fresh_high", "fresh to", NOT_IN_PRINT),
        p_value("bh", "p, BH"), p_value("holm", "p, Holm"), text("differences_pp", "per seed, pp", CSV_ONLY),
        *(signed_pp(name, f"{name}, s{found.seeds[0]}, pp") for name, found in references.items()), NOTE, RUNS,
    )  # fmt: skip
    records = [
        _row(
            _cells(found), _summary(found.all), _summary(found.fresh, "fresh_"), note=found.reason or None,
            differences_pp=_each_seed(found.all), runs=Runs(found.run_ids),
            **{
                name: _get(reference.differences(view.data(found.task)).get((found.left, found.right)), "one_seed")
                for name, reference in references.items()
            },
        )
        for found in view.comparisons(axis, comparable=False)
        if found.status != "n/a"
    ]  # fmt: skip
    return Table.of(
        f"comparisons-{axis}", f"{AXES[axis].title}: every comparison", columns, records, stub=3,
        empty="The study has no comparison on this axis.",
        note=f"Test {view.metric_name}, left minus right, paired within seed. Detectable: with the SD and seeds of "
        f"that row. {_with_sources(view, f'{_fresh(view)} The sign-flip p cannot fall below its floor.', references)}",
    )  # fmt: skip


def _fresh(view: View) -> str:
    seed = view.results.selection_seed
    return "All seeds are fresh." if seed is None else f"Fresh leaves the selection seed ({seed}) out."


def _each_seed(found: Paired | None) -> str | None:
    if found is None:
        return None
    return " ".join(f"{seed}:{value!r}" for seed, value in zip(found.seeds, found.differences, strict=True))


def _replication(view: View) -> Table:
    """Comparisons rerun on fresh seeds, and those of this study that a reference replicated."""
    records, shown = [], {}
    for found in view.analysis.comparisons:
        published: dict[str, Any] = {}
        for name, reference in view.references.items():
            printed = reference.differences(view.data(found.task)).get((found.left, found.right))
            if printed is not None and printed.mean is not None and found.status != "n/a":
                published |= {f"{name}_{key}": value for key, value in printed._asdict().items()}
                shown[name] = reference
        if found.status != "n/a" and (found.role == "replication" or published):
            chosen = _at(found.all, view.results.selection_seed)
            parts = (_cells(found), _summary(found.all), _summary(found.fresh, "fresh_"), published)
            records.append(_row(*parts, selected=chosen, runs=Runs(found.run_ids)))
    columns = [
        AXIS, *PAIR, signed_pp("selected", "selection seed, pp"), *_summary_columns(), count("fresh_n", "fresh n"),
        signed_pp("fresh_mean", "fresh mean, pp"), signed_pp("fresh_low", "fresh from"),
        signed_pp("fresh_high", "fresh to"), p_value("fresh_p", "fresh p"), p_value("holm", "p, Holm"),
    ]  # fmt: skip
    for name, reference in shown.items():
        columns += [
            signed_pp(f"{name}_one_seed", f"{name} s{reference.seeds[0]}"), signed_pp(f"{name}_mean", f"{name} mean"),
            pp(f"{name}_sd", f"{name} SD"), signed_pp(f"{name}_low", f"{name} from"),
            signed_pp(f"{name}_high", f"{name} to"), p_value(f"{name}_p", f"{name} p"),
        ]  # fmt: skip
    note = f"{_fresh(view)} Holm is over these comparisons."
    return Table.of(
        "replication", "Replication: headline comparisons over seeds", [*columns, RUNS], records, stub=4,
        empty="The study replicates no comparison, and has none of the paper's nine.",
        note=_with_sources(view, note, shown),
    )  # fmt: skip


def _secondary(view: View) -> Table:
    """Outcomes other than test accuracy, for the replicated comparisons."""
    records = []
    for found in view.analysis.comparisons:
        if found.role == "replication" and found.all is not None:
            row: dict[str, Any] = {}
            for name, outcome in _OUTCOMES.items():
                left, right = (
                    {seed: outcome(view, run) for seed, run in view.done(found.task, point).items()}
                    for point in (found.left, found.right)
                )
                both = [seed for seed in left if left[seed] is not None and right.get(seed) is not None]
                difference = summarise([left[seed] - right[seed] for seed in both]) if both else None
                row |= _summary(difference, f"{name}_")
            records.append(_row(_cells(found), row))
    columns = [AXIS, *PAIR]
    for name, title, unit in (
        ("prior_corrected", "prior-corrected accuracy, pp", signed_pp), ("auc", "macro AUC, pp", signed_pp),
        ("f1", "macro-F1, pp", signed_pp), ("area", "validation curve, pp", signed_pp), ("loss", "log-loss", lam)
    ):  # fmt: skip
        if any(record[f"{name}_n"] for record in records):
            columns += [
                count(f"{name}_n", "n"), unit(f"{name}_mean", title), unit(f"{name}_low", "95 % from"),
                unit(f"{name}_high", "to"),
            ]  # fmt: skip
    return Table.of(
        "secondary", "Replication: secondary outcomes", columns, records, stub=4,
        note="Left minus right, paired within seed, with 95 % intervals that are not adjusted for their number: no "
        "claim rests on them. Prior-corrected accuracy (after a bias per label, fitted on the validation rows), macro "
        "AUC and macro-F1 are those of the test split. The area under the validation curve is the mean "
        "accuracy on validation over the steps, by trapezoids. Log-loss is that of the labels on validation after the "
        "last step, in nats: below 0 the left side is better.",
    )  # fmt: skip


def _area(view: View, run: RunResult) -> Any:
    """Mean validation accuracy over the steps in %, by trapezoids; None with fewer than three evaluations."""
    curve = list(view.validation(run).items())
    if len(curve) < 3:
        return None
    parts = [(b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(curve)]
    return 100 * fsum(parts) / (curve[-1][0] - curve[0][0])


def _loss(view: View, run: RunResult) -> Any:
    score = run.scores.get("val")
    return None if score is None or score.calibration is None else score.calibration.log_loss


def _f1(view: View, run: RunResult) -> Any:
    f1 = run.scores["test"].macro_f1 if "test" in run.scores else None
    return None if f1 is None else 100 * f1


def _of_probabilities(name: str) -> Callable[[View, RunResult], Any]:
    def outcome(view: View, run: RunResult) -> Any:
        value = _get(_get(run.scores.get("test"), "calibration"), name)
        return None if value is None else 100 * value

    return outcome


_OUTCOMES: Mapping[str, Callable[[View, RunResult], Any]] = {
    "prior_corrected": _of_probabilities("prior_corrected"),
    "auc": _of_probabilities("auc"),
    "f1": _f1,
    "area": _area,
    "loss": _loss,
}


def _at(found: Paired | None, seed: int | None) -> float | None:
    if found is None or seed not in found.seeds:
        return None
    return found.differences[found.seeds.index(seed)]


@_table(
    "examples", "Example by example",
    (
        AXIS, *PAIR, signed_pp("mean", "mean, pp"), signed_pp("low", "95 % from"), signed_pp("high", "to"),
        text("resampled"), count("examples"),
        text("mcnemar", "only left right / only right right, exact p, per seed"),
    ),
    stub=4, empty="No pair of runs has predictions.",
    note="McNemar's test asks whether these two trained models differ on other examples; what another seed would give "
    "is outside of it. The bootstrap says what it resampled.",
)  # fmt: skip
def _examples(view: View) -> Iterator[Record]:
    for found in view.analysis.comparisons:
        if found.bootstrap is not None or found.mcnemar:
            tests = "; ".join(f"s{seed}: {t.left_only}/{t.right_only}, p {t.p:.3f}" for seed, t in found.mcnemar)
            yield _row(_cells(found), _cells(found.bootstrap), mcnemar=tests or None)


# ---------------------------------------------------------------------------------------------------- groups


def _shown_groups(view: View) -> Iterator[tuple[GroupEvidence, dict[str, Any]]]:
    """All groups with their naming cells; with a single task only the pooled ones, which have the same numbers."""
    for group in view.analysis.groups:
        if group.task == ALL_TASKS or len(view.results.tasks) > 1:
            axis = f"{group.axis}: {group.restriction}" if group.restriction else group.axis
            yield group, {"axis": axis, "task": group.task, "cells": group.comparable}


@_table(
    "groups", "Group claims",
    (
        AXIS, TASK, count("cells"), count("na", "N/A"), count("missing"), *_summary_columns(interval="CI"),
        p_value("sign_flip_floor", "sign-flip floor"), *_summary_columns("fresh", "CI"),
        p_value("fresh_sign_flip_floor", "fresh floor"), p_value("holm", "p, Holm"),
        signed_pp("mixed", "mixed model, pp", CSV_ONLY), p_value("mixed_p", "mixed p (too small)", CSV_ONLY), NOTE,
    ),
    stub=2, empty="There is no comparison yet.",
    note="Mean difference of all cells of an axis, per (task, seed) block; t and sign-flip are over blocks, never over "
    "cells. Fresh leaves the selection seed out and is the one that confirms. CI is of 95 % at the first look at the "
    "results, and of a higher confidence later. Holm is over all planned claims. Detectable is about the smallest true "
    "difference that would be supported in 80 % of repetitions.",
)  # fmt: skip
def _groups(view: View) -> Iterator[Record]:
    for group, names in _shown_groups(view):
        yield _row(
            _cells(group), _summary(group.all), _summary(group.fresh, "fresh_"), names, na=group.not_applicable,
            mixed=_get(group.mixed, "mean"), mixed_p=_get(group.mixed, "p"), note=_cells(group.fresh)["note"],
        )  # fmt: skip


def _best(view: View) -> Table:
    columns = [
        TASK, text("side"), text("chosen", "best on validation"), percent("chosen_val", "its val, %"),
        percent("chosen_test", "its test, %"), text("observed", "best on test (optimistic)"),
        percent("observed_test", "its test, %"),
    ]  # fmt: skip
    for name, reference in view.references.items():
        columns.append(percent(f"{name}_observed", f"{name}'s best on test, s{reference.seeds[0]}, %"))
    records = []
    for task, selection in view.analysis.selection.items():
        for side in [*(s for s in _SIDES if s in selection.sides), *(s for s in selection.sides if s not in _SIDES)]:
            chosen, observed = selection.sides[side].chosen, selection.sides[side].observed
            record = _row(
                task=task, side=side, chosen=_get(chosen, "label"), chosen_val=_get(chosen, "val"),
                chosen_test=_get(chosen, "test"), observed=_get(observed, "label"),
                observed_test=_get(observed, "test"),
            )  # fmt: skip
            for name, reference in view.references.items():
                record[f"{name}_observed"] = reference.best(view.data(task)).get(side)
            records.append(record)
    note = (
        "Means over the seeds of the sweep. What is best on test was picked by what it is judged by, and is "
        "optimistic; what is best on validation is not."
    )
    return Table.of(
        "best-observed", "The best of each side", columns, records, stub=2, empty="No run is done.",
        note=_with_sources(view, note),
    )  # fmt: skip
