"""The command `gatespace`: its commands, and the one place where errors become messages and exit codes.

Starting must stay fast: neither this module nor a command's module imports torch, pydantic, Rich or matplotlib at its
top. Each command imports what it needs when it runs.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gatespace.cli import doctor, evaluate, gate, init, plan, predict, report, run, status, teach, train
from gatespace.cli.console import gatespace_version, print_error, stop_on_sigterm, stopped
from gatespace.errors import GatespaceError, unknown_name
from gatespace.plugins import provided
from gatespace.training.processes import is_first


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


app = typer.Typer(
    name="gatespace",
    cls=_Group,
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
    gatespace teach --task tweeteval/emotion        make a teacher
    gatespace train --teacher runs/teach --gate G5  distil it into a student
    gatespace evaluate runs/train                   how often it is right
    gatespace predict runs/train texts.txt          label texts with it
    gatespace plan demo                             what a study would do
    gatespace run demo                              a whole study, its report
    gatespace doctor                                what is installed here
    """


app.command("gate", cls=gate.PointCommand)(gate.gate)
app.command("teach")(teach.teach)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("init")(init.init)
app.command("plan")(plan.plan)
app.command("run")(run.run)
app.command("status")(status.status)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)


def _add(name: str, command: Any) -> None:
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name, cls=_Group)
    else:
        app.command(name)(command)


for _name, _point in provided("commands").items():
    try:
        _add(_name, _point.load())
    except Exception as error:  # a broken package must not take the other commands with it
        sys.stderr.write(f"note: the command {_name} of {_point.value} cannot be loaded: {error}\n")


def main() -> None:
    """Entry point of the console script and of `python -m gatespace`."""
    for stream in (sys.stdout, sys.stderr):
        # A legacy code page without λ must cost a character, not the command.
        if hasattr(stream, "reconfigure") and (stream.encoding or "").lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")
    try:
        stop_on_sigterm()
        app(prog_name="gatespace")
    except KeyboardInterrupt as interrupt:
        sys.exit(stopped(interrupt))
