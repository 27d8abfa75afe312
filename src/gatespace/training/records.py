"""Everything that a run records: logs, trackers, evaluations, checkpoints, failures, the summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gatespace.config import TrainConfig, dump_config
from gatespace.errors import GatespaceError, RunError
from gatespace.evaluation import Evaluation, Metrics, TextMetrics, write
from gatespace.evaluation.metrics import metric_of
from gatespace.files import JsonLines, Mark
from gatespace.plugins import provided, provider
from gatespace.teacher.scores import TeacherAwayError
from gatespace.training import checkpoint
from gatespace.training.job import Job
from gatespace.training.trackers import Trackers, open_trackers
from gatespace.training.warnings import Alarm, AlarmError, Alarms, concerns, of_choice, start_of


class Records:
    """The records of a run, from the step it starts or resumes at. Only the first process writes."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._writes = job.processes.first
        self._logs: dict[str, JsonLines] = {}
        self._marks: dict[str, Mark] = {}
        """Log positions at the checkpoint."""
        self._trackers: Trackers
        self._alarms: Alarms | None = None
        self._evaluations: list[dict[str, Any]] = []
        """During training."""
        self._best: Path | None = None
        """Tensors of the step with the best evaluation, as kept by the last checkpoint."""
        self.start = self._saved = self._restore()
        """Steps already done."""

    def __enter__(self) -> Self:
        job, config = self._job, self._job.config
        with job.processes.together():
            if self._writes:
                self._logs = job.run.open_logs(self._marks)
                self._evaluations = job.run.log("evaluations")
                if isinstance(config, TrainConfig):
                    self._alarms = Alarms(config, job.run.log("metrics"))
        self._evaluations = job.processes.gather(self._evaluations)[0]
        names = config.trace.trackers if self._writes else ()
        self._trackers = open_trackers(
            names, job.run.path, dump_config(config), step=self.start, report=job.progress.note
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trackers.close()
        for log in self._logs.values():
            log.close()

    def log(self, done: int, lines: Mapping[str, list[dict[str, Any]]]) -> None:
        """Log a finished step; `lines`: log → lines."""
        for name, records in lines.items():
            for record in records:
                self._append(name, record)
        metrics = lines["metrics"][0]
        self._trackers.log(done, metrics)
        self._job.progress.step(done, self._job.config.steps, metrics, lines["timings"][0])
        for alarm in self._alarms.see(metrics) if self._alarms is not None else ():
            self._append("alarms", alarm._asdict())
            self._job.progress.warn(str(alarm))

    @property
    def best(self) -> int | None:
        """Step of the best evaluation during training, the first on ties; None if there was none."""
        best = max(self._evaluations, key=lambda record: metric_of(record)[1], default=None)
        return None if best is None else int(best["step"])

    @property
    def out_of_patience(self) -> bool:
        """Whether to stop early: the last `evaluation.patience` evaluations did not improve."""
        patience, best = self._job.config.evaluation.patience, self.best
        if patience is None or best is None:
            return False
        return sum(1 for record in self._evaluations if record["step"] > best) >= patience

    def evaluate(self, done: int) -> None:
        """Evaluate during training, unless done before the run resumed."""
        if any(record["step"] == done for record in self._evaluations):
            return
        evaluation = self._job.evaluate(self._job.config.evaluation.split)
        metrics = evaluation.metrics
        record: dict[str, Any] = {"step": done, "split": evaluation.split}
        if isinstance(metrics, TextMetrics):
            record |= metrics.as_json()
            shown = ("score", "truncated", "length")
        else:
            record |= _of_labels(metrics)
            shown = ("accuracy", "macro_f1", "parse_failures")
        self._append("evaluations", record)
        self._evaluations.append(record)
        self._trackers.log(done, {f"eval/{key}": record[key] for key in shown})
        self._job.progress.evaluated(done, evaluation)

    def stop_on_alarm(self, done: int) -> None:
        """Checkpoint and end the run if an alarm of `alarms.stop_on` is on."""
        job = self._job
        if not isinstance(job.config, TrainConfig) or not job.config.alarms.stop_on:
            return
        on = self._alarms.on if self._alarms is not None else {}
        own = [[*alarm] for name, alarm in on.items() if name in job.config.alarms.stop_on]
        found = [Alarm(*values) for values in job.processes.gather(own)[0]]
        if not found:
            return
        if done != self._saved:
            self.checkpoint(done)
        names = ", ".join(alarm.alarm for alarm in found)
        error = AlarmError(
            f"the run was ended after step {done} of {job.config.steps} by an alarm (alarms.stop_on): {names}",
            got=" ".join(alarm.seen for alarm in found),
            why=" ".join(alarm.helps for alarm in found),
            instead="other settings in another output folder; or, to continue anyway, the same command without "
            f"{names} in alarms.stop_on, which resumes after step {done}",
        )
        error.raised_by = 0
        raise error

    def checkpoint(self, done: int) -> None:
        """Save everything that the next step depends on."""
        job = self._job
        for log in self._logs.values():
            log.sync()
        marks = {name: log.mark._asdict() for name, log in self._logs.items()}
        tensors, state = job.optimizer.tensors(), {"logs": marks, **job.state()}
        with job.processes.together():
            if self._writes:
                job.run.check_claim()
                checkpoint.save(
                    job.run.checkpoints,
                    done,
                    tensors,
                    state,
                    keep=job.config.checkpoint.keep,
                    best=None if self.best == done else self._best,
                )
        self._saved = done
        if job.config.checkpoint.select == "best":
            self._best = checkpoint.tensors_file(job.run.checkpoints, done, best=self.best != done)

    @contextmanager
    def failures(self, step: int) -> Iterator[None]:
        """If step `step` (from 0) fails: save a checkpoint if the teacher is away, else record what the step saw."""
        job = self._job
        try:
            yield
        except TeacherAwayError as error:
            job.optimizer.discard()
            keep = step > 0 and job.config.checkpoint.every > 0
            if keep:
                self.checkpoint(step)
            where = f"resumes from step {step}" if keep else "starts again"
            raise TeacherAwayError(
                f"step {step + 1} could not run: {error.what}",
                got=error.got,
                why=error.why,
                instead=f"check the teacher; the same command then {where}",
            ) from error
        except GatespaceError as error:
            rank = job.processes.rank
            if error.raised_by not in (None, rank):
                raise  # the process that raised it records it
            evidence = {"error": str(error), **job.evidence()}
            saved = job.run.failed_step(step + 1, evidence, rank=rank if job.processes.size > 1 else None)
            failed = RunError(
                f"step {step + 1} failed: {error.what}",
                got=error.got,
                why=f"what the step saw is in {saved.name}; weights and records are those before it",
                instead=error.instead,
            )
            failed.raised_by = error.raised_by
            raise failed from error

    def pause(self, done: int) -> dict[str, Any]:
        """Save a checkpoint, then evaluate on `evaluation.split` into the folder of this step; the run is not done."""
        job, settings = self._job, self._job.config.evaluation
        if done != self._saved:
            self.checkpoint(done)
        evaluation = job.evaluate(settings.split, probabilities=settings.probabilities)
        if self._writes:
            job.run.check_claim()
            write(evaluation, job.run.at_step(done).path)
        job.progress.evaluated(done, evaluation)
        return {"steps": done, "evaluation": {settings.split: evaluation.as_json()}}

    def finish(self, done: int) -> dict[str, Any]:
        """Evaluate, save the model, write the summary; the run is done after `done` steps."""
        job, config, run = self._job, self._job.config, self._job.run
        chosen = self._choose(done)
        evaluations: dict[str, Evaluation] = {}
        for split in sorted(config.evaluation.final, key=lambda split: split != "val"):  # others are judged with it
            evaluation = job.evaluate(split, probabilities=config.evaluation.probabilities)
            evaluations[split] = evaluation = evaluation.judged_with(evaluations.get("val"))
            if self._writes:
                run.check_claim()
                write(evaluation, run.path)
            job.progress.evaluated(chosen, evaluation)
            self._trackers.log(done, {f"final/{split}/{evaluation.metrics.metric}": evaluation.metrics.score})
        results = {split: evaluation.as_json() for split, evaluation in evaluations.items()}
        summary = {"steps": done, "evaluation": results, **job.summary(), **job.save_model()}
        if done < config.steps or config.checkpoint.select == "best":
            summary |= {"planned_steps": config.steps, "chosen_step": chosen}
        if self._writes:
            found = {split: evaluation.metrics for split, evaluation in evaluations.items()}
            start, steps = start_of(run.log("evaluations")), run.log("metrics")
            aucs = {split: one.calibration.auc for split, one in evaluations.items() if one.calibration is not None}
            about = concerns(found, start=start, steps=steps, unchanged=chosen == 0, aucs=aucs)
            if config.checkpoint.select == "best" or config.evaluation.patience is not None:
                about += of_choice(self._evaluations[-1]["count"])
            summary["warnings"] = [*map(str, about)]
            if self._alarms is not None:
                if withdrawn := self._alarms.withdraw(found.values()):
                    job.progress.note(withdrawn)
                on = [alarm._asdict() for alarm in self._alarms.on.values()]
                summary["alarms"] = [{**raised, "on": raised in on} for raised in run.log("alarms")]
                summary["warnings"] += map(str, self._alarms.on.values())
            run.finish(summary)
            for name in provided("finishers"):
                provider("finishers", name)(run)
            run.mark_done()
        return summary

    def _choose(self, done: int) -> int:
        """Load the weights that the run ends with; returns the step they are from."""
        job, best = self._job, self.best
        if job.config.checkpoint.select == "last" or best is None or best == done:
            return done
        assert self._best is not None
        job.optimizer.restore(checkpoint.tensors_of(self._best))
        job.progress.note(f"the weights are those after step {best}, the best on {job.config.evaluation.split}")
        return best

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        if self._writes:
            self._job.run.check_claim()
            self._logs[name].append(record)

    def _restore(self) -> int:
        """Resume from the latest checkpoint; returns its step."""
        job = self._job
        found = checkpoint.latest(job.run.checkpoints, report=job.progress.note)
        start = 0 if found is None else found.step
        job.processes.agree(
            start,
            lambda steps: RunError(
                "the processes of this run see different checkpoints",
                got=", ".join(map(str, steps)),
                instead="an output folder that all machines share",
            ),
        )
        if found is not None:
            job.optimizer.restore(found.tensors)
            self._marks = {name: Mark(**mark) for name, mark in found.state.pop("logs").items()}
            job.restore(found.state)
            self._best = found.best if job.config.checkpoint.select == "best" else None
            job.progress.note(f"resuming from step {start} of {job.config.steps}")
        return start


def _of_labels(metrics: Metrics) -> dict[str, Any]:
    """Label metrics, as in evaluations.jsonl."""
    return {
        "count": metrics.count,
        "accuracy": metrics.accuracy,
        "balanced_accuracy": metrics.balanced_accuracy,
        "macro_f1": metrics.macro_f1,
        "parse_failures": metrics.parse_failures,
        "predicted": {row.label: row.predicted for row in metrics.per_label},
    }
