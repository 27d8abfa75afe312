"""A study file: tasks × points × axes × seeds over shared training settings.

The `train` and `teach` sections, shared by all runs, are stored as written; `gatespace.study.plan` expands them into
one complete configuration per run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AllowInfNan, BeforeValidator, Field, Strict, model_validator

from gatespace.config.base import Count, CountOrZero, Fault, Name, Place, Section, Seed, Switch
from gatespace.config.objective import GateValue, Parameter, gate_value, method_parameters

BEST = "best"


def _once(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError("must not name anything twice")
    return values


def _some(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        raise ValueError("must not be empty")
    return _once(values)


def _settings(value: Any) -> Any:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("must be a mapping of settings")
    return dict(value)


def _points(value: Any) -> Any:
    """Validate a list of gates, or a mapping from the user's names to gates."""
    if value == "paper":
        return value
    if isinstance(value, Mapping):
        return {str(name): gate_value(part) for name, part in value.items()}
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("must be paper, a list of gates such as [G4, G5, '4,0,-1,2'], or a mapping of name to gate")
    if not all(isinstance(part, str) and part.strip() for part in value):
        raise ValueError("must be a list of gates as text, e.g. [G4, G5, '4,0,-1,2']")
    return _once(tuple(part.strip() for part in value))


Settings = Annotated[dict[str, Any], BeforeValidator(_settings)]
Points = Annotated[Literal["paper"] | tuple[str, ...] | dict[str, GateValue], BeforeValidator(_points)]
Seeds = Annotated[tuple[Seed, ...], AfterValidator(_some)]
Labels = Annotated[tuple[Name, ...], AfterValidator(_once)]


class PublishedConfig(Section):
    """A published method to compare with the family."""

    method: Name
    """Its name; `gatespace methods` lists them."""

    params: Annotated[dict[str, Parameter], BeforeValidator(method_parameters)] = Field(default={})
    """Its parameters; others have the published default."""

    rollout: Settings = Field(default={})
    """Settings of `rollout` that belong to the method and differ from the study's, e.g. {top_p: 0.9}, or
    {from: {student: 0.5, teacher: 0.5}}. The comparison is then one of the method with its rollouts."""

    label: Name | None = None
    """Its name in tables; null: the method's, with the parameters and settings given here."""

    @property
    def point(self) -> str:
        """Its label in comparisons."""
        given = ",".join(f"{name}={value}" for name, value in [*self.params.items(), *_flat(self.rollout)])
        return self.label or (f"{self.method}({given})" if given else self.method)


def _flat(settings: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Flatten settings to (dotted path, value)."""
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        found += _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else [(f"{before}{name}", value)]
    return found


def _published(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list of methods, e.g. [todi, eopd, {method: jsd, params: {beta: 0.1}}]")
    return [{"method": part} if isinstance(part, str) else part for part in value]


class IsolationConfig(Section):
    """Static twins: the same training at the constant λ that a dynamic point had on average."""

    match: Annotated[tuple[Literal["lam", "rkl"], ...], AfterValidator(_some)] = ("lam", "rkl")
    """What the constant is: lam is E[λ] over all tokens of the training, as in the paper; rkl is Σλ·RKL / ΣRKL, which
    gives reverse KL the same total weight. With d > 0 the two are far apart, and a point that differs from its E[λ]
    twin alone differs in how much reverse KL it has."""

    reuse: Literal["per-seed", "first-seed"] = "per-seed"
    """Whose average: that of the dynamic run with the same seed, or, as in the paper, of the first seed for all."""

    decimals: Annotated[int, Field(ge=1, le=15)] | None = None
    """Round the constant to this many decimals (the paper: 3); null: no rounding."""

    points: Literal["all"] | Labels = "all"
    """The dynamic points that get a twin: all points of the task, or a list of labels."""


class ControlsConfig(Section):
    """Controls: a gate with one of its properties removed."""

    shuffled: Literal["all"] | Labels = ()
    """The dynamic points that get a shuffled-λ control: the values of λ in every step, assigned to its tokens at
    random. What it loses against the gate is due to where the gate puts λ, not to which values it has."""


class AxesConfig(Section):
    """What the points are compared with."""

    restrictions: Switch = True
    """Each point against its matched-magnitude restrictions: entropy-only (-|a|,0,0,0) and gap-only (0,0,0,d)."""

    gap: Switch = True
    """Each point with d against the same point without, if the study has it."""

    static: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], AfterValidator(_once)] = (0.5,)
    """Constant λ that every point is compared with."""

    isolation: IsolationConfig | None = IsolationConfig()
    """Mean-matched static twins; null: none."""

    controls: ControlsConfig = ControlsConfig()
    """Controls."""

    published: Annotated[tuple[PublishedConfig, ...], BeforeValidator(_published)] = ()
    """Published methods as their authors define them."""


class PairOfPoints(Section):
    """Two points of a task that are compared."""

    task: Name
    """The task's name in this study."""

    left: Name
    """Label of a point: G4, HG5,d+4, 4,0,-1,2."""

    right: Name
    """Label of another: entropy-only(-4), gap-only(+2), static:0.5, twin(G4), shuffled(G4), todi."""


class ReplicationConfig(Section):
    """Comparisons that were chosen elsewhere or on the selection seed, and are run on fresh seeds."""

    comparisons: Literal["paper", "all"] | tuple[PairOfPoints, ...] = "paper"
    """paper: the nine of the paper's Table 3seed, where the study has their tasks. all: every comparison of the sweep.
    Or a list of task, left and right."""

    seeds: Annotated[tuple[Seed, ...], AfterValidator(_once)] = ()
    """The fresh seeds. []: the comparisons were fixed before the study, so all its `seeds` are fresh and none is a
    selection seed; no task may have a sweep then."""

    beside: Labels = ()
    """Points that are run at the same seeds on every task with comparisons, without being compared, e.g. [static:0.5]:
    a reference for the others."""


class StudyTask(Section):
    """A task of a study."""

    task: Settings
    """Texts and labels, and how a model is prompted: the section `task` of `gatespace train`."""

    points: Points | None = None
    """Points of this task; null: those of the study."""

    base: Name | None = None
    """The point that HG points are built on: G5, G4, …, or best; null: that of the study."""

    sweep: Switch = True
    """Whether all points and axes are run on this task; false: only what the replication needs."""

    train: Settings = Field(default={})
    """Settings that differ from the study's `train` on this task, e.g. {steps: 200}."""


class TeachersConfig(Section):
    """Models trained before the runs, per task."""

    teacher: Settings | None = None
    """Settings of `gatespace teach` for the teacher of each task; null: `train.pair.teacher` exists already. Its `task`
    section contains only what differs from the study's, e.g. {split: {teacher: 0.1}}. Its baseline is evaluated as the
    runs are; on free text, its own evaluations have the `max_new_tokens` of `train.evaluation` too."""

    student: Settings | None = None
    """The same for the student that every run starts from, e.g. to teach it the response format; null: runs start from
    `train.pair.student` itself."""


Amount = Annotated[float, Strict(), AllowInfNan(False), Field(gt=0)]


class ResourcesConfig(Section):
    """Resources that each run requests from an engine. They never change a run's numbers. Local processes use only
    `retries`."""

    cpus: Amount | None = None
    """Cores; null: one per thread of the run."""

    gpus: Annotated[float, Strict(), AllowInfNan(False), Field(ge=0)] = 0.0
    """GPUs, or a fraction of one, e.g. 0.5. Ray hides all GPUs from a run that requests none."""

    memory_gb: Amount | None = None
    """Memory in GiB; null: not requested. Ray reserves it but does not enforce it."""

    custom: dict[Name, Amount] = Field(default={})
    """Resources that the cluster's nodes were started with, e.g. {a100: 1}."""

    retries: CountOrZero = 3
    """How often a run is resumed from its last checkpoint after losing its worker or node."""


class StudyConfig(Section):
    """A whole study."""

    name: Name
    """Its name in reports."""

    about: str = ""
    """A sentence or two on its question, shown in the report."""

    tasks: Annotated[dict[Name, StudyTask], Field(min_length=1)]
    """Name → task. The names appear in ids, tables and folders."""

    train: Settings = Field(default={})
    """Settings shared by all runs: those of `gatespace train` except task, objective.gate, seed and output."""

    teach: TeachersConfig = TeachersConfig()
    """Models to train first."""

    points: Points = "paper"
    """paper: the 13 points of the paper's sweeps (G1 … G5, H1 … H4 on G2, four HG points on the base). Or a list."""

    base: Name = BEST
    """The point that HG points are built on; best: the one of G1 … G5 with the best mean validation accuracy."""

    axes: AxesConfig = AxesConfig()
    """What the points are compared with."""

    outcome: Literal["accuracy", "prior_corrected", "auc"] = "accuracy"
    """What comparisons on label tasks are about. accuracy: of the responses. prior_corrected: accuracy of the most
    probable label after a bias per label, fitted on the validation rows. auc: macro AUC of the label probabilities.
    The last two need evaluation.probabilities; free text keeps its metric."""

    seeds: Seeds = (42,)
    """Seeds of the sweep."""

    selection_seed: Seed | None = None
    """The seed on which choices were made; it is left out of confirmations. null: the first of `seeds`, or none if
    `replication` has no seeds of its own."""

    replication: ReplicationConfig | None = None
    """Comparisons on fresh seeds; null: none."""

    workers: Count = 1
    """Runs at once, each in its own process with its share of the cores. Memory must hold this many pairs."""

    resources: ResourcesConfig = ResourcesConfig()
    """Resources per run, for engines such as a Ray cluster."""

    keep_models: Switch = False
    """Keep the trained weights of every run, as large as the student each; false: predictions and records only."""

    plugins: Labels = ()
    """Python files or modules of your own that every run imports first: signals, objectives or tasks that they register
    are known by name. A file lies beside the study file or below the working folder. Their source is part of each run's
    identity, and a command that would import them needs --plugin FILE or --trust-plugins."""

    tune: Settings = Field(default={})
    """Settings of `gatespace tune`, the add-on that searches for a gate; it checks them. Runs do not depend on them."""

    output: Place | None = None
    """The folder of the study; null: studies/NAME."""

    @model_validator(mode="after")
    def _is_consistent(self) -> StudyConfig:
        if self.name == ".." or Path(self.name).name != self.name or "\\" in self.name or not self.name.isprintable():
            raise Fault("name", "is also the name of a folder", instead="a name without / and \\")
        for name in self.tasks:
            if not all(char.isalnum() or char in "_." for char in name):
                raise Fault("tasks", f"{name!r} is used in ids and folders", instead="letters, digits, _ and .")
        for key in ("task", "seed", "output"):
            if key in self.train:
                raise Fault(f"train.{key}", "differs from run to run", instead="tasks, seeds, or the study's output")
        parts = {"train": self.train, "teach.teacher": self.teach.teacher, "teach.student": self.teach.student}
        parts |= {f"tasks.{name}.train": task.train for name, task in self.tasks.items()}
        for place, settings in parts.items():
            if settings is not None and "plugins" in settings:
                raise Fault(f"{place}.plugins", "all runs import the same", instead="plugins of the study itself")
        if isinstance(objective := self.train.get("objective"), Mapping):
            for key in ("gate", "method", "params", "shuffle"):
                if key in objective:
                    raise Fault(f"train.objective.{key}", "differs from run to run", instead="points and axes")
        for name, task in self.tasks.items() if self.outcome != "accuracy" else ():
            asked = [part.get("evaluation") for part in (self.train, task.train)]
            evaluation = {key: value for part in asked if isinstance(part, Mapping) for key, value in part.items()}
            known = evaluation.get("probabilities") and {"val", "test"} <= {*evaluation.get("final", ("val", "test"))}
            if not task.task.get("text") and not known:
                what = f"{self.outcome} needs label probabilities of val and test, which {name} does not have"
                raise Fault("outcome", what, instead="train: {evaluation: {probabilities: true}}")
        if self.replication is not None:
            if again := sorted(set(self.replication.seeds) & set(self.seeds)):
                raise Fault("replication.seeds", f"{again} are seeds of the sweep and not fresh")
            if self.replication.comparisons == "all" and not any(task.sweep for task in self.tasks.values()):
                raise Fault("replication.comparisons", "all are those of the sweep, and no task has one")
            if not self.replication.seeds and any(task.sweep for task in self.tasks.values()):
                raise Fault("replication.seeds", "a sweep has used `seeds`", instead="fresh ones, or sweep: false")
        if self.selection_seed is not None and self.selection_seed not in self.seeds:
            raise Fault("selection_seed", "is one of the seeds of the sweep", instead=f"one of {list(self.seeds)}")
        return self

    @property
    def choosing_seed(self) -> int | None:
        """The seed on which choices were made; all others are fresh. None if nothing was chosen."""
        if self.selection_seed is None and self.replication is not None and not self.replication.seeds:
            return None
        return self.seeds[0] if self.selection_seed is None else self.selection_seed

    def with_plugins_from(self, folder: Path) -> StudyConfig:
        """The same study with absolute paths of plugin files: in `folder`, else relative to the working directory."""

        def found(plugin: str) -> str:
            if not plugin.endswith(".py"):
                return plugin
            path = Path(plugin).expanduser()
            return str((folder / path if (folder / path).is_file() else path).absolute())

        return self.model_copy(update={"plugins": tuple(map(found, self.plugins))}) if self.plugins else self
