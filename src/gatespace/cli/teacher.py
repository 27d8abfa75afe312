"""`gatespace teacher`: a teacher as a service of its own, its keys, and how it is doing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatespace.cli import run_options as options
from gatespace.cli.console import console, print_json
from gatespace.errors import UsageError

if TYPE_CHECKING:
    from gatespace.models import Model
    from gatespace.teacher.cache import ScoreCache

teacher = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)


@teacher.callback()
def _teacher() -> None:
    """A teacher that many students share: in another process, or on another machine.

    \b
    gatespace teacher serve --model runs/teach --bind tcp://127.0.0.1:5555
    gatespace train --teacher zmq://127.0.0.1:5555
    gatespace teacher status zmq://127.0.0.1:5555
    gatespace teacher keygen server
    """


Key = Annotated[
    Path | None,
    typer.Option(
        "--key", metavar="FILE", show_default=False, help="The secret key of the service, which `keygen` makes."
    ),
]
Allow = Annotated[
    Path | None,
    typer.Option(
        "--allow",
        metavar="FILE",
        show_default=False,
        help="The public keys of the clients that may come in, one a line; or a folder of *.pub files.",
    ),
]


@teacher.command("serve")
def serve(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            show_default=False,
            help="A run's folder, a model folder, smollm2, or a Hub name.",
        ),
    ],
    bind: Annotated[
        str, typer.Option("--bind", metavar="ADDRESS", help="Where; port 0 has the system choose.")
    ] = "tcp://127.0.0.1:5555",
    precision: Annotated[
        str | None,
        typer.Option("--precision", metavar="NAME", show_default="auto", help="fp32, bf16, or auto by the machine."),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1, mps or xpu.")
    ] = "auto",
    cache: Annotated[
        str,
        typer.Option("--cache", metavar="DIR", help="Keeps scores: a folder, auto (in the user's cache), or none."),
    ] = "auto",
    cache_mb: Annotated[int, typer.Option("--cache-mb", metavar="N", min=1, help="Its largest size in MiB.")] = 4096,
    key: Key = None,
    allow: Allow = None,
    max_queue: Annotated[
        int, typer.Option("--max-queue", metavar="N", min=1, help="Requests of all clients that may wait.")
    ] = 256,
    max_client_queue: Annotated[
        int, typer.Option("--max-client-queue", metavar="N", min=1, help="Requests of one client that may wait.")
    ] = 8,
    batch_tokens: Annotated[
        int, typer.Option("--batch-tokens", metavar="N", min=1, help="Tokens that are scored together.")
    ] = 4096,
    drain: Annotated[
        float, typer.Option("--drain", metavar="SECONDS", min=0, help="To finish what is under way when told to end.")
    ] = 60.0,
    quiet: options.Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for every event.")] = False,
) -> None:
    """Serve a teacher until SIGTERM or Ctrl-C; then finish what is under way.

    Without keys it is to be had on this machine only. With --key and
    --allow it may listen anywhere, and talks to the listed clients.

    \b
    gatespace teacher serve --model runs/teach
    gatespace teacher serve --model Qwen/Qwen3-32B --bind tcp://0.0.0.0:5555
        --key server.key --allow clients.txt
    """
    import signal

    from gatespace.teacher.keys import check_bind, server_keys

    if (key is None) != (allow is None):
        given, missing = ("--key", "--allow") if allow is None else ("--allow", "--key")
        raise UsageError(f"{given} needs {missing}", why="a service with keys talks to the clients in its list")
    keys = server_keys(key, allow) if key is not None and allow is not None else None
    check_bind(bind, secured=keys is not None)  # before the model, which takes its time

    def note(text: str) -> None:
        if as_json:
            _line({"event": "note", "text": text})
        elif not quiet:
            # Clients name themselves, and their names must not drive the terminal.
            sys.stderr.write("".join(c if c.isprintable() else "?" for c in text) + "\n")

    loaded = _model(model, precision, device, note)
    from gatespace.teacher.server import ServerLimits, TeacherServer

    limits = ServerLimits(queue=max_queue, client_queue=max_client_queue, batch_tokens=batch_tokens, drain=drain)
    scores = _cache(cache, cache_mb, note)
    try:
        server = TeacherServer(loaded, bind, cache=scores, keys=keys, limits=limits, report=note)

        def ready() -> None:
            if as_json:
                event = {"event": "ready", "address": server.address, "model": loaded.name}
                _line(
                    event | {"fingerprint": server.fingerprint, "instance": server.instance, "keys": keys is not None}
                )
            else:
                sys.stdout.write(f"{server.address} serves {loaded.name}, fingerprint {server.fingerprint[:16]}\n")
                sys.stdout.flush()

        server.run(signals=(signal.SIGTERM, signal.SIGINT), ready=ready)
        if as_json:
            _line({"event": "ended", **_counters(server.status())})
    finally:
        if scores is not None:
            scores.close()


@teacher.command("status")
def status(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", show_default="zmq://127.0.0.1:5555", help="zmq://host:port")
    ] = "zmq://127.0.0.1:5555",
    client_key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", show_default=False, help="Your secret key, if the service has keys."),
    ] = None,
    server_key: Annotated[
        str | None,
        typer.Option(
            "--server-key", metavar="KEY", show_default=False, help="The service's public key, or the file that has it."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="How long to wait for an answer.")
    ] = 5.0,
    as_json: options.AsJson = False,
) -> None:
    """How a teacher service is doing."""
    from gatespace.teacher.keys import client_keys
    from gatespace.teacher.status import ask_status

    counters = _counters(ask_status(address, keys=client_keys(client_key, server_key), timeout=timeout))
    if as_json:
        print_json({"address": address, **counters})
        return
    out = console()
    out.print(f"{address} serves {counters['model']}", style="bold", soft_wrap=True)
    asked = counters["cache_hits"] + counters["cache_misses"]
    lines = {
        "fingerprint": counters["fingerprint"][:16],
        "up": f"{counters['uptime']:.0f} s" + (", ending" if counters["draining"] else ""),
        "clients": str(counters["clients"]),
        "queue": f"{counters['queued']} requests, {counters['queued_rows']} rows",
        "answered": f"{counters['requests']} requests, {counters['rows']} rows, {counters['tokens']} tokens",
        "refused": f"{counters['failures']} messages, {counters['dropped']} dropped",
        "speed": f"{counters['tokens_per_second']:.1f} tokens/s in the last minute, model busy {counters['busy']:.0%}",
        "model": f"{counters['passes']} passes, {counters['computed_tokens']} tokens, "
        f"{counters['batches']} batches ({counters['merged']} of several clients)",
        "cache": f"{counters['cache_hits']} of {asked} positions" if asked else "nothing asked",
    }
    for label, text in lines.items():
        out.print(f"{label:>12}  {text}", soft_wrap=True)


@teacher.command("keygen")
def keygen(
    name: Annotated[Path, typer.Argument(metavar="NAME", show_default=False, help="Makes NAME.key and NAME.pub.")],
    as_json: options.AsJson = False,
) -> None:
    """Make a pair of keys, for a service or for a client.

    NAME.key is the secret one and stays where it is; NAME.pub goes to the
    other side: the service's to its clients, a client's into the list that
    `serve --allow` takes.
    """
    from gatespace.teacher.keys import read_public, write_keys

    files = write_keys(name)
    public = read_public(files.public).decode()
    if as_json:
        print_json({"secret": str(files.secret), "public": str(files.public), "public_key": public})
        return
    out = console()
    out.print(f"wrote {files.secret}, which nobody else may read", soft_wrap=True)
    out.print(f"wrote {files.public}: {public}", soft_wrap=True)


def _model(name: str, precision: str | None, device: str, note: Any) -> Model:
    from gatespace.cli.found_model import model_folder
    from gatespace.config import TeachEngineConfig, parse_config
    from gatespace.models import load_model
    from gatespace.training.setup import placement

    place = placement(parse_config(TeachEngineConfig, {"device": device, "precision": precision or "auto"}))
    return load_model(model_folder(name), dtype=place.dtype, device=place.device, report=note)


def _cache(where: str, max_mb: int, note: Any) -> ScoreCache | None:
    from gatespace.models.cache_root import cache_root
    from gatespace.teacher.cache import ScoreCache

    if where == "none":
        return None
    folder = cache_root() / "scores" if where == "auto" else Path(where).expanduser()
    return ScoreCache(folder, max_mb=max_mb, report=note)


def _counters(reply: Any) -> dict[str, Any]:
    import msgspec

    counters: dict[str, Any] = msgspec.structs.asdict(reply)
    del counters["id"]
    return counters


def _line(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event, allow_nan=False) + "\n")
    sys.stdout.flush()
