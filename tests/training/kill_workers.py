"""A small real run over the files of a run folder, and a nursery that starts it, kills it and starts it again.

Run as `python kill_workers.py WORK ...`. The nursery imports torch once and forks for each life of the run.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from gatespace.config import ObjectiveConfig, TraceConfig, parse_config
from gatespace.files import JsonLines, Mark, atomic_write, claim
from gatespace.gating import Gate, gated_kl
from gatespace.gating.configured import build_objective
from gatespace.rollout import Rollout
from gatespace.seeding import stream
from gatespace.tasks import Example
from gatespace.training import checkpoint
from gatespace.training.batches import Row
from gatespace.training.clock import Clock
from gatespace.training.metrics import StepMetrics, Texts
from gatespace.training.optimizer import Update
from gatespace.training.rollouts import MicroBatch

COMPARED = ("metrics.jsonl", "tokens.jsonl", "evaluations.jsonl", "weights", "summary")
_OPERATIONS = ("open", "os.", "shutil.")


def train(folder: Path, steps: int, every: int, ballast: int) -> None:
    """A linear student that learns from a fixed teacher, in the order of calls that a training loop keeps to."""
    with claim(folder):
        if (folder / "done").exists():
            return
        weight = torch.nn.Parameter(torch.zeros(16, 8))
        teacher = torch.randn(16, 8, generator=_generator("teacher")) * 3
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        trace = _metrics(weight, teacher)
        metrics, tokens, evaluations = (JsonLines(folder / name) for name in COMPARED[:3])
        found = checkpoint.latest(folder / "checkpoints", report=lambda note: _fail(note))
        if found is not None:
            with torch.no_grad():
                weight.copy_(found.tensors["weight"])
            moments = {name: found.tensors[name] for name in ("exp_avg", "exp_avg_sq", "step")}
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: moments}})
            trace.restore(found.state["trace"])
        start = found.step if found is not None else -1
        marks = {} if found is None else found.state["logs"]
        for log in (metrics, tokens, evaluations):
            log.cut(Mark(**marks.get(log.path.name, {})))
        if found is None:
            evaluations.append({"step": 0, "accuracy": 0.1 + 0.2})
        for step in range(max(start, 0) + 1, steps + 1):
            record = _step(step, weight, teacher, optimizer, trace, tokens)
            metrics.append(record)
            if step % every == 0:
                evaluations.append({"step": step, "accuracy": float(weight.detach().std())})
                for log in (metrics, tokens, evaluations):
                    log.sync()
                marks = {log.path.name: log.mark._asdict() for log in (metrics, tokens, evaluations)}
                own = optimizer.state_dict()["state"][0]
                tensors = {"weight": weight, **own, "ballast": torch.full((ballast,), float(step))}
                checkpoint.save(folder / "checkpoints", step, tensors, {"trace": trace.state(), "logs": marks}, keep=1)
        atomic_write(folder / "weights", repr(weight.tolist()))
        atomic_write(folder / "summary", repr(trace.summary()))
        atomic_write(folder / "done", "")


def _step(
    step: int,
    weight: torch.Tensor,
    teacher: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    trace: StepMetrics,
    log: JsonLines,
) -> dict[str, object]:
    hidden = torch.randn(1, 6, 8, generator=_generator("batch", step))
    trace.begin(step - 1)
    for row, span in enumerate((slice(0, 4), slice(4, 6))):
        part, ids = hidden[:, span], [*range(span.start, span.stop)]
        rollout = Rollout([ids], [[-step / 7] * len(ids)], [(row + step) % 3 == 0])
        batch = MicroBatch([Row(row, Example("text", "joy"), [0], [0])], [row], rollout=rollout, sources=["student"])
        batch.hidden = part[0]
        out = gated_kl(part @ weight.T, part @ teacher.T, gate=Gate(4, 1, -1, 2), total_tokens=6)
        out.loss.backward()
        trace.add(batch, out)
    norm = float(weight.grad.norm())
    optimizer.step()
    optimizer.zero_grad()
    lines = trace.record(Update(norm, 0.1), Clock())
    for line in lines["tokens"]:
        log.append(line)
    return lines["metrics"][0]


def _metrics(weight: torch.Tensor, teacher: torch.Tensor) -> StepMetrics:
    settings = parse_config(ObjectiveConfig, {"gate": [4, 1, -1, 2]})
    return StepMetrics(
        objective=build_objective(settings),
        settings=settings,
        trace=TraceConfig(tokens_every=1),
        vocab_size=16,
        logits=lambda batch, span: (batch.hidden[span] @ weight.detach().T, batch.hidden[span] @ teacher.T),
        texts=Texts(str, str, str, judged=False),
    )


def _generator(*names: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(stream(7, *names) % 2**63)


# ---------------------------------------------------------------------------------------------------- lives


def life(work: Callable[[], None], *, kill_at: int = 0) -> tuple[bool, int]:
    """Run `work` in a process of its own; whether it was killed, and how many file operations it has begun."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        count = 0

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            if event.startswith(_OPERATIONS) and not event.startswith(("os.kill", "os.fork")):
                count += 1
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(watch)
            work()
            os.write(writer, str(count).encode())
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 64)
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, -signal.SIGKILL):
        _fail(f"a life ended with {status}")
    return status != 0, int(said or 0)


def at_every_operation(reference: Path, folder: Path) -> None:
    """Killed before the n-th file operation, for every n; then once more on the way; then left alone."""

    def work(place: Path) -> Callable[[], None]:
        return lambda: train(place, 4, 2, 10)

    killed, total = life(work(reference))
    assert not killed
    assert total > 40, f"only {total} operations seen"
    for n in range(1, total + 1):
        place = folder / str(n)
        assert life(work(place), kill_at=n)[0], f"{n} of {total}: not killed"
        life(work(place), kill_at=1 + n * 7 % total)
        _finish_and_compare(reference, place, work(place), f"killed before operation {n}")
        shutil.rmtree(place)
    print(total)


def while_saving(folder: Path) -> None:
    """Killed before the n-th file operation of a save, for every n: a whole checkpoint is there, and no damaged one."""
    for n in range(1, 1000):
        place = folder / str(n)
        checkpoint.save(place, 1, {"a": torch.ones(10)}, {"turn": 1})
        save = functools.partial(checkpoint.save, place, 2, {"a": torch.ones(10) * 2}, {"turn": 2}, keep=1)
        killed, _ = life(save, kill_at=n)
        found = checkpoint.latest(place, report=_fail)
        assert found is not None, f"nothing left after operation {n}"
        assert bool((found.tensors["a"] == found.state["turn"]).all())
        assert found.state["turn"] == 2 or killed
        if not killed:
            print(n)
            break
        save()
        assert [path.name for path in place.iterdir()] == ["step-000002"], f"scrap after operation {n}"


def _finish_and_compare(reference: Path, folder: Path, work: Callable[[], None], what: str) -> None:
    assert not life(work)[0]
    for name in COMPARED:
        assert (folder / name).read_bytes() == (reference / name).read_bytes(), f"{what}: {name} differs"
    # What a kill left beside the latest goes with the next save, or with the folder when a run is done.
    left, wanted = (max(path.name for path in (one / "checkpoints").glob("step-*")) for one in (folder, reference))
    assert left == wanted, f"{what}: {left}"


def _fail(note: str) -> None:
    raise AssertionError(note)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked process must not wait for threads that it has not
    with tempfile.TemporaryDirectory() as warm:
        train(Path(warm), 1, 1, 1)  # imports that wait for their first use would count as file operations
    {"every": at_every_operation, "saving": while_saving}[sys.argv[1]](*map(Path, sys.argv[2:]))  # type: ignore[operator]
