"""`gatespace status`: show a study's progress, from any terminal."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from gatespace.cli import run_options as options

_SECONDS_BETWEEN_LOOKS = 1.0


def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a study, e.g. studies/demo.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Refresh until the study ends. Ctrl-C stops following only.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show the progress of a study, running or stopped.

    \b
    gatespace status studies/demo
    gatespace status studies/demo --follow
    gatespace status studies/demo --json
    """
    from gatespace.cli.console import console, print_json
    from gatespace.cli.study_view import StudyView, headline, status_table, validation
    from gatespace.runs import StudyFolder
    from gatespace.study.outlook import read_outlook

    study = StudyFolder.open(folder)
    if follow:
        with StudyView(study.workers) as view, suppress(KeyboardInterrupt):
            while study.is_running:
                view.update(read_outlook(study))
                time.sleep(_SECONDS_BETWEEN_LOOKS)
    outlook, alive = read_outlook(study), study.is_running
    failed = outlook.errors()
    if as_json:
        work = [
            {
                "name": one.name,
                "title": one.title,
                "state": outlook.states[one.name],
                "step": one.folder.last_step(),
                "steps": one.steps,
                "val_accuracy": validation(one),
                "seconds": one.folder.seconds(),
                "error": failed.get(one.name),
            }
            for one in outlook.work
        ]
        left = outlook.seconds_left(study.workers)
        print_json({"study": study.config().name, "running": alive, "seconds_left": left, "work": work})
        return
    out = console()
    out.print(status_table(outlook))
    for name, error in failed.items():
        out.print(f"{name}: {error}", soft_wrap=True)
    out.print(headline(outlook, study.workers))
    if not alive and outlook.count("done") < len(outlook.work):
        out.print(f"no process is working on it; resume with: gatespace run {folder}", soft_wrap=True)
