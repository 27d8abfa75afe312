"""Cost of a kill: the same distillation killed at random and resumed, by gatespace and by TRL's own trainer.

    python benchmarks/kills.py [--kills N] [--steps N] [--save-every N] [--seed N] [--quick] [--json]

Both sides distil the same tiny pair on the same prompts of the generated task, with reverse KL, the same steps, batch,
length, learning rate and checkpoints, in float32 on one thread. A trial is a run that gets SIGKILL at a random moment
of a random step and is restarted as a user would: gatespace with the same command, TRL with
`train(resume_from_checkpoint=...)` if there is a checkpoint. It is then compared with an uninterrupted run:

    resumed      the second start finished without intervention
    same loss    the loss of the last step differs by at most 1e-6
    same bytes   model.safetensors is the same file
    steps again  mean number of steps repeated

Two uninterrupted runs are compared first; if they differ, the kill is not to blame. Every life is its own process,
forked after the imports.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import measure

from gatespace.config import TeachConfig, TrainConfig, parse_config
from gatespace.models.encode import Encoder
from gatespace.models.load import load_model
from gatespace.models.tiny import STUDENT, TinyPair, build_tiny
from gatespace.tasks import Prompt, synthetic_task
from gatespace.training.progress import Silent
from gatespace.training.train import teach, train

BATCH, LENGTH, RATE, TOLERANCE = 8, 8, 2e-3, 1e-6
TASK = {"name": "synthetic", "brief": True}
QUIET = {"every": 0, "final": []}


class Work(NamedTuple):
    """Settings of every run."""

    pair: TinyPair
    steps: int
    save_every: int


class Ending(NamedTuple):
    """Result of a finished run."""

    loss: float
    weights: str


Tell = Callable[[], Any]
Side = Callable[[Work, Path, Tell], Ending]


def prepared(folder: Path, steps: int) -> TinyPair:
    """Build a pair with a trained teacher, in a child process: after using autograd, this one could not fork."""
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            # TRL requires heads with the same number of rows.
            pair = build_tiny(synthetic_task(), folder / "tiny", student=replace(STUDENT, pad_to=64, spare=1))
            lesson = {"task": TASK, "model": str(pair.teacher), "steps": steps, "batch_size": 24}
            options = {"optimizer": {"lr": RATE}, "evaluation": QUIET, "output": str(folder / "taught")}
            teach(parse_config(TeachConfig, lesson | options))
            os._exit(0)
        os._exit(1)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        raise SystemExit("the teacher could not be made")
    return TinyPair(folder / "tiny" / "student", folder / "taught" / "model")


def ours(work: Work, folder: Path, tell: Tell) -> Ending:
    """Run `gatespace train`; the same call resumes."""

    class Steps(Silent):
        def step(self, *_: Any) -> None:
            tell()

    settings = {
        "task": TASK,
        "pair": {"student": str(work.pair.student), "teacher": str(work.pair.teacher)},
        "objective": {"gate": "static:1"},  # reverse KL
        "rollout": {"max_new_tokens": LENGTH, "stop": "eos"},
        "optimizer": {"lr": RATE, "weight_decay": 0.0},
        "engine": {"precision": "fp32"},
        "evaluation": QUIET,
        "checkpoint": {"every": work.save_every},
        "teacher": {"cache": str(folder / "scores")},
        "steps": work.steps,
        "batch_size": BATCH,
        "output": str(folder / "run"),
    }
    train(parse_config(TrainConfig, settings), Steps())
    last = (folder / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    return Ending(json.loads(last)["loss"], _hash(folder / "run" / "model"))


def trl(work: Work, folder: Path, tell: Tell) -> Ending:
    """Run TRL's DistillationTrainer unchanged, resumed as documented."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
    from trl import DistillationConfig, DistillationTrainer

    class Steps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            tell()

    student, teacher = load_model(str(work.pair.student)), load_model(str(work.pair.teacher))
    task = synthetic_task()
    texts = [example.text for example in task.train]
    encoder = Encoder(Prompt.of(task, brief=True), student.tokenizer, texts)
    prompts = [student.tokenizer.decode([*encoder.prefix, *encoder.suffix(text)]) for text in texts]
    student.network.generation_config.eos_token_id = list(student.end_ids)
    config = DistillationConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        max_steps=work.steps,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_completion_length=LENGTH,
        temperature=1.0,
        beta=1.0,  # reverse KL, its default
        save_steps=work.save_every,
        save_total_limit=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = DistillationTrainer(
        model=student.network,
        teacher_model=teacher.network,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=student.tokenizer,
        callbacks=[Steps()],
    )
    found = (folder / "out").is_dir() and get_last_checkpoint(str(folder / "out"))
    trainer.train(resume_from_checkpoint=found or None)
    trainer.save_model(str(folder / "model"))
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return Ending(losses[-1], _hash(folder / "model"))


SIDES: dict[str, Side] = {"gatespace": ours, "trl": trl}


def _hash(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


# ---------------------------------------------------------------------------------------------------- lives


class Life(NamedTuple):
    """One process of a run: its result, its error, or None if it was killed; and the number of steps it did."""

    ended: Ending | str | None
    steps: int


def life(side: Side, work: Work, folder: Path, *, kill_at: tuple[int, float] | None = None) -> Life:
    """Run one process of a run.

    `kill_at`: (steps, seconds): kill it this long after this many of its steps (0: after its start).
    """
    folder.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(reader)
            _be(side, work, folder, writer)
        os._exit(1)
    os.close(writer)
    told = b""
    with open(reader, "rb", buffering=0) as pipe:
        while part := pipe.read(4096):
            told += part
            if kill_at is not None and told.count(b".") > kill_at[0]:
                time.sleep(kill_at[1])
                os.kill(child, signal.SIGKILL)
                kill_at = None
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    answer = told.lstrip(b".")
    steps = len(told) - len(answer) - 1
    if status == -signal.SIGKILL:
        return Life(None, steps)
    said = json.loads(answer or b'{"failed": "no answer"}')
    return Life(said["failed"] if "failed" in said else Ending(**said), steps)


def _be(side: Side, work: Work, folder: Path, writer: int) -> None:
    """Child process: write a dot at the start and after each step, then the result."""
    with open(folder / "log", "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

    def tell() -> None:
        os.write(writer, b".")

    try:
        tell()
        answer: dict[str, Any] = side(work, folder, tell)._asdict()
    except Exception as error:
        answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
    os.write(writer, json.dumps(answer).encode())
    os._exit(0)


def trial(side: Side, work: Work, folder: Path, rng: random.Random, pace: float) -> tuple[Life, Life]:
    """Kill a run once at a random moment, then let it resume; return both lives."""
    for attempt in range(20):
        place = folder / str(attempt)
        killed = life(side, work, place, kill_at=(rng.randrange(work.steps), rng.random() * pace))
        if killed.ended is None:
            return killed, life(side, work, place)
    raise RuntimeError("every run ended before it could be killed")


def compare(side: Side, work: Work, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Run all trials of a side."""
    begun = time.perf_counter()
    reference, repeated = (life(side, work, folder / f"whole-{n}").ended for n in range(2))
    pace = (time.perf_counter() - begun) / 2 / work.steps
    if not isinstance(reference, Ending):
        return {"unavailable": reference}
    rng = random.Random(seed)
    trials = []
    for n in range(kills):
        killed, again = trial(side, work, folder / f"killed-{n}", rng, pace)
        row: dict[str, Any] = {"killed_after": killed.steps, "steps_again": killed.steps + again.steps - work.steps}
        if isinstance(again.ended, Ending):
            off, same = abs(again.ended.loss - reference.loss), again.ended.weights == reference.weights
            row |= {"off": off, "same_bytes": same}
        else:
            row["failed"] = again.ended
        trials.append(row)
        print(f"  {n + 1}/{kills} {row}", file=sys.stderr, flush=True)
    return {
        "repeats": repeated == reference,
        "kills": kills,
        "resumed": sum("failed" not in row for row in trials),
        "same_loss": sum(row.get("off", 1.0) <= TOLERANCE for row in trials),
        "same_bytes": sum(row.get("same_bytes", False) for row in trials),
        "largest_off": max((row["off"] for row in trials if "off" in row), default=None),
        "steps_again": sum(row["steps_again"] for row in trials) / kills,
        "trials": trials,
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each side (default 20)")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-every", type=int, default=4, help="steps between checkpoints (default 4)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments of the kills")
    parser.add_argument("--quick", action="store_true", help="does it run? two kills of few steps")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.quick:
        asked.kills, asked.steps, asked.save_every = 2, 6, 2
    try:
        from trl import DistillationTrainer  # noqa: F401  # imported once, before any fork
    except ImportError as error:
        missing = f"cannot be imported: {error}"
    else:
        missing = None
    import torch

    torch.set_num_threads(1)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gatespace-kills-") as scratch:
        work = Work(prepared(Path(scratch), 10 if asked.quick else 60), asked.steps, asked.save_every)
        for name, side in SIDES.items():
            print(name, file=sys.stderr, flush=True)
            if name == "trl" and missing:
                results[name] = {"unavailable": missing}
            else:
                results[name] = compare(side, work, Path(scratch) / name, asked.kills, asked.seed)
    environment = measure.environment(1)
    if asked.json:
        print(json.dumps({"environment": environment, "results": results}, indent=1))
        return
    print(f"{environment['cpu']}; {environment['packages']}")
    print(f"{asked.steps} steps, a checkpoint every {asked.save_every}, one kill each")
    columns = ("repeats", "kills", "resumed", "same loss", "same bytes", "steps again", "largest difference")
    print(f"{'':10}", *(f"{column:>{len(column) + 1}}" for column in columns))
    for name, row in results.items():
        if "unavailable" in row:
            print(f"{name:10} {row['unavailable']}")
            continue
        shares = [f"{100 * row[key] / row['kills']:.0f} %" for key in ("resumed", "same_loss", "same_bytes")]
        off = "" if row["largest_off"] is None else f"{row['largest_off']:.2g}"
        cells = ["yes" if row["repeats"] else "no", str(row["kills"]), *shares, f"{row['steps_again']:.1f}", off]
        print(f"{name:10}", *(f"{cell:>{len(column) + 1}}" for cell, column in zip(cells, columns, strict=True)))


if __name__ == "__main__":
    main(sys.argv[1:])
