"""The `gatespace` command: its subcommands, and the one place where errors become messages and exit codes.

Start-up must stay fast: a command's module is imported when the command is called or listed, and neither it nor this
one imports torch, pydantic, Rich or matplotlib at module level.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gatespace.cli.console import gatespace_version, print_error, stop_on_sigterm, stopped
from gatespace.errors import GatespaceError, unknown_name
from gatespace.plugins import provided
from gatespace.training.processes import is_first

_CORE = (
    *("gate", "methods", "distill", "teach", "train", "evaluate", "predict", "init"),
    *("plan", "run", "status", "evidence", "report", "doctor"),
)
"""Each is a function in the module of the same name. Add-ons and other packages provide more."""


class _Group(TyperGroup):
    """Turns a `GatespaceError` into a message and its exit code. Anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GatespaceError as error:
            if is_first() or error.raised_by is None:
                print_error(error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(stopped(interrupt)) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not ctx.resilient_parsing and not name.startswith("-") and self.get_command(ctx, name) is None:
            raise unknown_name("command", name, self.list_commands(ctx))
        return super().resolve_command(ctx, args)


class _Commands(_Group):
    """All commands, imported lazily."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_CORE, *provided("commands")]

    def get_command(self, ctx: Any, name: str) -> Any:
        name = {"distil": "distill"}.get(name, name)
        if name not in self.commands and name in self.list_commands(ctx):
            try:
                self.commands[name] = _load(name)
            except Exception as error:  # a broken package must not break the other commands
                if name in _CORE:
                    raise
                sys.stderr.write(
                    f"note: the command {name} of {provided('commands')[name].value} cannot be loaded: {error}\n"
                )
        return self.commands.get(name)


def _load(name: str) -> Any:
    holder = typer.Typer(rich_markup_mode="rich")
    if name in _CORE:
        module = importlib.import_module(f"gatespace.cli.{name}")
        holder.command(name, cls=module.PointCommand if name == "gate" else None)(getattr(module, name))
    elif isinstance(command := provided("commands")[name].load(), typer.Typer):
        holder.add_typer(command, name=name, cls=_Group)
    else:
        holder.command(name)(command)
    return typer.main.get_group(holder).commands[name]


app = typer.Typer(
    name="gatespace",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gatespace {gatespace_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Gates for on-policy distillation, as points (a,b,c,d) of one shared space.

    At every token λ = σ(a·h + b·u + c + d·gap) weighs reverse KL,
    and 1-λ weighs forward KL.

    \b
    gatespace gate G5 H2 static:0.388               what these points do
    gatespace methods                               published methods
    gatespace distill rows.csv --teacher T --student S -o DIR   all in one
    gatespace teach --task tweeteval/emotion        make a teacher
    gatespace train --teacher runs/teach --gate G5  distil it into a student
    gatespace evaluate runs/train                   how often it is right
    gatespace predict runs/train texts.txt          label texts with it
    gatespace plan demo                             what a study would do
    gatespace run demo                              a whole study, its report
    gatespace doctor                                does it work here?
    """


def main() -> None:
    """Entry point of the console script and of `python -m gatespace`."""
    for stream in (sys.stdout, sys.stderr):
        # On a legacy code page without λ, replace the character instead of failing.
        if hasattr(stream, "reconfigure") and (stream.encoding or "").lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")
    try:
        stop_on_sigterm()
        app(prog_name="gatespace")
    except KeyboardInterrupt as interrupt:
        sys.exit(stopped(interrupt))
