"""On-policy distillation: a student, its teachers, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatespace.config import TrainConfig, in_setting
from gatespace.config.address import is_address, parse_address
from gatespace.config.checking import checking
from gatespace.config.sections import SELF_EMA
from gatespace.errors import RunError
from gatespace.gating.configured import build_gate, build_objective
from gatespace.gating.fused import fused_distillation_loss
from gatespace.gating.loss import LossInputs, LossOutput, distillation_loss
from gatespace.gating.objectives import Objective
from gatespace.gating.tokens import TeacherTopK
from gatespace.models import Model
from gatespace.models.body import Body, response_states
from gatespace.models.cache_root import cache_root
from gatespace.models.encode import Encoder
from gatespace.plugins import provider
from gatespace.seeding import generator, permutation
from gatespace.teacher.average import AverageTeacher
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import ScoreSpec, Teacher
from gatespace.teacher.several import Teachers, joint_fingerprint
from gatespace.training.batches import Batches
from gatespace.training.fit import check_models, check_teachers
from gatespace.training.job import Job
from gatespace.training.memory import chunk_mb, micro_tokens
from gatespace.training.metrics import StepMetrics, Texts
from gatespace.training.progress import Progress
from gatespace.training.rollouts import MicroBatch, Rollouts
from gatespace.training.setup import ModelSpec, material, open_model, teacher_encoder_for, usable


@dataclass(frozen=True)
class DistillationLoss:
    """The gated divergence of the student from its teacher, of one micro-batch at a time.

    Args:
        student: Its body.
        objective: Gate and divergences.
        config: Settings of the run.
        vocab_size: Ids from here on are padding.
        special_ids: Tokens that objectives may leave out.
        sampled_here: Whether the student itself samples, not a copy of its weights.
    """

    student: Body
    objective: Objective
    config: TrainConfig
    vocab_size: int
    special_ids: Set[int] = frozenset()
    sampled_here: bool = True

    def __call__(self, step: int, batch: MicroBatch) -> LossOutput:
        """Summed loss of all response tokens; the optimizer divides it by the tokens of the whole step."""
        forward, scores = batch.forward, batch.scores
        hidden = response_states(self.student, batch.prompts, batch.families, prefix=batch.prefix, forward=forward)
        if not bool(torch.isfinite(hidden).all()):
            raise RunError("the student's hidden states are not finite", instead="a smaller learning rate, or fp32")
        batch.hidden = hidden.detach()
        if "special" in self.objective.needs:
            batch.leave_out(self.special_ids)
        head, inputs = self.student.model.head, self._inputs(step, batch, hidden.device)
        if checking().fused:
            return fused_distillation_loss(
                hidden[None],
                head,
                scores.payload,
                scores.head,
                objective=self.objective,
                inputs=inputs,
                chunk_mb=chunk_mb(hidden.device.type),
            )
        teacher = scores.payload
        if scores.head is not None and isinstance(teacher, Tensor):
            teacher = scores.head.logits(teacher)
        return distillation_loss(head.logits(hidden[None]), teacher, objective=self.objective, inputs=inputs)

    @torch.no_grad()
    def logits(self, batch: MicroBatch, tokens: slice) -> tuple[Tensor, Tensor | TeacherTopK]:
        """(N, V) logits of both models for some tokens of a micro-batch, or the teacher's top-k."""
        assert batch.hidden is not None
        scores = batch.scores.part(tokens)
        student = self.student.model.head.logits(batch.hidden[tokens])[:, : self.vocab_size]
        if scores.head is None:
            return student, scores.payload
        return student, scores.head.logits(scores.payload[0])[:, : self.vocab_size]

    def _inputs(self, step: int, batch: MicroBatch, device: torch.device) -> LossInputs:
        rollout, settings, responses = self.config.rollout, self.config.objective, batch.rollout.responses
        # Responses drawn from the current student's own distribution need no importance weights.
        on_policy = (
            (rollout.temperature, rollout.top_p, rollout.staleness) == (1, 1, 0)
            and set(batch.sources) == {"student"}
            and self.sampled_here
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


class Distillation(Job):
    """The job of `gatespace train`."""

    config: TrainConfig
    rollouts: Rollouts
    loss: Any
    trace: StepMetrics
    teachers: Teachers
    cache: ScoreCache | None
    sampler: Any
    """Samples instead of the student; None: the student does."""

    def open(self) -> None:
        """Load the models, and connect to teachers that are services."""
        config, pair, progress = self.config, self.config.pair, self.progress
        self.objective = build_objective(config.objective, run=config)
        self.data = material(config.task, "distill")
        check_teachers(config, self.data)  # before anything large is loaded
        self.models = self._load()
        self.encoder = self.encoder_of(self.model)
        self.check(student=self.model, **self.models)
        self.cache = _open_cache(config, progress)
        if self.cache is not None:
            self.stack.enter_context(self.cache)
        self.vocab_size = self.model.vocab_size
        for scorer, model in self.models.items():
            with nullcontext() if pair.teachers is None else in_setting(f"pair.{scorer}"):
                report = check_models(config, self.model, model)
            for note in report.notes:
                progress.note(note)
            self.vocab_size = report.vocab_size
        self.teacher_encoder = self.open_teacher_encoder()
        self.services: dict[str, Teacher] = {}
        """Teachers behind an address, by address."""
        for scorer, where in pair.scorers().items():
            if scorer not in self.models and where not in self.services:
                self.services[where] = self._connect(scorer, where)
        teacher, self.about = self._teachers_identity()
        self.content = {
            "task": self.data.task.digest,
            "student": self.fingerprint(),
            "teacher": teacher,
            "gate": str(build_gate(config.objective)),
            "precision": self.place.precision,
        }

    def _load(self) -> dict[str, Model]:
        """Load the student; returns the teachers in this process by setting below `pair`. Each is loaded once."""
        config, pair, task, note = self.config, self.config.pair, self.data.task, self.progress.note
        device = pair.teacher_device or self.place.device
        device = device if device == "auto" else usable(device, "pair.teacher_device")
        # Quantised models have no float32 weights to round later.
        dtype = self.place.dtype if pair.student_quantization else torch.float32
        student: dict[str, Any] = {"dtype": dtype, "lora": pair.lora, "seed": config.seed}
        models: dict[str, Model] = {}
        loaded: dict[tuple[str, str], Model] = {}
        with self.processes.in_turn():
            for scorer, where in pair.scorers().items():  # first: they are most often missing
                if is_address(where):
                    continue
                spec = ModelSpec.of(
                    pair.alone(scorer), "teacher", f"pair.{scorer}", device=device, dtype=self.place.dtype
                )
                if where == SELF_EMA:
                    spec = ModelSpec.of(pair, "student", device=device, **student)
                folder = Path(spec.name).expanduser()
                key = (
                    str(folder.resolve()) if folder.is_dir() else spec.name,
                    where if where == SELF_EMA else spec.role,
                )
                if key not in loaded:
                    loaded[key] = open_model(spec, task, note)
                models[scorer] = loaded[key]
            spec = ModelSpec.of(pair, "student", device=self.processes.loads_on(self.place.device), **student)
            self.model = open_model(spec, task, note)
        if loaded and self.processes.size > 1:
            weights = [parameter.nbytes for model in loaded.values() for parameter in model.network.parameters()]
            note(
                f"each of the {self.processes.size} processes holds the whole teacher ({sum(weights) / 1e9:.2g} GB); "
                "one for all: gatespace teacher serve, and pair.teacher: zmq://…"
            )
        return models

    def open_teacher_encoder(self) -> Encoder:
        """Encoder of the teacher's prompts: the student's, unless it has its own."""
        return teacher_encoder_for(self.config, self.data, self.model, self.models) or self.encoder

    def _connect(self, scorer: str, where: str) -> Teacher:
        teacher: Teacher = provider("teachers", parse_address(where).scheme)(
            self.config.alone(scorer),
            self.model,
            self.score_spec(),
            place=self.place,
            cache=self.cache,
            report=self.progress.note,
            setting=f"pair.{scorer}",
        )
        self.stack.callback(teacher.close)
        return teacher

    def _teachers_identity(self) -> tuple[str, dict[str, Any]]:
        """The teachers' part of the run's identity, and their entries of environment.json."""
        fingerprints: dict[str, str] = {}
        about: dict[str, dict[str, str]] = {}
        for scorer, where in self.config.pair.scorers().items():
            name = scorer.removeprefix("teachers.")
            if scorer in self.models:
                fingerprints[name] = self.models[scorer].fingerprint()
                about[name] = {}
                if where == SELF_EMA:
                    fingerprints[name] = f"{SELF_EMA} {fingerprints[name]}"
            else:
                fingerprints[name], about[name] = self.services[where].fingerprint, self.services[where].about()
        if self.config.pair.teachers is None:
            return fingerprints["teacher"], {} if self.models else about
        teachers = {name: {"fingerprint": fingerprints[name], **about[name]} for name in fingerprints}
        return joint_fingerprint(fingerprints), {"teachers": teachers}

    def score_spec(self) -> ScoreSpec:
        """The scores to request."""
        prefix, teacher = tuple(self.teacher_encoder.prefix), self.config.teacher
        return ScoreSpec(prefix, self.config.rollout.max_new_tokens, self.vocab_size, teacher.payload, teacher.k)

    def prepare(self) -> None:
        """Create what training needs besides the models."""
        super().prepare()
        config = self.config
        self.teachers = self._open_teachers()
        averages = [teacher for teacher in self.teachers.distinct if isinstance(teacher, AverageTeacher)]
        self.optimizer.followers = list(averages)
        self.sampler = self._open_sampler()
        self.assemble(
            student=self.body,
            teachers=self.teachers,
            encoder=self.encoder,
            batches=Batches(
                self.data.rows,
                self.encoder,
                batch_size=config.batch_size,
                seed=config.seed,
                teacher_encoder=None if self.teacher_encoder is self.encoder else self.teacher_encoder,
                by_teacher=config.pair.teachers is not None,
            ),
            settings=config.rollout,
            steps=config.steps,
            vocab_size=self.vocab_size,
            seed=config.seed,
            micro_tokens=micro_tokens(self.sizes, config.engine, len(self.encoder.prefix)),
            rollout_tokens=self.sizes.rollout_tokens(self.place.dtype.itemsize),
            reuse=checking().reuse_rollout,
            sampler=self.sampler,
            processes=self.processes,
            share=checking().share_prompt,
            # permutation and selection are over the tokens of every sample
            merge=not (config.objective.shuffle or "selection" in self.objective.needs),
        )

    def assemble(self, **options: Any) -> None:
        """Put rollouts, loss and trace together; `options` are those of `Rollouts`."""
        self.rollouts = Rollouts(**options)
        special = {*self.model.end_ids, *self.encoder.tokenizer.all_special_ids}
        self.loss = DistillationLoss(
            self.body, self.objective, self.config, self.vocab_size, special, sampled_here=self.sampler is None
        )
        prompt, tokenizer = self.encoder.prompt, self.encoder.tokenizer
        texts = Texts(
            self.encoder.decode, lambda token: tokenizer.decode([token]), prompt.parse, judged=bool(prompt.labels)
        )
        self.trace = self.metrics(self.loss.logits, texts)

    def metrics(self, logits: Callable[..., Any], texts: Texts) -> StepMetrics:
        """Metrics of steps, from both models' logits and the texts of responses."""
        return StepMetrics(
            objective=self.objective,
            settings=self.config.objective,
            trace=self.config.trace,
            vocab_size=self.vocab_size,
            logits=logits,
            texts=texts,
            counts=self._counts,
            processes=self.processes,
        )

    def _counts(self) -> dict[str, int]:
        stats, cache = self.teachers.stats, self.cache
        hits = {} if cache is None else {"cache_hits": cache.stats.hits, "cache_misses": cache.stats.misses}
        return {"teacher_tokens": stats.computed_tokens, "teacher_passes": stats.passes, **hits}

    def _open_teachers(self) -> Teachers:
        """Teachers by the names that rows have for them; one model is one teacher."""
        config, spec, device = self.config, self.score_spec(), self.place.device
        packed = checking().packed
        opened: dict[int, Teacher] = {}
        by_name: dict[str, Teacher] = {}
        for scorer, where in config.pair.scorers().items():
            name = "" if scorer == "teacher" else scorer.removeprefix("teachers.")
            if (model := self.models.get(scorer)) is None:
                by_name[name] = self.services[where]
                continue
            if id(model) not in opened:
                opened[id(model)] = (
                    AverageTeacher(
                        model, spec, decay=config.pair.ema_decay, dtype=self.place.dtype, packed=packed, device=device
                    )
                    if where == SELF_EMA
                    else LocalTeacher(model, spec, cache=self.cache, packed=packed, device=device)
                )
            by_name[name] = opened[id(model)]
        return Teachers(by_name)

    def _open_sampler(self) -> Any:
        config = self.config
        if config.rollout.engine == "native":
            return None
        texts = [row.text for row in self.data.rows]
        if config.evaluation.engine == config.rollout.engine:
            splits = {*config.evaluation.final, config.evaluation.split}
            texts += [row.text for split in splits for row in self.data.task.rows(split)]
        opener = provider("samplers", config.rollout.engine)
        return self.stack.enter_context(
            opener(config, self.model, self.encoder, texts, run=self.run, place=self.place, report=self.progress.note)
        )

    # ------------------------------------------------------------------ between the steps

    def advance(self, loss: float, progress: float) -> None:
        """Move the objective's state, e.g. TAID's τ."""
        self.objective.advance(loss, progress)

    def evaluation_writer(self) -> Any:
        """The sampler with current weights, if it evaluates too."""
        if self.sampler is None or self.config.evaluation.engine == "native":
            return None
        self.sampler.sync()
        return self.sampler

    def state(self, done: int) -> dict[str, Any]:
        """Checkpoint state besides tensors, after `done` steps."""
        objective = dict(self.objective.state)
        return {**self.trace.state(), **self.rollouts.state(done), **({"objective": objective} if objective else {})}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.objective.state.update(state.get("objective", {}))
        self.rollouts.restore(state)
        self.trace.restore({name: value for name, value in state.items() if name not in ("objective", "ahead")})

    def evidence(self) -> dict[str, Any]:
        """What a failed step saw: its micro-batches up to the one that failed, or all if it failed in sampling."""
        parts = self.rollouts.parts
        sampled = bool(parts) and bool(parts[-1].rollout.responses)
        return self.trace.evidence(parts[: len(self.trace.batches) + 1] if sampled else parts)

    def summary(self) -> dict[str, Any]:
        """The run's tokens and λ."""
        return {"run": self.trace.summary()}


def _open_cache(config: TrainConfig, progress: Progress) -> ScoreCache | None:
    where = config.teacher.cache
    if where is None:
        return None
    folder = cache_root() / "scores" if where == "auto" else Path(where).expanduser()
    return ScoreCache(folder, max_mb=config.teacher.cache_mb, report=progress.note)
