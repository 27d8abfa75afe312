"""`gatespace predict`: a label for every line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gatespace.cli import run_options as options
from gatespace.cli.evaluate import BatchSize, ConfigFile, Device, MaxNewTokens, ModelName, Precision, Prefill


def predict(
    model: ModelName,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", show_default=False, help="Texts, one per line; - is standard input.")
    ] = Path("-"),
    field: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", show_default="text for .jsonl", help="The lines are JSON, and this key has the text."
        ),
    ] = None,
    task: options.Task = None,
    root: options.Root = None,
    config: ConfigFile = None,
    brief: options.Brief = None,
    prefill: Prefill = None,
    batch_size: BatchSize = None,
    max_new_tokens: MaxNewTokens = None,
    precision: Precision = None,
    device: Device = "auto",
    quiet: options.Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines: line, label, text, and the raw answer.")
    ] = False,
) -> None:
    """Label texts, one per line, with a trained model.

    Prints one line per line: the label, a tab, the text. A text without a
    legal label in its answer, or one too long for the model, has an empty
    label (null in JSON); empty lines keep their place.

    \b
    gatespace predict runs/train texts.txt
    gatespace predict runs/train tweets.jsonl --field text --json
    cat texts.txt | gatespace predict runs/train | cut -f1 | sort | uniq -c
    """
    from gatespace.cli.found_model import ModelOptions
    from gatespace.cli.predict_lines import label_lines

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
    )
    label_lines(model, file, asked, field=field, as_json=as_json, quiet=quiet)
