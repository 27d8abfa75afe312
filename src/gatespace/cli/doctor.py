"""`gatespace doctor`: what is installed and usable, what is missing, and the command that adds it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatespace.cli.console import console, print_json, table

if TYPE_CHECKING:
    from rich.table import Table

_TOLERANCE = 1e-5


def doctor(
    device: Annotated[
        str | None,
        typer.Option("--device", help="Check this device against the CPU: cpu, cuda, cuda:1, ... Two minutes at most."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show what is installed and usable, what is missing, and how to add it.

    It also computes a tiny gated loss and its gradient, and compares both
    with the formula. Exit code 0: the core is usable; 1: it is not.

    With --device: losses and gradients on every support and a short run
    against the CPU's, two equal runs, a run that is killed and resumed,
    tokens per second and memory. Exit code 1: a check failed; 2: there is
    no such device.

    \b
    gatespace doctor
    gatespace doctor --json
    gatespace doctor --device cpu

    The keys of the JSON are stable:

    \b
    gatespace  version, installed, missing \\[requirement]
    python     version, implementation, executable
    platform   system, release, machine
    cpu        cores, usable, container_limit
    memory     total_bytes, available_bytes, container_limit_bytes
    torch      usable, version, error, threads, cpu_capability, bf16 {}
    devices    \\[{kind, index, name}]
    engines    \\[{name, installed, version, for, command}]
    extras     \\[{name, installed, missing \\[requirement], command}]
    checks     \\[{name, status: ok | failed | skipped, detail}]
    self_check null, or {device, name, memory_bytes, free_bytes, bf16,
               compared_with, precision, decoded_tokens_per_second,
               update_tokens_per_second, peak_memory_bytes}
    usable     true or false
    """
    from gatespace.cli.environment import facts

    found = facts()
    found["checks"] = [loss_check(found["torch"]["usable"])]
    found["usable"] = (
        found["torch"]["usable"]
        and not found["gatespace"]["missing"]
        and all(check["status"] == "ok" for check in found["checks"])
    )
    found["self_check"] = None
    if device is not None and found["usable"]:
        from gatespace.cli.self_check import self_check

        found["self_check"], checks = self_check(device, lambda text: print(text, file=sys.stderr, flush=True))
        found["checks"] += checks
    if as_json:
        print_json(found)
    else:
        _print_report(found)
    failed = [check for check in found["checks"] if check["status"] == "failed"]
    for check in failed:
        print(f"failed: {check['name']}: {check['detail']}", file=sys.stderr)
    if failed or not found["usable"]:
        raise typer.Exit(1)


def loss_check(torch_usable: bool) -> dict[str, str]:
    """Check a gated loss of two tokens and its gradient against the formula in plain Python."""
    name = "loss self-check"
    if not torch_usable:
        return {"name": name, "status": "skipped", "detail": "torch is not usable"}
    try:
        problem = _loss_problem()
    # Any error of a mismatched installation is a finding.
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        return {"name": name, "status": "failed", "detail": problem}
    return {"name": name, "status": "ok", "detail": "value and gradient of a gated loss agree with the formula"}


def _loss_problem() -> str:
    """What is wrong with `gated_kl` on this machine, or ""."""
    import torch

    from gatespace import Gate, gated_kl

    gate = Gate.named("G5")
    student = [[0.3, -0.2, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    teacher = [[1.5, 0.1, -0.4, 0.2], [2.0, -1.0, 0.5, 0.0]]
    losses = [_formula_loss(gate.a, gate.c, s, t) for s, t in zip(student, teacher, strict=True)]
    expected = sum(losses) / len(losses)

    logits = torch.tensor([student], requires_grad=True)
    out = gated_kl(logits, torch.tensor([teacher]), gate=gate, top_k=len(teacher[0]))
    out.loss.backward()
    value = float(out.loss.detach())
    if not math.isclose(value, expected, rel_tol=_TOLERANCE):
        return f"gated_kl gives {value:.8g}, the formula {expected:.8g}"
    step = 1e-5
    for token, row in enumerate(student):
        for v in range(len(row)):
            nudged = [[*row[:v], row[v] + sign * step, *row[v + 1 :]] for sign in (1, -1)]
            up, down = (_formula_loss(gate.a, gate.c, s, teacher[token]) for s in nudged)
            slope = (up - down) / (2 * step) / len(student)
            gradient = float(logits.grad[0, token, v]) if logits.grad is not None else math.nan
            if not math.isclose(gradient, slope, rel_tol=1e-3, abs_tol=_TOLERANCE):
                return f"the gradient of gated_kl is {gradient:.6g}, the formula's {slope:.6g}"
    return ""


def _formula_loss(a: float, c: float, student_logits: list[float], teacher_logits: list[float]) -> float:
    """λR + (1-λ)F with λ = σ(a·h + c), over the whole vocabulary."""
    student, teacher = _softmax(student_logits), _softmax(teacher_logits)
    forward = sum(t * math.log(t / s) for s, t in zip(student, teacher, strict=True))
    reverse = sum(s * math.log(s / t) for s, t in zip(student, teacher, strict=True))
    h = -sum(t * math.log(t) for t in teacher) / math.log(len(teacher))
    lam = 1 / (1 + math.exp(-(a * h + c)))
    return lam * reverse + (1 - lam) * forward


def _softmax(logits: list[float]) -> list[float]:
    exponentials = [math.exp(z) for z in logits]
    return [e / sum(exponentials) for e in exponentials]


def _print_report(found: dict[str, Any]) -> None:
    from rich.table import Table

    from gatespace.cli.environment import FOR_DEVELOPMENT

    out = console()
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _machine_lines(found):
        grid.add_row(label, text)
    out.print(grid)
    out.print()

    engines = _with_commands(table("Engines", "engine", "state", "for"))
    for engine in found["engines"]:
        state = engine["version"] or "installed" if engine["installed"] else "not installed"
        engines.add_row(engine["name"], state, engine["for"], engine["command"] or "")
    out.print(engines)

    extras = _with_commands(table("Extras", "extra", "state"))
    for extra in found["extras"]:
        name = f"{extra['name']} (development)" if extra["name"] in FOR_DEVELOPMENT else extra["name"]
        if extra["installed"]:
            extras.add_row(name, "installed", "")
        else:
            extras.add_row(name, f"missing: {', '.join(extra['missing'])}", extra["command"])
    if found["extras"]:
        out.print(extras)
    elif found["gatespace"]["installed"]:
        out.print("Extras: unknown, because the package packaging is not installed.")
    else:
        out.print("Extras: unknown, because gatespace runs from source and is not installed.")
    out.print()
    if found["self_check"]:
        out.print(_self_checked(found["self_check"]), soft_wrap=True)
    for check in found["checks"]:
        style = {"ok": "green", "failed": "bold red"}.get(check["status"], "yellow")
        out.print(f"{check['name']}: {check['status']}", style=style, end="")
        out.print(f" ({check['detail']})", soft_wrap=True)
    if found["usable"]:
        out.print("The core is usable.", style="green")
        return
    out.print("The core is not usable.", style="bold red")
    if found["torch"]["error"]:
        out.print(f"  torch: {found['torch']['error']}", soft_wrap=True)
    for requirement in found["gatespace"]["missing"]:
        out.print(f"  missing: {requirement}", soft_wrap=True)
    if found["gatespace"]["missing"] or found["torch"]["error"]:
        out.print("  add it with: pip install --upgrade '.', in a clone of gatespace")


def _with_commands(table: Table) -> Table:
    table.add_column("add it with, in a clone", no_wrap=True)  # a command must survive copying
    return table


def _machine_lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "gatespace", found["gatespace"]["version"] + ("" if found["gatespace"]["installed"] else " (from source)")
    yield "python", f"{found['python']['version']} ({found['python']['executable']})"
    yield "platform", " ".join(found["platform"].values())
    cpu = found["cpu"]
    limit = f", a container's limit of {cpu['container_limit']:g}" if cpu["container_limit"] else ""
    yield "cores", f"{cpu['usable']} usable of {cpu['cores']}{limit}"
    memory = found["memory"]
    sizes = [
        f"{memory[key] / 2**30:.1f} GiB {word}"
        for key, word in (
            ("total_bytes", "in all"),
            ("available_bytes", "available"),
            ("container_limit_bytes", "a container's limit"),
        )
        if memory[key] is not None
    ]
    yield "memory", ", ".join(sizes) or "unknown"
    torch = found["torch"]
    if not torch["usable"]:
        yield "torch", "not usable"
        return
    yield "torch", f"{torch['version']}, {torch['threads']} threads, {torch['cpu_capability'] or 'unknown'} kernels"
    bf16 = [name for name, has in torch["bf16"].items() if has]
    without = [name for name, has in torch["bf16"].items() if not has]
    yield (
        "bf16 on CPU",
        (f"in hardware: {', '.join(bf16)}" if bf16 else "emulated, slower than float32")
        + (f" (not here: {', '.join(without)})" if without else ""),
    )
    yield "devices", ", ".join(_device(device) for device in found["devices"])


def _self_checked(facts: dict[str, Any]) -> str:
    name = f" ({facts['name']})" if facts["name"] else ""
    sizes = (("memory_bytes", "in all"), ("free_bytes", "free"))
    memory = "".join(f", {facts[key] / 2**30:.1f} GiB {word}" for key, word in sizes if facts[key] is not None)
    itself = "; it is compared with itself" if facts["compared_with"] == "itself" else ""
    return f"{facts['device']}{name}{memory}, bf16 {facts['bf16']}{itself}"


def _device(device: dict[str, Any]) -> str:
    index = "" if device["kind"] in ("cpu", "mps") else f":{device['index']}"
    return f"{device['kind']}{index}" + (f" ({device['name']})" if device["name"] else "")
