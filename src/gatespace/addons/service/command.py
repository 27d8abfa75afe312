"""`gatespace teacher`: a teacher as a service of its own, its keys, and how it is doing."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatespace.cli import run_options as options
from gatespace.cli.console import console, print_json
from gatespace.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from gatespace.addons.service.backend import VllmBackend
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
    engine: Annotated[
        str, typer.Option("--engine", metavar="NAME", help="native: in this process; vllm: a vLLM server computes.")
    ] = "native",
    vllm: Annotated[
        str | None,
        typer.Option(
            "--vllm",
            metavar="PYTHON|vllm://HOST:PORT",
            show_default=False,
            help="Of the engine vllm: the Python of an environment with vLLM, which is started here; or a server that "
            "has MODEL.",
        ),
    ] = None,
    vllm_args: Annotated[
        str,
        typer.Option(
            "--vllm-args", metavar="TEXT", show_default=False, help="More for vLLM: '--tensor-parallel-size 2'."
        ),
    ] = "",
    max_model_len: Annotated[
        int, typer.Option("--max-model-len", metavar="N", min=8, help="Of a started vLLM: prompt and response.")
    ] = 2048,
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
    gatespace teacher serve --model Qwen/Qwen3-32B --engine vllm
        --vllm .venv-vllm/bin/python --vllm-args '--tensor-parallel-size 2'

    With the engine vllm it gives first choices only (teacher.payload:
    top_k). A vLLM that was started here is started again if it ends.
    """
    import signal

    from gatespace.addons.service.keys import check_bind, server_keys

    if (key is None) != (allow is None):
        given, missing = ("--key", "--allow") if allow is None else ("--allow", "--key")
        raise UsageError(f"{given} needs {missing}", why="a service with keys talks to the clients in its list")
    _check_engine(engine, vllm, vllm_args)
    keys = server_keys(key, allow) if key is not None and allow is not None else None
    check_bind(bind, secured=keys is not None)  # before the model, which takes its time

    def note(text: str) -> None:
        if as_json:
            _line({"event": "note", "text": text})
        elif not quiet:
            # Clients name themselves, and their names must not drive the terminal.
            sys.stderr.write("".join(c if c.isprintable() else "?" for c in text) + "\n")

    with ExitStack() as stack:
        scores = _cache(cache, cache_mb, note)
        if scores is not None:
            stack.enter_context(scores)
        taught: Model | VllmBackend
        facts: dict[str, Any] = {"engine": engine}
        if vllm is None:
            taught = _model(model, precision, device, note)
        else:
            taught = backend = _vllm(model, vllm, precision, vllm_args, max_model_len, scores, note)
            stack.callback(backend.close)
            facts |= {"vllm": backend.address, "vllm_pid": backend.pid}
        from gatespace.addons.service.server import ServerLimits, TeacherServer

        limits = ServerLimits(queue=max_queue, client_queue=max_client_queue, batch_tokens=batch_tokens, drain=drain)
        server = TeacherServer(taught, bind, cache=scores, keys=keys, limits=limits, report=note)

        def ready() -> None:
            if as_json:
                event = {"event": "ready", "address": server.address, "model": taught.name, **facts}
                _line(
                    event | {"fingerprint": server.fingerprint, "instance": server.instance, "keys": keys is not None}
                )
            else:
                sys.stdout.write(f"{server.address} serves {taught.name}, fingerprint {server.fingerprint[:16]}\n")
                sys.stdout.flush()

        server.run(signals=(signal.SIGTERM, signal.SIGINT), ready=ready)
        if as_json:
            _line({"event": "ended", **_counters(server.status())})


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
    from gatespace.addons.service.keys import client_keys
    from gatespace.addons.service.status import ask_status

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
    from gatespace.addons.service.keys import read_public, write_keys

    files = write_keys(name)
    public = read_public(files.public).decode()
    if as_json:
        print_json({"secret": str(files.secret), "public": str(files.public), "public_key": public})
        return
    out = console()
    out.print(f"wrote {files.secret}, which nobody else may read", soft_wrap=True)
    out.print(f"wrote {files.public}: {public}", soft_wrap=True)


def _check_engine(engine: str, vllm: str | None, arguments: str) -> None:
    engines = ("native", "vllm")
    if engine not in engines:
        raise unknown_name("engine", engine, engines)
    if engine == "vllm" and vllm is None:
        raise UsageError("--engine vllm needs --vllm", instead="--vllm .venv-vllm/bin/python, or vllm://HOST:PORT")
    if engine == "native" and (vllm is not None or arguments):
        given = "--vllm" if vllm is not None else "--vllm-args"
        raise UsageError(f"{given} has no meaning with --engine native", instead="--engine vllm")
    if arguments and vllm is not None and "://" in vllm:
        raise UsageError("--vllm-args are for a vLLM that is started here", got=vllm)


def _vllm(
    name: str, where: str, precision: str | None, arguments: str, longest: int, cache: ScoreCache | None, note: Any
) -> VllmBackend:
    import shlex

    from gatespace.addons.service.backend import VllmBackend
    from gatespace.addons.vllm.process import check_python
    from gatespace.addons.vllm.server import parse_place
    from gatespace.addons.vllm.source import vllm_source
    from gatespace.cli.found_model import model_folder

    if started := "://" not in where:
        check_python(where)
    else:
        parse_place(where)
    if precision not in (None, "auto", "fp32", "bf16"):
        raise unknown_name("precision", str(precision), ("auto", "fp32", "bf16"))
    source = vllm_source(model_folder(name), weights=started, report=note)
    return VllmBackend(
        source,
        where,
        cache=cache,
        dtype="float32" if precision == "fp32" else "bfloat16",
        max_model_len=longest,
        options=shlex.split(arguments),
        report=note,
    )


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
