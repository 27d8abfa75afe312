"""A study that was never trained: plausible predictions, λ and curves for a whole plan, drawn from one seed.

What is drawn is per example, so that counts, scores and statistics follow from it as they do in a real study. Rows that
are hard are hard for every run, runs of one seed share a part of their luck, and the points of the family are better by
`effect` percentage points than everything they are compared with.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from gatespace.config.study import StudyConfig
from gatespace.evaluation.calibration import LabelProbabilities, calibrate
from gatespace.evaluation.metrics import measure
from gatespace.gating.coefficients import SATURATION, Gate, NotApplicable, sigmoid
from gatespace.runs import Base, RunFolder
from gatespace.study.plan import NINE
from gatespace.study.records import (
    Comparison,
    Cost,
    LamStats,
    RunResult,
    RunSpec,
    Score,
    SplitRead,
    StudyResults,
    TaskBaseline,
)

__all__ = ["SAMPLE_TASKS", "grid", "sample_results"]

SAMPLE_TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "emotion": ("tweeteval/emotion", ("anger", "joy", "optimism", "sadness")),
    "hate": ("tweeteval/hate", ("not-hate", "hate")),
    "offensive": ("tweeteval/offensive", ("not-offensive", "offensive")),
    "weather": ("synthetic", ("sun", "rain", "snow")),
}
"""The study's name of a task → name of the data, and labels."""

_BASES = {"hate": "G4"}
_BINS = 20
_SHARED = 0.8
"""How much of what makes a row right or wrong is the row's own."""
_NORMAL = NormalDist()


def grid(base: str) -> dict[str, Gate]:
    """The 13 points of the paper's sweeps, the HG points on `base`."""
    names = [*(f"G{i}" for i in range(1, 6)), *(f"H{i}" for i in range(1, 5))]
    names += [f"H{base},d{d:+d}" for d in (2, 4, -2, -4)]
    return {name: Gate.named(name) for name in names}


def sample_results(
    folder: Path,
    *,
    seed: int = 0,
    effect: float = 0.0,
    seeds: Sequence[int] = (42, 2, 3),
    tasks: Mapping[str, tuple[str, tuple[str, ...]]] | Sequence[str] = ("emotion",),
    points: Sequence[str] | None = None,
    rows: int = 400,
    steps: int = 40,
    noise: float = 1.0,
    twins: Sequence[str] = ("lam",),
    shuffled: Sequence[str] = ("G5",),
    published: Sequence[str] = ("todi", "eopd"),
    replication_seeds: Sequence[int] = (),
    replicated: Sequence[tuple[str, str]] = (("H1", "entropy-only(-4)"), ("G5", "twin(G5)")),
    nine: bool = False,
    failed: Mapping[str, str] | None = None,
    waiting: Sequence[str] = (),
    duplicates: int = 7,
    start: float = 0.42,
    collapsed: Mapping[str, float] | None = None,
    name: str = "sample",
    about: str = "",
    text: str = "text",
    probabilities: bool = False,
) -> StudyResults:
    """A whole study in `folder`, with the files that a report reads.

    Args:
        folder: Gets a folder per run, with predictions, metrics and evaluations on the way.
        seed: Of everything that is drawn.
        effect: How many percentage points the points of the family are better.
        seeds: Of the sweep; the first is the selection seed.
        tasks: Names in `SAMPLE_TASKS`, or a mapping of name to (name of the data, labels).
        points: Names of the paper's points that are kept; None: all 13.
        rows: Of the test split; val has half as many.
        steps: Of every run.
        noise: SD over runs of a run's own accuracy, in percentage points, before rows are drawn.
        twins: ``lam``, ``rkl``, both or neither.
        shuffled: Points that have a shuffled-λ control.
        published: Published methods.
        replication_seeds: Fresh seeds, on which `replicated` is run again.
        replicated: Pairs (left, right).
        nine: The paper's nine comparisons alone, fixed before the study: all `seeds` are fresh.
        failed: ``task-point-s<seed>`` or ``point`` → the error of a run that failed.
        waiting: The same keys, of runs that have not begun.
        duplicates: Test rows whose text stands in train.
        start: Accuracy of the student before training.
        collapsed: Point → the percentage points by which it is worse than it would be.
        name: Of the study.
        about: What it asks.
        text: The beginning of every text.
        probabilities: Whether models have probabilities of labels.
    """
    named = tasks if isinstance(tasks, Mapping) else {task: SAMPLE_TASKS[task] for task in tasks}
    failed = failed or {}
    specs: list[RunSpec] = []
    comparisons: list[Comparison] = []
    for task in named:
        kept = {
            label: gate
            for label, gate in grid(_BASES.get(task, "G5")).items()
            if points in (None, ()) or label in points
        }
        for run_seed in seeds:
            found, pairs = _plan(task, run_seed, kept, twins, shuffled, published)
            if nine:
                pairs = [_replicated(pair) for pair in pairs if (task, pair.left, pair.right) in NINE]
                arms = {label for pair in pairs for label in (pair.left, pair.right)} | {"static:0.5"}
                found = [spec for spec in found if spec.point in arms]
            specs += found
            comparisons += pairs
        wanted = [(left, right) for left, right in replicated if left in kept]
        for run_seed in replication_seeds:
            found, pairs = _plan(task, run_seed, kept, twins, shuffled, published)
            labels = {label for pair in wanted for label in pair}
            specs += [spec for spec in found if spec.point in labels]
            comparisons += [_replicated(pair) for pair in pairs if (pair.left, pair.right) in wanted]

    runs: dict[str, RunResult] = {}
    draws = {
        task: _Draws(seed, task, labels, rows, duplicates, text, probabilities) for task, (_, labels) in named.items()
    }
    for spec in specs:
        keys = (f"{spec.task}-{spec.point}-s{spec.seed}", spec.point)
        state = "failed" if any(k in failed for k in keys) else "waiting" if any(k in waiting for k in keys) else "done"
        place = Path(folder) / "runs" / spec.id
        if state == "done":
            gain = (effect if spec.kind == "point" else 0.0) - (collapsed or {}).get(spec.point, 0.0)
            runs[spec.id] = _run(spec, place, draws[spec.task], effect=gain, noise=noise, steps=steps)
            continue
        error = next((failed[k] for k in keys if k in failed), "")
        runs[spec.id] = RunResult(spec, state, place, error=error)

    states = [run.state for run in runs.values()]
    problems = [
        f"{states.count(state)} of {len(states)} runs {word}"
        for state, word in (("failed", "failed"), ("waiting", "are not done"))
        if state in states
    ]
    baselines = {}
    reads = []
    for task, (data, _) in named.items():
        scores = {}
        for who, accuracy in (("start", start), ("teacher", 0.86)):
            said = {split: draws[task].predictions(split, accuracy, who) for split in ("val", "test")}
            scores[who] = {split: draws[task].scored(split, labels) for split, labels in said.items()}
            for split, labels in said.items():
                draws[task].write(Path(folder) / "baselines" / f"{task}-{who}", split, labels)
        folders = {who: Path(folder) / "baselines" / f"{task}-{who}" for who in scores}
        digest = hashlib.sha256(data.encode()).hexdigest()[:16]
        baselines[task] = TaskBaseline(data, digest, scores["start"], scores["teacher"], folders)
        reads += [SplitRead(f"{task}-{who}", task, rows, "baseline", 1) for who in ("start", "teacher")]
    reads += [
        SplitRead(r.spec.id, r.spec.task, rows, "result", 1 + (i == 3))
        for i, r in enumerate(runs.values())
        if r.state == "done"
    ]
    config = StudyConfig.model_validate(
        {
            "name": name,
            "about": about,
            "tasks": {task: {"task": {"name": data}, "sweep": not nine} for task, (data, _) in named.items()},
            "seeds": tuple(seeds),
            "replication": {"comparisons": "paper", "beside": ["static:0.5"]}
            if nine
            else {"comparisons": "all", "seeds": tuple(replication_seeds)}
            if replication_seeds
            else None,
        }
    )
    return StudyResults(
        name=name,
        folder=Path(folder),
        config=config,
        seeds=tuple(seeds),
        replication_seeds=tuple(replication_seeds),
        selection_seed=config.choosing_seed,
        tasks=tuple(named),
        runs=runs,
        comparisons=tuple(comparisons),
        baselines=baselines,
        test_reads=tuple(reads),
        bases={task: Base(_BASES.get(task, "G5"), "the study file", {}) for task in named},
        problems=tuple(problems),
    )


# ---------------------------------------------------------------------------------------------------- the plan


def _plan(
    task: str,
    seed: int,
    gates: Mapping[str, Gate],
    twins: Sequence[str],
    shuffled: Sequence[str],
    published: Sequence[str],
) -> tuple[list[RunSpec], list[Comparison]]:
    specs: dict[str, RunSpec] = {}
    pairs: list[Comparison] = []

    def add(point: str, kind: Any, gate: Gate | None = None, of: str | None = None) -> None:
        if point in specs:
            return
        digest = hashlib.sha256(f"{task}|{point}|{seed}".encode()).hexdigest()[:8]
        plain = "".join(c if c.isalnum() or c in "+-." else "_" for c in point)
        needs = (specs[of].id,) if of else ()
        specs[point] = RunSpec(
            f"{task}-{plain}-s{seed}-{digest}", task, point, kind, seed, gate.abcd if gate else None, of, needs
        )

    def pair(axis: Any, left: str, right: str, **more: Any) -> None:
        pairs.append(Comparison(task, axis, left, right, seed, **more))

    for label, gate in gates.items():
        add(label, "point", gate)
    for label, gate in gates.items():
        for kind, cut in (("entropy-only", gate.entropy_only()), ("gap-only", gate.gap_only())):
            if isinstance(cut, NotApplicable):
                pair("restriction", label, kind, status="n/a", reason=cut.reason, restriction=kind)
            else:
                add(cut.label, "restriction", cut)
                pair("restriction", label, cut.label, restriction=kind)
    add("static:0.5", "static", Gate.static(0.5))
    for label in gates:
        pair("static", label, "static:0.5")
    for match in twins:
        for label in gates:
            point = f"twin({label})" if match == "lam" else f"twin-{match}({label})"
            add(point, "twin", None, label)
            pair("isolation", label, point)
    for label in [label for label in shuffled if label in gates]:
        add(f"shuffled({label})", "control", gates[label], label)
        pair("control", label, f"shuffled({label})")
    for method in published:
        add(method, "published")
        for label in gates:
            pair("published", label, method)
    for label, gate in gates.items():
        flat = next((n for n, g in gates.items() if gate.d != 0 and g.abcd == (*gate.abcd[:3], 0.0)), None)
        if flat is not None:
            pair("gap", label, flat)
    return list(specs.values()), pairs


def _replicated(pair: Comparison) -> Comparison:
    return Comparison(**{**asdict(pair), "role": "replication"})


# ---------------------------------------------------------------------------------------------------- the draws


class _Draws:
    """The rows of a task, how hard they are, and what a run says about them."""

    def __init__(
        self, seed: int, task: str, labels: tuple[str, ...], rows: int, duplicates: int, text: str, probabilities: bool
    ) -> None:
        self.seed, self.task, self.labels, self.duplicates, self.text = seed, task, labels, duplicates, text
        self.probabilities = probabilities
        self.rng = self.generator("rows")
        weights = np.array([1 / (i + 1) for i in range(len(labels))])
        self.gold = {
            split: [labels[i] for i in self.rng.choice(len(labels), size=n, p=weights / weights.sum())]
            for split, n in (("val", max(rows // 2, 1)), ("test", rows))
        }
        self.hard = {split: self.rng.normal(size=len(gold)) for split, gold in self.gold.items()}

    def generator(self, *names: object) -> np.random.Generator:
        digest = hashlib.sha256("|".join(map(str, (self.seed, self.task, *names))).encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:8], "big"))

    def predictions(self, split: str, accuracy: float, *names: object) -> list[str | None]:
        rng = self.generator(split, *names)
        own = rng.normal(size=len(self.gold[split]))
        latent = math.sqrt(_SHARED) * self.hard[split] + math.sqrt(1 - _SHARED) * own
        right = latent < _NORMAL.inv_cdf(min(max(accuracy, 0.02), 0.98))
        said: list[str | None] = []
        for gold, correct in zip(self.gold[split], right, strict=True):
            others = [label for label in self.labels if label != gold]
            wrong = None if rng.random() < 0.03 else others[int(rng.integers(len(others)))]
            said.append(gold if correct else wrong)
        return said

    def write(self, folder: Path, split: str, said: Sequence[str | None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _write_lines(
            RunFolder(folder).predictions_file(split),
            [
                {"index": i, "text": f"{self.text} {i}", "gold": gold, "label": label, "raw": str(label), "ended": True}
                for i, (gold, label) in enumerate(zip(self.gold[split], said, strict=True))
            ],
        )

    def likely(self, split: str, said: Sequence[str | None]) -> list[LabelProbabilities]:
        """The label that was said is the most probable one, by more where the text is easy."""
        rng = self.generator("likely", split, *said)
        found = []
        for label, hard in zip(said, self.hard[split], strict=True):
            scores = {one: float(rng.normal()) for one in self.labels}
            if label is not None:
                scores[label] = max(scores.values()) + float(rng.exponential(1.5)) + max(0.0, -hard)
            total = math.log(sum(math.exp(score) for score in scores.values()))
            found.append(LabelProbabilities.of(self.labels, [score - total - 0.02 for score in scores.values()]))
        return found

    def scored(self, split: str, said: Sequence[str | None]) -> Score:
        gold, skip = self.gold[split], self.duplicates if split == "test" else 0
        full = measure(gold, said, self.labels)
        clean: dict[str, Any] = {}
        if split == "test":
            clean = measure(gold[skip:], said[skip:], self.labels).as_json()
        record = {"split": split, "metrics": full.as_json(), "duplicates": skip, "without_duplicates": clean}
        if self.probabilities:
            rows = (gold, self.likely(split, said))
            record["calibration"] = calibrate(*rows, rows).as_json()
        return Score.from_json(record)


def with_labels(score: Score, **changes: Any) -> Score:
    """The score with other statistics of its labels; its accuracy is that of `correct`."""
    assert score.labels is not None
    labels = replace(score.labels, **changes)
    accuracy = labels.correct / score.count
    return replace(score, accuracy=accuracy, metrics=replace(score.metrics, score=accuracy, labels=labels))


def set_correct(metrics: dict[str, Any], correct: int) -> None:
    """Give the metrics of a record of labels this many right answers, all of the first label."""
    for place, row in enumerate(metrics["per_label"]):
        row["correct"] = 0 if place else correct
    metrics |= {"score": correct / metrics["count"], "accuracy": correct / metrics["count"], "correct": correct}


def _run(spec: RunSpec, folder: Path, draws: _Draws, *, effect: float, noise: float, steps: int) -> RunResult:
    folder.mkdir(parents=True, exist_ok=True)
    own = draws.generator("run", spec.point, spec.seed)
    luck = draws.generator("seed", spec.seed).normal(scale=noise)
    accuracy = 0.74 + (luck + own.normal(scale=noise) + effect) / 100
    scores = {}
    for split in ("val", "test"):
        said = draws.predictions(split, accuracy, spec.point, spec.seed)
        scores[split] = draws.scored(split, said)
        draws.write(folder, split, said)
    lam = _lam(spec, draws)
    _write_lines(RunFolder(folder).log_file("metrics"), _curve(lam, steps, own))
    way = [0, steps // 2, steps]
    _write_lines(
        RunFolder(folder).log_file("evaluations"),
        [
            {
                "step": s,
                "split": "val",
                "accuracy": 0.42 + (accuracy - 0.42) * (1 - math.exp(-4 * s / steps)),
                "macro_f1": 0.4,
            }
            for s in way
        ],
    )
    static = float(lam.mean()) if spec.kind in ("twin", "static") and lam is not None else None
    gate = spec.gate if spec.kind != "twin" else Gate.static(static or 0.5).abcd
    tokens = steps * 96
    return RunResult(
        spec,
        "done",
        folder,
        gate=gate,
        lam=static,
        scores=scores,
        lam_stats=_lam_stats(lam, tokens),
        chosen_step=steps,
        cost=Cost(
            seconds=6 + 2 * float(own.random()),
            cpu_seconds=6.0,
            steps=steps,
            response_tokens=tokens,
            teacher_tokens=int(own.integers(200, 4000)),
            scores_asked=tokens,
            scores_cached=int(tokens * own.uniform(0.85, 0.99)),
        ),
        environment={
            "gatespace": "0.1.0",
            "commit": "0123456789abcdef0123456789abcdef01234567",
            "python": "3.11.2",
            "packages": {"torch": "2.9.0", "transformers": "5.5.0"},
            "machine": "x86_64",
            "system": "Linux",
            "threads": 1,
            "device": "cpu",
            "precision": "fp32",
        },
        fingerprint=hashlib.sha256(spec.id.encode()).hexdigest()[:16],
    )


def _lam(spec: RunSpec, draws: _Draws) -> np.ndarray | None:
    """λ of some tokens, from the gate and drawn signals."""
    if spec.kind == "published":
        return None
    if spec.kind == "twin":
        of = Gate.named(spec.of or "")
        return np.full(400, _gated(of, draws.generator("signals", spec.seed)).mean())
    return _gated(Gate(*(spec.gate or (0, 0, 0, 0))), draws.generator("signals", spec.seed))


def _gated(gate: Gate, rng: np.random.Generator) -> np.ndarray:
    h, u, gap = rng.beta(1.2, 2.5, size=400), rng.beta(1.5, 3.0, size=400), rng.beta(0.7, 1.4, size=400)
    return np.array([sigmoid(gate.logit(h=x, u=y, gap=z)) for x, y, z in zip(h, u, gap, strict=True)])


def _lam_stats(lam: np.ndarray | None, tokens: int) -> LamStats | None:
    if lam is None:
        return None
    counts = np.histogram(lam, bins=_BINS, range=(0.0, 1.0))[0]
    saturated = float(np.mean((lam < SATURATION) | (lam > 1 - SATURATION)))
    weight = np.linspace(0.5, 1.5, lam.size)
    return LamStats(
        mean=float(lam.mean()),
        sd=float(lam.std()),
        saturated=saturated,
        hist=tuple(int(c) for c in counts),
        rkl_mean=float((lam * weight).sum() / weight.sum()),
        tokens=tokens,
    )


def _curve(lam: np.ndarray | None, steps: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    records = []
    for step in range(1, steps + 1):
        left = math.exp(-3 * step / steps)
        forward, reverse = 0.1 + 1.2 * left + 0.05 * rng.random(), 0.08 + 0.9 * left + 0.05 * rng.random()
        mean = None if lam is None else float(lam.mean() + 0.05 * left)
        weight = 0.5 if mean is None else mean
        records.append(
            {
                "step": step,
                "tokens": 96,
                "loss": weight * reverse + (1 - weight) * forward,
                "forward_kl": forward,
                "reverse_kl": reverse,
                "lam_mean": mean,
                "lam_sd": None if lam is None else float(lam.std()),
                "h": 0.3 + 0.1 * left,
                "u": 0.33,
                "gap": 0.2 + 0.4 * left,
            }
        )
    return records


def _write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record, sort_keys=True) + "\n" for record in records), encoding="utf-8")
