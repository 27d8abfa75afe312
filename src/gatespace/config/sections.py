"""The sections on how a run is computed: models, rollout, teacher, optimizer, engine, evaluation, logging."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

from pydantic import AfterValidator, AllowInfNan, BeforeValidator, Field, Strict, model_validator

from gatespace.config.address import is_address, parse_address
from gatespace.config.base import SPLITS, Count, CountOrZero, Fault, Name, Section, Share, Split, Switch, Text
from gatespace.plugins import provided

Positive = Annotated[float, Strict(), AllowInfNan(False), Field(gt=0)]
NotNegative = Annotated[float, Strict(), AllowInfNan(False), Field(ge=0)]
Beta = Annotated[float, Strict(), AllowInfNan(False), Field(ge=0, lt=1)]


def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("must not name anything twice")
    return names


def _targets(value: object) -> object:
    if value == "all-linear":
        return value
    if not isinstance(value, list | tuple) or not value or not all(isinstance(part, str) and part for part in value):
        raise ValueError("must be all-linear, or a list of names of layers")
    return _once(tuple(value))


def _device(value: str) -> str:
    if value == "mps":
        raise ValueError("cannot be mps: it has no float64, which responses are drawn with; cpu can")
    if not re.fullmatch(r"auto|cpu|(cuda|xpu)(:\d+)?", value):
        raise ValueError("must be auto, cpu, cuda, cuda:1 and so on, or xpu")
    return value


def sampler_name(value: str) -> str:
    """Validate the name of an installed sampler."""
    return _installed(value, "samplers", ["native"])


def _trackers(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_installed(name, "trackers") for name in names)


def _installed(name: str, group: str, known: Sequence[str] = ()) -> str:
    names = [*known, *provided(group)]
    if name not in names:
        raise ValueError(f"must be one of {', '.join(names) or 'none: no add-on has one'}")
    return name


def _options(value: object) -> object:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("must be a mapping of option to value")
    return {key: str(part) if isinstance(part, Path) else part for key, part in value.items()}


def _row_limit(value: object) -> object:
    counts = [*value.values()] if isinstance(value, Mapping) else [] if value is None else [value]
    if any(type(count) is not int or count < 1 for count in counts) or value == {}:
        raise ValueError("must be a whole number from 1, or a mapping of split to such a number: {val: 300}")
    if isinstance(value, Mapping) and (unknown := [key for key in value if key not in SPLITS]):
        raise ValueError(f"has no split {unknown[0]!r}; there are {', '.join(SPLITS)}")
    return value


def _teacher_options(value: object) -> object:
    found = cast("dict[str, object]", _options(value))
    return {key: _options(part) if isinstance(part, Mapping) else part for key, part in found.items()}


RowLimit = Annotated[Count | dict[Split, Count] | None, BeforeValidator(_row_limit)]
Option = bool | int | float | str | None
Options = Annotated[dict[str, Option], BeforeValidator(_options)]
TeacherOptions = Annotated[dict[str, Option | dict[str, Option]], BeforeValidator(_teacher_options)]


class LoraConfig(Section):
    """Train low-rank adapters (LoRA) instead of the weights."""

    r: Count = 16
    """The rank of the adapters."""

    alpha: Positive = 32.0
    """The adapters are scaled by alpha / r."""

    targets: Annotated[Literal["all-linear"] | tuple[str, ...], BeforeValidator(_targets)] = "all-linear"
    """The layers that get adapters: all-linear (all but the head), or a list of their names."""


SELF, SELF_EMA = "self", "self-ema"
"""Teacher names: the student's weights before training; an exponential moving average of them during training."""


class PairConfig(Section):
    """Student and teacher, with the same tokenizer unless `objective.support` is over labels."""

    student: Name = "smollm2"
    """The model that learns: a folder, smollm2 (fetched and converted once), tiny (built for the task), or the name of
    a model on the Hugging Face Hub."""

    teacher: Name | None = None
    """The model that scores: the same choices, e.g. the folder that `gatespace teach` wrote; zmq://HOST:PORT, where
    `gatespace teacher serve` has one; or vllm://HOST:PORT, where a vLLM server has one; or self, the student's own
    weights as they are before training; or self-ema, an exponential moving average of its weights. Required, unless
    `teachers` names several."""

    teachers: Annotated[dict[Name, Name], Field(min_length=1)] | None = None
    """Several teachers instead of one, name → model, with the same choices: {math: runs/math, code: zmq://HOST:PORT}.
    Each training row names its own in the column `teacher_column` of task.text or task.table."""

    ema_decay: Beta = 0.95
    """For the teacher self-ema: decay of the moving average per step. 0.95 is that of SDPO (arXiv:2601.20802)."""

    student_revision: Name | None = None
    """Branch, tag or commit of a student from the Hub; null: its main branch."""

    teacher_revision: Name | None = None
    """Branch, tag or commit of a teacher from the Hub; null: its main branch."""

    teacher_device: Annotated[str, Strict(), AfterValidator(_device)] | None = None
    """Where a teacher in this process computes: cpu, cuda:1 and so on; auto: its layers are spread over all GPUs; null:
    where the student does. Its scores go to the student's device, with a copy of its head."""

    teacher_quantization: Literal["int8", "nf4"] | None = None
    """Quantise a teacher in this process when it is loaded, all linear layers but its head; needs bitsandbytes. One
    that was saved quantised (GPTQ, AWQ, bitsandbytes) is loaded as it is."""

    student_quantization: Literal["int8", "nf4"] | None = None
    """The same for the student (QLoRA with nf4). Quantised weights are not trained: it needs `lora`."""

    trust_remote_code: Switch = False
    """Run Python code that comes with a model. Only for models whose code you have read."""

    lora: LoraConfig | None = None
    """LoRA adapters of the student; null: all its weights are trained."""

    def model(self, role: str) -> tuple[str, str | None, str]:
        """Name and revision of the ``student`` or the ``teacher``, and its role: student for a self-teacher."""
        role = "student" if role == "teacher" and self.teacher in (SELF, SELF_EMA) else role
        return getattr(self, role), getattr(self, f"{role}_revision"), role

    def scorers(self) -> dict[str, str]:
        """Setting below `pair` → model or address: ``{"teacher": …}``, or ``{"teachers.NAME": …}`` for several."""
        if self.teachers is None:
            return {} if self.teacher is None else {"teacher": self.teacher}
        return {f"teachers.{name}": model for name, model in self.teachers.items()}

    def alone(self, scorer: str) -> PairConfig:
        """The same pair with one of its `scorers` as the only teacher."""
        return self.model_copy(update={"teacher": self.scorers()[scorer], "teachers": None})

    @model_validator(mode="after")
    def _one_or_several(self) -> PairConfig:
        if self.teacher is None and self.teachers is None:
            raise Fault(
                "teacher", "is needed and not given", instead="--teacher, a folder that `gatespace teach` makes"
            )
        if self.teacher is not None and self.teachers is not None:
            raise Fault("teachers", "a pair has a teacher or teachers, not both", instead="teacher: null")
        if self.teachers is not None and self.teacher_revision is not None:
            raise Fault("teacher_revision", "it is not clear which of several teachers", instead="null; folders stay")
        models = self.scorers().values()
        if SELF_EMA in models and self.teacher_quantization is not None:
            raise Fault("teacher_quantization", "quantised weights cannot be averaged", instead="null")
        if SELF_EMA not in models and self.ema_decay != type(self).model_fields["ema_decay"].default:
            raise Fault("ema_decay", "applies to the teacher self-ema only")
        return self

    def quantization(self, role: str) -> str | None:
        """How the ``student`` or the ``teacher`` is quantised on loading."""
        found: str | None = getattr(self, f"{role}_quantization")
        return found or (self.student_quantization if self.model(role)[2] == "student" else None)

    @model_validator(mode="after")
    def _additions_are_trained(self) -> PairConfig:
        if self.student_quantization is not None and self.lora is None:
            raise Fault("student_quantization", "quantised weights are not trained", instead="null, or pair.lora: {}")
        return self

    @model_validator(mode="after")
    def _addresses(self) -> PairConfig:
        """Only a teacher can be a service, whose model is already loaded."""
        if is_address(self.student):
            raise Fault("student", "only a teacher can be a service", instead="a folder, or the name of a model")
        addresses = {setting: model for setting, model in self.scorers().items() if is_address(model)}
        for setting, address in addresses.items():
            parse_address(address, setting)
        if addresses and len(addresses) == len(self.scorers()):
            for name in ("teacher_revision", "teacher_device", "teacher_quantization"):
                if getattr(self, name) is not None:
                    raise Fault(name, "a teacher that is a service has been loaded already", instead="null")
        return self


class SourceConfig(Section):
    """Sources of the responses trained on. A source not listed has share 0; the shares sum to 1."""

    student: Share = 0.0
    """The share of responses that the student samples: 1 is on-policy distillation."""

    teacher: Share = 0.0
    """The share of responses that the teacher samples: 1 is offline distillation on the teacher's answers."""

    gold: Share = 0.0
    """The share of responses that are the right answers of the data."""

    @model_validator(mode="after")
    def _sums_to_one(self) -> SourceConfig:
        total = self.student + self.teacher + self.gold
        if abs(total - 1) > 1e-6:
            raise Fault("", f"the shares must sum to 1, not {total:g}", instead="e.g. student: 0.5, teacher: 0.5")
        return self

    def shares(self) -> dict[str, float]:
        """Source → share in a fixed order, without shares of 0."""
        given = (("student", self.student), ("teacher", self.teacher), ("gold", self.gold))
        return {name: share for name, share in given if share > 0}


class RolloutConfig(Section):
    """How responses are obtained."""

    source: SourceConfig = Field(default=SourceConfig(student=1.0), validation_alias="from", serialization_alias="from")
    """Sources of the responses trained on."""

    temperature: NotNegative = 1.0
    """Sampling temperature. 1 is the student's own distribution, which the divergences assume; 0 takes the likeliest
    token."""

    top_p: Annotated[float, Strict(), AllowInfNan(False), Field(gt=0, le=1)] = 1.0
    """Sample from the most probable tokens with this total mass; 1: from all."""

    max_new_tokens: Count = 32
    """The longest response, in tokens."""

    per_prompt: Count = 1
    """Responses per prompt."""

    stop: Literal["json", "eos"] = "json"
    """Where a response ends: json at the closed JSON object or the end token, eos at the end token only."""

    staleness: Annotated[int, Strict(), Field(ge=0, le=1)] = 0
    """0: responses come from the current student. 1: from the student one update ago, so that a
    teacher elsewhere scores the next responses while the student updates. This changes the numbers."""

    engine: Annotated[Name, AfterValidator(sampler_name)] = "native"
    """What samples the student's responses: native is this process; vllm a vLLM server, which gets the student's
    weights before every step and is checked against them. Its numbers are close to the student's, not the same."""

    options: Options = Field(default={})
    """Settings of an engine other than native, e.g. {server: .venv-vllm/bin/python} for vllm."""

    @model_validator(mode="after")
    def _native_has_no_options(self) -> RolloutConfig:
        if self.engine == "native" and self.options:
            raise Fault("options", "has no meaning with rollout.engine: native", instead="{}, or another engine")
        return self


class ShotConfig(Section):
    """An example prompt with its response."""

    user: Name
    """The prompt."""

    assistant: Name
    """The response."""


class TeacherPromptConfig(Section):
    """The teacher's own prompt before the student's response, in place of the student's prompt."""

    prompt: Name | None = None
    """The user's turn, with columns in braces; they may hold what the student does not see: the right response, a
    retrieved text. {prompt} is the student's turn, and rows with labels have {text} and {label}. null: the student's
    turns."""

    system: Text | None = None
    """The system message; "" for none, null: the student's."""

    examples: tuple[ShotConfig, ...] = ()
    """Turns of user and assistant that come before it, each {user: …, assistant: …}."""

    @model_validator(mode="after")
    def _is_another(self) -> TeacherPromptConfig:
        if self.prompt is None and self.system is None and not self.examples:
            raise Fault("", "adds nothing to the student's prompt", instead="null")
        return self


class TeacherConfig(Section):
    """What the teacher sends of its distribution, and where its scores are cached."""

    payload: Literal["hidden", "top_k"] = "hidden"
    """hidden: the last hidden state of a position, from which the full distribution follows exactly. top_k: the k most
    probable tokens only; needs an objective with a support other than full."""

    k: Count = 64
    """Number of tokens per position in the payload top_k."""

    cache: Name | None = "auto"
    """The folder that keeps scores over steps, seeds and runs: a path, auto (in the user's cache), or null for none."""

    cache_mb: Count = 4096
    """The maximum size of that folder in MiB; the oldest scores are evicted first."""

    options: TeacherOptions = Field(default={})
    """Settings of a teacher behind an address, e.g. {timeout: 60, patience: 600, client_key: ..., server_key: ...}.
    With several teachers, those of one go under its name: {timeout: 60, math: {server_key: ...}}."""

    prompt: TeacherPromptConfig | None = None
    """The teacher's own prompt: it scores the student's response tokens after this one. null: the student's."""


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    lr: Positive = 1e-6
    """Learning rate."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's betas: decay rates of the first and second moment."""

    eps: Positive = 1e-8
    """AdamW's epsilon."""

    weight_decay: NotNegative = 0.0
    """Decoupled weight decay. The paper does not name one; at its learning rate and length even 0.01 would shrink a
    weight by two millionths, and with 0 only the loss moves the weights."""

    states: Literal["fp32", "8bit"] = "fp32"
    """AdamW's moments: fp32, 8 bytes per weight; or 8bit, 2 bytes, quantised in blocks of 256 (torchao), which changes
    the numbers. Not with engine.parallel: fsdp."""

    clip: Positive | None = 1.0
    """Maximum gradient norm over all weights; null: no clipping."""

    warmup_steps: CountOrZero = 0
    """Steps over which the learning rate rises from 0."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up."""

    min_lr_ratio: Share = 0.0
    """Final learning rate of the schedules linear and cosine, as a fraction of lr."""


class TeachOptimizerConfig(OptimizerConfig):
    """AdamW for supervised fine-tuning."""

    lr: Positive = 1e-4
    """Learning rate."""

    warmup_steps: CountOrZero = 10
    """Steps over which the learning rate rises from 0."""

    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Learning rate schedule after the warm-up."""


class EngineConfig(Section):
    """Where and how the numbers are computed."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """fp32, or bf16 compute with fp32 master weights; auto: bf16 where the machine is fast at it."""

    device: Annotated[str, Strict(), AfterValidator(_device)] = "auto"
    """auto, cpu, cuda, cuda:1 or xpu; auto: a GPU if there is one."""

    deterministic: Switch = False
    """Bit-reproducible results on a GPU, at some cost in time. A CPU always has them."""

    threads: Count | None = None
    """CPU threads; null: torch's default."""

    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several processes (--processes) train one model: ddp, each with a whole copy; fsdp, each with a shard of its
    weights, gradients and optimizer state. Both give the numbers of one process, up to rounding."""

    micro_tokens: Count | None = None
    """Most tokens in a micro-batch of the update; null: as many as need about 6 GiB, by the sizes of the model and the
    shared prefix alone. Loss and gradient do not depend on it, up to rounding."""

    activation_checkpointing: Switch | None = None
    """Store little of each layer for the backward pass, and recompute the layer there. Exact; for long texts and
    large models, at about a third more time. null: every second layer, where a text has more than about 340 tokens of
    its own; false: none."""


class EvaluationConfig(Section):
    """Greedy decoding of held-out texts, and the accuracy of the parsed labels."""

    every: CountOrZero = 20
    """Steps between two evaluations during training, the first of them before training; 0: none. A study, which
    evaluates the student once for all runs, has 0 by default."""

    split: Split = "val"
    """The split of the evaluations during training."""

    limit: RowLimit = None
    """Evaluate on the first N rows only, of every split or, as {val: 300}, of those named; null: all. A shorter
    validation split costs only precision. Do not report figures from a shorter test: the first rows of
    TweetEval's tests are easier than the rest."""

    max_new_tokens: Count = 32
    """The longest response, in tokens."""

    batch_size: Count = 64
    """Most texts decoded together; fewer if they are so long that their KV cache would need more than about 6 GiB."""

    final: Annotated[tuple[Split, ...], AfterValidator(_once)] = ("val", "test")
    """The splits evaluated at the end."""

    probabilities: bool = False
    """Also score the probability of every label in the final evaluations: log-loss, Brier score, calibration and
    risk against coverage, in the run's files and in a study's report. Needs evaluation.engine: native."""

    patience: Count | None = None
    """End the run after this many consecutive evaluations whose accuracy is not above the best before them; null: do
    all steps. The one before training counts. Needs evaluation.every, and a split other than test."""

    def limit_of(self, split: str) -> int | None:
        """Number of rows of the split to evaluate on, from the start; None: all."""
        return self.limit.get(cast("Split", split)) if isinstance(self.limit, dict) else self.limit


class TrainEvaluationConfig(EvaluationConfig):
    """Evaluation of a student."""

    engine: Annotated[Name, AfterValidator(sampler_name)] = "native"
    """What generates: native is this process; otherwise the sampler of rollout.engine, which gets the student's
    weights first. If two tokens are equally probable up to rounding, its response may differ."""


class CheckpointConfig(Section):
    """What a killed run resumes from."""

    every: CountOrZero = 25
    """Steps between two checkpoints; 0: none, a killed run starts again."""

    keep: Count = 1
    """Number of latest checkpoints to keep."""

    model: Switch = True
    """Write the trained model at the end; false: only its records."""

    select: Literal["last", "best"] = "last"
    """The weights that a run ends with: those of its last step, or those of its best evaluation during training, the
    first if tied. Checkpoints then hold both. Needs evaluation.every, and a split other than test."""


def choose_on_validation(evaluation: EvaluationConfig, checkpoint: CheckpointConfig) -> None:
    """Raise if a run would select by evaluations that it does not make, or that are on the test split."""
    best = checkpoint.select == "best"
    if evaluation.patience is None and not best:
        return
    name = "checkpoint.select: best" if best else "evaluation.patience"
    if not evaluation.every:
        raise Fault("evaluation.every", f"{name} needs evaluations during training", instead="e.g. 20")
    if evaluation.split == "test":
        what = f"{name} chooses by this split, and a test that was chosen by says nothing any more"
        raise Fault("evaluation.split", what, instead="val")
    if best and not checkpoint.every:
        raise Fault("checkpoint.every", "the best weights are kept in checkpoints", instead="e.g. 25")


AlarmName = Literal["teacher", "truncated", "length", "entropy", "overlap", "repeated", "legal"]
ALARMS: tuple[str, ...] = get_args(AlarmName)
"""The alarms of a run, by the names of their thresholds."""


class AlarmsConfig(Section):
    """When a run warns that training collapses: each alarm's threshold; null disables it. An alarm about the student
    is raised if the last steps are beyond the threshold and no better than the same number of steps before them."""

    window: Count = 10
    """Steps averaged; at least trace.tokens_every for what is measured only on those steps."""

    teacher: Share | None = 0.9
    """Alarm from the first step on if the teacher is nearly uniform: mean h, and its entropy as a share of ln V, are
    at least this."""

    truncated: Share | None = 0.5
    """Alarm if at least this share of responses does not end before rollout.max_new_tokens."""

    length: Annotated[float, Strict(), AllowInfNan(False), Field(gt=1)] | None = 4.0
    """Alarm if the mean response length differs from that of the first steps by at least this factor."""

    entropy: Share | None = 0.1
    """Alarm if the ratio of the student's mean entropy to the teacher's, at the same tokens, is at most this."""

    overlap: Share | None = 0.3
    """Alarm if student and teacher share at most this fraction of their objective.top_k likeliest tokens."""

    repeated: Share | None = 0.3
    """Alarm if at least this share of a response's 4-grams is repeated."""

    legal: Share | None = 0.3
    """Alarm if at most this share of responses has a legal answer. Tasks with labels only."""

    stop_on: Annotated[tuple[AlarmName, ...], AfterValidator(_once)] = ()
    """Alarms that end the run, with a checkpoint and exit code 3. Remove them here, and the same command resumes it."""

    @model_validator(mode="after")
    def _stops_by_what_is_on(self) -> AlarmsConfig:
        for name in self.stop_on:
            if getattr(self, name) is None:
                raise Fault("stop_on", f"{name} is switched off", instead=f"a threshold in alarms.{name}")
        return self


class TeachTraceConfig(Section):
    """What is recorded during training."""

    trackers: Annotated[tuple[Name, ...], AfterValidator(_once), AfterValidator(_trackers)] = ()
    """Where metrics go in addition to metrics.jsonl: any of tensorboard, wandb, trackio, and what installed packages
    add."""


class TraceConfig(TeachTraceConfig):
    """What is recorded during training, down to individual tokens."""

    tokens_every: CountOrZero = 10
    """Steps between two records of individual tokens (λ, signals, divergences); 0: none."""

    rollouts: Count = 8
    """Number of responses in such a record."""
