"""All tables of a report: what was measured, and what the measurements may claim."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any

from gatespace.evidence.paired import minimum_detectable, seeds_needed
from gatespace.evidence.records import ALL_TASKS, GroupEvidence, Paired
from gatespace.gating.coefficients import Gate, NotApplicable
from gatespace.report.table import (
    CSV_ONLY,
    FILES_ONLY,
    NOT_IN_PRINT,
    PAGE_ONLY,
    Column,
    Record,
    Runs,
    Table,
    Value,
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
from gatespace.study.records import Cost, RunResult, Score

TASK, POINT, AXIS, SEEDS = text("task"), text("point"), text("axis"), count("seeds")
PAIR = (TASK, text("left"), text("right"))
NOTE = text("note", "note", NOT_IN_PRINT)
RUN = Column("run", "run", "runs")
RUNS = Column("runs", "runs", "runs", NOT_IN_PRINT)
NO_LABEL = "(none)"
_SIDES = ("family", "entropy-only", "gap-only", "static", "published")


def file_tables(view: View) -> list[Table]:
    """Those that are written to files: they hold nothing that differs between two computations of one study.

    Also those that are empty and say why.
    """
    return [
        _baselines(view),
        _points(view),
        _per_seed(view),
        _runs(view),
        _lam(view),
        _duplicates(view),
        _confusion(view),
        _reads(view),
        _provenance(view),
        _groups(view),
        _wins(view),
        *(_comparisons(view, axis) for axis in view.axes),
        _d_on_g2(view),
        _replication(view),
        _best(view),
        _anova(view),
        _power(view),
        _controls(view),
        _examples(view),
        _not_applicable(view),
    ]


def page_tables(view: View) -> list[Table]:
    """Those that are on the page only: seconds are those of one machine and moment, and an error may name a path."""
    return [_cost(view), _failures(view)]


# ---------------------------------------------------------------------------------------------------- scores


def _baselines(view: View) -> Table:
    columns = (
        TASK, text("data"), count("rows", "test rows"), percent("majority", "majority, %"),
        percent("start", "start, %"), percent("trained", "family, mean %"), signed_pp("gain_pp", "gain, pp"),
        percent("teacher", "teacher, %"), percent("start_macro_f1", "start F1, %"),
        percent("trained_macro_f1", "family F1, %"), percent("teacher_macro_f1", "teacher F1, %"),
        count("below_majority", "runs below majority"), count("done", "runs done"),
        count("duplicates", "test rows in train"), text("base", "base of HG points"),
    )  # fmt: skip
    records = []
    for task, found in view.analysis.baselines.items():
        known, base = view.results.baselines.get(task), view.results.bases.get(task)
        chosen = f"{base.point} ({base.chosen_by})" if base is not None else None
        records.append(
            _row(_cells(found, columns), task=task, data=_get(known, "name"), gain_pp=found.gain, base=chosen)
        )
    return Table.of(
        "baselines", "What stands beside every accuracy", columns, records,
        note="Test split. Majority gives the most frequent label of train to all rows; start is the student before "
        "training; family is the mean over all runs of the family's points; F1 is macro-F1.",
    )  # fmt: skip


def _points(view: View) -> Table:
    columns = (
        TASK, POINT, text("kind"), text("gate", "a,b,c,d"), SEEDS, percent("accuracy", "accuracy, mean %"),
        pp("sd_pp", "SD, pp"), percent("macro_f1", "macro-F1, mean %"), percent("val_accuracy", "val, mean %"),
        lam("lam", "E[λ]"), signed_pp("above_start_pp", "over start, pp"),
        signed_pp("above_majority_pp", "over majority, pp"), signed_pp("to_teacher_pp", "to teacher, pp"), RUNS,
    )  # fmt: skip
    records = []
    for task, point in _task_points(view):
        scores, beside = view.sweep(task, point), view.analysis.baselines[task]
        shares = [score.accuracy for score in scores.values()]
        mean, kind, gate = mean_of(shares), view.kind(task, point), view.gate(task, point)
        runs = [run for seed, run in view.done(task, point).items() if seed in scores]
        records.append(
            _row(
                task=task, point=point, kind=KINDS[kind], seeds=len(shares), accuracy=mean, sd_pp=_sd_pp(shares),
                gate=None if gate is None or kind in ("static", "twin") else str(gate), runs=_ids(runs),
                macro_f1=mean_of([score.macro_f1 for score in scores.values()]),
                val_accuracy=mean_of([score.accuracy for score in view.sweep(task, point, "val").values()]),
                lam=mean_of([run.lam_stats.mean for run in runs if run.lam_stats is not None]),
                above_start_pp=_difference_pp(mean, beside.start), to_teacher_pp=_difference_pp(mean, beside.teacher),
                above_majority_pp=_difference_pp(mean, beside.majority),
            )
        )  # fmt: skip
    return Table.of(
        "points", "Points: accuracy over seeds, beside start, majority and teacher", columns, records, stub=2,
        note="Means and SDs over the seeds of the sweep, test split unless it says val. A point with one seed has no "
        "SD. E[λ] is the mean over all response tokens of the training.",
    )  # fmt: skip


def _per_seed(view: View) -> Table:
    columns = [TASK, POINT, *(percent(f"seed_{seed}", f"s{seed}, %") for seed in view.seeds), pp("sd_pp", "SD, pp")]
    for name, reference in view.references.items():
        columns += [percent(f"{name}_seed_{seed}", f"{name} s{seed}, %") for seed in reference.seeds]
        columns.append(pp(f"{name}_sd_pp", f"{name} SD, pp"))
    records = []
    for task, point in _task_points(view):
        own = {seed: score.accuracy for seed, score in view.scores(task, point).items()}
        record = _row(task=task, point=point, sd_pp=_sd_pp([*own.values()]))
        record |= {f"seed_{seed}": share for seed, share in own.items()}
        for name, reference in view.references.items():
            printed = reference.accuracies(view.data(task)).get(point, {})
            record |= {f"{name}_seed_{seed}": share for seed, share in printed.items()}
            record[f"{name}_sd_pp"] = _sd_pp([printed[seed] for seed in reference.seeds if seed in printed])
        records.append(record)
    note = _with_sources(view, "Test split, %.")
    return Table.of("per-seed", "Accuracy per seed", columns, records, stub=2, note=note)


def _runs(view: View) -> Table:
    columns = (
        TASK, POINT, count("seed"), text("state"), percent("accuracy", "accuracy, %"), count("correct"),
        count("count", "rows"), percent("macro_f1", "macro-F1, %"), count("parse_failures", "no legal label"),
        percent("val_accuracy", "val, %"), lam("lam", "E[λ]"), RUNS,
    )  # fmt: skip
    records = [
        _row(
            _cells(run.spec, columns), _cells(run.scores.get("test"), columns), state=run.state, runs=_ids([run]),
            val_accuracy=_get(run.scores.get("val"), "accuracy"), lam=_get(run.lam_stats, "mean"),
        )
        for run in view.ordered
    ]  # fmt: skip
    return Table.of(
        "runs", "All runs", columns, records, stub=3,
        note="Test split unless it says val. An answer without a legal label is wrong.",
    )  # fmt: skip


def _duplicates(view: View) -> Table:
    columns = (
        TASK, POINT, SEEDS, count("rows", "test rows"), count("duplicates", "of them in train"),
        percent("accuracy", "all rows, %"), percent("without", "without those, %"),
        signed_pp("change_pp", "change, pp"),
    )  # fmt: skip
    records: list[Record] = []
    for task, point in _task_points(view):
        scores = [score for score in view.scores(task, point).values() if score.without_duplicates is not None]
        if not scores:
            continue
        whole = fmean(score.accuracy for score in scores)
        clean = fmean(s.without_duplicates.accuracy for s in scores if s.without_duplicates is not None)
        records.append(
            _row(
                task=task, point=point, seeds=len(scores), rows=scores[0].count, duplicates=scores[0].duplicates,
                accuracy=whole, without=clean, change_pp=100 * (clean - whole),
            )
        )  # fmt: skip
    return Table.of(
        "duplicates", "Accuracy with and without test texts that stand in train", columns, records, stub=2,
        note="Means over seeds.", empty="No run is done.",
    )  # fmt: skip


def confusion_models(view: View, task: str) -> list[tuple[str, tuple[Score, ...]]]:
    """The models whose confusions are shown: start, the point chosen on validation (all its seeds), teacher."""
    baseline, chosen = view.results.baselines.get(task), view.analysis.selection[task].chosen
    found: dict[str, tuple[Score, ...]] = {}
    if baseline is not None and "test" in baseline.start:
        found["start"] = (baseline.start["test"],)
    if not isinstance(chosen, NotApplicable):
        found[chosen.label] = tuple(view.scores(task, chosen.label).values())
    if baseline is not None and "test" in baseline.teacher:
        found["teacher"] = (baseline.teacher["test"],)
    return [(model, scores) for model, scores in found.items() if scores]


def confusion(scores: Sequence[Score]) -> dict[str, dict[str, int]]:
    """Gold → predicted → rows, summed; responses without a legal label as ``(none)``."""
    labels = scores[0].labels
    summed: dict[str, dict[str, int]] = {}
    for gold in labels:
        counts = {said: sum(score.confusion.get(gold, {}).get(said, 0) for score in scores) for said in labels}
        support = sum(int(row["support"]) for score in scores for row in score.per_label if row["label"] == gold)
        summed[gold] = {**counts, NO_LABEL: support - sum(counts.values())}
    return summed


def confusion_records(view: View, task: str) -> Iterator[Record]:
    """One record per model, gold label and predicted label of a task."""
    for model, scores in confusion_models(view, task):
        for gold, counts in confusion(scores).items():
            total = sum(counts.values())
            for said, rows in counts.items():
                share = rows / total if total else None
                yield _row(task=task, model=model, gold=gold, predicted=said, rows=rows, share=share)


def _confusion(view: View) -> Table:
    columns = (
        TASK, text("model"), text("gold", "gold label"), text("predicted"), count("rows"),
        percent("share", "of the gold label's, %"),
    )  # fmt: skip
    records = [record for task in view.results.tasks for record in confusion_records(view, task)]
    return Table.of(
        "confusion", "Confusions on the test split", columns, records, stub=3, empty="Nothing was evaluated yet.",
        note="Start, teacher, and the family's point that is best on validation, summed over its seeds. "
        "(none): no legal label in the answer.",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- runs


def lam_records(view: View, task: str, *kinds: str) -> list[dict[str, Any]]:
    """λ over the tokens of training, one record per point of these kinds."""
    records = []
    for point in view.points(task, *kinds):
        runs = [run for run in view.done(task, point).values() if run.lam_stats is not None]
        stats = [run.lam_stats for run in runs if run.lam_stats is not None]
        if not stats:
            continue
        gate = view.gate(task, point)
        low, high = gate.lam_range() if gate is not None else (None, None)
        records.append(
            _row(
                task=task, point=point, seeds=len(stats), low=low, high=high, runs=_ids(runs),
                mean=fmean(s.mean for s in stats), sd=fmean(s.sd for s in stats),
                saturated=fmean(s.saturated for s in stats), tokens=sum(s.tokens for s in stats),
                rkl_mean=mean_of([s.rkl_mean for s in stats if s.rkl_mean is not None]),
                hist=[float(sum(bins)) for bins in zip(*(s.hist for s in stats), strict=True)],
            )
        )  # fmt: skip
    return records


def _lam(view: View) -> Table:
    columns = (
        TASK, POINT, SEEDS, lam("mean", "E[λ]"), lam("sd", "SD over tokens"), percent("saturated", "saturated, %"),
        lam("rkl_mean", "RKL-weighted E[λ]"), count("tokens"), lam("low", "least possible λ"),
        lam("high", "greatest possible λ"), RUNS,
    )  # fmt: skip
    kinds = ("point", "restriction", "control", "static", "twin")
    records = [record for task in view.results.tasks for record in lam_records(view, task, *kinds)]
    return Table.of(
        "lambda", "λ over the tokens of training", columns, records, stub=2, empty="No run with a λ is done.",
        note="Means over seeds of each run's own figures. Saturated: λ within 0.02 of 0 or 1, where a gate hardly "
        "moves. RKL-weighted: Σ λ·RKL / Σ RKL.",
    )  # fmt: skip


def _reads(view: View) -> Table:
    columns = (
        TASK, text("model"), count("rows"), text("purpose", "what for"),
        # After a kill a split is read again for the same predictions: true, and no property of the results.
        count("reads", "times read", PAGE_ONLY),
    )  # fmt: skip
    place = {name: i for i, name in enumerate(view.results.runs)}
    reads = sorted(
        view.results.test_reads, key=lambda read: (place.get(read.run, -1), read.task, read.run, read.purpose)
    )
    records = [_row(read._asdict(), model=read.run) for read in reads]
    return Table.of(
        "test-reads", "Every read of a test split", columns, records, stub=2,
        note="Nothing was chosen on a test split: choices are made on validation.", empty="No test split was read.",
    )  # fmt: skip


def _provenance(view: View) -> Table:
    columns = (
        RUN, TASK, POINT, text("kind"), count("seed"), text("gate", "a,b,c,d as trained"), lam("lam", "constant λ"),
        text("weights"), text("commit"), text("versions", "versions", NOT_IN_PRINT),
    )  # fmt: skip
    records = [
        _row(
            _cells(run.spec, columns), run=_ids([run]), kind=KINDS[run.spec.kind], lam=run.lam,
            gate=None if run.gate is None or run.spec.kind in ("twin", "static") else str(Gate(*run.gate)),
            weights=run.fingerprint or None, commit=_commit(run), versions=_versions(run),
        )
        for run in view.ordered
    ]  # fmt: skip
    return Table.of(
        "provenance", "Where the numbers come from", columns, records,
        note="One row per run of the plan. Weights: fingerprint of the trained weights.",
    )  # fmt: skip


def _failures(view: View) -> Table:
    columns = (RUN, text("state"), text("error"))
    runs = [run for run in view.ordered if run.state != "done"]
    records = [_row(run=_ids([run]), state=run.state, error=run.error or None) for run in runs]
    return Table.of("failures", "Runs that are not done", columns, records)


def costs(view: View, kind: str, task: str | None = None) -> list[Cost]:
    """What the runs of a kind took, of one task or of all."""
    runs = [run for run in view.results.done if run.spec.kind == kind and task in (None, run.spec.task)]
    return [run.cost for run in runs if run.cost is not None]


def _cost(view: View) -> Table:
    columns = (
        TASK, text("kind"), count("runs"), number("seconds", "median s per run"), number("cpu_seconds", "CPU s, all"),
        count("response_tokens", "response tokens, all"), count("teacher_tokens", "teacher tokens, all"),
        percent("cached", "scores from cache, %"),
    )  # fmt: skip
    records: list[Record] = []
    for task, kind in [(task, kind) for task in view.results.tasks for kind in KINDS]:
        if not (mine := costs(view, kind, task)):
            continue
        asked = sum(cost.scores_asked for cost in mine)
        records.append(
            _row(
                task=task, kind=KINDS[kind], runs=len(mine), seconds=median(cost.seconds for cost in mine),
                cpu_seconds=sum(cost.cpu_seconds for cost in mine),
                response_tokens=sum(cost.response_tokens for cost in mine),
                teacher_tokens=sum(cost.teacher_tokens for cost in mine),
                cached=sum(cost.scores_cached for cost in mine) / asked if asked else None,
            )
        )  # fmt: skip
    return Table.of(
        "cost", "What the runs took", columns, records, stub=2, empty="No run is done.",
        note="Teacher tokens are those that the teacher's network read; a score that another step or run had asked for "
        "before comes from the cache. Seconds belong to this machine and moment, and stand in no file of tables/.",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- comparisons

_SUMMARY = {
    "n": "n", "mean_pp": "mean", "sd_pp": "sd", "low_pp": "low", "high_pp": "high", "p": "p",
    "sign_flip_p": "sign_flip_p", "mde_pp": "mde", "sign_flip_floor": "sign_flip_floor",
}  # fmt: skip


def _summary(found: object, prefix: str = "") -> dict[str, Value]:
    """The cells of a `Summary`, also where there is none or where it does not apply."""
    return {prefix + key: _get(found, name) for key, name in _SUMMARY.items()}


def _summary_columns(what: str = "") -> tuple[Column, ...]:
    prefix, title = (f"{what}_", f"{what} ") if what else ("", "")
    return (
        count(f"{prefix}n", f"{title}n"), signed_pp(f"{prefix}mean_pp", f"{title}mean, pp"),
        pp(f"{prefix}sd_pp", f"{title}SD"), signed_pp(f"{prefix}low_pp", f"{title}95 % from"),
        signed_pp(f"{prefix}high_pp", f"{title}to"), p_value(f"{prefix}p", f"{title}p (t)"),
        p_value(f"{prefix}sign_flip_p", f"{title}p (sign-flip)"), pp(f"{prefix}mde_pp", f"{title}detectable, pp"),
    )  # fmt: skip


def _comparisons(view: View, axis: str) -> Table:
    columns = (
        *PAIR, text("role", "role", FILES_ONLY), *_summary_columns(), p_value("sign_flip_floor", "sign-flip floor"),
        count("fresh_n", "fresh n"), signed_pp("fresh_mean_pp", "fresh mean, pp"),
        signed_pp("fresh_low_pp", "fresh from", NOT_IN_PRINT), signed_pp("fresh_high_pp", "fresh to", NOT_IN_PRINT),
        p_value("bh", "p, BH"), p_value("holm", "p, Holm"), text("differences_pp", "per seed, pp", CSV_ONLY), NOTE,
        RUNS,
    )  # fmt: skip
    records = [
        _row(
            _cells(found, columns), _summary(found.all), _summary(found.fresh, "fresh_"), note=found.reason or None,
            differences_pp=_each_seed(found.all), runs=Runs(found.run_ids),
        )
        for found in view.comparisons(axis, comparable=False)
        if found.status != "n/a"
    ]  # fmt: skip
    return Table.of(
        f"comparisons-{axis}", f"{AXES[axis].title}: every comparison", columns, records, stub=3,
        empty="The study has no comparison on this axis.",
        note="Accuracy on test, left minus right, paired within seed. Detectable: the smallest true difference that "
        "would be found in 80 % of repetitions with this SD and so many seeds. Fresh leaves the selection seed "
        f"({view.results.selection_seed}) out. The sign-flip p cannot fall below its floor.",
    )  # fmt: skip


def _each_seed(found: Paired | None) -> str | None:
    if found is None:
        return None
    return " ".join(f"{seed}:{value!r}" for seed, value in zip(found.seeds, found.differences, strict=True))


def _d_on_g2(view: View) -> Table:
    columns = [
        TASK, text("base", "on"), POINT, Column("d", "d", "coefficient"), *_summary_columns(),
        *(signed_pp(f"{name}_pp", f"{name}, s{found.seeds[0]}, pp") for name, found in view.references.items()),
    ]  # fmt: skip
    records = []
    for found in view.comparisons("gap"):
        gate = view.gate(found.task, found.left)
        record = _row(_summary(found.all), task=found.task, base=found.right, point=found.left, d=_get(gate, "d"))
        for name, reference in view.references.items():
            printed = reference.differences(view.data(found.task)).get((found.left, found.right))
            record[f"{name}_pp"] = _get(printed, "one_seed")
        records.append(record)
    return Table.of(
        "d-on-g2", "Adding the gap coefficient d", columns, records, stub=3,
        empty="The study has no point with d beside the same point without.",
        note=_with_sources(view, "Difference to the same point with d = 0."),
    )  # fmt: skip


def _replication(view: View) -> Table:
    """What was run again on fresh seeds, and what a reference replicated and this study has."""
    records = []
    shown = set()
    for found in view.analysis.comparisons:
        published: dict[str, Value] = {}
        for name, reference in view.references.items():
            printed = reference.differences(view.data(found.task)).get((found.left, found.right))
            if printed is not None and printed.mean is not None:
                published |= {f"{name}_{key}{'' if key == 'p' else '_pp'}": v for key, v in printed._asdict().items()}
                if found.status != "n/a":
                    shown.add(name)
        if found.status == "n/a" or (found.role != "replication" and not published):
            continue
        records.append(
            _row(
                _cells(found, (AXIS, *PAIR)), _summary(found.all), _summary(found.fresh, "fresh_"), published,
                selected_pp=_at(found.all, view.results.selection_seed), holm=found.holm, runs=Runs(found.run_ids),
            )
        )  # fmt: skip
    columns = [
        AXIS, *PAIR, signed_pp("selected_pp", "selection seed, pp"), *_summary_columns(), count("fresh_n", "fresh n"),
        signed_pp("fresh_mean_pp", "fresh mean, pp"), signed_pp("fresh_low_pp", "fresh from"),
        signed_pp("fresh_high_pp", "fresh to"), p_value("fresh_p", "fresh p"), p_value("holm", "p, Holm"),
    ]  # fmt: skip
    for name, reference in view.references.items():
        if name in shown:
            columns += [
                signed_pp(f"{name}_one_seed_pp", f"{name} s{reference.seeds[0]}"),
                signed_pp(f"{name}_mean_pp", f"{name} mean"), pp(f"{name}_sd_pp", f"{name} SD"),
                signed_pp(f"{name}_low_pp", f"{name} from"), signed_pp(f"{name}_high_pp", f"{name} to"),
                p_value(f"{name}_p", f"{name} p"),
            ]  # fmt: skip
    note = (
        f"The selection seed ({view.results.selection_seed}) is left out of what is called fresh; Holm is over these "
        "comparisons."
    )
    return Table.of(
        "replication", "Replication: headline comparisons over seeds", [*columns, RUNS], records, stub=4,
        empty="The study replicates no comparison, and has none of the paper's nine.",
        note=_with_sources(view, note, shown),
    )  # fmt: skip


def _at(found: Paired | None, seed: int) -> float | None:
    if found is None or seed not in found.seeds:
        return None
    return found.differences[found.seeds.index(seed)]


def _controls(view: View) -> Table:
    columns = (
        *PAIR, *_summary_columns(), lam("left_lam", "E[λ] left"), lam("right_lam", "E[λ] right"),
        lam("left_lam_sd", "SD left"), lam("right_lam_sd", "SD right"), RUNS,
    )  # fmt: skip
    records = []
    for found in [*view.comparisons("control"), *view.comparisons("isolation")]:
        record = _row(_cells(found, PAIR), _summary(found.all), runs=Runs(found.run_ids))
        for side, point in (("left", found.left), ("right", found.right)):
            runs = view.done(found.task, point).values()
            stats = [run.lam_stats for run in runs if run.lam_stats is not None]
            record[f"{side}_lam"] = mean_of([one.mean for one in stats])
            record[f"{side}_lam_sd"] = mean_of([one.sd for one in stats])
        records.append(record)
    return Table.of(
        "controls", "Controls: shuffled λ, and constants with the same mean", columns, records, stub=3,
        empty="The study has no control.",
        note="A shuffled control has the gate's values of λ at other tokens; a twin has their mean at all tokens. What "
        "the gate gains over the first is due to where λ goes, over the second to λ varying at all.",
    )  # fmt: skip


def _examples(view: View) -> Table:
    columns = (
        AXIS, *PAIR, signed_pp("mean_pp", "mean, pp"), signed_pp("low_pp", "95 % from"), signed_pp("high_pp", "to"),
        text("resampled"), count("examples"),
        text("mcnemar", "only left right / only right right, exact p, per seed"),
    )  # fmt: skip
    records = []
    for found in view.analysis.comparisons:
        boot = found.bootstrap
        if boot is None and not found.mcnemar:
            continue
        tests = "; ".join(f"s{seed}: {t.left_only}/{t.right_only}, p {t.p:.3f}" for seed, t in found.mcnemar)
        records.append(
            _row(
                _cells(found, (AXIS, *PAIR)), _cells(boot, columns), mean_pp=_get(boot, "mean"),
                low_pp=_get(boot, "low"), high_pp=_get(boot, "high"), mcnemar=tests or None,
            )
        )  # fmt: skip
    return Table.of(
        "examples", "Example by example", columns, records, stub=4, empty="No pair of runs has predictions.",
        note="McNemar's test asks whether these two trained models differ on other examples; what another seed would "
        "give is outside of it. The bootstrap says what it resampled.",
    )  # fmt: skip


def _not_applicable(view: View) -> Table:
    columns = (TASK, AXIS, text("left", "point"), text("right", "against"), text("reason", "why there is none"))
    seen: dict[tuple[Value, ...], None] = {}
    for found in view.results.comparisons:
        if found.status == "n/a":
            seen[found.task, found.axis, found.left, found.restriction or found.right, found.reason] = None
    return Table(
        "not-applicable", "Cells that cannot be by construction", columns, tuple(seen), stub=4, empty="There are none.",
        note="N/A is no missing number: the restriction keeps nothing of such a point.",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- groups


def _shown_groups(view: View) -> list[GroupEvidence]:
    """All; of a study with one task those of all tasks, which are the same numbers."""
    alone = len(view.results.tasks) == 1
    return [group for group in view.analysis.groups if group.task == ALL_TASKS or not alone]


def _group_name(group: GroupEvidence) -> str:
    return f"{group.axis}: {group.restriction}" if group.restriction else group.axis


def _groups(view: View) -> Table:
    columns = (
        AXIS, TASK, count("cells"), count("na", "N/A"), count("missing"), *_summary_columns(),
        p_value("sign_flip_floor", "sign-flip floor"), *_summary_columns("fresh"),
        p_value("fresh_sign_flip_floor", "fresh floor"), p_value("holm", "p, Holm"),
        signed_pp("mixed_pp", "mixed model, pp", CSV_ONLY), p_value("mixed_p", "mixed p (too small)", CSV_ONLY), NOTE,
    )  # fmt: skip
    records = [
        _row(
            _summary(group.all), _summary(group.fresh, "fresh_"), axis=_group_name(group), task=group.task,
            cells=group.comparable, na=group.not_applicable, missing=group.missing, holm=group.holm,
            mixed_pp=_get(group.mixed, "mean"), mixed_p=_get(group.mixed, "p"),
            note=(group.fresh.reason if isinstance(group.fresh, NotApplicable) else group.fresh.note) or None,
        )
        for group in _shown_groups(view)
    ]  # fmt: skip
    return Table.of(
        "groups", "Group claims", columns, records, stub=2, empty="There is no comparison yet.",
        note="Mean difference of all cells of an axis, per (task, seed) block; t and sign-flip are over blocks, never "
        "over cells. Fresh leaves the selection seed out and is the one that confirms. Holm is over the pooled axes.",
    )  # fmt: skip


def _wins(view: View) -> Table:
    columns = (
        AXIS, TASK, count("cells"), count("wins"), count("ties"), count("losses"),
        p_value("naive_p", "p, cells independent"), p_value("correlated_p", "p, shared runs kept"),
        number("naive_variance", "variance, independent"), number("null_variance", "variance, shared runs"),
        number("effective_n", "effective cells"), NOTE,
    )  # fmt: skip
    records = [
        _row(_cells(group.wins, columns), axis=_group_name(group), task=group.task, cells=group.comparable)
        for group in _shown_groups(view)
    ]
    return Table.of(
        "wins", "Cells won, tied and lost", columns, records, stub=2, empty="There is no comparison yet.",
        note="By the mean over seeds. Cells share runs, so that a count varies more than independent ones would: the "
        "second p keeps what is shared, and effective cells are the independent ones that it is worth.",
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
            found = selection.sides[side]
            record = _row(
                task=task, side=side, observed=_get(found.observed, "label"),
                observed_test=_get(found.observed, "test"), chosen=_get(found.chosen, "label"),
                chosen_val=_get(found.chosen, "val"), chosen_test=_get(found.chosen, "test"),
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


def _anova(view: View) -> Table:
    columns = (
        TASK, count("points"), SEEDS, count("runs"), number("f", "F of points"), text("df"), p_value("p"),
        number("seed_f", "F of seeds"), p_value("seed_p", "p"), pp("sd_pp", "pooled SD, pp"), NOTE,
    )  # fmt: skip
    records = []
    for task, found in view.analysis.anova.items():
        record = _row(_cells(found, columns), task=task, sd_pp=_get(found, "sd"))
        if not isinstance(found, NotApplicable):
            record["df"] = f"{found.df[0]}, {found.df[1]}"
        records.append(record)
    return Table.of(
        "anova", "Is there any difference among the points of a task?", columns, records, empty="No run is done.",
        note="Two-way analysis of variance, point + seed, without interaction.",
    )  # fmt: skip


def _power(view: View) -> Table:
    columns = (
        AXIS, TASK, count("pairs", "comparisons"), SEEDS, pp("sd_pp", "SD of differences, pp"),
        pp("mde_pp", "detectable now, pp"), count("seeds_for_1", "seeds for 1 pp"), count("seeds_for_2", "for 2 pp"),
        count("seeds_for_3", "for 3 pp"),
    )  # fmt: skip
    records = []
    for axis, task in [(axis, task) for axis in view.axes for task in view.results.tasks]:
        pairs = [found.all for found in view.comparisons(axis, task) if found.all is not None]
        if not pairs:
            continue
        n, sd = min(pair.n for pair in pairs), view.spread(axis, task)
        record = _row(axis=axis, task=task, pairs=len(pairs), seeds=n, sd_pp=sd)
        if sd:
            record["mde_pp"] = minimum_detectable(sd, n) if n > 1 else None
            record |= {f"seeds_for_{gap}": seeds_needed(sd, float(gap)) for gap in (1, 2, 3)}
        else:
            unknown = ("mde_pp", "seeds_for_1", "seeds_for_2", "seeds_for_3")
            record |= dict.fromkeys(unknown, NotApplicable("no SD over seeds"))
        records.append(record)
    return Table.of(
        "power", "What could have been seen, and how many seeds it takes", columns, records, stub=2,
        empty="There is no comparison yet.",
        note="For one comparison: two-sided paired t-test at .05 with 80 % power, with the pooled SD over seeds of the "
        "axis' differences.",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- cells


def _get(found: object, name: str) -> Any:
    """An attribute of a value; the value itself where it is None or does not apply."""
    return found if found is None or isinstance(found, NotApplicable) else getattr(found, name)


def _row(*parts: Record, **cells: Any) -> dict[str, Any]:
    """A record from parts of one; later cells win."""
    return {key: value for part in (*parts, cells) for key, value in part.items()}


def _cells(found: object, columns: Sequence[Column]) -> dict[str, Any]:
    """The attributes of a value by the columns of the same name; where it does not apply, that in every column."""
    if isinstance(found, NotApplicable):
        return {column.key: found for column in columns} | {"note": found.reason}
    values = {column.key: getattr(found, column.key) for column in columns if hasattr(found, column.key)}
    return values | {"note": values.get("note") or None}


def _ids(runs: Sequence[RunResult]) -> Runs:
    return Runs(tuple(run.spec.id for run in runs))


def _task_points(view: View) -> list[tuple[str, str]]:
    return [(task, point) for task in view.results.tasks for point in view.points(task)]


def _sd_pp(shares: Sequence[float]) -> float | None:
    sd = sd_of(shares)
    return None if sd is None else 100 * sd


def _difference_pp(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else 100 * (left - right)


def _with_sources(view: View, note: str, names: set[str] | None = None) -> str:
    """A note, and whose the published numbers beside it are."""
    sources = [found.note for name, found in view.references.items() if names is None or name in names]
    return " ".join([note, *sources])


def _commit(run: RunResult) -> str | None:
    """The start of a commit, with the mark of changed files kept."""
    commit, dirty, _ = str(run.environment.get("commit") or "").partition("-dirty")
    return commit[:12] + dirty or None


def _versions(run: RunResult) -> str | None:
    known = run.environment
    parts = [f"{name} {known[name]}" for name in ("gatespace", "python") if known.get(name)]
    packages = known.get("packages")
    if isinstance(packages, dict):
        parts += [f"{name} {version}" for name, version in sorted(packages.items()) if version]
    parts += [str(known[name]) for name in ("precision", "device") if known.get(name)]
    return ", ".join(parts) or None
