"""`gatespace watch`: a study or a run, live in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[
    Path,
    typer.Argument(metavar="DIR", show_default=False, help="The folder of a study or a run; it need not be there yet."),
]
Port = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, max=65535, show_default="as last time, if free", help="0: one that is free."),
]
Open = Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser of this machine.")]
NewAddress = Annotated[bool, typer.Option("--new-address", help="Make a new token: earlier addresses are void.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the address as one line of JSON.")]


def watch(
    folder: Folder,
    port: Port = None,
    open_page: Open = False,
    new_address: NewAddress = False,
    as_json: AsJson = False,
) -> None:
    """Watch a study or a run in a browser, while it goes on.

    The page has all runs with their states, the time left, curves of loss, λ and
    accuracy as they come, and errors of runs that failed. It only reads, on this
    machine only, and for those who have the address.

    \b
    gatespace watch studies/demo
    gatespace watch runs/train --open
    ssh -L 8123:127.0.0.1:8123 machine gatespace watch studies/demo --port 8123

    --json prints {url, port, folder} and goes on serving. Ctrl-C ends it.
    """
    import json

    from gatespace.addons.pages.watch import watch_server
    from gatespace.addons.pages.watch_snapshot import check_watchable

    begun = check_watchable(folder.expanduser())
    watched = watch_server(folder, port=port, new_address=new_address)
    with watched.server as server:
        # Not by Rich: who reads a pipe waits for this line.
        if as_json:
            place = str(folder.expanduser().absolute())
            typer.echo(json.dumps({"url": watched.url, "port": watched.port, "folder": place}))
        else:
            typer.echo(f"{watched.url}  (Ctrl-C ends it)")
        if not begun:
            typer.echo(f"nothing in {folder} yet; the page shows it when it begins", err=True)
        if open_page:
            import webbrowser

            if not webbrowser.open(watched.url):
                typer.echo("no browser could be opened here; open the address above", err=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            if not as_json:
                typer.echo("ended")
