"""A run's model as a folder to be given away: weights, tokenizer and card, nothing of the machine it was made on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gatespace.addons.publish.card import CARD, Evidence, model_card
from gatespace.errors import UsageError, unknown_name
from gatespace.files import atomic_write
from gatespace.models.cache_root import RECORD, new_folder, read_record, write_record
from gatespace.models.hub import without_progress_bars
from gatespace.models.load import load_model
from gatespace.training.loop import DONE
from gatespace.training.run import IDENTITY, MODEL

__all__ = ["DTYPES", "Exported", "check_export", "export_model"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MARK = "export"
"""The key of a record that says that a folder is an export, and may be replaced by another one."""


@dataclass(frozen=True)
class Exported:
    """An export that was written."""

    folder: Path
    card: Path
    identity: str
    """Of the run."""
    fingerprint: str
    """Of the weights as they were written."""
    files: tuple[str, ...]
    size: int
    """Bytes of all files."""


def check_export(run: Path, output: Path, *, dtype: str = "fp32") -> None:
    """Raise unless the model of the run in `run` can be exported to `output`."""
    if dtype not in DTYPES:
        raise unknown_name("precision of weights", dtype, DTYPES)
    if not (run / IDENTITY).is_file() or not (run / "config.yaml").is_file():
        raise UsageError(
            "this is not the folder of a run",
            got=str(run),
            why=f"it has no {IDENTITY}",
            instead="the folder that `gatespace train` or `teach` has written",
        )
    if not (run / DONE).exists():
        raise UsageError("this run is not done", got=str(run), instead="the command that began it, which goes on")
    if not (run / MODEL).is_dir():
        job = "train" if "teacher" in json.loads((run / IDENTITY).read_text(encoding="utf-8"))["content"] else "teach"
        again = f"gatespace {job} --set checkpoint.model=true --output OTHER {run / 'config.yaml'}"
        raise UsageError(
            "the model of this run was not kept",
            got=str(run),
            why="checkpoint.model is false, as in a study without keep_models: true",
            instead=f"train it once more, to the same numbers: {again}",
        )
    place, own = output.resolve(), run.resolve()
    if place == own or own in place.parents:
        raise UsageError("an export is a folder of its own", got=str(output), why="this one lies in the run's folder")
    if (place / RECORD).exists() and _MARK not in read_record(place):
        raise UsageError(
            "this folder holds a model that is no export, and it would be lost",
            got=str(output),
            instead="name a new folder",
        )


def export_model(
    run: Path,
    output: Path,
    *,
    dtype: str = "fp32",
    evidence: Evidence | None = None,
    name: str | None = None,
    license: str | None = None,
    report: Callable[[str], None] | None = None,
) -> Exported:
    """Write the model of a run with its card into `output`, whole or not at all. An earlier export is replaced.

    The weights must be those that the run's numbers are about, by their fingerprint.

    Args:
        run: The folder of a run that is done.
        output: A new folder, or one of an earlier export.
        dtype: Precision of the written weights: fp32, as they were trained, or bf16.
        evidence: What a study says about the run's point.
        name: What readers of the card load the model by; None: the name of the folder.
        license: Identifier of the model's licence, for the card.
        report: Is told what takes long.
    """
    check_export(run, output, dtype=dtype)
    summary, own = (json.loads((run / file).read_text(encoding="utf-8")) for file in ("summary.json", IDENTITY))
    card = model_card(run, evidence=evidence, name=name or output.name, dtype=dtype, license=license)
    if report is not None:
        report("reading the weights")
    model = load_model(str(run / MODEL))
    _check_weights(run, model.fingerprint(), summary)
    network: Any = model.network
    network.to(DTYPES[dtype])
    with new_folder(output) as fresh:
        with without_progress_bars():
            network.save_pretrained(fresh)
            model.tokenizer.save_pretrained(fresh)
        atomic_write(fresh / CARD, card)
        fingerprint = model.fingerprint()
        write_record(fresh, {_MARK: 1, "run": own["identity"], "fingerprint": fingerprint, "dtype": dtype})
    files = sorted(path for path in output.rglob("*") if path.is_file())
    return Exported(
        folder=output,
        card=output / CARD,
        identity=own["identity"],
        fingerprint=fingerprint,
        files=tuple(path.relative_to(output).as_posix() for path in files),
        size=sum(path.stat().st_size for path in files),
    )


def _check_weights(run: Path, fingerprint: str, summary: dict[str, Any]) -> None:
    """A card tells of accuracies: they must be of these weights."""
    from gatespace.config.text import read_yaml

    config = read_yaml((run / "config.yaml").read_text(encoding="utf-8"), where="config.yaml")
    lora = config["pair"]["lora"] if "pair" in config else config["lora"]
    if lora is not None:  # the fingerprint was taken before the adapters were merged
        return
    if fingerprint != summary["fingerprint"]:
        raise UsageError(
            "the weights of this run are not those that it has evaluated",
            got=f"{fingerprint[:12]} in {run / MODEL}, {summary['fingerprint'][:12]} in its summary",
            why="something has changed them since, and the run's numbers are not theirs",
            instead="the run's own model, or train it again in another folder",
        )
