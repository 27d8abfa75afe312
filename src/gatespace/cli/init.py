"""`gatespace init`: a study file to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gatespace.cli.study_file import shipped
from gatespace.errors import RunError, UsageError, unknown_name


def init(
    study: Annotated[
        str, typer.Argument(metavar="STUDY", help="demo, methods, smollm2, replication or paper.")
    ] = "demo",
    output: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", show_default=False, help="Where to write it; default: STUDY.yaml."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Copy a shipped study for editing.

    \b
    gatespace init demo my.yaml
    gatespace plan my.yaml
    gatespace run my.yaml
    """
    studies = shipped()
    if study not in studies:
        raise unknown_name("study", study, studies)
    path = output or Path(f"{study}.yaml")
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(studies[study])
    except FileExistsError:
        raise UsageError("the file exists", got=path, instead="another name, or --force") from None
    except OSError as error:
        raise RunError(f"{path} cannot be written", why=error.strerror or str(error)) from error
    typer.echo(f"wrote {path}; next: gatespace plan {path}")
