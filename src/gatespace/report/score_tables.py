"""Tables of what was measured: runs, points, baselines, λ, confusions, reads of test splits, provenance, cost."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from gatespace.addons.paper.published import PAPER_SEEDS, SOURCE, paper_task, per_seed
from gatespace.gating.coefficients import Gate, NotApplicable
from gatespace.report.table import NOT_IN_PRINT, PAGE_ONLY, Column, Runs, Table, Value
from gatespace.report.view import KIND_NAMES, KINDS, View, mean_of, sd_of
from gatespace.study.records import RunResult, Score

__all__ = ["confusion_models", "cost_table", "failures_table", "score_tables"]

RUNS = Column("runs", "runs", "runs", NOT_IN_PRINT)


def score_tables(view: View) -> list[Table]:
    """Those that are written to files: they hold nothing that differs between two computations of one study."""
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
    ]


def _baselines(view: View) -> Table:
    columns = (
        Column("task", "task"), Column("data", "data"), Column("rows", "test rows", "count"),
        Column("majority", "majority, %", "percent"), Column("start", "start, %", "percent"),
        Column("trained", "family, mean %", "percent"), Column("gain_pp", "gain, pp", "signed_pp"),
        Column("teacher", "teacher, %", "percent"), Column("start_macro_f1", "start F1, %", "percent"),
        Column("trained_macro_f1", "family F1, %", "percent"), Column("teacher_macro_f1", "teacher F1, %", "percent"),
        Column("below_majority", "runs below majority", "count"), Column("done", "runs done", "count"),
        Column("duplicates", "test rows in train", "count"), Column("base", "base of HG points"),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for task in view.results.tasks:
        found, base = view.analysis.baselines.get(task), view.results.bases.get(task)
        data = view.results.baselines[task].name if task in view.results.baselines else None
        chosen = f"{base.point} ({base.chosen_by})" if base is not None else None
        if found is None:
            rows.append((task, data, *(None,) * 12, chosen))
            continue
        rows.append(
            (
                task, data, found.rows, found.majority, found.start, found.trained, found.gain, found.teacher,
                found.start_macro_f1, found.trained_macro_f1, found.teacher_macro_f1, found.below_majority, found.done,
                found.duplicates, chosen,
            )
        )  # fmt: skip
    return Table(
        "baselines",
        "What stands beside every accuracy",
        columns,
        tuple(rows),
        note="Test split. Majority gives the most frequent label of train to all rows; start is the student before "
        "training; family is the mean over all runs of the family's points; F1 is macro-F1.",
    )


def _points(view: View) -> Table:
    columns = (
        Column("task", "task"), Column("point", "point"), Column("kind", "kind"), Column("gate", "a,b,c,d"),
        Column("seeds", "seeds", "count"), Column("accuracy", "accuracy, mean %", "percent"),
        Column("sd_pp", "SD, pp", "pp"), Column("macro_f1", "macro-F1, mean %", "percent"),
        Column("val_accuracy", "val, mean %", "percent"), Column("lam", "E[λ]", "lam"),
        Column("above_start_pp", "over start, pp", "signed_pp"),
        Column("above_majority_pp", "over majority, pp", "signed_pp"),
        Column("to_teacher_pp", "to teacher, pp", "signed_pp"), RUNS,
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for task in view.results.tasks:
        beside = view.analysis.baselines.get(task)
        for point in view.points(task):
            scores = view.sweep(task, point)
            shares = [score.accuracy for score in scores.values()]
            mean = mean_of(shares)
            sd = sd_of(shares)
            runs = {seed: run for seed, run in view.done(task, point).items() if seed in scores}
            against: list[float | None] = [None, None, None]
            if beside is not None:
                against = [_pp(mean, beside.start), _pp(mean, beside.majority), _pp(mean, beside.teacher)]
            rows.append(
                (
                    task, point, KIND_NAMES[view.kind(task, point)], _gate_text(view, task, point), len(shares), mean,
                    None if sd is None else 100 * sd, mean_of([score.macro_f1 for score in scores.values()]),
                    mean_of([score.accuracy for score in view.sweep(task, point, "val").values()]),
                    mean_of([run.lam_stats.mean for run in runs.values() if run.lam_stats is not None]),
                    *against, Runs(tuple(run.spec.id for run in runs.values())),
                )
            )  # fmt: skip
    return Table(
        "points",
        "Points: accuracy over seeds, beside start, majority and teacher",
        columns,
        tuple(rows),
        note="Means and SDs over the seeds of the sweep, test split unless it says val. A point with one seed has no "
        "SD. E[λ] is the mean over all response tokens of the training.",
        stub=2,
    )


def _per_seed(view: View) -> Table:
    seeds = view.seeds
    papers = {task: paper_task(view.results, task) for task in view.results.tasks}
    columns = [Column("task", "task"), Column("point", "point")]
    columns += [Column(f"seed_{seed}", f"s{seed}, %", "percent") for seed in seeds]
    columns += [Column("sd_pp", "SD, pp", "pp")]
    beside = any(papers.values())
    if beside:
        columns += [Column(f"paper_seed_{seed}", f"paper s{seed}, %", "percent") for seed in PAPER_SEEDS]
        columns += [Column("paper_sd_pp", "paper SD, pp", "pp")]
    rows: list[tuple[Value, ...]] = []
    for task in view.results.tasks:
        paper = papers[task]
        printed = per_seed(paper) if paper else {}
        for point in view.points(task):
            scores = view.scores(task, point)
            sd = sd_of([score.accuracy for score in scores.values()])
            row: list[Value] = [task, point, *(scores[s].accuracy if s in scores else None for s in seeds)]
            row.append(None if sd is None else 100 * sd)
            if beside:
                theirs = printed.get(point, {})
                spread = sd_of([theirs[s] for s in PAPER_SEEDS if s in theirs])
                row += [*(theirs.get(s) for s in PAPER_SEEDS), None if spread is None else 100 * spread]
            rows.append(tuple(row))
    return Table(
        "per-seed",
        "Accuracy per seed",
        tuple(columns),
        tuple(rows),
        note=f"Test split, %. {SOURCE}" if beside else "Test split, %.",
        stub=2,
    )


def _runs(view: View) -> Table:
    columns = (
        Column("task", "task"), Column("point", "point"), Column("seed", "seed", "count"), Column("state", "state"),
        Column("accuracy", "accuracy, %", "percent"), Column("correct", "correct", "count"),
        Column("count", "rows", "count"),
        Column("macro_f1", "macro-F1, %", "percent"), Column("parse_failures", "no legal label", "count"),
        Column("val_accuracy", "val, %", "percent"), Column("lam", "E[λ]", "lam"), RUNS,
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for run in _ordered(view):
        score, val = run.scores.get("test"), run.scores.get("val")
        measured: tuple[Value, ...] = (None,) * 5
        if score is not None:
            measured = (score.accuracy, score.correct, score.count, score.macro_f1, score.parse_failures)
        rows.append(
            (
                run.spec.task, run.spec.point, run.spec.seed, run.state, *measured,
                None if val is None else val.accuracy, None if run.lam_stats is None else run.lam_stats.mean,
                Runs((run.spec.id,)),
            )
        )  # fmt: skip
    return Table(
        "runs", "All runs", columns, tuple(rows), stub=3,
        note="Test split unless it says val. An answer without a legal label is wrong.",
    )  # fmt: skip


def _lam(view: View) -> Table:
    columns = (
        Column("task", "task"), Column("point", "point"), Column("seeds", "seeds", "count"),
        Column("mean", "E[λ]", "lam"), Column("sd", "SD over tokens", "lam"),
        Column("saturated", "saturated, %", "percent"),
        Column("rkl_mean", "RKL-weighted E[λ]", "lam"), Column("tokens", "tokens", "count"),
        Column("low", "least possible λ", "lam"), Column("high", "greatest possible λ", "lam"), RUNS,
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for task in view.results.tasks:
        for point in view.points(task, "point", "restriction", "control", "static", "twin"):
            runs = [run for run in view.done(task, point).values() if run.lam_stats is not None]
            stats = [run.lam_stats for run in runs if run.lam_stats is not None]
            if not stats:
                continue
            gate = view.gate(task, point)
            reach = gate.lam_range() if gate is not None else (None, None)
            weighted = [s.rkl_mean for s in stats if s.rkl_mean is not None]
            rows.append(
                (
                    task, point, len(stats), fmean(s.mean for s in stats), fmean(s.sd for s in stats),
                    fmean(s.saturated for s in stats), mean_of(weighted), sum(s.tokens for s in stats), *reach,
                    Runs(tuple(run.spec.id for run in runs)),
                )
            )  # fmt: skip
    return Table(
        "lambda", "λ over the tokens of training", columns, tuple(rows), stub=2,
        note="Means over seeds of each run's own figures. Saturated: λ within 0.02 of 0 or 1, where a gate hardly "
        "moves. RKL-weighted: Σ λ·RKL / Σ RKL.",
        empty="No run with a λ is done.",
    )  # fmt: skip


def _duplicates(view: View) -> Table:
    columns = (
        Column("task", "task"), Column("point", "point"), Column("seeds", "seeds", "count"),
        Column("rows", "test rows", "count"), Column("duplicates", "of them in train", "count"),
        Column("accuracy", "all rows, %", "percent"), Column("without", "without those, %", "percent"),
        Column("change_pp", "change, pp", "signed_pp"),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for task in view.results.tasks:
        for point in view.points(task):
            scores = [s for s in view.scores(task, point).values() if s.without_duplicates is not None]
            if not scores:
                continue
            whole = fmean(s.accuracy for s in scores)
            clean = fmean(s.without_duplicates.accuracy for s in scores if s.without_duplicates is not None)
            rows.append(
                (task, point, len(scores), scores[0].count, scores[0].duplicates, whole, clean, 100 * (clean - whole))
            )
    return Table(
        "duplicates", "Accuracy with and without test texts that stand in train", columns, tuple(rows), stub=2,
        note="Means over seeds.", empty="No run is done.",
    )  # fmt: skip


def confusion_models(view: View, task: str) -> list[tuple[str, tuple[Score, ...]]]:
    """The models whose confusions are shown: start, the point chosen on validation (all its seeds), teacher."""
    found: list[tuple[str, tuple[Score, ...]]] = []
    baseline = view.results.baselines.get(task)
    if baseline is not None and "test" in baseline.start:
        found.append(("start", (baseline.start["test"],)))
    selection = view.analysis.selection.get(task)
    if selection is not None and not isinstance(selection.chosen, NotApplicable):
        scores = tuple(view.scores(task, selection.chosen.label).values())
        if scores:
            found.append((selection.chosen.label, scores))
    if baseline is not None and "test" in baseline.teacher:
        found.append(("teacher", (baseline.teacher["test"],)))
    return found


def _confusion(view: View) -> Table:
    columns = (
        Column("task", "task"), Column("model", "model"), Column("gold", "gold label"),
        Column("predicted", "predicted"),
        Column("rows", "rows", "count"), Column("share", "of the gold label's, %", "percent"),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for task in view.results.tasks:
        for model, scores in confusion_models(view, task):
            for gold, counts in confusion(scores).items():
                total = sum(counts.values())
                rows += [(task, model, gold, said, n, n / total if total else None) for said, n in counts.items()]
    return Table(
        "confusion", "Confusions on the test split", columns, tuple(rows), stub=3, empty="Nothing was evaluated yet.",
        note="Start, teacher, and the family's point that is best on validation, summed over its seeds. "
        "(none): no legal label in the answer.",
    )  # fmt: skip


def confusion(scores: Sequence[Score]) -> dict[str, dict[str, int]]:
    """Gold → predicted → rows, summed; answers without a legal label as ``(none)``."""
    labels = scores[0].labels
    summed: dict[str, dict[str, int]] = {}
    for gold in labels:
        counts = {said: sum(score.confusion.get(gold, {}).get(said, 0) for score in scores) for said in labels}
        support = sum(int(row["support"]) for score in scores for row in score.per_label if row["label"] == gold)
        counts["(none)"] = support - sum(counts.values())
        summed[gold] = counts
    return summed


def _reads(view: View) -> Table:
    columns = (
        Column("task", "task"), Column("model", "model"), Column("rows", "rows", "count"),
        Column("purpose", "what for"),
        # After a kill a split is read again for the same predictions: true, and no property of the results.
        Column("reads", "times read", "count", PAGE_ONLY),
    )  # fmt: skip
    place = {name: i for i, name in enumerate(view.results.runs)}
    reads = sorted(
        view.results.test_reads, key=lambda read: (place.get(read.run, -1), read.task, read.run, read.purpose)
    )
    rows = tuple((read.task, read.run, read.rows, read.purpose, read.reads) for read in reads)
    return Table(
        "test-reads", "Every read of a test split", columns, rows, stub=2, empty="No test split was read.",
        note="Nothing was chosen on a test split: choices are made on validation.",
    )  # fmt: skip


def _provenance(view: View) -> Table:
    columns = (
        Column("run", "run", "runs"), Column("task", "task"), Column("point", "point"), Column("kind", "kind"),
        Column("seed", "seed", "count"), Column("gate", "a,b,c,d as trained"), Column("lam", "constant λ", "lam"),
        Column("weights", "weights"), Column("commit", "commit"), Column("versions", "versions", "text", NOT_IN_PRINT),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for run in _ordered(view):
        gate = None if run.gate is None else str(Gate(*run.gate)) if run.spec.kind not in ("twin", "static") else None
        rows.append(
            (
                Runs((run.spec.id,)), run.spec.task, run.spec.point, KIND_NAMES[run.spec.kind], run.spec.seed, gate,
                run.lam, run.fingerprint or None, _text(run.environment.get("commit"), 12), _versions(run),
            )
        )  # fmt: skip
    return Table(
        "provenance", "Where the numbers come from", columns, tuple(rows),
        note="One row per run of the plan. Weights: fingerprint of the trained weights.",
    )  # fmt: skip


def failures_table(view: View) -> Table:
    """Runs that are not done, with the error of those that failed. On the page only: an error may name a path."""
    columns = (Column("run", "run", "runs"), Column("state", "state"), Column("error", "error"))
    rows = tuple((Runs((run.spec.id,)), run.state, run.error or None) for run in _ordered(view) if run.state != "done")
    return Table("failures", "Runs that are not done", columns, rows)


def cost_table(view: View) -> Table:
    """What the runs took. On the page only: seconds are those of one machine and moment."""
    columns = (
        Column("task", "task"), Column("kind", "kind"), Column("runs", "runs", "count"),
        Column("seconds", "median s per run", "number"), Column("cpu_seconds", "CPU s, all", "number"),
        Column("response_tokens", "response tokens, all", "count"),
        Column("teacher_tokens", "teacher tokens, all", "count"),
        Column("cached", "scores from cache, %", "percent"),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for task in view.results.tasks:
        for kind in KINDS:
            costs = [
                run.cost
                for run in view.results.done
                if (run.spec.task, run.spec.kind) == (task, kind) and run.cost is not None
            ]
            if not costs:
                continue
            asked = sum(cost.scores_asked for cost in costs)
            rows.append(
                (
                    task, KIND_NAMES[kind], len(costs), median(cost.seconds for cost in costs),
                    sum(cost.cpu_seconds for cost in costs), sum(cost.response_tokens for cost in costs),
                    sum(cost.teacher_tokens for cost in costs),
                    sum(cost.scores_cached for cost in costs) / asked if asked else None,
                )
            )  # fmt: skip
    return Table(
        "cost", "What the runs took", columns, tuple(rows), stub=2, empty="No run is done.",
        note="Teacher tokens are those that the teacher's network read; a score that another step or run had asked for "
        "before comes from the cache. Seconds belong to this machine and moment, and stand in no file of tables/.",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- helpers


def _ordered(view: View) -> list[RunResult]:
    """Tasks as in the study; points of the family first; seeds as in the study."""
    found = []
    for task in view.results.tasks:
        for point in view.points(task):
            found += [run for seed in view.seeds if (run := view.run(task, point, seed)) is not None]
    return found


def _gate_text(view: View, task: str, point: str) -> str | None:
    if view.kind(task, point) in ("static", "twin"):
        return None
    gate = view.gate(task, point)
    return None if gate is None else str(gate)


def _pp(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else 100 * (left - right)


def _text(value: object, most: int) -> str | None:
    """The start of a commit, with the mark of changed files kept."""
    if not value:
        return None
    commit, dirty, _ = str(value).partition("-dirty")
    return commit[:most] + dirty


def _versions(run: RunResult) -> str | None:
    known = run.environment
    parts = [f"{name} {known[name]}" for name in ("gatespace", "python") if known.get(name)]
    packages = known.get("packages")
    if isinstance(packages, dict):
        parts += [f"{name} {version}" for name, version in sorted(packages.items()) if version]
    parts += [str(known[name]) for name in ("precision", "device") if known.get(name)]
    return ", ".join(parts) or None
