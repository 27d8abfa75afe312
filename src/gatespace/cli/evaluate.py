"""`gatespace evaluate`: how often a model's greedy answers are right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatespace.cli import run_options as options
from gatespace.cli.console import console, print_json

if TYPE_CHECKING:
    from gatespace.addons.vllm.sampler import VllmWriter
    from gatespace.models import Model

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
    typer.Option("--prefill", metavar="TEXT", show_default=False, help='How the answer begins; "" for nothing.'),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", metavar="N", min=1, show_default="32", help="The longest answer."),
]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", metavar="N", min=1, show_default="64", help="Texts that are answered together."),
]
Precision = Annotated[
    str | None,
    typer.Option("--precision", metavar="NAME", show_default="auto", help="fp32, bf16, or auto by the machine."),
]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1, mps or xpu.")]


def evaluate(
    model: ModelName,
    task: options.Task = None,
    root: options.Root = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="train, val or test.")] = "test",
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, show_default=False, help="Only the first so many rows: a glance.")
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
    vllm: Annotated[
        str | None,
        typer.Option(
            "--vllm",
            metavar="PYTHON|vllm://HOST:PORT",
            show_default=False,
            help="vLLM answers: the Python of an environment with vLLM, which is started here; or a server that has "
            "MODEL.",
        ),
    ] = None,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Let a model label held-out texts, greedily, and count how often it is right.

    Of a model that `gatespace teach` or `train` has written, the task and
    the way of asking are known; options say otherwise.

    \b
    gatespace evaluate runs/train
    gatespace evaluate smollm2 --task tweeteval/emotion --limit 100
    gatespace evaluate runs/train --split val --output runs/train/val --json
    gatespace evaluate runs/train --vllm .venv-vllm/bin/python

    An answer without a legal label counts as wrong. Test rows whose text
    also stands in train are counted, and left out in a row of their own.

    With --vllm the model is loaded here too, on the CPU: vLLM's
    log-probabilities of a text are held against its own first.
    """
    from gatespace.cli.found_model import find
    from gatespace.cli.progress import RunProgress
    from gatespace.cli.tables import labels_table, results_table
    from gatespace.errors import unknown_name
    from gatespace.evaluation import evaluate as run_evaluation
    from gatespace.evaluation import write

    splits = ("train", "val", "test")
    if split not in splits:
        raise unknown_name("split", split, splits)
    if vllm is not None:
        _check_place(vllm)
        device = "cpu" if device == "auto" else device  # a GPU is vLLM's
    with RunProgress(quiet=quiet, job="evaluate") as progress, ExitStack() as stack:
        found = find(
            model,
            config=config,
            task=task,
            root=root,
            brief=brief,
            prefill=prefill,
            precision=precision,
            device=device,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            report=progress.note,
        )
        encoder, writer = None, None
        if vllm is not None:
            from gatespace.models.encode import Encoder

            texts = [row.text for row in found.task.rows(split)[:limit]]
            encoder = Encoder(found.prompt, found.model.tokenizer, texts)
            longest = len(encoder.prefix) + max((len(encoder.suffix(text)) for text in texts), default=0)
            longest += found.max_new_tokens
            writer = stack.enter_context(_writer(vllm, model, found.model, longest, progress.note))
        progress.begin()
        evaluation = run_evaluation(
            found.model,
            found.task,
            found.prompt,
            split=split,
            limit=limit,
            max_new_tokens=found.max_new_tokens,
            batch_size=found.batch_size,
            encoder=encoder,
            progress=progress.answering,
            writer=writer,
        )
    written = write(evaluation, output) if output is not None else ()
    result = evaluation.as_json()
    if as_json:
        print_json({"model": found.model.name, "source": found.model.source, **result, "written": [*map(str, written)]})
        return
    out = console()
    out.print(f"{found.model.name} on {evaluation.task}", style="bold", soft_wrap=True)
    out.print(results_table({split: result}))
    out.print(labels_table(result["metrics"]))
    if limit is not None and limit < evaluation.available:
        out.print(f"Only the first {limit} of {evaluation.available} rows, which need not be like the rest.")
    if evaluation.split == "test":
        out.print(f"{evaluation.duplicates} of these texts also stand in train.")
    for path in written:
        out.print(f"wrote {path}", soft_wrap=True)


def _check_place(where: str) -> None:
    """Before a model is loaded, which takes its time."""
    from gatespace.addons.vllm.process import check_python
    from gatespace.addons.vllm.server import parse_place

    if "://" in where:
        parse_place(where)
    else:
        check_python(where)


@contextmanager
def _writer(where: str, name: str, model: Model, longest: int, note: Any) -> Iterator[VllmWriter]:
    """vLLM with the model: the server that is named, or one that lives as long as it is needed."""
    import tempfile

    from gatespace.addons.vllm.process import VllmProcess
    from gatespace.addons.vllm.sampler import VllmWriter
    from gatespace.addons.vllm.source import vllm_source
    from gatespace.cli.found_model import model_folder
    from gatespace.models.load import TINY

    dtype, process = model.head.weight.dtype, None
    with ExitStack() as stack:
        if "://" not in where:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gatespace-vllm-")))
            if name in TINY:
                model.save(scratch / "model")
                folder = scratch / "model"
            else:
                folder = vllm_source(model_folder(name), weights=True, report=note).folder
            note("starting vLLM")
            process = VllmProcess(
                Path(where).expanduser(),
                folder,
                log=scratch / "vllm.log",
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=max(64, longest + 1),
            )
            where = stack.enter_context(process).address
            stack.enter_context(process.watched())
        yield stack.enter_context(VllmWriter(where, model, dtype=dtype, wait=process is None, report=note))
