"""`gatespace export`: a run's model as a folder that transformers can load, with a model card."""

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
    from gatespace.runs import RunFolder

Run = Annotated[Path, typer.Argument(metavar="RUN", show_default=False, help="The folder of a run that is done.")]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", show_default=False, help="A new folder, or an earlier export.")
]
Study = Annotated[
    Path | None,
    typer.Option(
        "--study", metavar="DIR", show_default="the one it is in", help="The study whose evidence the card gives."
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", metavar="NAME", help="Precision of the weights: fp32 or bf16.")]
License = Annotated[
    str | None,
    typer.Option("--license", metavar="ID", show_default=False, help="For the card, e.g. apache-2.0; default: none."),
]
Push = Annotated[
    str | None,
    typer.Option("--push", metavar="OWNER/NAME", show_default=False, help="Upload it to the Hugging Face Hub too."),
]
Private = Annotated[bool, typer.Option("--private", help="With --push: make the repository private.")]

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
    The card says how the model was trained, how well it does and, for a
    run of a study, what the study's evidence supports about its point.

    \b
    gatespace export runs/train --output emotion-student
    gatespace export runs/best --study studies/demo --output best --dtype bf16
    gatespace export runs/train --output emotion-student --push me/emotion-student --private

    Nothing leaves this machine without --push.
    """
    from gatespace.addons.publish import export as exporting
    from gatespace.cli.progress import RunProgress
    from gatespace.errors import UsageError
    from gatespace.runs import RunFolder

    if private and push is None:
        raise UsageError("--private says how to push, and there is no --push", instead="--push OWNER/NAME --private")
    folder = RunFolder(run)
    if folder.path.name == "model" and not folder.exists and RunFolder(folder.path.parent).exists:
        folder = RunFolder(folder.path.parent)  # a model folder stands for its run
    place = output.expanduser()
    exporting.check_export(folder, place, dtype=dtype)
    if push is not None:
        exporting.check_push(push, private=private)
    evidence = _evidence(folder, study)
    with RunProgress(quiet=quiet, job="export") as progress:
        written = exporting.export_model(
            folder, place, dtype=dtype, evidence=evidence, name=push, license=license, report=progress.note
        )
        url = None
        if push is not None:
            progress.note(f"uploading to {push}")
            url = exporting.push(place, push, private=private, bars=not quiet and sys.stderr.isatty())
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
        out.print(f"next  {shlex.join(['gatespace', 'predict', str(written.folder)])} < texts.txt", soft_wrap=True)


def _evidence(run: RunFolder, study: Path | None) -> Evidence | None:
    """The study's evidence about the run's point; None if no study is given and the run is in none."""
    from gatespace.errors import missing_extra
    from gatespace.runs import StudyFolder

    if study is None:
        study = run.path.parent.parent
        if not StudyFolder(study).exists or StudyFolder(study).run(run.path.name).path != run.path:
            return None
    try:
        from gatespace.addons.publish.evidence import evidence_of
    except ModuleNotFoundError as error:
        raise missing_extra("the evidence of a study", module=error.name or "numpy", extra="study") from None
    return evidence_of(run, study.expanduser())
