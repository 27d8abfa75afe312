"""The two jobs: `teach` makes a teacher, `train` distils it into a student."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatespace.addons.parallel.ranks import Ranks, joined
from gatespace.config import CheckpointConfig, TeachConfig, TrainConfig, dump_config, dump_yaml, identity, load_config
from gatespace.config.address import is_address
from gatespace.config.identity import CONTENT, LEFT_OUT, settings_of
from gatespace.errors import GatespaceError, RunError, UsageError
from gatespace.evaluation import Evaluation, evaluate
from gatespace.files import atomic_write, claim
from gatespace.gating.configured import build_gate, build_objective
from gatespace.models import Model, check_pair
from gatespace.models.body import body_of
from gatespace.models.cache_root import cache_root, remove_leftovers
from gatespace.models.encode import Encoder
from gatespace.rollout.greedy import Answer
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.local import LocalTeacher
from gatespace.training import loop
from gatespace.training.batches import Batches
from gatespace.training.clock import Clock
from gatespace.training.environment import environment
from gatespace.training.loop import Course, Outcome, Progress, Silent
from gatespace.training.optimizer import Optimizer
from gatespace.training.pipeline import Pipeline
from gatespace.training.setup import (
    Material,
    Placement,
    encoder_for,
    material,
    micro_tokens,
    open_model,
    placement,
    remote_teacher,
    run_folder,
    vllm_sampler,
)
from gatespace.training.step import CountingTeacher, Distillation
from gatespace.training.supervised import Supervised
from gatespace.training.telemetry import Telemetry

if TYPE_CHECKING:
    from gatespace.addons.service.client import RemoteTeacher
    from gatespace.addons.vllm.sampler import VllmSampler
    from gatespace.addons.vllm.teacher import VllmTeacher

IDENTITY = "identity.json"
MODEL = "model"
"""The folder of the trained model within the run's."""


def train(config: TrainConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Distil a teacher into a student, and return the run's summary. A run that was killed is taken up again."""
    with ExitStack() as stack:
        ranks = _joined(config, patience=config.teacher.patience)
        progress = progress if progress is not None and ranks.first else Silent()
        folder = run_folder(config.output)
        stack.enter_context(_claimed(folder, ranks))
        place = placement(config.engine, ranks)
        data = material(config.task, "distill")
        objective = build_objective(config.objective)
        pair = config.pair
        options: dict[str, Any] = {
            "task": data.task,
            "device": place.device,
            "trust_remote_code": pair.trust_remote_code,
            "report": progress.note,
        }
        # The teacher first: it is the one that is most often not there. One that is a service has to be told the
        # beginning of all prompts, which is in the student's tokens.
        model = None
        with ranks.in_turn():
            if not is_address(pair.teacher):
                model = open_model(
                    pair.teacher,
                    "pair.teacher",
                    role="teacher",
                    revision=pair.teacher_revision,
                    dtype=place.dtype,
                    **options,
                )
            student = open_model(
                pair.student,
                "pair.student",
                role="student",
                revision=pair.student_revision,
                lora=pair.lora,
                seed=config.seed,
                **options,
            )
        splits = (*config.evaluation.final, config.evaluation.split)
        encoder = encoder_for(data, student, splits, share=config.engine.share_prefix)
        cache = _cache(config, progress)
        if cache is not None:
            stack.enter_context(cache)
        packed, remote = config.engine.packed, None
        if model is not None:
            report = check_pair(student, model)
            for note in report.notes:
                progress.note(note)
            vocab_size, fingerprint = report.vocab_size, model.fingerprint()
        else:
            remote = remote_teacher(config, student, encoder, place, cache=cache, report=progress.note)
            stack.callback(remote.close)
            vocab_size, fingerprint = remote.vocab_size, remote.fingerprint
        content = {
            "task": data.task.digest,
            "student": student.fingerprint(),
            "teacher": fingerprint,
            "gate": str(build_gate(config.objective)),
            "precision": place.precision,
        }
        where = {} if remote is None else {"teacher": _whereabouts(remote)}
        if (summary := _begin(folder, config, content, place, progress, ranks, where)) is not None:
            return summary
        student, optimizer = _in_training(student, config, place, ranks)
        scorer: CountingTeacher
        if model is not None:
            scorer = LocalTeacher(
                model,
                encoder.prefix,
                max_new_tokens=config.rollout.max_new_tokens,
                payload=config.teacher.payload,
                k=config.teacher.k,
                vocab_size=vocab_size,
                cache=cache,
                packed=packed,
            )
        else:
            assert remote is not None
            scorer = remote
        sampler = None
        if config.rollout.engine == "vllm":
            sampler = stack.enter_context(vllm_sampler(config, student, encoder, data, folder, place, progress.note))
        distillation = Distillation(
            student=body_of(student, packed=packed),
            teacher=scorer,
            encoder=encoder,
            objective=objective,
            settings=config.objective,
            rollout=config.rollout,
            optimizer=optimizer,
            vocab_size=vocab_size,
            seed=config.seed,
            micro_tokens=micro_tokens(student, config.engine.micro_tokens),
            reuse=config.engine.reuse_rollout,
            fused=config.engine.fused,
            sampler=sampler,
            ranks=ranks,
        )
        batches = Batches(data.rows, encoder, batch_size=config.batch_size, seed=config.seed)
        pipeline = Pipeline(distillation, batches, steps=config.steps)
        telemetry = Telemetry(distillation, build_gate(config.objective), config.trace, cache)

        def step(number: int, clock: Clock) -> Outcome:
            telemetry.begin(number)
            with telemetry.evidence():
                update = pipeline.step(number, clock, telemetry.watch)
            return telemetry.outcome(update, clock)

        course = Course(
            folder=folder,
            steps=config.steps,
            step=step,
            optimizer=optimizer,
            state=lambda: {**telemetry.state(), **pipeline.state()},
            restore=lambda state: telemetry.restore(pipeline.restore(state)),
            evaluate=_evaluator(student, data, encoder, config, ranks, sampler),
            finish=lambda: {
                "run": telemetry.summary(),
                **_finish(folder, student, optimizer, config.checkpoint, ranks),
            },
            evaluation=config.evaluation,
            checkpoint=config.checkpoint,
            trackers=config.trace.trackers,
            settings=dump_config(config),
            progress=progress,
            ranks=ranks,
        )
        return loop.run(course)


def teach(config: TeachConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Fine-tune a model on a task's gold labels, and return the run's summary."""
    with ExitStack() as stack:
        ranks = _joined(config)
        progress = progress if progress is not None and ranks.first else Silent()
        folder = run_folder(config.output)
        stack.enter_context(_claimed(folder, ranks))
        place = placement(config.engine, ranks)
        data = material(config.task, "teacher")
        with ranks.in_turn():
            model = open_model(
                config.model,
                "model",
                role="teacher",
                task=data.task,
                device=place.device,
                revision=config.revision,
                trust_remote_code=config.trust_remote_code,
                lora=config.lora,
                seed=config.seed,
                report=progress.note,
            )
        content = {"task": data.task.digest, "model": model.fingerprint(), "precision": place.precision}
        if (summary := _begin(folder, config, content, place, progress, ranks)) is not None:
            return summary
        model, optimizer = _in_training(model, config, place, ranks)
        splits = (*config.evaluation.final, config.evaluation.split)
        encoder = encoder_for(data, model, splits, share=config.engine.share_prefix)
        supervised = Supervised(
            body_of(model, packed=config.engine.packed),
            encoder,
            optimizer,
            model.vocab_size,
            micro_tokens(model, config.engine.micro_tokens),
            ranks,
        )
        batches = Batches(data.rows, encoder, batch_size=config.batch_size, seed=config.seed)

        def step(number: int, clock: Clock) -> Outcome:
            rows = batches.at(number)
            try:
                learned = supervised.step(number, rows, clock)
            except GatespaceError as error:
                seen = [{"index": row.index, "text": row.example.text, "gold": row.example.label} for row in rows]
                error.evidence = {"rows": seen}  # type: ignore[attr-defined]
                raise
            record = {
                "step": number + 1,
                "loss": learned.loss,
                "tokens": learned.tokens,
                "token_accuracy": learned.right / learned.tokens,
                "grad_norm": learned.update.grad_norm,
                "lr": learned.update.lr,
            }
            return Outcome(record, {"step": number + 1, "wall": clock.wall, "cpu": clock.cpu})

        course = Course(
            folder=folder,
            steps=config.steps,
            step=step,
            optimizer=optimizer,
            state=dict,
            restore=lambda state: None,
            evaluate=_evaluator(model, data, encoder, config, ranks),
            finish=lambda: _finish(folder, model, optimizer, config.checkpoint, ranks),
            evaluation=config.evaluation,
            checkpoint=config.checkpoint,
            trackers=config.trace.trackers,
            settings=dump_config(config),
            progress=progress,
            ranks=ranks,
        )
        return loop.run(course)


# ---------------------------------------------------------------------- common parts


def _joined(config: TrainConfig | TeachConfig, patience: float = 0.0) -> Ranks:
    """The processes that do the run; an error where they cannot."""
    engine, rows = config.engine, config.batch_size
    ranks = joined(device=engine.device, sharded=engine.parallel == "fsdp", patience=patience)
    with ranks.together():
        if isinstance(config, TrainConfig):
            rows *= config.rollout.per_prompt
            if ranks.size > 1 and config.rollout.engine == "vllm":
                raise UsageError(
                    "rollout.engine: vLLM samples for one process only",
                    got=f"vllm with {ranks.size} processes",
                    instead="native",
                )
        if rows < ranks.size:
            raise UsageError("batch_size: every process needs a row", got=f"{rows} rows for {ranks.size} processes")
    return ranks


@contextmanager
def _claimed(folder: Path, ranks: Ranks) -> Iterator[None]:
    with ExitStack() as stack:
        with ranks.together():
            if ranks.first:
                stack.enter_context(claim(folder))
        yield


def _in_training(
    model: Model, config: TrainConfig | TeachConfig, place: Placement, ranks: Ranks
) -> tuple[Model, Optimizer]:
    """The model as it is trained, whole or in pieces, and its optimizer."""
    if ranks.sharded:
        from gatespace.addons.parallel.sharded import shard

        body_of(model, packed=config.engine.packed)  # whether packed passes fit is found out on the whole model
        model = shard(model, dtype=place.dtype)
    return model, Optimizer(model.network, config.optimizer, steps=config.steps, dtype=place.dtype, ranks=ranks)


def _begin(
    folder: Path,
    config: TrainConfig | TeachConfig,
    content: Mapping[str, str],
    place: Placement,
    progress: Progress,
    ranks: Ranks,
    where: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Make the folder this run's, or see that it already is; the summary if the run is done."""
    if ranks.size > 1:
        # Sums over processes differ in their last bits from those of one, as do gradients that were divided.
        content = {**content, "processes": f"{ranks.size} {'fsdp' if ranks.sharded else 'ddp'}"}
        for name, value in content.items():
            ranks.agree(
                value,
                lambda found, name=name: RunError(  # type: ignore[misc]
                    f"the processes of this run do not have the same {name}",
                    got=", ".join(text[:12] for text in found),
                    instead="the same files on every machine",
                ),
            )
    summary = None
    with ranks.together():
        if ranks.first:
            summary = _own(folder, config, content, place, progress, where)
    first: dict[str, Any] | None = ranks.gather(summary)[0]
    return first


def _own(
    folder: Path,
    config: TrainConfig | TeachConfig,
    content: Mapping[str, str],
    place: Placement,
    progress: Progress,
    where: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    own = {"identity": identity(config, content=content), "content": dict(content)}
    path = folder / IDENTITY
    if path.exists():
        other = json.loads(path.read_text())
        if other["identity"] != own["identity"]:
            raise UsageError(
                "output: this folder holds another run",
                got=folder,
                why=_difference(folder, config, other, own),
                instead="another output folder, or remove this one",
            )
        if (summary := loop.finished(folder)) is not None:
            progress.note("this run is done; its summary was read from the folder")
            if config.checkpoint.model and summary["model"] is None:
                progress.note("its model was not kept (checkpoint.model: false); in another output it is trained again")
            return summary
    atomic_write(folder / "config.yaml", dump_yaml(config))
    found = {**environment(place), **(where or {})}
    atomic_write(folder / "environment.json", json.dumps(found, indent=2, sort_keys=True) + "\n")
    atomic_write(path, json.dumps(own, indent=2, sort_keys=True) + "\n")
    return None


def _difference(
    folder: Path, config: TrainConfig | TeachConfig, other: Mapping[str, Any], own: Mapping[str, Any]
) -> str:
    before, now = other["content"], own["content"]
    if before.get("processes") != now.get("processes"):
        return f"it is a run of {before.get('processes', '1')} processes, not {now.get('processes', '1')}"
    if set(before) != set(now):
        return "it is not a run of this command"
    for name in ("gate", "precision"):  # in plain words; and the precision shows in a teacher's hash too
        if name in now and before[name] != now[name]:
            return f"its {name} is {before[name]}, not {now[name]}"
    for name, value in now.items():
        if before[name] != value:
            return f"its {name} is another one"
    found = tuple(path for name in now for path in CONTENT[name])
    try:
        old = settings_of(load_config(type(config), folder / "config.yaml"))
    except UsageError:
        return "its settings are others"
    for path, value in settings_of(config).items():
        if path not in LEFT_OUT and not path.startswith(found) and old.get(path) != value:
            return f"its {path} is {json.dumps(old.get(path))}, not {json.dumps(value)}"
    return "its settings are others"


def _whereabouts(teacher: RemoteTeacher | VllmTeacher) -> dict[str, str]:
    """What is written down of a teacher elsewhere; the weights are in the run's identity."""
    return {"address": str(teacher.address), "model": teacher.model_name, "numerics": teacher.numerics}


def _cache(config: TrainConfig, progress: Progress) -> ScoreCache | None:
    where = config.teacher.cache
    if where is None:
        return None
    folder = cache_root() / "scores" if where == "auto" else Path(where).expanduser()
    return ScoreCache(folder, max_mb=config.teacher.cache_mb, report=progress.note)


def _evaluator(
    model: Model,
    data: Material,
    encoder: Encoder,
    config: TrainConfig | TeachConfig,
    ranks: Ranks,
    sampler: VllmSampler | None = None,
) -> Callable[[str, Callable[[int, int], None]], Evaluation]:
    settings = config.evaluation
    writer = sampler if isinstance(config, TrainConfig) and config.evaluation.engine == "vllm" else None

    def on(split: str, progress: Callable[[int, int], None]) -> Evaluation:
        with model.whole():
            if writer is not None:
                writer.sync()
            return evaluate(
                model,
                data.task,
                data.prompt,
                split=split,
                limit=settings.limit,
                max_new_tokens=settings.max_new_tokens,
                batch_size=settings.batch_size,
                encoder=encoder,
                progress=progress,
                writer=writer,
                share=share if ranks.size > 1 else None,
            )

    def share(texts: Sequence[str], answered: Callable[[Sequence[str]], list[Answer]]) -> list[Answer]:
        found = ranks.divide(texts, lambda some: [[one.ids, one.text, one.ended] for one in answered(some)])
        return [Answer(tuple(ids), text, ended) for ids, text, ended in found]

    return on


def _finish(
    folder: Path, model: Model, optimizer: Optimizer, settings: CheckpointConfig, ranks: Ranks
) -> dict[str, Any]:
    """Write the model with its float32 weights, if it is wanted."""
    optimizer.widen()
    whole = model.gathered(here=ranks.first)
    fingerprint, *others = ranks.gather(None if whole is None else whole.fingerprint())
    with ranks.together():
        if any(other not in (None, fingerprint) for other in others):
            raise RunError("the processes of this run have come to different weights")
        if ranks.first and whole is not None:
            remove_leftovers(folder / MODEL)
            if settings.model:
                whole.save(folder / MODEL)
            else:  # this very run may have written it, and been killed before it was done
                shutil.rmtree(folder / MODEL, ignore_errors=True)
    return {"model": MODEL if settings.model else None, "fingerprint": fingerprint}
