"""The two complete configurations: `TrainConfig` for `gatespace train`, `TeachConfig` for `gatespace teach`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import model_validator

from gatespace.config.address import is_address
from gatespace.config.base import Count, Fault, Name, Place, Section, Seed, Switch
from gatespace.config.objective import ObjectiveConfig
from gatespace.config.sections import (
    AlarmsConfig,
    CheckpointConfig,
    EngineConfig,
    EvaluationConfig,
    LoraConfig,
    OptimizerConfig,
    PairConfig,
    RolloutConfig,
    TeacherConfig,
    TeachOptimizerConfig,
    TeachTraceConfig,
    TraceConfig,
    TrainEvaluationConfig,
    choose_on_validation,
)
from gatespace.config.task import TaskConfig


def _check_probabilities(task: TaskConfig, evaluation: EvaluationConfig) -> None:
    if task.text is not None and evaluation.probabilities:
        raise Fault("evaluation.probabilities", "only labels have probabilities, and task.text has none")


class TrainConfig(Section):
    """On-policy distillation of a teacher into a student. Defaults are the paper's where it states them."""

    task: TaskConfig = TaskConfig()
    """Texts and labels, and how a model is prompted."""

    pair: PairConfig
    """Student and teacher."""

    objective: ObjectiveConfig = ObjectiveConfig()
    """What is minimised at a token."""

    rollout: RolloutConfig = RolloutConfig()
    """How responses are obtained."""

    teacher: TeacherConfig = TeacherConfig()
    """What the teacher sends, and where its scores are kept."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its learning rate."""

    engine: EngineConfig = EngineConfig()
    """Where and how the numbers are computed."""

    evaluation: TrainEvaluationConfig = TrainEvaluationConfig()
    """Accuracy on held-out texts."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """What a killed run resumes from."""

    trace: TraceConfig = TraceConfig()
    """What is recorded during training."""

    alarms: AlarmsConfig = AlarmsConfig()
    """When the run warns that training collapses, or ends."""

    steps: Count = 100
    """Updates of the student: 100 on emotion, 200 on hate and offensive in the paper."""

    batch_size: Count = 72
    """Prompts per step."""

    seed: Seed = 42
    """Seed for the order of the prompts and for sampling. The paper's single runs have 42, its replications 42, 2 and
    3."""

    plugins: tuple[Name, ...] = ()
    """Your own Python files or modules, imported before the run: signals, objectives or tasks that they register are
    known by name. Their source is part of the run's identity."""

    output: Place = Path("runs/train")
    """The folder of the run."""

    @model_validator(mode="before")
    @classmethod
    def _pair(cls, data: Any) -> Any:
        """Without a pair it is the teacher that is missing."""
        return {"pair": {}, **data} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _chooses_on_validation(self) -> TrainConfig:
        choose_on_validation(self.evaluation, self.checkpoint)
        return self

    @model_validator(mode="after")
    def _stops_by_what_is_measured(self) -> TrainConfig:
        for name in ("entropy", "overlap"):
            if name in self.alarms.stop_on and not self.trace.tokens_every:
                raise Fault("alarms.stop_on", f"{name} is measured every trace.tokens_every steps, which is 0")
        if "legal" in self.alarms.stop_on and self.task.text is not None:
            raise Fault(
                "alarms.stop_on", "legal is about labels, and task.text has none", instead="truncated, repeated"
            )
        return self

    @model_validator(mode="after")
    def _free_text_has_no_labels(self) -> TrainConfig:
        if self.task.text is not None and self.objective.over_labels:
            what = f"{self.objective.support} is over labels, and task.text has none"
            raise Fault("objective.support", what, instead="full")
        _check_probabilities(self.task, self.evaluation)
        return self

    @model_validator(mode="after")
    def _services_only_score(self) -> TrainConfig:
        if self.rollout.source.teacher > 0 and self.pair.teachers is not None:
            what = "several teachers score responses and generate none"
            raise Fault("rollout.from.teacher", what, instead="0, or one teacher")
        if self.rollout.source.teacher > 0 and any(map(is_address, self.pair.scorers().values())):
            what = "a teacher that is a service scores responses and generates none"
            raise Fault("rollout.from.teacher", what, instead="0, or a teacher in this process")
        return self

    @model_validator(mode="after")
    def _rows_name_their_teachers(self) -> TrainConfig:
        for name in ("text", "table"):  # a plugin's task may assign teachers itself
            data = getattr(self.task, name)
            if self.pair.teachers is not None and data is not None and data.teacher_column is None:
                what = "which column names the teacher of each row (pair.teachers)?"
                raise Fault(f"task.{name}.teacher_column", what, instead="its name, or one pair.teacher")
        for name, value in self.teacher.options.items():
            if isinstance(value, dict) and name not in (self.pair.teachers or {}):
                raise Fault(f"teacher.options.{name}", "has options, and is no name of pair.teachers")
        return self

    def alone(self, scorer: str) -> TrainConfig:
        """The same run with one of `pair.scorers()` as its only teacher, and that teacher's options."""
        given = self.teacher.options
        own = given.get(scorer.removeprefix("teachers."))
        options = {key: value for key, value in given.items() if not isinstance(value, dict)}
        options |= own if isinstance(own, dict) else {}
        teacher = self.teacher.model_copy(update={"options": options})
        return self.model_copy(update={"pair": self.pair.alone(scorer), "teacher": teacher})

    @model_validator(mode="after")
    def _one_sampler(self) -> TrainConfig:
        if self.evaluation.engine not in ("native", self.rollout.engine):
            what = f"{self.evaluation.engine} evaluates only where it samples the responses too"
            raise Fault("evaluation.engine", what, instead=f"native, or rollout.engine: {self.evaluation.engine}")
        if self.evaluation.engine != "native" and self.evaluation.probabilities:
            what = "probabilities of labels come from the model in this process"
            raise Fault("evaluation.probabilities", what, instead="false, or evaluation.engine: native")
        return self

    @model_validator(mode="after")
    def _labels_are_not_sampled(self) -> TrainConfig:
        if not self.objective.over_labels:
            return self
        support, rollout, usual = self.objective.support, self.rollout, RolloutConfig()
        if self.teacher.payload != "hidden":
            raise Fault(
                "teacher.payload", f"the support {support} needs the teacher's full distribution", instead="hidden"
            )
        for name in ("source", "temperature", "top_p", "per_prompt", "staleness", "engine"):
            if getattr(rollout, name) != getattr(usual, name):
                setting = "from" if name == "source" else name
                raise Fault(
                    f"rollout.{setting}", f"has no meaning with objective.support: {support}, which samples nothing"
                )
        return self

    @model_validator(mode="after")
    def _top_k_is_enough(self) -> TrainConfig:
        """Reject settings that a top-K payload cannot serve; `build_objective` asks the method whether it can."""
        if self.teacher.payload == "hidden":
            return self
        goal, k = self.objective, self.teacher.k
        hidden = "teacher.payload: hidden"
        if goal.temperature != 1 and goal.support not in ("full", "renorm"):
            what = f"with a top-K teacher the support {goal.support} is known at temperature 1 only"
            raise Fault("objective.temperature", what, instead=f"1, objective.support: renorm, or {hidden}")
        if goal.entropy == "full":
            what = "full needs the teacher's full distribution"
            raise Fault("objective.entropy", what, instead=f"top_k, or {hidden}")
        for name, value in (("top_k", goal.top_k), ("support_k", goal.support_k)):
            if value is not None and value > k:
                raise Fault(f"objective.{name}", f"the teacher sends its top {k} only (teacher.k)")
        return self


class TeachConfig(Section):
    """Supervised fine-tuning of a teacher on a task's gold responses."""

    task: TaskConfig = TaskConfig()
    """Texts and labels, and how a model is prompted. Only the rows of `split.teacher` are learned from."""

    model: Name = "smollm2"
    """The model to start from: a folder, smollm2 (fetched and converted once), tiny (built for the task), or the name
    of a model on the Hugging Face Hub."""

    revision: Name | None = None
    """Branch, tag or commit of a model from the Hub; null: its main branch."""

    trust_remote_code: Switch = False
    """Run Python code that comes with the model. Only for models whose code you have read."""

    lora: LoraConfig | None = None
    """LoRA adapters; null: all weights are trained. The teacher is written with the adapters merged in."""

    optimizer: TeachOptimizerConfig = TeachOptimizerConfig()
    """AdamW and its learning rate."""

    engine: EngineConfig = EngineConfig()
    """Where and how the numbers are computed."""

    evaluation: EvaluationConfig = EvaluationConfig()
    """Accuracy on held-out texts."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """What a killed run resumes from."""

    trace: TeachTraceConfig = TeachTraceConfig()
    """What is recorded during training."""

    steps: Count = 120
    """Updates of the model."""

    batch_size: Count = 24
    """Rows per step."""

    seed: Seed = 42
    """Seed for the order of the rows."""

    plugins: tuple[Name, ...] = ()
    """Your own Python files or modules, imported before the run: signals, objectives or tasks that they register are
    known by name. Their source is part of the run's identity."""

    output: Place = Path("runs/teach")
    """The folder of the run, in which the teacher is written."""

    @model_validator(mode="after")
    def _chooses_on_validation(self) -> TeachConfig:
        choose_on_validation(self.evaluation, self.checkpoint)
        return self

    @model_validator(mode="after")
    def _free_text_has_no_labels(self) -> TeachConfig:
        _check_probabilities(self.task, self.evaluation)
        return self
