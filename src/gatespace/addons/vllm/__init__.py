"""vLLM as teacher, as rollout sampler, and for `gatespace evaluate`: the entry points that the core calls.

vLLM has its own environment and is reached over HTTP. A place is either the address of a running server,
``vllm://HOST:PORT``, or the Python of an environment with vLLM, with which a server is started for as long as needed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gatespace.config import TrainConfig, in_setting, parse_config
from gatespace.config.address import is_address
from gatespace.config.base import Name, Section
from gatespace.config.sections import Positive
from gatespace.errors import UsageError

if TYPE_CHECKING:
    from gatespace.addons.vllm.sampler import VllmSampler
    from gatespace.addons.vllm.teacher import VllmTeacher
    from gatespace.models import Model
    from gatespace.models.encode import Encoder
    from gatespace.runs.run_folder import RunFolder
    from gatespace.teacher.cache import ScoreCache
    from gatespace.teacher.scores import ScoreSpec
    from gatespace.training.setup import Placement

Report = Callable[[str], None]
_SHORTEST = 64
"""Smallest --max-model-len of a server started here."""


class TeacherOptions(Section):
    """`teacher.options` of a teacher at vllm://HOST:PORT."""

    timeout: Positive = 60.0
    """Seconds without a reply after which a request is retried."""

    patience: Positive = 600.0
    """Seconds without a reply after which the run writes a checkpoint and stops."""


class SamplerOptions(Section):
    """`rollout.options` of the engine vllm."""

    server: Name
    """The Python of an environment with vLLM, which is started here; or vllm://HOST:PORT of a server that takes weights
    and was started from a folder with an untied head."""

    timeout: Positive = 60.0
    """Seconds without a reply after which a request is retried."""

    patience: Positive = 600.0
    """Seconds without a reply after which the run stops."""


def check_place(where: str) -> None:
    """Raise unless this is an interpreter or an address of a vLLM server; contacts neither."""
    from gatespace.addons.vllm.process import check_python
    from gatespace.addons.vllm.server import server_address

    if is_address(where):
        server_address(where)
    else:
        check_python(where)


def open_teacher(
    config: TrainConfig,
    student: Model,
    spec: ScoreSpec,
    *,
    place: Placement,
    cache: ScoreCache | None,
    report: Report,
    setting: str = "pair.teacher",
) -> VllmTeacher:
    """Connect to the teacher at `pair.teacher: vllm://HOST:PORT`.

    `cache` is unused: a stock server sends no hash of its weights, so other weights under the same name would hit the
    same entries. `setting` names the teacher in errors.
    """
    from gatespace.addons.vllm.teacher import VllmTeacher

    with in_setting("teacher.options"):
        options = parse_config(TeacherOptions, dict(config.teacher.options))
    if spec.payload != "top_k":
        raise UsageError(
            "teacher.payload: a vLLM server gives top-k log-probabilities only",
            got=spec.payload,
            instead="top_k, with objective.support: bucket or hybrid",
        )
    with in_setting(setting):
        return VllmTeacher(
            str(config.pair.teacher),
            spec,
            student.tokenizer,
            device=place.device,
            timeout=options.timeout,
            patience=options.patience,
            report=report,
        )


@contextmanager
def open_sampler(
    config: TrainConfig,
    student: Model,
    encoder: Encoder,
    texts: Sequence[str],
    *,
    run: RunFolder,
    place: Placement,
    report: Report,
) -> Iterator[VllmSampler]:
    """Open the sampler of `rollout.engine: vllm`; a server started here stops with it.

    Args:
        config: Configuration of the run.
        student: The model whose weights the server gets.
        encoder: Encodes the task with the student's tokenizer.
        texts: All texts to classify, which bound the prompt length.
        run: Holds the log of a server started here.
        place: Its precision is also the server's.
        report: Called with a message about slow steps.
    """
    from gatespace.addons.vllm.process import VllmProcess
    from gatespace.addons.vllm.sampler import VllmSampler, save_untied
    from gatespace.training.processes import launched

    options = _sampler_options(config)
    if (ranks := launched()) is not None:
        raise UsageError(
            "rollout.engine: vLLM samples for one process only",
            got=f"vllm with {ranks[1]} processes",
            instead="native",
        )
    weights, server = run.path / "vllm", options.server
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, weights, ignore_errors=True)
        with in_setting("rollout.options.server"):
            check_place(server)
            if not is_address(server):
                save_untied(student, weights / "start", dtype=place.dtype)
                rollout, evaluation = config.rollout, config.evaluation
                longest = len(encoder.prefix) + max(len(encoder.suffix(text)) for text in texts)
                longest += max(rollout.max_new_tokens, evaluation.max_new_tokens if evaluation.engine == "vllm" else 0)
                as_the_model = (rollout.temperature, rollout.top_p) in ((1.0, 1.0), (0.0, 1.0))
                report("starting vLLM")
                process = VllmProcess(
                    Path(server).expanduser(),
                    weights / "start",
                    log=run.path / "vllm.log",
                    dtype=str(place.dtype).removeprefix("torch."),
                    max_model_len=max(_SHORTEST, longest + 1),
                    weights=True,
                    options=() if as_the_model else ("--logprobs-mode", "processed_logprobs"),
                )
                server = stack.enter_context(process).address
                stack.enter_context(process.watched())
            sampler = VllmSampler(
                server,
                student,
                weights,
                dtype=place.dtype,
                timeout=options.timeout,
                patience=options.patience,
                wait=is_address(options.server),  # a server started here does not come back by itself
                report=report,
            )
        yield stack.enter_context(sampler)


def _sampler_options(config: TrainConfig) -> SamplerOptions:
    if config.rollout.options.get("server") is None:
        raise UsageError(
            "rollout.options.server: is needed with rollout.engine: vllm",
            instead=".venv-vllm/bin/python, or vllm://HOST:PORT",
        )
    with in_setting("rollout.options"):
        return parse_config(SamplerOptions, dict(config.rollout.options))


def evaluator(where: str) -> Callable[..., AbstractContextManager[VllmSampler]]:
    """Return an opener for `gatespace evaluate --sampler vllm=WHERE`; WHERE is checked immediately.

    Call it as ``opener(name, model, longest=…, report=…)``, see `open_evaluator`.
    """
    check_place(where)
    return partial(open_evaluator, where)


@contextmanager
def open_evaluator(where: str, name: str, model: Model, *, longest: int, report: Report) -> Iterator[VllmSampler]:
    """Open vLLM with a model's weights, checked against the model's own log-probabilities.

    Args:
        where: An interpreter or an address.
        name: Model name, as in `load_model`.
        model: The same model in this process.
        longest: Tokens of the longest prompt and response.
        report: Called with a message about slow steps.
    """
    from gatespace.addons.vllm.process import VllmProcess
    from gatespace.addons.vllm.sampler import VllmSampler
    from gatespace.addons.vllm.source import vllm_source
    from gatespace.models.load import TINY

    dtype, address = model.head.weight.dtype, where
    with ExitStack() as stack:
        if not is_address(where):
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gatespace-vllm-")))
            if name in TINY:
                model.save(scratch / "model")
                folder = scratch / "model"
            else:
                folder = vllm_source(name, weights=True, report=report).folder
            report("starting vLLM")
            process = VllmProcess(
                Path(where).expanduser(),
                folder,
                log=scratch / "vllm.log",
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=max(_SHORTEST, longest + 1),
            )
            address = stack.enter_context(process).address
            stack.enter_context(process.watched())
        yield stack.enter_context(VllmSampler(address, model, dtype=dtype, wait=is_address(where), report=report))
