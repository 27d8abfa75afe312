"""Expand a study file into runs and comparisons, before anything is trained.

The plan is a function of the file and of the bases chosen on validation. A run's id contains a hash of every setting
that can change its numbers, so a changed file yields new runs, never new numbers under an old name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gatespace.config import StudyConfig, TaskConfig, TeachConfig, TrainConfig, dump_config, identity, parse_config
from gatespace.errors import UsageError, unknown_name
from gatespace.gating.coefficients import Gate, NotApplicable
from gatespace.plugins import plugins_digest
from gatespace.study.points import CANDIDATES, Catalogue, Point, base_of
from gatespace.study.records import Axis, Comparison, Kind, RunSpec

NINE: tuple[tuple[str, str, str], ...] = (
    ("hate", "H1", "entropy-only(-4)"),
    ("hate", "HG4,d+2", "gap-only(+2)"),
    ("emotion", "HG5,d+4", "entropy-only(-4)"),
    ("offensive", "H1", "entropy-only(-4)"),
    ("offensive", "H1", "gap-only(+2)"),
    ("offensive", "G2", "entropy-only(-4)"),
    ("hate", "G4", "twin(G4)"),
    ("emotion", "HG5,d+4", "twin(HG5,d+4)"),
    ("offensive", "H1", "twin(H1)"),
)
"""The comparisons of the paper's Table 3seed: TweetEval task, left, right."""

ROLES = ("teacher", "student")
_PLACEHOLDER = "made by the study"
_ORDER: tuple[Kind, ...] = ("point", "restriction", "static", "published", "control", "twin")


@dataclass(frozen=True)
class Plan:
    """Runs and comparisons of a study.

    Args:
        config: The study file.
        runs: By id, in display order.
        comparisons: All cells, including those that are not applicable.
        points: (task, label) → point.
        bases: Task → the point that its HG points are built on. Tasks whose base is not chosen yet are left out.
    """

    config: StudyConfig
    runs: Mapping[str, RunSpec]
    comparisons: tuple[Comparison, ...]
    points: Mapping[tuple[str, str], Point]
    bases: Mapping[str, str]

    @property
    def open_bases(self) -> tuple[str, ...]:
        """Tasks whose base will be chosen on validation once the candidates' runs are done."""
        return tuple(sorted({run.task for run in self.runs.values() if self.points[run.task, run.point].d is not None}))

    def find(self, task: str, point: str, seed: int) -> RunSpec | None:
        """The run at a point and seed."""
        wanted = (task, point, seed)
        return next((run for run in self.runs.values() if (run.task, run.point, run.seed) == wanted), None)

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {
            "study": self.config.name,
            "runs": [
                {
                    "id": run.id,
                    "task": run.task,
                    "point": run.point,
                    "gate": None if run.gate is None else list(run.gate),
                    "seed": run.seed,
                    "kind": run.kind,
                    "of": run.of,
                    "needs": list(run.needs),
                }
                for run in self.runs.values()
            ],
            "comparisons": [vars(comparison) for comparison in self.comparisons],
            "bases": dict(self.bases),
        }


def make_plan(config: StudyConfig, bases: Mapping[str, str] | None = None) -> Plan:
    """Expand a study file.

    Args:
        config: The study file.
        bases: Task → base chosen on validation, for tasks whose base the file leaves open.
    """
    chosen = dict(bases or {})
    runs: dict[str, RunSpec] = {}
    comparisons: list[Comparison] = []
    points: dict[tuple[str, str], Point] = {}
    known: dict[str, str] = {}
    for task in config.tasks:
        base = base_of(config, task) or chosen.get(task)
        if base is not None:
            known[task] = base
        planner = _TaskPlanner(config, task, Catalogue(config, task, base))
        planner.expand()
        runs |= planner.runs
        comparisons += planner.comparisons
        points |= {(task, label): planner.catalogue[label] for label in planner.seeds}
    return Plan(config, runs, tuple(comparisons), points, known)


def least_runs(config: StudyConfig) -> int:
    """Lower bound on the number of runs, without making the plan: points times seeds."""
    points = {name: config.points if task.points is None else task.points for name, task in config.tasks.items()}
    swept = [len(points[name]) for name, task in config.tasks.items() if task.sweep and points[name] != "paper"]
    return len(config.seeds) * sum(swept)


class _TaskPlanner:
    """Runs and comparisons of one task."""

    def __init__(self, config: StudyConfig, task: str, catalogue: Catalogue) -> None:
        self.config, self.task, self.catalogue = config, task, catalogue
        self.comparisons: list[Comparison] = []
        self.runs: dict[str, RunSpec] = {}
        self.seeds: dict[str, dict[int, None]] = {}
        """Label of each point to run → its seeds, in order."""

    def expand(self) -> None:
        study, seeds = self.config, self.config.seeds
        if study.tasks[self.task].sweep:
            cells = list(self._cells())
            for label in self.catalogue.family:
                self._want(label, seeds)
            for seed in seeds:
                for axis, left, right, restriction in cells:
                    self._compare(axis, left, right, seed, restriction=restriction)
        if study.replication is not None:
            self._replicate()
        order = sorted(self.seeds, key=lambda label: _ORDER.index(self.catalogue[label].kind))
        ids: dict[tuple[str, int], str] = {}
        for label in order:
            point = self.catalogue[label]
            for seed in self.seeds[label]:
                run = self._run(point, seed, ids)
                ids[label, seed] = run.id
                self.runs[run.id] = run

    # ------------------------------------------------------------------ cells

    def _cells(self) -> Iterable[tuple[Axis, str, Point | NotApplicable | None, Any]]:
        axes, points = self.config.axes, self.catalogue
        dynamic = [label for label in points.family if points[label].is_dynamic]
        if axes.restrictions:
            for label in points.family:
                for name in ("gap-only", "entropy-only"):
                    yield "restriction", label, points.restriction(label, name), name
        if axes.gap:
            for label in points.family:
                if (other := points.without_gap(label)) is not None:
                    yield "gap", label, other, None
        for lam in axes.static:
            for label in dynamic:
                yield "static", label, points.gate(Gate.static(lam), "static"), None
        for method in axes.published:
            for label in dynamic:
                yield "published", label, points.published(method), None
        if axes.isolation is not None:
            for label in self._chosen(axes.isolation.points, dynamic, "axes.isolation.points"):
                for match in axes.isolation.match:
                    yield "isolation", label, points.twin(label, match), None
        for label in self._chosen(axes.controls.shuffled, dynamic, "axes.controls.shuffled"):
            yield "control", label, points.shuffled(label), None

    def _chosen(self, wanted: str | tuple[str, ...], dynamic: list[str], setting: str) -> list[str]:
        if wanted == "all":
            return dynamic
        found = []
        for text in wanted:
            try:
                label = self.catalogue.find(text).label
            except UsageError as error:
                raise UsageError(f"{setting}: {error.what}", got=error.got, instead=error.instead) from None
            if label in dynamic:  # it may be a point of another task only
                found.append(label)
        return found

    def _compare(
        self,
        axis: Axis,
        left: str,
        right: Point | NotApplicable | None,
        seed: int,
        *,
        restriction: Any = None,
        replication: bool = False,
    ) -> None:
        common: dict[str, Any] = {"task": self.task, "axis": axis, "left": left, "seed": seed}
        common |= {"restriction": restriction, "role": "replication" if replication else "sweep"}
        if isinstance(right, NotApplicable):
            self.comparisons.append(Comparison(**common, right=restriction, status="n/a", reason=right.reason))
        elif right is None:
            reason = "if the base that validation chooses has a ≠ 0"
            self.comparisons.append(Comparison(**common, right=f"{restriction}(base)", reason=reason))
        else:
            if right.label != "base":
                self._want(right.label, [seed])
            self.comparisons.append(Comparison(**common, right=right.label))

    def _replicate(self) -> None:
        replication = self.config.replication
        assert replication is not None
        sweep = self.config.seeds
        fresh = replication.seeds or sweep
        if replication.comparisons == "all":
            for old in [cell for cell in self.comparisons if cell.seed == sweep[0]]:
                for seed in fresh:
                    if old.status == "comparable":
                        for label in (old.left, old.right):
                            if label in self.seeds:
                                self._want(label, [seed])
                    values = {**vars(old), "seed": seed, "role": "replication"}
                    self.comparisons.append(Comparison(**values))
            return
        seen = {(cell.axis, cell.left, cell.right, cell.seed) for cell in self.comparisons}
        for left_text, right_text in self._pairs(replication.comparisons):
            left, right = self.catalogue.find(left_text), self.catalogue.find(right_text)
            axis, restriction = _axis(right)
            for seed in dict.fromkeys((*sweep, *fresh)):
                for label in (left.label, right.label):
                    self._want(label, [seed])
                if (axis, left.label, right.label, seed) not in seen:
                    again = seed in fresh
                    self._compare(axis, left.label, right, seed, restriction=restriction, replication=again)
        if self.seeds:
            for text in replication.beside:
                self._want(self.catalogue.find(text).label, dict.fromkeys((*sweep, *fresh)))

    def _pairs(self, wanted: Any) -> list[tuple[str, str]]:
        if wanted != "paper":
            for pair in wanted:
                if pair.task not in self.config.tasks:
                    raise unknown_name("task", pair.task, self.config.tasks)
            return [(pair.left, pair.right) for pair in wanted if pair.task == self.task]
        name = self.config.tasks[self.task].task.get("name", self.task)
        pairs = [(left, right) for task, left, right in NINE if name in (task, f"tweeteval/{task}")]
        base = self.catalogue.base
        if any(left.startswith("HG") and (base is None or not left.startswith(f"H{base}")) for left, _ in pairs):
            raise UsageError(
                f"replication.comparisons: the paper's nine have {self.task} on another base",
                got=f"base: {base or 'best'}",
                instead="base: G5 for emotion and G4 for hate, or a list of comparisons",
            )
        return pairs

    # ------------------------------------------------------------------ runs

    def _want(self, label: str, seeds: Iterable[int]) -> None:
        point = self.catalogue[label]
        self.seeds.setdefault(label, {}).update(dict.fromkeys(seeds))
        if point.of is not None:
            self._want(point.of, [self._source_seed(point, seed) for seed in seeds])

    def _source_seed(self, point: Point, seed: int) -> int:
        """Seed of the dynamic run whose E[λ] a twin uses."""
        isolation = self.config.axes.isolation
        first = isolation is not None and isolation.reuse == "first-seed"
        return self.config.seeds[0] if first and point.kind == "twin" else seed

    def _run(self, point: Point, seed: int, ids: Mapping[tuple[str, int], str]) -> RunSpec:
        needs: list[str] = []
        if point.kind == "twin":
            assert point.of is not None
            needs = [ids[point.of, self._source_seed(point, seed)]]
        elif point.d is not None or (point.kind == "control" and point.gate is None):
            needs = [ids[name, s] for name in CANDIDATES for s in self.config.seeds if (name, s) in ids]
        config = train_config(self.config, self.task, seed, objective(point, lam=0.5), rollout=point.rollout)
        recipe: dict[str, Any] = {"identity": _identity(config), "models": _model_identities(self.config, self.task)}
        if point.match is not None:
            isolation = self.config.axes.isolation
            recipe |= {"twin": needs, "match": point.match, "decimals": isolation and isolation.decimals}
        if point.d is not None:
            recipe |= {"d": point.d}
        return RunSpec(
            id=f"{self.task}-{slug(point.label)}-s{seed}-{_digest(recipe)}",
            task=self.task,
            point=point.label,
            kind=point.kind,
            seed=seed,
            gate=None if point.gate is None or point.gate.extra else point.gate.abcd,
            of=point.of,
            needs=tuple(needs),
        )


# ---------------------------------------------------------------------------------------------------- configurations


def objective(point: Point, *, lam: float | None = None) -> dict[str, Any]:
    """The `objective` settings of a run at this point.

    Args:
        point: The point.
        lam: The constant λ of a twin.
    """
    if point.method is not None:
        return {"method": point.method.method, "params": point.method.params}
    gate = Gate.static(lam) if point.kind == "twin" and lam is not None else point.gate
    if gate is None:
        gate = Gate()
    settings: dict[str, Any] = {"method": "gated", "gate": str(gate)}
    return settings | ({"shuffle": True} if point.kind == "control" else {})


def train_config(
    study: StudyConfig,
    task: str,
    seed: int,
    goal: Mapping[str, Any],
    *,
    rollout: Mapping[str, Any] | None = None,
    models: Mapping[str, str] | None = None,
    cache: str | None = None,
    output: Path | None = None,
    threads: int | None = None,
) -> TrainConfig:
    """The complete configuration of one run.

    Args:
        study: The study file.
        task: Its task.
        seed: Its seed.
        goal: The result of `objective`.
        rollout: The point's own `rollout` settings.
        models: Role → folder of a model that the study has trained.
        cache: Folder of the score cache, unless the file names one.
        output: The run's folder.
        threads: CPU threads, unless the file sets them.
    """
    settings = _merged(study.train, study.tasks[task].train)
    settings["task"] = study.tasks[task].task
    settings["seed"] = seed
    settings["objective"] = {**settings.get("objective", {}), **goal}
    settings = _merged(settings, {"rollout": rollout or {}})
    pair = dict(settings.get("pair", {}))
    if study.teach.teacher is not None and pair.get("teachers"):
        what = f"{study.name}: train.pair.teachers: the study makes a teacher, and these are in its place"
        raise UsageError(what, instead="teach.teacher: null; `gatespace teach` makes each of them")
    for role in ROLES:
        if getattr(study.teach, role) is not None:
            pair[role] = (models or {}).get(role, _PLACEHOLDER)
    settings["pair"] = pair
    if output is not None:
        settings["output"] = str(output)
    if cache is not None:
        settings["teacher"] = {"cache": cache, **settings.get("teacher", {})}
    settings["checkpoint"] = {**settings.get("checkpoint", {}), "model": study.keep_models}
    settings["evaluation"] = {"every": 0, **settings.get("evaluation", {})}
    if threads is not None:
        settings["engine"] = {"threads": threads, **settings.get("engine", {})}
    settings["plugins"] = list(study.plugins)
    config = parse_config(TrainConfig, settings, where=f"{study.name}: train")
    for split in ("val", "test"):
        if split not in config.evaluation.final:
            raise UsageError(
                f"{study.name}: train.evaluation.final: must have {split}",
                why="choices are made on val, and evidence comes from test",
            )
    return config


def teach_config(
    study: StudyConfig, task: str, role: str, *, output: Path | None = None, threads: int | None = None
) -> TeachConfig | None:
    """The configuration that trains the teacher or student of a task, or None if the study trains none."""
    given = getattr(study.teach, role)
    if given is None:
        return None
    # A model's test rows are read once, by its baseline, and nothing is selected during training.
    usual: dict[str, Any] = {"every": 0, "final": []}
    if study.tasks[task].task.get("text") and "evaluation" in given:  # free text, of a length that `train` knows
        usual["max_new_tokens"] = train_config(study, task, study.seeds[0], {}).evaluation.max_new_tokens
    settings = _merged({"evaluation": usual}, given)
    settings["task"] = _merged(study.tasks[task].task, settings.get("task", {}))
    if output is not None:
        settings["output"] = str(output)
    if threads is not None:
        settings["engine"] = {"threads": threads, **settings.get("engine", {})}
    settings["plugins"] = list(study.plugins)
    return parse_config(TeachConfig, settings, where=f"{study.name}: teach.{role}")


def model_name(study: StudyConfig, task: str, role: str) -> str | None:
    """Name of the model that the study trains for a role, or None if it trains none."""
    found = _model_identities(study, task).get(role)
    return None if found is None else f"{task}-{role}-{found[:8]}"


def _model_identities(study: StudyConfig, task: str) -> dict[str, str]:
    """Role → identity hash of the model that the study trains for it."""
    configs = {role: teach_config(study, task, role) for role in ROLES}
    return {role: _identity(config) for role, config in configs.items() if config is not None}


def _identity(config: TrainConfig | TeachConfig) -> str:
    """Identity of a configuration before models and data are resolved. Plugins are hashed by their source."""
    return identity(config, content={"plugins": plugins_digest(config.plugins)} if config.plugins else {})


def ending(study: StudyConfig, task: str) -> str:
    """Describe a task's early stopping and checkpoint selection as a clause; "" if it has neither.

    A task's runs differ only in objective and seed, so both sides of a comparison follow the same rule.
    """
    settings = _merged(study.train, study.tasks[task].train)
    if "patience" not in (settings.get("evaluation") or ()) and "select" not in (settings.get("checkpoint") or ()):
        return ""
    config = train_config(study, task, study.seeds[0], {})
    checks, parts = config.evaluation, []
    if checks.patience is not None:
        parts.append(
            f"a run ends before step {config.steps} where {checks.patience} evaluations on {checks.split} in a row, "
            f"one every {checks.every} steps, are no better than the best before them"
        )
    if config.checkpoint.select == "best":
        parts.append(f"the weights of a run are those of its best evaluation on {checks.split}")
    return "; ".join(parts) and f"all points by the same rule: {'; '.join(parts)}"


def baseline_name(study: StudyConfig, task: str, role: str) -> str:
    """Name of the evaluation of a task's student or teacher before the runs."""
    run = train_config(study, task, study.seeds[0], {})
    config, name = dump_config(run), run.pair.model(role)
    del config["evaluation"]["patience"]  # only applies to training
    if not config["evaluation"]["probabilities"]:  # keeps names from before the setting existed
        del config["evaluation"]["probabilities"]
    for kind in ("table", "text"):
        if config["task"][kind] is not None and config["task"][kind]["teacher_column"] is None:
            del config["task"][kind]["teacher_column"]
    recipe = {
        "task": config["task"],
        "model": [name[0] or config["pair"]["teachers"], name[1], model_name(study, task, name[2])],
        "evaluation": config["evaluation"],
        "precision": config["engine"]["precision"],
    }
    if study.plugins:
        recipe["plugins"] = plugins_digest(study.plugins)
    if (how := run.pair.quantization(role)) is not None:
        recipe["quantization"] = how
    if role == "teacher" and run.teacher.prompt is not None:
        recipe["prompt"] = config["teacher"]["prompt"]
    return f"{task}-{'start' if role == 'student' else role}-{_digest(recipe)}"


def check(study: StudyConfig) -> Plan:
    """Make the plan of a file, validating every configuration that it implies."""
    plan = make_plan(study)
    for name, task in study.tasks.items():
        parse_config(TaskConfig, task.task, where=f"{study.name}: tasks.{name}.task")
    if not plan.runs:
        raise UsageError(f"{study.name}: there is nothing to run", why="no task has a sweep or a replication")
    return plan


def slug(label: str) -> str:
    """Make a label safe for file names."""
    text = re.sub(r"\((?=[-+])", "", label).replace("(", "-")
    return re.sub(r"[^A-Za-z0-9.+_-]", "", text)


def _axis(right: Point) -> tuple[Axis, str | None]:
    """The axis of a comparison with `right`, and the name of the restriction if it is one."""
    if right.kind == "twin":
        return "isolation", None
    if right.kind == "control":
        return "control", None
    if right.kind == "published":
        return "published", None
    if right.gate is not None and right.gate.is_static:
        return "static", None
    if right.kind == "restriction" and right.gate is not None:
        return "restriction", "entropy-only" if right.gate.a else "gap-only"
    return "gap", None


def _digest(recipe: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `above` into `below` recursively."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
