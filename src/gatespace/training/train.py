"""The training loop: `train` distils a teacher into a student, `teach` makes a teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from gatespace.config import TeachConfig, TrainConfig
from gatespace.plugins import load_plugins
from gatespace.runs import RunFolder
from gatespace.training.clock import Clock
from gatespace.training.distill import Distillation
from gatespace.training.job import Job
from gatespace.training.labels import LabelDistillation
from gatespace.training.processes import join
from gatespace.training.progress import SILENT, Progress
from gatespace.training.records import Records
from gatespace.training.supervised import Supervised


def train(config: TrainConfig, progress: Progress = SILENT, *, until: int | None = None) -> dict[str, Any]:
    """Distil a teacher into a student, and return the run's summary. A killed run resumes.

    Args:
        config: All settings.
        progress: Follows the run.
        until: Pause after this many steps, with a checkpoint and an evaluation, which is returned; a later call resumes
            from there, and the run ends as if it had not paused. None: run all steps.
    """
    with opened(config, progress) as job:
        return _run(job, until)


def teach(config: TeachConfig, progress: Progress = SILENT) -> dict[str, Any]:
    """Fine-tune a model on a task's gold labels, and return the run's summary. A killed run resumes."""
    with opened(config, progress) as job:
        return _run(job)


def _run(job: Job, until: int | None = None) -> dict[str, Any]:
    """The loop of a run. `Distillation` and `Supervised` define its rollouts and loss."""
    if (summary := job.begin()) is not None:  # already done
        return summary
    job.prepare()
    config, rollouts, loss, optimizer, trace = job.config, job.rollouts, job.loss, job.optimizer, job.trace
    goal = config.steps if until is None else min(until, config.steps)
    with _records(job) as records:
        if records.start == 0 and config.evaluation.every:
            records.evaluate(0)
        done, best = records.start, config.checkpoint.select == "best"
        if best and done == 0:  # the initial model may stay the best
            records.checkpoint(0)
        while done < goal and not records.out_of_patience:
            records.stop_on_alarm(done)
            step = done
            clock = Clock(job.place.device)
            with records.failures(step, job.evidence):
                trace.begin(step)
                batch = rollouts(step, clock)  # rows → prompts → responses, by the student as it is
                with job.processes.update(job.body, len(batch.parts), batch.most):
                    for part in batch.parts:
                        with clock("score"):
                            part.scores = part.ask()  # the teacher's; a remote one computed them meanwhile
                        with clock("update"):
                            out = loss(step, part)  # hidden states → signals → gate → divergences
                            out.loss.backward()
                        trace.add(part, out)
                        part.free()
                    with clock("update"):
                        batch.backward()  # through the prefix that all prompts share
                with clock("optimizer"):
                    update = optimizer.step(step, trace.tokens)
                lines = trace.record(update, clock)
                job.advance(lines["metrics"][0]["loss"], step / config.steps)  # an objective's state: TAID's τ
            done = step + 1
            records.log(done, lines)
            if best if done == config.steps else _due(config.evaluation.every, done):
                records.evaluate(done)
            needed = done == config.steps or records.out_of_patience or (best and records.best == done)
            if _due(config.checkpoint.every, done) or (config.checkpoint.every and needed):
                records.checkpoint(done)
        if done < config.steps and not records.out_of_patience:
            return records.pause(done)
        return records.finish(done, job.summary(), job.save_model)


def _records(job: Job) -> Records:
    return Records(
        job.config,
        job.run,
        processes=job.processes,
        progress=job.progress,
        optimizer=job.optimizer,
        state=job.state,
        restore=job.restore,
        evaluate=job.evaluate,
    )


def _due(every: int, done: int) -> bool:
    return every > 0 and done % every == 0


@contextmanager
def opened(config: TrainConfig | TeachConfig, progress: Progress = SILENT) -> Iterator[Job]:
    """The job with its folder claimed and models loaded; closes on exit what it opened."""
    kind: Callable[..., Job] = Supervised
    if isinstance(config, TrainConfig):
        kind = LabelDistillation if config.objective.over_labels else Distillation
    load_plugins(config.plugins)
    processes = join(config)
    run = RunFolder(config.output)
    with ExitStack() as stack:
        with processes.together():
            if processes.first:
                stack.enter_context(run.claim())
        yield kind(config, run, processes, progress if processes.first else SILENT, stack)
