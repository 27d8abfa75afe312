"""`gatespace pack` and `gatespace merge`: a study's results as one file, and several machines' as one study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gatespace.cli import run_options as options
from gatespace.cli.console import console, print_json

Study = Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="The folder of a study, done or not.")]
File = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", show_default="DIR.tar.xz", help="The archive, NAME.tar.xz."),
]
Sources = Annotated[
    list[Path], typer.Argument(metavar="PATH…", show_default=False, help="Folders or archives of one study.")
]
Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="PATH", show_default=False, help="A new folder, or an archive: NAME.tar.xz."
    ),
]


def pack(study: Study, output: File = None, quiet: options.Quiet = False, as_json: options.AsJson = False) -> None:
    """Write the results of a study as one file, without models and caches.

    It has what report and explore read: settings, predictions, metrics,
    recorded tokens, environments and the log of test reads. The same
    results give the same bytes.

    \b
    gatespace pack studies/demo
    gatespace report studies/demo.tar.xz

    --json prints {file, bytes, files}.
    """
    import sys

    from rich.progress import Progress

    from gatespace.addons.archive.pack import pack as write
    from gatespace.runs import StudyFolder

    folder, files = StudyFolder.open(study), 0
    hidden = quiet or as_json or not sys.stderr.isatty()
    with Progress(console=console(stderr=True), transient=True, disable=hidden) as bar:
        task = bar.add_task("pack")

        def progress(done: int, of: int) -> None:
            nonlocal files
            files = done
            bar.update(task, completed=done, total=of)

        path = write(folder, output, progress=progress)
    size = path.stat().st_size
    if as_json:
        print_json({"file": str(path), "bytes": size, "files": files})
        return
    console().print(f"wrote {path}: {files} files, {size / 1e6:.1f} MB", soft_wrap=True)


def merge(sources: Sources, output: Output, as_json: options.AsJson = False) -> None:
    """Join results of one study from several machines.

    Sources may differ in their seeds. A run that several of them have is
    kept once; if its results differ, nothing is written. Runs still missing
    are listed, and `gatespace run` on the new folder runs them.

    \b
    gatespace merge a.tar.xz b.tar.xz -o studies/both
    gatespace merge studies/demo other.tar.xz -o both.tar.xz

    --json prints {path, done, missing, twice}.
    """
    from dataclasses import asdict

    from gatespace.addons.archive.merge import merge as join

    merged = join(sources, output)
    if as_json:
        print_json(asdict(merged) | {"path": str(merged.path)})
        return
    out = console()
    whole = len(merged.done) + len(merged.missing)
    out.print(f"wrote {merged.path}: {len(merged.done)} of {whole} runs are done", soft_wrap=True)
    if merged.twice:
        out.print(f"in several sources, with the same results: {len(merged.twice)}")
    for name in merged.missing:
        out.print(f"missing: {name}", soft_wrap=True)
