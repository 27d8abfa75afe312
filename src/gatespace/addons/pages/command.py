"""`gatespace explore`: a browser page of gates on tokens."""

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
    from gatespace.study.results import reading

    if serve and (output is not None or as_json):
        raise UsageError("--serve writes nothing", instead="leave out --output and --json, or leave out --serve")
    gates = [Gate.parse(text) for text in gate or ()]

    def build() -> Explorer:
        with reading(*folders):
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
