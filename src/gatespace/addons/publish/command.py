"""`gatespace export`: a run's model as a folder that anybody can load, with a card that says how it came about."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gatespace.cli import run_options as options
from gatespace.cli.console import console, print_json

if TYPE_CHECKING:
    from gatespace.addons.publish.card import Evidence

Run = Annotated[Path, typer.Argument(metavar="RUN", show_default=False, help="The folder of a run that is done.")]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", show_default=False, help="A new folder, or an earlier export.")
]
Study = Annotated[
    Path | None,
    typer.Option(
        "--study", metavar="DIR", show_default="the one it lies in", help="The study whose evidence the card gives."
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", metavar="NAME", help="Precision of the weights: fp32 or bf16.")]
License = Annotated[
    str | None,
    typer.Option("--license", metavar="ID", show_default=False, help="For the card, e.g. apache-2.0; else none."),
]
Push = Annotated[
    str | None,
    typer.Option("--push", metavar="OWNER/NAME", show_default=False, help="Upload it to the Hugging Face Hub too."),
]
Private = Annotated[bool, typer.Option("--private", help="With --push: only for those whom its owner lets in.")]

_MEGABYTE = 1e6


def export(
    run: Run,
    output: Output,
    study: Study = None,
    dtype: Dtype = "fp32",
    license: License = None,
    push: Push = None,
    private: Private = False,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Write a run's model as a normal model folder, with a model card.

    transformers and vLLM load it; adapters are merged into the weights.
    The card says how the model was made, what it was measured at and, of
    a run of a study, what the study's evidence supports about its point.

    \b
    gatespace export runs/train --output emotion-student
    gatespace export runs/best --study studies/demo --output best --dtype bf16
    gatespace export runs/train --output emotion-student --push me/emotion-student --private

    Nothing leaves this machine without --push.
    """
    from gatespace.addons.publish.export import check_export, export_model
    from gatespace.cli.progress import RunProgress
    from gatespace.errors import UsageError

    if private and push is None:
        raise UsageError("--private says how to push, and there is no --push", instead="--push OWNER/NAME --private")
    folder = _run_folder(run)
    place = output.expanduser()
    check_export(folder, place, dtype=dtype)
    if push is not None:
        from gatespace.addons.publish.push import check_push

        check_push(push, private=private)
    evidence = _evidence(folder, study)
    with RunProgress(quiet=quiet, job="export") as progress:
        written = export_model(
            folder, place, dtype=dtype, evidence=evidence, name=push, license=license, report=progress.note
        )
        url = None
        if push is not None:
            from gatespace.addons.publish.push import push as upload

            progress.note(f"uploading to {push}")
            url = upload(place, push, private=private, bars=not quiet and sys.stderr.isatty())
    if as_json:
        print_json(
            {
                "run": str(folder),
                "identity": written.identity,
                "output": str(written.folder),
                "card": str(written.card),
                "dtype": dtype,
                "fingerprint": written.fingerprint,
                "files": list(written.files),
                "bytes": written.size,
                "study": None if evidence is None else evidence.study,
                "pushed": url,
            }
        )
        return
    out = console()
    out.print(f"wrote {written.folder}, {len(written.files)} files, {written.size / _MEGABYTE:.1f} MB", soft_wrap=True)
    out.print(f"card  {written.card}", soft_wrap=True)
    if evidence is not None:
        out.print(f"      with the evidence of the study {evidence.study}", soft_wrap=True)
    if url is not None:
        out.print(f"at    {url}", soft_wrap=True)
    else:
        out.print(f"next  {_next(folder, written.folder)}", soft_wrap=True)


def _run_folder(run: Path) -> Path:
    """The run; its model's folder stands for it."""
    folder = run.expanduser()
    is_model = folder.name == "model" and not (folder / "identity.json").is_file()
    return folder.parent if is_model and (folder.parent / "identity.json").is_file() else folder


def _evidence(folder: Path, study: Path | None) -> Evidence | None:
    """What the study says about the run's point; None where no study is named and the run lies in none."""
    from gatespace.errors import UsageError, missing_extra
    from gatespace.study.store import STUDY

    place = study.expanduser() if study is not None else _study_of(folder)
    if place is None:
        return None
    try:
        from gatespace.addons.publish.point import point_evidence, run_in
        from gatespace.study.results import read_results
    except ModuleNotFoundError as error:
        raise missing_extra("the evidence of a study", module=error.name or "numpy", extra="study") from None
    results = read_results(place)
    found = run_in(results, folder)
    if found is None:
        raise UsageError(
            "this run is none of the study's",
            got=f"{folder}, and {place / STUDY}",
            why="neither its folder nor its identity is that of a run of the study that is done",
            instead="a run with the settings of one of the study's, or no --study",
        )
    return point_evidence(results, found)


def _study_of(folder: Path) -> Path | None:
    from gatespace.study.store import STUDY

    place = folder.absolute().parents
    if len(place) > 1 and place[0].name == "runs" and (place[1] / STUDY).is_file():
        return place[1]
    return None


def _next(folder: Path, output: Path) -> str:
    """The command that uses it."""
    words = ["gatespace", "predict", str(output), "--config", str(folder / "config.yaml")]
    return f"{shlex.join(words)} < texts.txt"
