"""Everything that a run records: logs, trackers, evaluations, checkpoints, failures, the summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gatespace.config import TeachConfig, TrainConfig, dump_config
from gatespace.errors import GatespaceError, RunError
from gatespace.evaluation import Evaluation, Metrics, write
from gatespace.evaluation.metrics import metric_of
from gatespace.files import Closing, JsonLines, Mark
from gatespace.plugins import provided, provider
from gatespace.runs import RunFolder
from gatespace.teacher.scores import TeacherAwayError
from gatespace.training import checkpoint
from gatespace.training.optimizer import Optimizer
from gatespace.training.processes import Processes
from gatespace.training.progress import Progress
from gatespace.training.trackers import open_trackers
from gatespace.training.warnings import Alarm, AlarmError, Alarms, concerns, of_choice, start_of


class Records(Closing):
    """The records of a run, from the step it starts or resumes at. Only the first process writes.

    Args:
        config: All settings.
        run: The run's folder.
        processes: Its processes.
        progress: Follows it.
        optimizer: Its tensors are those of a checkpoint.
        state: Steps done → the rest of a checkpoint: all else that the next step depends on.
        restore: Restores what `state` returned.
        evaluate: Evaluates the model on a split.
    """

    def __init__(
        self,
        config: TrainConfig | TeachConfig,
        run: RunFolder,
        *,
        processes: Processes,
        progress: Progress,
        optimizer: Optimizer,
        state: Callable[[int], dict[str, Any]],
        restore: Callable[[dict[str, Any]], None],
        evaluate: Callable[..., Evaluation],
    ) -> None:
        self._config, self._run, self._processes, self._progress = config, run, processes, progress
        self._optimizer, self._state, self._evaluate = optimizer, state, evaluate
        self._writes = processes.first
        self._saved: int | None = None
        """Step of the last checkpoint."""
        self._best: Path | None = None
        """Tensors of the step with the best evaluation, as kept by the last checkpoint."""
        marks = self._resume(restore)
        self.start = self._saved or 0
        """Steps already done."""
        with processes.together():
            self._logs: dict[str, JsonLines] = run.open_logs(marks) if self._writes else {}
            self._alarms = None
            if self._writes and isinstance(config, TrainConfig):
                self._alarms = Alarms(config, run.log("metrics"))
        self._evaluations: list[dict[str, Any]] = processes.gather(run.log("evaluations") if self._writes else [])[0]
        """During training."""
        trackers = config.trace.trackers if self._writes else ()
        self._trackers = open_trackers(trackers, run.path, dump_config(config), step=self.start, report=progress.note)

    def close(self) -> None:
        """Close logs and trackers."""
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
        self._progress.step(done, self._config.steps, metrics, lines["timings"][0])
        for alarm in self._alarms.see(metrics) if self._alarms is not None else ():
            self._append("alarms", alarm._asdict())
            self._progress.warn(str(alarm))

    @property
    def best(self) -> int | None:
        """Step of the best evaluation during training, the first on ties; None if there was none."""
        best = max(self._evaluations, key=lambda record: metric_of(record)[1], default=None)
        return None if best is None else int(best["step"])

    @property
    def out_of_patience(self) -> bool:
        """Whether to stop early: the last `evaluation.patience` evaluations did not improve."""
        patience, best = self._config.evaluation.patience, self.best
        if patience is None or best is None:
            return False
        return sum(1 for record in self._evaluations if record["step"] > best) >= patience

    def evaluate(self, done: int) -> None:
        """Evaluate during training, unless done before the run resumed."""
        if any(record["step"] == done for record in self._evaluations):
            return
        evaluation = self._evaluate(self._config.evaluation.split)
        record = {"step": done, "split": evaluation.split, **_line(evaluation.metrics)}
        self._append("evaluations", record)
        self._evaluations.append(record)
        self._trackers.log(done, {f"eval/{key}": record[key] for key in _TRACKED if key in record})
        self._progress.evaluated(done, evaluation)

    def stop_on_alarm(self, done: int) -> None:
        """Checkpoint and end the run if an alarm of `alarms.stop_on` is on."""
        config = self._config
        if not isinstance(config, TrainConfig) or not config.alarms.stop_on:
            return
        on = self._alarms.on if self._alarms is not None else {}
        own = [[*alarm] for name, alarm in on.items() if name in config.alarms.stop_on]
        alarms = [Alarm(*values) for values in self._processes.gather(own)[0]]
        if not alarms:
            return
        self.checkpoint(done)
        names = ", ".join(alarm.alarm for alarm in alarms)
        error = AlarmError(
            f"the run was ended after step {done} of {config.steps} by an alarm (alarms.stop_on): {names}",
            got=" ".join(alarm.seen for alarm in alarms),
            why=" ".join(alarm.helps for alarm in alarms),
            instead="other settings in another output folder; or, to continue anyway, the same command without "
            f"{names} in alarms.stop_on, which resumes after step {done}",
        )
        error.raised_by = 0
        raise error

    def checkpoint(self, done: int) -> None:
        """Save everything that the next step depends on, unless it is saved already."""
        if done == self._saved:
            return
        for log in self._logs.values():
            log.sync()
        marks = {name: log.mark._asdict() for name, log in self._logs.items()}
        tensors, state = self._optimizer.tensors(), {"logs": marks, **self._state(done)}
        keep, best = self._config.checkpoint.keep, None if self.best == done else self._best
        with self._processes.together():
            if self._writes:
                self._run.check_claim()
                checkpoint.save(self._run.checkpoints, done, tensors, state, keep=keep, best=best)
        self._saved = done
        if self._config.checkpoint.select == "best":
            self._best = checkpoint.tensors_file(self._run.checkpoints, done, best=self.best != done)

    @contextmanager
    def failures(self, step: int, evidence: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """If step `step` (from 0) fails: save a checkpoint if the teacher is away, else record what the step saw."""
        try:
            yield
        except TeacherAwayError as error:
            keep = step > 0 and self._config.checkpoint.every > 0
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
            rank = self._processes.rank
            if error.raised_by not in (None, rank):
                raise  # the process that raised it records it
            saved = self._run.failed_step(
                step + 1, {"error": str(error), **evidence()}, rank=rank if self._processes.size > 1 else None
            )
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
        settings = self._config.evaluation
        self.checkpoint(done)
        evaluation = self._evaluate(settings.split, probabilities=settings.probabilities)
        if self._writes:
            self._run.check_claim()
            write(evaluation, self._run.at_step(done).path)
        self._progress.evaluated(done, evaluation)
        return {"steps": done, "evaluation": {settings.split: evaluation.as_json()}}

    def finish(self, done: int, about: Mapping[str, Any], save_model: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Evaluate, save the model, write the summary with entries `about` the steps; the run is done."""
        config, run = self._config, self._run
        chosen = self._choose(done)
        evaluations: dict[str, Evaluation] = {}
        for split in sorted(config.evaluation.final, key=lambda split: split != "val"):  # others are judged with it
            evaluation = self._evaluate(split, probabilities=config.evaluation.probabilities)
            evaluations[split] = evaluation = evaluation.judged_with(evaluations.get("val"))
            if self._writes:
                run.check_claim()
                write(evaluation, run.path)
            self._progress.evaluated(chosen, evaluation)
            self._trackers.log(done, {f"final/{split}/{evaluation.metrics.metric}": evaluation.metrics.score})
        results = {split: evaluation.as_json() for split, evaluation in evaluations.items()}
        summary = {"steps": done, "evaluation": results, **about, **save_model()}
        if done < config.steps or config.checkpoint.select == "best":
            summary |= {"planned_steps": config.steps, "chosen_step": chosen}
        if self._writes:
            found = {split: evaluation.metrics for split, evaluation in evaluations.items()}
            start, steps = start_of(run.log("evaluations")), run.log("metrics")
            aucs = {split: one.calibration.auc for split, one in evaluations.items() if one.calibration is not None}
            warnings = concerns(found, start=start, steps=steps, unchanged=chosen == 0, aucs=aucs)
            if config.checkpoint.select == "best" or config.evaluation.patience is not None:
                warnings += of_choice(self._evaluations[-1]["count"])
            summary["warnings"] = [*map(str, warnings)]
            if self._alarms is not None:
                if withdrawn := self._alarms.withdraw(found.values()):
                    self._progress.note(withdrawn)
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
        best = self.best
        if self._config.checkpoint.select == "last" or best is None or best == done:
            return done
        assert self._best is not None
        self._optimizer.restore(checkpoint.tensors_of(self._best))
        self._progress.note(f"the weights are those after step {best}, the best on {self._config.evaluation.split}")
        return best

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        if self._writes:
            self._run.check_claim()
            self._logs[name].append(record)

    def _resume(self, restore: Callable[[dict[str, Any]], None]) -> dict[str, Mark]:
        """Resume from the latest checkpoint; returns its log positions."""
        latest = checkpoint.latest(self._run.checkpoints, report=self._progress.note)
        self._processes.agree(
            0 if latest is None else latest.step,
            lambda steps: RunError(
                "the processes of this run see different checkpoints",
                got=", ".join(map(str, steps)),
                instead="an output folder that all machines share",
            ),
        )
        if latest is None:
            return {}
        self._saved = latest.step
        self._optimizer.restore(latest.tensors)
        marks = latest.state.pop("logs")
        restore(latest.state)
        self._best = latest.best if self._config.checkpoint.select == "best" else None
        self._progress.note(f"resuming from step {latest.step} of {self._config.steps}")
        return {name: Mark(**mark) for name, mark in marks.items()}


_TRACKED = ("score", "truncated", "length", "accuracy", "macro_f1", "parse_failures")


def _line(metrics: Metrics) -> dict[str, Any]:
    """Metrics as in evaluations.jsonl: of labels, how often each was predicted in place of their tables."""
    values = metrics.as_json()
    if metrics.labels is not None:
        values["predicted"] = {row.label: row.predicted for row in metrics.labels.per_label}
    return {key: value for key, value in values.items() if key not in ("per_label", "confusion", "best_constant")}
