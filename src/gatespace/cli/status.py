"""`gatespace status`: how a study stands, from another terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gatespace.cli import run_options as options


def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a study, e.g. studies/demo.")],
    as_json: options.AsJson = False,
) -> None:
    """Show how far a study is. It may be running in another terminal, or stopped.

    \b
    gatespace status studies/demo
    gatespace status studies/demo --json
    """
    from gatespace.cli.console import console, print_json
    from gatespace.cli.study_view import headline, status_table, validation
    from gatespace.files import is_claimed
    from gatespace.study.runner import look
    from gatespace.study.store import Store, progress_of, seconds_of

    store = Store.open(folder)
    outlook = look(store)
    alive = is_claimed(store.folder)
    failed = {work.name: store.error(work.folder) for work in outlook.work if outlook.states[work.name] == "failed"}
    if as_json:
        work = [
            {
                "name": one.name,
                "title": one.title,
                "state": outlook.states[one.name],
                "step": progress_of(one.folder),
                "steps": one.steps,
                "val_accuracy": validation(one, store),
                "seconds": seconds_of(one.folder),
                "error": failed.get(one.name),
            }
            for one in outlook.work
        ]
        left = outlook.seconds_left(store.workers)
        print_json({"study": store.config().name, "running": alive, "seconds_left": left, "work": work})
        return
    out = console()
    out.print(status_table(outlook, store))
    for name, error in failed.items():
        out.print(f"{name}: {error}", soft_wrap=True)
    out.print(headline(outlook, store.workers))
    if not alive and outlook.count("done") < len(outlook.work):
        out.print(f"nobody is working on it; go on with: gatespace run {folder}", soft_wrap=True)
