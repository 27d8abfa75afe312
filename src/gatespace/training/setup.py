"""Setup of a run: device, precision, models, and the task in their tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gatespace.config import EngineConfig, LoraConfig, PairConfig, TaskConfig, TrainConfig, in_setting
from gatespace.config.address import is_address
from gatespace.config.checking import checking
from gatespace.errors import UsageError, missing_extra
from gatespace.models import Model, build_tiny, load_model, with_lora
from gatespace.models.encode import Encoder
from gatespace.models.load import TINY, located
from gatespace.seeding import stream
from gatespace.tasks.configured import configured_prompt, configured_rows, load_configured_task, teacher_prompt
from gatespace.tasks.data import Example, Task
from gatespace.tasks.prompt import Prompt
from gatespace.training.processes import ONE, Processes


@dataclass(frozen=True)
class Placement:
    """Device and compute precision of networks."""

    device: str
    dtype: torch.dtype

    @property
    def precision(self) -> str:
        """As in the configuration: fp32 or bf16."""
        return "fp32" if self.dtype == torch.float32 else "bf16"


@dataclass(frozen=True)
class Material:
    """A task with its prompt and the rows to train on."""

    task: Task
    prompt: Prompt
    rows: Sequence[Example]


def placement(engine: EngineConfig, processes: Processes = ONE) -> Placement:
    """Resolve ``auto``, and set torch's threads."""
    if engine.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUDA reads it once, when it starts
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    device = usable(processes.device or engine.device, "engine.device")
    precision = engine.precision
    if precision == "auto":
        precision = "bf16" if _fast_bf16(device) else "fp32"
    return Placement(device, torch.float32 if precision == "fp32" else torch.bfloat16)


@contextmanager
def deterministic(engine: EngineConfig, place: Placement) -> Iterator[None]:
    """Use torch's deterministic algorithms if `engine.deterministic` is set.

    Not on a CPU, where the default ones are deterministic; operations without one raise.
    """
    if not engine.deterministic or place.device == "cpu":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # nothing unwritten is read
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


def usable(device: str, setting: str) -> str:
    """Resolve ``auto``, and raise if networks cannot run or sample on the device."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, dtype=torch.float64, device=device)  # sampling needs it
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UsageError(
            f"{setting}: this device cannot be used", got=device, why=str(error).splitlines()[0], instead="auto, or cpu"
        ) from None
    return device


def _fast_bf16(device: str) -> bool:
    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device != "cpu":
        return False
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # torch has no public API for this
    return any(getattr(torch.cpu, name, lambda: False)() for name in probes)


def material(config: TaskConfig, part: str) -> Material:
    """The task, its prompt, and the training rows of one part (``teacher`` or ``distill``)."""
    task = load_configured_task(config)
    return Material(task, configured_prompt(config, task), configured_rows(config, task, part))


@dataclass(frozen=True)
class ModelSpec:
    """Which model to load, and how."""

    name: str
    """A folder, a name on the Hub, or ``tiny``, which is built for the task in the size of its role."""
    setting: str
    """The setting that names it, for errors."""
    role: str = "student"
    """``student`` or ``teacher``."""
    revision: str | None = None
    trust_remote_code: bool = False
    quantization: str | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    lora: LoraConfig | None = None
    """Adapters to add."""
    seed: int = 0
    """Of the run; draws the adapters."""

    @classmethod
    def of(cls, pair: PairConfig, role: str, setting: str = "", **more: Any) -> ModelSpec:
        """The ``student`` or ``teacher`` of a pair as before training; `setting`: if not `pair.ROLE`."""
        name, revision, whose = pair.model(role)
        code, quantization = pair.trust_remote_code, pair.quantization(role)
        return cls(name, setting or f"pair.{role}", whose, revision, code, quantization, **more)


def open_model(spec: ModelSpec, task: Task, report: Callable[[str], None] | None = None) -> Model:
    """Load a model; `report` is called with notes."""
    with in_setting(spec.setting):
        if is_address(spec.name):
            raise UsageError(
                "this is the address of a teacher service, not a model",
                got=spec.name,
                why="a service scores responses and does nothing else",
                instead="the folder of the model",
            )
        folder = _built(spec, task)
        model = load_model(
            folder,
            dtype=spec.dtype,
            device=spec.device,
            revision=spec.revision,
            trust_remote_code=spec.trust_remote_code,
            quantization=spec.quantization,
            report=report,
        )
        if folder != spec.name:
            model = Model(model.network, model.tokenizer, spec.name, model.source)
    if (lora := spec.lora) is not None:
        targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
        model = with_lora(model, r=lora.r, alpha=lora.alpha, targets=targets, seed=stream(spec.seed, "lora"))
    return model


def load_shapes(
    spec: ModelSpec, task: Task, report: Callable[[str], None] | None = None, *, weights: bool = True
) -> Model:
    """Load a model without weights: shapes and tokenizer. `weights`: whether a folder must have them."""
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("loading a model", module="transformers", extra="train") from error
    with in_setting(spec.setting):
        where, options, source = located(_built(spec, task), spec.revision, report, weights=weights)
        options |= {"trust_remote_code": spec.trust_remote_code}
        try:
            config = transformers.AutoConfig.from_pretrained(where, **options)
            tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
            with torch.device("meta"):
                code = spec.trust_remote_code
                network = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=code)
        except (OSError, ValueError) as error:
            raise UsageError(f"{spec.name} could not be read", got=str(error).strip().splitlines()[0]) from error
    return Model(network, tokenizer, spec.name, source or where)


def _built(spec: ModelSpec, task: Task) -> str:
    """The folder of a tiny model, built for the task in the size of its role; any other name unchanged."""
    if spec.name not in TINY:
        return spec.name
    return str(getattr(build_tiny(task), spec.name.removeprefix("tiny-") if spec.name != "tiny" else spec.role))


def encoder_for(material: Material, model: Model, splits: tuple[str, ...], *, share: bool) -> Encoder:
    """The task in the model's tokens. The prefix is what all training rows and all rows of `splits` share."""
    texts = [row.text for row in material.rows]
    for split in splits:
        texts += [row.text for row in material.task.rows(split)]
    return Encoder(material.prompt, model.tokenizer, texts, share=share)


def teacher_encoder_for(
    config: TrainConfig, material: Material, student: Model, teachers: Mapping[str, Model]
) -> Encoder | None:
    """Encoder of the teacher's own prompts; None: it has those of the student.

    `teachers`: those in this process by setting; prompt and response must fit into their context windows.
    """
    prompt = teacher_prompt(config.teacher.prompt, material.prompt)
    if prompt is material.prompt:
        return None
    model, rows = teachers.get("teacher", student), material.rows
    texts = [prompt.text(row) for row in rows]
    encoder = Encoder(prompt, model.tokenizer, texts, share=checking().share_prefix)
    with in_setting("teacher.prompt"):
        for window in {one.window for one in (model, *teachers.values())}:
            encoder.check(rows, window, config.rollout.max_new_tokens)
    return encoder
