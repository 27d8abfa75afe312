"""Worker process of step.py: a few steps of one contender, timed by phase.

`Work` is what all contenders share: the pair, the rows of every step, and the prompt. ladder_worker.py uses it too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
from torch import Tensor

from gatespace.config import TrainConfig, parse_config
from gatespace.gating.configured import build_objective
from gatespace.models import Model, check_pair, load_model
from gatespace.models.body import body_of
from gatespace.models.encode import Encoder
from gatespace.models.sizes import sizes_of
from gatespace.seeding import permutation, stream
from gatespace.tasks import Prompt, load_task
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import ScoreSpec
from gatespace.teacher.several import Teachers
from gatespace.training.batches import Row
from gatespace.training.clock import Clock
from gatespace.training.distill import DistillationLoss
from gatespace.training.memory import micro_tokens
from gatespace.training.optimizer import Optimizer
from gatespace.training.rollouts import Rollouts

GATE = "G5"
PHASES = ("rollout", "score", "update", "optimizer")


@dataclass(frozen=True)
class Work:
    """The benchmark's workload, the same for everybody; fields as in the settings of step.py."""

    student: str
    teacher: str
    task: str
    root: str | None
    brief: bool
    batch: int
    max_new_tokens: int
    precision: str
    steps: int
    warm_up: int
    lr: float
    seed: int
    per_prompt: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def all_steps(self) -> int:
        return self.warm_up + self.steps

    def encoder(self, tokenizer: Any) -> Encoder:
        """Encoder for the texts of all steps."""
        return Encoder(self._prompt(), tokenizer, [example.text for example in self._examples()])

    def rows(self, encoder: Encoder) -> list[list[Row]]:
        """The rows of every step, warm-up first."""
        rows = [Row(i, row, ids := encoder.suffix(row.text), ids) for i, row in enumerate(self._examples())]
        return [rows[step * self.batch : (step + 1) * self.batch] for step in range(self.all_steps)]

    def _prompt(self) -> Prompt:
        return Prompt.of(load_task(self.task, self.root), brief=self.brief)

    def _examples(self) -> list[Any]:
        train = load_task(self.task, self.root).train
        order = permutation(len(train), self.seed, "order", 0)
        return [train[order[i % len(order)]] for i in range(self.batch * self.all_steps)]


@dataclass
class Meter:
    """Records every step, including warm-up."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    _begun: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def begin(self) -> None:
        self.clock = Clock()
        self._begun = _now()

    def end(self, responses: Sequence[Sequence[int]], **more: Any) -> None:
        wall, cpu, busy = (now - then for now, then in zip(_now(), self._begun, strict=True))
        record: dict[str, Any] = {"wall": wall, "cpu": cpu, "others": max(0.0, busy - cpu)}
        for kind, seconds in (("wall", self.clock.wall), ("cpu", self.clock.cpu)):
            record |= {f"{kind}_{phase}": seconds.get(phase, 0.0) for phase in PHASES}
        lengths = [len(response) for response in responses]
        record["response_tokens"] = sum(lengths)
        record["mean_length"] = sum(lengths) / max(1, len(lengths))
        self.steps.append(record | more)

    @contextmanager
    def step(self) -> Iterator[list[list[int]]]:
        """Measure a step; append its responses to the yielded list."""
        responses: list[list[int]] = []
        self.begin()
        yield responses
        self.end(responses)


def _now() -> tuple[float, float, float]:
    return time.perf_counter(), time.process_time(), measure._busy_everywhere()


def whole_prompts(encoder: Encoder, rows: Sequence[Row]) -> list[list[int]]:
    """The prompts with their shared prefix."""
    return [[*encoder.prefix, *row.prompt] for row in rows]


def padded_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def _pair(work: Work) -> tuple[Model, Model]:
    """Load the pair. The student's weights are float32 for everybody; the teacher's are in compute precision, as
    autocast would round float32 ones again in every pass."""
    return load_model(work.student), load_model(work.teacher, dtype=work.dtype)


# ---------------------------------------------------------------------- contenders: each returns the work to measure


def trl(work: Work, meter: Meter, folder: Path, *, autocast: bool = False) -> Callable[[], None]:
    """TRL's DistillationTrainer on rendered prompts. Reverse KL (its default), which is its cheapest loss.

    With bf16=True, generation is in bfloat16 but the student's training pass is not: accelerate wraps the network's
    `forward` in autocast, and TRL's loss replaces that very method while it runs. `autocast` restores it through the
    trainer's own hook, so that all contenders have the same precision.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DistillationConfig, DistillationTrainer

    student, teacher = _pair(work)
    encoder = work.encoder(student.tokenizer)
    prompts = [
        ids for rows in work.rows(encoder) for ids in whole_prompts(encoder, rows) for _ in range(work.per_prompt)
    ]
    texts = [student.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in prompts]
    if student.tokenizer(text=texts)["input_ids"] != prompts:
        raise RuntimeError("it tokenizes the rendered prompts differently")
    student.network.generation_config.eos_token_id = list(student.end_ids)
    responses: list[list[int]] = []

    class Timed(DistillationTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with meter.clock("rollout"):
                return super()._generate_and_score_completions(inputs)

        def _generate(self, prompts: Any) -> Any:
            found = super()._generate(prompts)
            responses[:] = found[1]
            return found

        def _get_last_hidden_state(self, model: Any, *arguments: Any, **options: Any) -> Any:
            if model is not teacher.network:
                return super()._get_last_hidden_state(model, *arguments, **options)
            with meter.clock("score"):
                return super()._get_last_hidden_state(model, *arguments, **options)

        def compute_loss_context_manager(self) -> Any:
            if autocast and work.precision == "bf16":
                return torch.autocast("cpu", torch.bfloat16)
            return super().compute_loss_context_manager()

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            with meter.clock("training"):
                return super().training_step(*arguments, **options)

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            # The rest of a training step is forward, loss (including both heads) and backward; outside of it are
            # clipping and AdamW.
            total = {"wall": time.perf_counter() - meter._begun[0], "cpu": time.process_time() - meter._begun[1]}
            for kind, whole in total.items():
                phases = getattr(meter.clock, kind)
                training = phases.pop("training")
                phases["update"] = training - phases["rollout"] - phases["score"]
                phases["optimizer"] = whole - training
            meter.end(responses)

    config = DistillationConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=work.precision == "bf16",
        gradient_checkpointing=False,
        per_device_train_batch_size=work.batch,
        gradient_accumulation_steps=work.per_prompt,  # it generates all responses of a step at once
        max_steps=work.all_steps,
        learning_rate=work.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.0,
        max_completion_length=work.max_new_tokens,
        temperature=1.0,
        beta=1.0,
        shuffle_dataset=False,
        seed=work.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Timed(
        model=student.network,
        teacher_model=teacher.network,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=student.tokenizer,
        callbacks=[Steps()],
    )
    return lambda: (trainer.train(), None)[1]


def plain(work: Work, meter: Meter, folder: Path) -> Callable[[], None]:
    """Transformers alone: generate, two forward passes with response-only logits, autograd."""
    from transformers import GenerationConfig

    student, teacher = _pair(work)
    network, size = student.network, check_pair(student, teacher).vocab_size
    encoder = work.encoder(student.tokenizer)
    steps, pad = work.rows(encoder), student.pad_id
    optimizer = torch.optim.AdamW(network.parameters(), lr=work.lr, weight_decay=0.0, fused=True)
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=work.max_new_tokens,
        num_return_sequences=work.per_prompt,
        eos_token_id=list(student.end_ids),
        pad_token_id=pad,
        bos_token_id=student.tokenizer.bos_token_id,
    )
    ends = torch.tensor(student.end_ids)
    torch.manual_seed(stream(work.seed, "rollout") % 2**63)

    def precision() -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=work.precision == "bf16")

    def step(rows: Sequence[Row]) -> None:
        with meter.step() as responses:
            ids, mask = padded_left(whole_prompts(encoder, rows), pad)
            with meter.clock("rollout"), torch.no_grad(), precision():
                written = network.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
                drawn = written[:, ids.shape[1] :]
                ended = torch.isin(drawn, ends)
                real = ended.cumsum(1) - ended.long() == 0
            seen = torch.cat([mask.repeat_interleave(work.per_prompt, 0), real.long()], 1)
            for start in range(0, len(written), work.batch):  # more rows do not fit into memory
                part = slice(start, start + work.batch)
                counted = real[part]
                keep = {"attention_mask": seen[part], "use_cache": False, "logits_to_keep": drawn.shape[1] + 1}
                with meter.clock("score"), torch.no_grad(), precision():
                    said = teacher.network(input_ids=written[part], **keep).logits[:, :-1, :size][counted]
                    teacher_log = torch.log_softmax(said.float(), -1)
                with meter.clock("update"):
                    with precision():
                        logits = network(input_ids=written[part], **keep).logits[:, :-1, :size][counted]
                    student_log = torch.log_softmax(logits.float(), -1)
                    forward_kl = torch.nn.functional.kl_div(student_log, teacher_log, log_target=True, reduction="none")
                    reverse_kl = torch.nn.functional.kl_div(teacher_log, student_log, log_target=True, reduction="none")
                    loss = (forward_kl + reverse_kl).sum() / (2 * int(real.sum()))
                    loss.backward()
            with meter.clock("optimizer"):
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            responses += [row[keeps].tolist() for row, keeps in zip(drawn, real, strict=True)]

    return lambda: [step(rows) for rows in steps].clear()


def gatespace(work: Work, meter: Meter, folder: Path) -> Callable[[], None]:
    """Our step as in `gatespace train`, without telemetry. `folder` decides whether the cache is warm."""
    store = ScoreCache(folder / "scores")
    engine = Engine(work, store, _pair)

    def step(number: int) -> None:
        hits, misses = store.stats.hits, store.stats.misses
        meter.begin()
        responses = engine.step(number, meter.clock)
        meter.end(responses, hits=store.stats.hits - hits, misses=store.stats.misses - misses)

    return lambda: [step(number) for number in range(work.all_steps)].clear()


class Engine:
    """Our engine with its default settings, assembled by hand: models are given, and nothing is recorded."""

    def __init__(self, work: Work, store: ScoreCache | None, load: Callable[[Work], tuple[Model, Model]]) -> None:
        student, teacher = load(work)
        settings: dict[str, Any] = {
            "pair": {"teacher": work.teacher},
            "objective": {"gate": GATE},
            "rollout": {"max_new_tokens": work.max_new_tokens, "stop": "eos", "per_prompt": work.per_prompt},
            "optimizer": {"lr": work.lr, "weight_decay": 0.0},
            "seed": work.seed,
        }
        config = parse_config(TrainConfig, settings)
        vocab_size = check_pair(student, teacher).vocab_size
        self.optimizer = Optimizer(student.network, config.optimizer, steps=work.all_steps, dtype=work.dtype)
        body = body_of(student)  # after the optimizer has cast the weights
        self.encoder = work.encoder(student.tokenizer)
        self.rows = work.rows(self.encoder)
        spec = ScoreSpec(tuple(self.encoder.prefix), work.max_new_tokens, vocab_size)
        sizes = sizes_of(student)
        self.loss = DistillationLoss(body, build_objective(config.objective), config, vocab_size)
        self.rollouts = Rollouts(
            student=body,
            teachers=Teachers({"": LocalTeacher(teacher, spec, cache=store)}),
            encoder=self.encoder,
            batches=self,  # type: ignore[arg-type]
            settings=config.rollout,
            steps=work.all_steps,
            vocab_size=vocab_size,
            seed=work.seed,
            micro_tokens=micro_tokens(sizes, config.engine, len(self.encoder.prefix)),
            rollout_tokens=sizes.rollout_tokens(work.dtype.itemsize),
        )

    def at(self, step: int) -> list[Row]:
        """Rows of a step, in place of `Batches`."""
        return self.rows[step]

    def step(self, number: int, clock: Clock) -> list[list[int]]:
        """Run one update; return the responses of all samples."""
        responses, tokens = [], 0.0
        batch = self.rollouts(number, clock)
        for part in batch.parts:
            with clock("score"):
                part.scores = part.ask()
            with clock("update"):
                output = self.loss(number, part)
                output.loss.backward()
                tokens += float(output.tokens)
            responses += [part.rollout.responses[row] for row in part.samples]
            part.free()
        with clock("update"):
            batch.backward()
        with clock("optimizer"):
            self.optimizer.step(number, tokens)
        return responses


CONTENDERS: dict[str, Callable[[Work, Meter, Path], Callable[[], None]]] = {
    "trl": trl,
    "trl-autocast": partial(trl, autocast=True),
    "plain": plain,
    "gatespace-cold": gatespace,
    "gatespace-warm": gatespace,
}


def main() -> None:
    asked = measure.request()
    torch.set_num_threads(asked["threads"])
    work, meter = Work(**asked["work"]), Meter()
    try:
        run = CONTENDERS[asked["contender"]](work, meter, Path(asked["folder"]))
    except ImportError as error:
        measure.answer({"unavailable": f"cannot be imported: {error}"})
        return
    measure.give_back_free_memory()
    _, cost = measure.measured(run)
    measure.answer({"steps": meter.steps[work.warm_up :], "peak_mib": cost.peak_rss / measure.MIB})


if __name__ == "__main__":
    main()
