"""`gatespace teacher`: serve a teacher, its keys and its status."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatespace.cli import run_options as options
from gatespace.cli.console import console, print_json
from gatespace.errors import GatespaceError, RunError, UsageError, unknown_name

if TYPE_CHECKING:
    from gatespace.addons.service.keys import ClientKeys
    from gatespace.addons.service.wire import StatusReply
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


def _option(name: str, metavar: str, help: str, *, shown: bool | str = False, **more: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=help, show_default=shown, **more)


@teacher.command("serve")
def serve(
    model: Annotated[str, _option("--model", "MODEL", "A run's folder, a model folder, smollm2, or a Hub name.")],
    bind: Annotated[
        str, _option("--bind", "ADDRESS", "Where to listen; port 0 is any free port.", shown=True)
    ] = "tcp://127.0.0.1:5555",
    engine: Annotated[
        str, _option("--engine", "NAME", "native: in this process; vllm: a vLLM server computes.", shown=True)
    ] = "native",
    vllm: Annotated[
        str | None,
        _option(
            "--vllm",
            "PYTHON|vllm://HOST:PORT",
            "For --engine vllm: a Python with vLLM, to start a server; or a server that has MODEL.",
        ),
    ] = None,
    vllm_args: Annotated[str, _option("--vllm-args", "TEXT", "Arguments for vLLM: '--tensor-parallel-size 2'.")] = "",
    max_model_len: Annotated[
        int, _option("--max-model-len", "N", "For a vLLM started here: prompt and response.", shown=True, min=8)
    ] = 2048,
    precision: Annotated[
        str | None, _option("--precision", "NAME", "fp32, bf16, or auto by the machine.", shown="auto")
    ] = None,
    quantization: Annotated[
        str | None, _option("--quantization", "NAME", "int8 or nf4: quantise the linear layers with bitsandbytes.")
    ] = None,
    device: Annotated[str, _option("--device", "NAME", "auto, cpu, cuda, cuda:1 or xpu.", shown=True)] = "auto",
    cache: Annotated[
        str, _option("--cache", "DIR", "Score cache: a folder, auto (in the user's cache), or none.", shown=True)
    ] = "auto",
    cache_mb: Annotated[int, _option("--cache-mb", "N", "Maximum cache size in MiB.", shown=True, min=1)] = 4096,
    key: Annotated[Path | None, _option("--key", "FILE", "The service's secret key, which `keygen` makes.")] = None,
    allow: Annotated[
        Path | None,
        _option(
            "--allow", "FILE", "Public keys of the clients that may connect, one a line; or a folder of *.pub files."
        ),
    ] = None,
    max_queue: Annotated[int, _option("--max-queue", "N", "Pending requests of all clients.", shown=True, min=1)] = 256,
    max_client_queue: Annotated[
        int, _option("--max-client-queue", "N", "Pending requests of one client.", shown=True, min=1)
    ] = 8,
    batch_tokens: Annotated[int, _option("--batch-tokens", "N", "Tokens scored together.", shown=True, min=1)] = 4096,
    drain: Annotated[
        float, _option("--drain", "SECONDS", "Time to finish pending requests on shutdown.", shown=True, min=0)
    ] = 60.0,
    quiet: options.Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for every event.")] = False,
) -> None:
    """Serve a teacher until SIGTERM or Ctrl-C; then finish pending requests.

    Without keys it listens on this machine only. With --key and
    --allow it may listen anywhere, and accepts the listed clients.

    \b
    gatespace teacher serve --model runs/teach
    gatespace teacher serve --model Qwen/Qwen3-32B --bind tcp://0.0.0.0:5555
        --key server.key --allow clients.txt
    gatespace teacher serve --model Qwen/Qwen3-32B --engine vllm
        --vllm .venv-vllm/bin/python --vllm-args '--tensor-parallel-size 2'

    With the engine vllm it gives top-k log-probabilities only
    (teacher.payload: top_k). A vLLM that was started here is restarted
    if it ends.
    """
    import signal

    from gatespace.addons.service.keys import check_bind, server_keys
    from gatespace.cli.found_model import model_folder

    if (key is None) != (allow is None):
        given, missing = ("--key", "--allow") if allow is None else ("--allow", "--key")
        raise UsageError(f"{given} needs {missing}", why="a service with keys accepts the clients in its list")
    _check_engine(engine, vllm, vllm_args)
    keys = server_keys(key, allow) if key is not None and allow is not None else None
    check_bind(bind, secured=keys is not None)  # before the slow model load

    def note(text: str) -> None:
        if as_json:
            _print_event({"event": "note", "text": text})
        elif not quiet:
            # Clients choose their names, which must not inject terminal control codes.
            sys.stderr.write("".join(c if c.isprintable() else "?" for c in text) + "\n")

    with ExitStack() as stack:
        scores = _open_cache(cache, cache_mb, note)
        if scores is not None:
            stack.enter_context(scores)
        from gatespace.addons.service.backend import Backend, LocalBackend, VllmBackend
        from gatespace.addons.service.server import ServerLimits, TeacherServer

        facts: dict[str, Any] = {"engine": engine}
        if vllm is None:
            source: Backend = LocalBackend(_load(model, precision, device, quantization, note), cache=scores)
        else:
            source = VllmBackend(
                model_folder(model),
                vllm,
                cache=scores,
                precision=precision,
                max_model_len=max_model_len,
                arguments=vllm_args,
                report=note,
            )
            stack.callback(source.close)
            facts |= {"vllm": source.address, "vllm_pid": source.pid}
        limits = ServerLimits(queue=max_queue, client_queue=max_client_queue, batch_tokens=batch_tokens, drain=drain)
        server = TeacherServer(source, bind, keys=keys, limits=limits, report=note)
        facts |= {"fingerprint": server.fingerprint, "instance": server.instance, "keys": keys is not None}

        def ready() -> None:
            if as_json:
                _print_event({"event": "ready", "address": server.address, "model": source.name, **facts})
            else:
                sys.stdout.write(f"{server.address} serves {source.name}, fingerprint {server.fingerprint[:16]}\n")
                sys.stdout.flush()

        server.run(signals=(signal.SIGTERM, signal.SIGINT), ready=ready)
        if as_json:
            _print_event({"event": "ended", **_counters(server.status())})


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


def _load(
    name: str, precision: str | None, device: str, quantization: str | None, note: Callable[[str], None]
) -> Model:
    from gatespace.cli.found_model import model_folder
    from gatespace.config import EngineConfig, parse_config
    from gatespace.models import load_model
    from gatespace.training.setup import placement

    place = placement(parse_config(EngineConfig, {"device": device, "precision": precision or "auto"}))
    return load_model(
        model_folder(name), dtype=place.dtype, device=place.device, quantization=quantization, report=note
    )


def _open_cache(where: str, max_mb: int, note: Callable[[str], None]) -> ScoreCache | None:
    from gatespace.models.cache_root import cache_root
    from gatespace.teacher.cache import ScoreCache

    if where == "none":
        return None
    folder = cache_root() / "scores" if where == "auto" else Path(where).expanduser()
    return ScoreCache(folder, max_mb=max_mb, report=note)


def _print_event(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event, allow_nan=False) + "\n")
    sys.stdout.flush()


# ---------------------------------------------------------------------------------------------------- status


@teacher.command("status")
def status(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", show_default="zmq://127.0.0.1:5555", help="zmq://host:port")
    ] = "zmq://127.0.0.1:5555",
    client_key: Annotated[Path | None, _option("--key", "FILE", "Your secret key, if the service has keys.")] = None,
    server_key: Annotated[
        str | None, _option("--server-key", "KEY", "The service's public key, or the file that holds it.")
    ] = None,
    timeout: Annotated[
        float, _option("--timeout", "SECONDS", "How long to wait for a reply.", shown=True, min=0.1)
    ] = 5.0,
    as_json: options.AsJson = False,
) -> None:
    """Show the status of a teacher service."""
    from gatespace.addons.service.keys import client_keys

    counters = _counters(fetch_status(address, keys=client_keys(client_key, server_key), timeout=timeout))
    if as_json:
        print_json({"address": address, **counters})
        return
    out = console()
    out.print(f"{address} serves {counters['model']}", style="bold", soft_wrap=True)
    positions = counters["cache_hits"] + counters["cache_misses"]
    lines = {
        "fingerprint": counters["fingerprint"][:16],
        "up": f"{counters['uptime']:.0f} s" + (", ending" if counters["draining"] else ""),
        "clients": str(counters["clients"]),
        "queue": f"{counters['queued']} requests, {counters['queued_rows']} rows",
        "scored": f"{counters['requests']} requests, {counters['rows']} rows, {counters['tokens']} tokens",
        "refused": f"{counters['failures']} messages, {counters['dropped']} dropped",
        "speed": f"{counters['tokens_per_second']:.1f} tokens/s in the last minute, model busy {counters['busy']:.0%}",
        "model": f"{counters['passes']} forward passes, {counters['computed_tokens']} tokens, "
        f"{counters['batches']} batches ({counters['merged']} of several clients)",
        "cache": f"{counters['cache_hits']} of {positions} positions" if positions else "not used",
    }
    for label, text in lines.items():
        out.print(f"{label:>12}  {text}", soft_wrap=True)


def fetch_status(address: str, *, keys: ClientKeys | None = None, timeout: float = 5.0) -> StatusReply:
    """Fetch the counters of the service at ``zmq://host:port``; raise if there is no reply in `timeout` seconds."""
    import zmq

    from gatespace.addons.service import wire
    from gatespace.addons.service.keys import connect, service_address

    deadline = time.monotonic() + timeout
    id = secrets.randbits(62)
    with zmq.Context() as context, connect(context, service_address(address), keys, timeout=timeout) as socket:
        socket.sndtimeo = round(1000 * timeout)
        with suppress(zmq.Again):  # not connected
            socket.send_multipart(wire.encode(wire.StatusRequest(id)))
        while socket.poll(max(0, round((deadline - time.monotonic()) * 1000))):
            reply = wire.decode(socket.recv_multipart()).message
            if isinstance(reply, wire.StatusReply) and reply.id == id:
                return reply
            if isinstance(reply, wire.Failure):
                raise GatespaceError(reply.what, got=reply.got, why=reply.why, instead=reply.instead)
    raise RunError(
        "the teacher service does not reply",
        got=f"{address}, {timeout:g} s",
        why="it is not running there, it is out of reach, or the keys of one side are not those the other expects",
    )


def _counters(reply: StatusReply) -> dict[str, Any]:
    import msgspec

    counters: dict[str, Any] = msgspec.structs.asdict(reply)
    del counters["id"]
    return counters


# ---------------------------------------------------------------------------------------------------- keys


@teacher.command("keygen")
def keygen(
    name: Annotated[Path, typer.Argument(metavar="NAME", show_default=False, help="Makes NAME.key and NAME.pub.")],
    as_json: options.AsJson = False,
) -> None:
    """Make a pair of keys, for a service or for a client.

    NAME.key is the secret key and stays where it is; NAME.pub goes to the
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
    out.print(f"wrote {files.secret}, which only you can read", soft_wrap=True)
    out.print(f"wrote {files.public}: {public}", soft_wrap=True)
