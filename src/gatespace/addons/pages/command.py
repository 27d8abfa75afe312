"""`gatespace explore` and `gatespace watch`: browser pages of gates on tokens, and of a study's progress."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gatespace.cli.console import console, print_json

if TYPE_CHECKING:
    from gatespace.addons.pages.explore import Explorer

Folders = Annotated[
    list[Path],
    typer.Argument(metavar="PATH…", show_default=False, help="Folders of runs, or a study: its folder or archive."),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", show_default="DIR/explorer.html", help="Where the page is written."),
]
Gates = Annotated[
    list[str] | None,
    typer.Option(
        "--gate",
        metavar="POINT",
        show_default="that of the first run",
        help="The gate that the page starts with, as `gatespace gate` takes it; twice for two side by side.",
    ),
]
Tokens = Annotated[
    int, typer.Option(metavar="N", min=1, help="Most tokens on the page; beyond that, whole responses are left out.")
]
Serve = Annotated[bool, typer.Option("--serve", help="Serve the page on this machine instead of writing it.")]
ServePort = Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="For --serve; 0: any free one.")]
ExploreJson = Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")]

Folder = Annotated[
    Path,
    typer.Argument(metavar="DIR", show_default=False, help="The folder of a study or a run; it need not exist yet."),
]
WatchPort = Annotated[
    int | None,
    typer.Option(
        "--port", metavar="N", min=0, max=65535, show_default="as last time, if free", help="0: any free one."
    ),
]
Open = Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser of this machine.")]
NewAddress = Annotated[bool, typer.Option("--new-address", help="Make a new token; earlier addresses stop working.")]
WatchJson = Annotated[bool, typer.Option("--json", help="Print the address as one line of JSON.")]


def explore(
    folders: Folders,
    output: Output = None,
    gate: Gates = None,
    tokens: Tokens = 50_000,
    serve: Serve = False,
    port: ServePort = 0,
    as_json: ExploreJson = False,
) -> None:
    """See what gates do: every recorded token tinted by λ, for any a, b, c, d.

    The page is one file that works offline. λ is computed in the browser from
    the recorded signals, so that moving a slider shows what another gate would
    have said of the same tokens. Nothing is trained.

    \b
    gatespace explore runs/train
    gatespace explore studies/demo --serve
    gatespace explore runs/one runs/two --gate G5 --gate H2 --output gates.html

    --json prints {html, runs, responses, recorded, tokens, bytes}.
    """
    from gatespace.addons.pages.explore import build_explorer
    from gatespace.addons.pages.page import page_server
    from gatespace.errors import UsageError
    from gatespace.gating.coefficients import Gate

    if serve and (output is not None or as_json):
        raise UsageError("--serve writes nothing", instead="leave out --output and --json, or leave out --serve")
    gates = [Gate.parse(text) for text in gate or ()]

    def build() -> Explorer:
        return build_explorer(folders, gates=gates, most_tokens=tokens)

    made = build()
    if serve:
        with page_server(lambda: build().html, port=port) as server:
            # Not via Rich: a program reading the pipe waits for this line.
            typer.echo(f"http://127.0.0.1:{server.server_address[1]}/  (Ctrl-C ends it)")
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                typer.echo("ended")
        return
    path = made.write(output)
    if as_json:
        print_json({"html": str(path), **made.counts, "bytes": path.stat().st_size})
        return
    out = console()
    runs, responses, recorded, tokens = made.counts.values()
    text = f"{tokens} tokens of {responses} responses, {runs} run{'s' * (runs != 1)}"
    out.print(text + (f"; {recorded - responses} responses left out (--tokens)" if recorded > responses else ""))
    out.print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)


def watch(
    folder: Folder,
    port: WatchPort = None,
    open_page: Open = False,
    new_address: NewAddress = False,
    as_json: WatchJson = False,
) -> None:
    """Watch a study or a run in a browser, while it runs.

    The page has all runs with their states, the time left, curves of loss, λ and
    scores as they come, and errors of runs that failed. It only reads, on this
    machine only, and for those who have the address.

    \b
    gatespace watch studies/demo
    gatespace watch runs/train --open
    ssh -L 8123:127.0.0.1:8123 machine gatespace watch studies/demo --port 8123

    --json prints {url, port, folder} and goes on serving. Ctrl-C ends it.
    """
    import json

    from gatespace.addons.pages.watch import check_watchable, watch_server

    begun = check_watchable(folder.expanduser())
    watched = watch_server(folder, port=port, new_address=new_address)
    with watched.server as server:
        # Not via Rich: a program reading the pipe waits for this line.
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
