"""`gatespace evaluate`: score a model's greedy responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatespace.cli import run_options as options
from gatespace.cli.console import console, print_json, print_warnings, table
from gatespace.evaluation.metrics import Metrics, metric_of, rounded, with_interval
from gatespace.tasks.data import SPLITS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gatespace.evaluation.calibration import Calibration

ModelName = Annotated[
    str,
    typer.Argument(metavar="MODEL", show_default=False, help="A run's folder, a model folder, smollm2, or a Hub name."),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", show_default=False, help="Take the task from this file of settings."),
]
Prefill = Annotated[
    str | None,
    typer.Option("--prefill", metavar="TEXT", show_default=False, help='How the response begins; "" for nothing.'),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", metavar="N", min=1, show_default="32", help="The longest response."),
]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", metavar="N", min=1, show_default="64", help="Texts decoded together."),
]
Precision = Annotated[
    str | None,
    typer.Option("--precision", metavar="NAME", show_default="auto", help="fp32, bf16, or auto by the machine."),
]
_BARS = "▁▂▃▄▅▆▇█"
_MOST_POINTS = 7
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1 or xpu.")]


def evaluate(
    model: ModelName,
    task: options.Task = None,
    root: options.Root = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="train, val or test.")] = "test",
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, show_default=False, help="Only the first N rows.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", show_default=False, help="Write every prediction and the metrics there."
        ),
    ] = None,
    config: ConfigFile = None,
    brief: options.Brief = None,
    prefill: Prefill = None,
    batch_size: BatchSize = None,
    max_new_tokens: MaxNewTokens = None,
    precision: Precision = None,
    device: Device = "auto",
    sampler: Annotated[
        str | None,
        typer.Option(
            "--sampler",
            metavar="NAME=WHERE",
            show_default=False,
            help="Generate in another process: vllm=PYTHON starts vLLM with the Python of an environment that "
            "has it; vllm=vllm://HOST:PORT is a server that has MODEL.",
        ),
    ] = None,
    probabilities: Annotated[
        bool,
        typer.Option(
            "--probabilities", help="Also score the probability of every label: log-loss, calibration, coverage."
        ),
    ] = False,
    samples: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            show_default=False,
            help="Also sample N responses per text, and report their accuracy.",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(metavar="T", min=0.0, help="Of --samples.")] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of --samples.")] = 0,
    plugins: options.Plugins = None,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Evaluate a model on held-out texts with greedy decoding.

    A model of `gatespace teach` or `train` is evaluated on the task and with
    the prompt of its run; options override both.

    \b
    gatespace evaluate runs/train
    gatespace evaluate smollm2 --task tweeteval/emotion --limit 100
    gatespace evaluate runs/train --split val --output runs/train/val --json
    gatespace evaluate runs/train --split val --probabilities
    gatespace evaluate runs/train --samples 8 --temperature 0.7
    gatespace evaluate runs/train --sampler vllm=.venv-vllm/bin/python

    Labels are right or wrong, and a response without a legal label is
    wrong; free text is scored by the task's metric. Test rows whose text
    also occurs in train are counted; a second row of the table is without
    them.

    With --probabilities the responses of all labels are scored too, after
    the same pass over each prompt. The second table is about the most
    probable label; its thresholds are for `gatespace predict --threshold`.

    With --samples N further responses to each text are sampled, after the
    same pass over its prompt.

    With --sampler the model is loaded here too, on the CPU, and first the
    sampler's log-probabilities of a text are compared with the model's own.
    """
    from gatespace.cli.found_model import ModelOptions, find, model_folder
    from gatespace.cli.progress import RunProgress
    from gatespace.config import EvaluationConfig, in_setting
    from gatespace.errors import UsageError, unknown_name
    from gatespace.evaluation import evaluate as run_evaluation
    from gatespace.evaluation import write
    from gatespace.models.encode import Encoder
    from gatespace.plugins import provider
    from gatespace.rollout import Draws, greedy
    from gatespace.training.warnings import concerns

    splits = ("train", "val", "test")
    if split not in splits:
        raise unknown_name("split", split, splits)
    opener = None
    if sampler is not None and (probabilities or samples):
        raise UsageError(
            f"{'--probabilities' if probabilities else '--samples'} and --sampler do not go together",
            why="these numbers come from the model in this process",
            instead="one of the two",
        )
    with in_setting("--temperature"):
        draws = None if samples is None else Draws(samples, temperature, seed)
    if sampler is not None:
        name, _, where = sampler.partition("=")
        with in_setting("--sampler"):  # before the slow loading of the model
            opener = provider("evaluators", name, kind="sampler")(where)
        device = "cpu" if device == "auto" else device  # leave the GPU to the sampler
    with RunProgress(quiet=quiet, job="evaluate") as progress, ExitStack() as stack:
        asked = ModelOptions(
            config=config,
            task=task,
            root=root,
            brief=brief,
            prefill=prefill,
            precision=precision,
            device=device,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            plugins=plugins or (),
        )
        found = find(model, asked, report=progress.note)
        encoder, writer = None, None
        if opener is not None:
            texts = [row.text for row in found.task.rows(split)[:limit]]
            encoder = Encoder(found.prompt, found.model.tokenizer, texts)
            longest = len(encoder.prefix) + max((len(encoder.suffix(text)) for text in texts), default=0)
            longest += found.max_new_tokens
            opened = opener(model_folder(model), found.model, longest=longest, report=progress.note)
            writer = stack.enter_context(opened)
        progress.begin()
        evaluation = run_evaluation(
            found.model,
            found.task,
            found.prompt,
            EvaluationConfig(limit=limit, max_new_tokens=found.max_new_tokens, batch_size=found.batch_size),
            split=split,
            probabilities=probabilities,
            draws=draws,
            encoder=encoder,
            generate=partial(greedy, writer=writer),
            progress=progress.generating,
        )
    written = write(evaluation, output) if output is not None else ()
    result = evaluation.as_json()
    aucs = {} if evaluation.calibration is None else {split: evaluation.calibration.auc}
    warnings = [str(one) for one in concerns({split: evaluation.metrics}, aucs=aucs)]
    if as_json:
        about = {"model": found.model.name, "source": found.model.source}
        print_json({**about, **result, "warnings": warnings, "written": [*map(str, written)]})
        return
    out = console()
    out.print(f"{found.model.name} on {evaluation.task}", style="bold", soft_wrap=True)
    out.print(results_table({split: result}))
    if "per_label" in result["metrics"]:
        out.print(_labels_table(result["metrics"]))
    if evaluation.calibration is not None:
        _print_calibration(out, evaluation.calibration)
        if split != "val":
            out.print("Thresholds chosen on the rows that they are judged by look too good: take those of --split val.")
    if (sampled := evaluation.sampled) is not None:
        rows = evaluation.metrics.count
        spread = (
            "" if sampled.sd is None else f", SD {rounded(sampled.sd, rows)} from one sample of all texts to another"
        )
        out.print(
            f"Sampled {sampled.samples} times at temperature {sampled.temperature:g}: {evaluation.metrics.metric} "
            f"{rounded(sampled.accuracy, rows)}{spread}"
            + ("." if sampled.no_label is None else _without_label(sampled.no_label))
        )
    if limit is not None and limit < evaluation.available:
        out.print(f"Only the first {limit} of {evaluation.available} rows, which need not be like the rest.")
    if evaluation.split == "test":
        out.print(f"{evaluation.duplicates} of these texts also occur in train.")
    print_warnings(warnings)
    for path in written:
        out.print(f"wrote {path}", soft_wrap=True)


def _without_label(share: float) -> str:
    return f"; {share:.2%} without a label."


def _print_calibration(out: Console, found: Calibration) -> None:
    columns = ("accuracy", "macro AUC", "confidence", "log-loss", "Brier", "ECE", "AURC", "mass of labels")
    shown = table("Probabilities of labels", *columns, numbers=columns)
    values = (found.confidence, found.log_loss, found.brier, found.ece, found.aurc, found.mass)
    shown.add_row(*(_figure(value) for value in (found.accuracy, found.auc, *values)))
    out.print(shown)
    names = ("accuracy of at least", "coverage", "--threshold")
    shown = table("Answering only the most confident texts", *names, numbers=names)
    for one in found.coverage_at:
        reached = one.threshold is not None
        shown.add_row(f"{one.accuracy:g}", f"{one.coverage:.4f}", f"{one.threshold:.4f}" if reached else "not reached")
    out.print(shown)


def _figure(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def results_table(evaluations: Mapping[str, Mapping[str, Any]], on_the_way: Sequence[Mapping[str, Any]] = ()) -> Table:
    """One row per split, from evaluation-SPLIT.json, and another without the test rows that are also in train.

    The lines of evaluations.jsonl add one for the model before training.
    """
    columns: tuple[str, ...] = ("rows",)
    for first in [Metrics.from_json(found["metrics"]) for found in evaluations.values()][:1]:
        interval = ", 95 % CI" if first.labels is not None and first.metric == "accuracy" else ""
        columns += (f"{first.metric}{interval}", *first.also, *first.figures)
        columns += ("best constant", "balanced", "macro-F1", "no label") if first.labels else ("tokens", "cut off")
    likely = {split: one["calibration"] for split, one in evaluations.items() if "calibration" in one}
    likely = likely if any(one.get("prior_corrected") is not None for one in likely.values()) else {}
    columns += ("prior corrected", "AUC") if likely else ()
    found = table("Results", "split", *columns, numbers=columns)
    for split in sorted(evaluations, key=SPLITS.index):
        evaluation = evaluations[split]
        metrics, without = evaluation["metrics"], evaluation["without_duplicates"]
        shown = f"{split}, first rows" if metrics["count"] < evaluation["available"] else split
        for record in on_the_way:
            if (record["step"], record["split"]) == (0, split):
                found.add_row(f"{shown}, before", *_cells(metrics, record), style="dim")
        outcomes = [_figure(likely.get(split, {}).get(name)) for name in ("prior_corrected", "auc")] if likely else []
        found.add_row(shown, *_cells(metrics), *outcomes)
        if evaluation["duplicates"] and "count" in without:
            found.add_row(f"{split} without {evaluation['duplicates']} rows that are in train", *_cells(without))
    return found


def _cells(metrics: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> list[str]:
    found, shown = Metrics.from_json(metrics), Metrics.from_json(before or metrics)
    rows, interval = shown.count, found.labels is not None and shown.metric == "accuracy"
    score = with_interval(shown.score, rows) if interval else rounded(shown.score, rows)
    cells = [str(rows), score, *(rounded(value, rows) for value in (*shown.also.values(), *shown.figures.values()))]
    if found.labels is None:
        return [*cells, f"{shown.length:.1f}", f"{shown.truncated:.1%}"]
    labels = before or found.labels.as_json()  # a line of evaluations.jsonl has the same figures
    shares = (found.labels.best_constant.accuracy, labels.get("balanced_accuracy"), labels["macro_f1"])
    cells += ["n/a" if share is None else rounded(share, rows) for share in shares]
    return [*cells, str(labels["parse_failures"])]


def curve(evaluations: Mapping[str, Mapping[str, Any]], on_the_way: Sequence[Mapping[str, Any]], steps: int) -> str:
    """The metric over steps as one line: bars from 0 to 1, then some of the values."""
    points = [(record["step"], metric_of(record)[1]) for record in on_the_way]
    split = on_the_way[0]["split"] if on_the_way else ""
    if split in evaluations:
        points.append((steps, metric_of(evaluations[split]["metrics"])[1]))
    if len(points) < 2:
        return ""
    bars = "".join(_BARS[min(int(score * len(_BARS)), len(_BARS) - 1)] for _, score in points)
    some = points[:: -(-len(points) // _MOST_POINTS)]
    some += points[-1:] if some[-1] != points[-1] else []
    name = metric_of(on_the_way[0])[0]
    return f"{split} {name} by step  {bars}  " + ", ".join(f"{step}: {score:.3f}" for step, score in some)


def _labels_table(metrics: Mapping[str, Any]) -> Table:
    columns = ("precision", "recall", "F1", "rows", "predicted", "no label")
    found = table("Labels", "label", *columns, numbers=columns)
    for row in metrics["per_label"]:
        shares = [f"{row[key]:.3f}" for key in ("precision", "recall", "f1")]
        found.add_row(row["label"], *shares, *(str(row[key]) for key in ("support", "predicted", "unparsed")))
    return found
