"""On-policy distillation: a student, its teacher, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatespace.config import TrainConfig, in_setting
from gatespace.config.address import is_address, parse_address
from gatespace.config.checking import checking
from gatespace.config.sections import SELF_EMA
from gatespace.errors import RunError, UsageError
from gatespace.gating.configured import build_gate, build_objective
from gatespace.gating.fused import fused_distillation_loss
from gatespace.gating.loss import LossInputs, LossOutput, distillation_loss
from gatespace.gating.tokens import TeacherTopK
from gatespace.models import Model
from gatespace.models.body import response_states
from gatespace.models.cache_root import cache_root
from gatespace.models.encode import Encoder
from gatespace.plugins import provider
from gatespace.runs import RunFolder
from gatespace.seeding import generator, permutation
from gatespace.teacher.average import AverageTeacher
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import ScoreSpec, Teacher
from gatespace.teacher.several import Addressed, Teachers, joint_fingerprint
from gatespace.training.batches import Batches
from gatespace.training.clock import Clock
from gatespace.training.fit import check_models, check_teachers
from gatespace.training.job import Job
from gatespace.training.memory import chunk_mb, micro_tokens
from gatespace.training.metrics import StepMetrics, Texts
from gatespace.training.processes import Processes
from gatespace.training.progress import Progress
from gatespace.training.rollouts import Ahead, MicroBatch, OnPolicy
from gatespace.training.setup import encoder_for, material, open_member, teacher_encoder_for, usable


class Distillation(Job):
    """The job of `gatespace train`."""

    config: TrainConfig
    trace: StepMetrics

    def __init__(
        self, config: TrainConfig, run: RunFolder, processes: Processes, progress: Progress, stack: ExitStack
    ) -> None:
        super().__init__(config, run, processes, progress, stack)
        self.objective = build_objective(config.objective, run=config)
        self.data = material(config.task, "distill")
        pair, scorers = config.pair, config.pair.scorers()
        check_teachers(config, self.data)  # before anything large is loaded
        options: dict[str, Any] = {"task": self.data.task, "report": progress.note}
        open_student = partial(
            open_member,
            pair,
            "student",
            # quantised models have no float32 weights to round later
            dtype=self.place.dtype if pair.student_quantization else torch.float32,
            lora=pair.lora,
            seed=config.seed,
            **options,
        )
        self._locals: dict[str, Model] = {}
        """Teacher setting below `pair` → model, for teachers in this process; each model is loaded once."""
        with processes.in_turn():
            # Teachers first: they are most often missing.
            opened: dict[Any, Model] = {}
            for scorer, where in scorers.items():
                if is_address(where):
                    continue
                own, device = pair.alone(scorer), self._teacher_device()
                name, _, role = own.model("teacher")
                folder = Path(name).expanduser()
                key = where if where == SELF_EMA else (str(folder.resolve()) if folder.is_dir() else name, role)
                if key not in opened and where == SELF_EMA:
                    opened[key] = open_student(device=device)
                elif key not in opened:
                    opened[key] = open_member(
                        own, "teacher", setting=f"pair.{scorer}", device=device, dtype=self.place.dtype, **options
                    )
                self._locals[scorer] = opened[key]
            self.model = open_student(device=processes.loads_on(self.place.device))
        self.encoder = encoder_for(self.data, self.model, self.splits, share=checking().share_prefix)
        self.check(student=self.model, **self._locals)
        self.cache = _open_cache(config, progress)
        if self.cache is not None:
            stack.enter_context(self.cache)
        _ = self.teacher_encoder  # errors in its prompts are raised before the run begins
        self.vocab_size = self.model.vocab_size
        for scorer, local in self._locals.items():
            with nullcontext() if pair.teachers is None else in_setting(f"pair.{scorer}"):
                report = check_models(config, self.model, local)
            for note in report.notes:
                progress.note(note)
            self.vocab_size = report.vocab_size
        if opened and processes.size > 1:
            progress.note(
                f"each of the {processes.size} processes holds the whole teacher "
                f"({sum(map(_gigabytes, opened.values())):.2g} GB); one for all: gatespace teacher serve, and "
                "pair.teacher: zmq://…"
            )
        if len(self._locals) < len(scorers):
            self.vocab_size = self.teacher.vocab_size
        self.content = {
            "task": self.data.task.digest,
            "student": self.fingerprint(),
            "teacher": self._teacher_content(),
            "gate": str(build_gate(config.objective)),
            "precision": self.place.precision,
        }

    @property
    def _local(self) -> Model | None:
        """The only teacher, if it is in this process."""
        return self._locals.get("teacher")

    def _teacher_content(self) -> str:
        """The teachers' part of the run's identity; also sets their entries of environment.json."""
        found: dict[str, str] = {}
        about: dict[str, dict[str, str]] = {}
        for scorer, where in self.config.pair.scorers().items():
            name = scorer.removeprefix("teachers.")
            if (local := self._locals.get(scorer)) is not None:
                found[name] = (f"{SELF_EMA} " if where == SELF_EMA else "") + local.fingerprint()
                about[name] = {}
            else:
                remote = self.teacher.teachers[name] if isinstance(self.teacher, Teachers) else self.teacher
                found[name], about[name] = remote.fingerprint, remote.about()
        if self.config.pair.teachers is None:
            self.about = {} if self._locals else about
            return found["teacher"]
        self.about = {"teachers": {name: {"fingerprint": found[name], **about[name]} for name in found}}
        return joint_fingerprint(found)

    def score_spec(self) -> ScoreSpec:
        """The scores to request."""
        config = self.config
        return ScoreSpec(
            tuple(self.teacher_encoder.prefix),
            config.rollout.max_new_tokens,
            self.vocab_size,
            config.teacher.payload,
            config.teacher.k,
        )

    @cached_property
    def teacher_encoder(self) -> Encoder:
        """Encoder of the teacher's prompts: the student's, unless it has its own."""
        return teacher_encoder_for(self.config, self.data, self.model, self._locals) or self.encoder

    def _asked(self) -> Callable[[Any], list[int]] | None:
        """Row → its teacher's prompt, with the teacher's name if several; None: the student's prompt."""
        encoder, several = self.teacher_encoder, self.config.pair.teachers is not None
        if encoder.prompt is self.data.prompt and not several:
            return None

        def asked(row: Any) -> list[int]:
            ids = encoder.suffix(encoder.prompt.text(row))
            return Addressed(ids, row.teacher) if several else ids

        return asked

    def _teacher_device(self) -> str:
        device = self.config.pair.teacher_device or self.place.device
        return device if device == "auto" else usable(device, "pair.teacher_device")

    @cached_property
    def teacher(self) -> Teacher:
        """Scores the responses: in this process, behind an address, or each row by the teacher that it names."""
        found: dict[str, Teacher] = {}
        made: dict[object, Teacher] = {}
        for scorer, where in self.config.pair.scorers().items():
            key = where if scorer not in self._locals else id(self._locals[scorer])
            if key not in made:
                made[key] = self._open_scorer(scorer, where)
            found[scorer.removeprefix("teachers.")] = made[key]
        return found["teacher"] if self.config.pair.teachers is None else Teachers(found)

    def _open_scorer(self, scorer: str, where: str) -> Teacher:
        config, spec = self.config.alone(scorer), self.score_spec()
        packed, device = checking().packed, self.place.device
        if where == SELF_EMA:
            decay, dtype = config.pair.ema_decay, self.place.dtype
            model = self._locals[scorer]
            return AverageTeacher(model, spec, decay=decay, dtype=dtype, packed=packed, device=device)
        if scorer in self._locals:
            return LocalTeacher(self._locals[scorer], spec, cache=self.cache, packed=packed, device=device)
        try:
            teacher: Teacher = provider("teachers", parse_address(where).scheme)(
                config, self.model, spec, place=self.place, cache=self.cache, report=self.progress.note
            )
        except UsageError as error:  # it says pair.teacher
            error.what = error.what.replace("pair.teacher: ", f"pair.{scorer}: ", 1)
            raise
        self.stack.callback(teacher.close)
        return teacher

    def prepare(self) -> None:
        """Create what training needs besides the models."""
        super().prepare()
        config = self.config
        self.sampler = None
        if config.rollout.engine != "native":
            texts = [row.text for row in self.data.rows]
            if config.evaluation.engine == config.rollout.engine:
                texts += [row.text for split in {*self.splits} for row in self.data.task.rows(split)]
            self.sampler = self.stack.enter_context(
                provider("samplers", config.rollout.engine)(
                    config,
                    self.model,
                    self.encoder,
                    texts,
                    run=self.run,
                    place=self.place,
                    report=self.progress.note,
                )
            )
        options: dict[str, Any] = {
            "student": self.body,
            "teacher": self.teacher,
            "encoder": self.encoder,
            "batches": Batches(
                self.data.rows, self.encoder, batch_size=config.batch_size, seed=config.seed, asked=self._asked()
            ),
            "settings": config.rollout,
            "vocab_size": self.vocab_size,
            "seed": config.seed,
            "micro_tokens": micro_tokens(self.sizes, config.engine, len(self.encoder.prefix)),
            "rollout_tokens": self.sizes.rollout_tokens(self.place.dtype.itemsize),
            "reuse": checking().reuse_rollout,
            "sampler": self.sampler,
            "processes": self.processes,
            "share": checking().share_prompt,
            # permutation and selection are over the tokens of every sample
            "merge": not (config.objective.shuffle or "selection" in self.objective.needs),
        }
        self.rollouts = self.open_rollouts(**options)
        self.trace = StepMetrics(
            objective=self.objective,
            settings=config.objective,
            trace=config.trace,
            vocab_size=self.vocab_size,
            logits=self.logits,
            texts=self.texts(),
            counts=self._counts,
            processes=self.processes,
        )
        every = self.teacher.teachers.values() if isinstance(self.teacher, Teachers) else [self.teacher]
        self.optimizer.followers = list({id(one): one for one in every if isinstance(one, AverageTeacher)}.values())

    def open_rollouts(self, **options: Any) -> OnPolicy:
        """The source of responses."""
        if self.processes.sharded or self.config.rollout.staleness > 0:
            return Ahead(**options, steps=self.config.steps)
        return OnPolicy(**options)

    # ------------------------------------------------------------------ a step

    @contextmanager
    def micro_batches(self, step: int, clock: Clock) -> Iterator[Iterator[MicroBatch]]:
        """The scored rollouts of a step; on exit, gradient also flows back through the shared prefix."""
        batches = self.rollouts.begin(step, clock)
        most = max(map(len, self.rollouts.split(step))) if self.processes.sharded else len(batches)
        with self.processes.update(self.body, len(batches), most):
            ids = self.encoder.prefix
            with clock("update"):
                # A single micro-batch has the shared prefix in its forward pass. Several share the KV cache of one
                # pass, whose accumulated gradient goes back once; not if sharded: layers are gathered at their
                # outputs only.
                root = self.body.prefix_cache(ids) if len(batches) > 1 and not self.processes.sharded else None
            leaves = None if root is None else root.leaves()
            yield self.rollouts.scored(step, batches, ids if leaves is None else leaves, clock)
            if root is not None and leaves is not None:
                with clock("update"):
                    root.backward(leaves)

    def loss(self, step: int, batch: MicroBatch) -> LossOutput:
        """Summed loss of all response tokens; the optimizer divides it by the tokens of the whole step."""
        hidden = response_states(self.body, batch.prompts, batch.families, prefix=batch.prefix, forward=batch.forward)
        if not bool(torch.isfinite(hidden).all()):
            raise RunError("the student's hidden states are not finite", instead="a smaller learning rate, or fp32")
        batch.hidden = hidden.detach()
        if "special" in self.objective.needs:
            batch.leave_out({*self.model.end_ids, *self.encoder.tokenizer.all_special_ids})
        assert batch.scores is not None
        payload, teacher_head = batch.scores.payload, batch.scores.head
        head, inputs = self.model.head, self._loss_inputs(step, batch, hidden.device)
        if checking().fused:
            return fused_distillation_loss(
                hidden[None],
                head,
                payload,
                teacher_head,
                objective=self.objective,
                inputs=inputs,
                chunk_mb=chunk_mb(hidden.device.type),
            )
        if teacher_head is not None and isinstance(payload, Tensor):
            payload = teacher_head.logits(payload)
        return distillation_loss(head.logits(hidden[None]), payload, objective=self.objective, inputs=inputs)

    def _loss_inputs(self, step: int, batch: MicroBatch, device: torch.device) -> LossInputs:
        rollout, settings, responses = self.config.rollout, self.config.objective, batch.rollout.responses
        # Responses drawn from the current student's own distribution need no importance weights.
        on_policy = (
            (rollout.temperature, rollout.top_p, rollout.staleness) == (1, 1, 0)
            and set(batch.sources) == {"student"}
            and self.sampler is None
        )
        drawn = [value for row in batch.rollout.log_probs for value in row]
        order = None
        if settings.shuffle:  # within the micro-batch: λ of later ones is not known yet
            order = torch.tensor(permutation(len(drawn), self.config.seed, "shuffle", step, batch.places[0]))
        weights = None if batch.weights is None else [[weight for row in batch.weights for weight in row]]
        noise = from_teacher = None
        if "selection" in self.objective.needs:
            draws = [generator(self.config.seed, "select", step, place).random for place in batch.places]
            drawn_by_row = [draw() for draw, row in zip(draws, responses, strict=True) for _ in row]
            noise = torch.tensor([drawn_by_row], dtype=torch.float64, device=device)
        if "source" in self.objective.needs:
            others = torch.tensor([source != "student" for source in batch.sources])
            from_teacher = others[batch.segments][None].to(device)
        return LossInputs(
            weights=None if weights is None else torch.tensor(weights, device=device),
            top_k=settings.top_k,
            temperature=settings.temperature,
            entropy=settings.entropy,
            sampled=torch.tensor([[token for row in responses for token in row]], device=device),
            sampled_log_probs=None if on_policy else torch.tensor([drawn], device=device),
            segment_ids=batch.segments.to(device)[None],
            total_tokens=1.0,
            vocab_size=self.vocab_size,
            lam_order=order,
            from_teacher=from_teacher,
            noise=noise,
        )

    def release(self, batch: MicroBatch) -> None:
        """Free the tensors of a micro-batch whose loss was computed and recorded."""
        batch.hidden = batch.scores = None

    def advance(self, loss: float, progress: float) -> None:
        """Move the state of the objective after a step with this mean loss."""
        self.objective.advance(loss, progress)

    # ------------------------------------------------------------------ records

    @torch.no_grad()
    def logits(self, batch: MicroBatch, tokens: slice) -> tuple[Tensor, Tensor | TeacherTopK]:
        """(N, V) logits of both models for some tokens of a micro-batch, or the teacher's top-k."""
        assert batch.hidden is not None
        assert batch.scores is not None
        scores = batch.scores.part(tokens)
        student = self.model.head.logits(batch.hidden[tokens])[:, : self.vocab_size]
        if isinstance(scores.payload, TeacherTopK):
            return student, scores.payload
        assert scores.head is not None
        return student, scores.head.logits(scores.payload[0])[:, : self.vocab_size]

    def texts(self) -> Texts:
        """How responses are read for the records."""
        encoder = self.encoder
        prompt, token = encoder.prompt, lambda token: encoder.tokenizer.decode([token])
        return Texts(encoder.decode, token, prompt.parse, judged=bool(prompt.labels))

    def _counts(self) -> dict[str, int]:
        stats, cache = self.teacher.stats, self.cache
        hits = {} if cache is None else {"cache_hits": cache.stats.hits, "cache_misses": cache.stats.misses}
        return {"teacher_tokens": stats.computed_tokens, "teacher_passes": stats.passes, **hits}

    # ------------------------------------------------------------------ outside the steps

    def evaluation_writer(self) -> Any:
        """The sampler with current weights, if it evaluates too."""
        if self.sampler is None or self.config.evaluation.engine == "native":
            return None
        self.sampler.sync()
        return self.sampler

    def state(self, done: int) -> dict[str, Any]:
        """Checkpoint state besides tensors, after `done` steps."""
        moving = dict(self.objective.state)
        return {**self.trace.state(), **self.rollouts.state(), **({"objective": moving} if moving else {})}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        rest = dict(state)
        self.objective.state.update(rest.pop("objective", {}))
        self.trace.restore(self.rollouts.restore(rest))

    def evidence(self) -> dict[str, Any]:
        """What a failed step saw, for its record."""
        seen, current = self.trace.batches, self.rollouts.current
        return self.trace.evidence(seen if current is None or current in seen else [*seen, current])

    def summary(self) -> dict[str, Any]:
        """The run's tokens and λ."""
        return {"run": self.trace.summary()}


def _gigabytes(model: Model) -> float:
    return sum(parameter.nbytes for parameter in model.network.parameters()) / 1e9


def _open_cache(config: TrainConfig, progress: Progress) -> ScoreCache | None:
    where = config.teacher.cache
    if where is None:
        return None
    folder = cache_root() / "scores" if where == "auto" else Path(where).expanduser()
    return ScoreCache(folder, max_mb=config.teacher.cache_mb, report=progress.note)
