"""From the STUDY of a command line to a study: one that is shipped, a file of one's own, or a study's folder."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gatespace.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from gatespace.config import StudyConfig

Study = Annotated[
    str,
    typer.Argument(
        metavar="STUDY", show_default=False, help="demo, smollm2 or paper; a YAML file; or the folder of a study."
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", show_default=False, help="Any setting, e.g. train.steps=20."),
]
Quick = Annotated[bool, typer.Option("--quick", help="One seed and five points, in a folder of its own.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", show_default=False, help="The study's folder; else studies/NAME."),
]


def shipped() -> dict[str, str]:
    """Name → text of the studies that come with gatespace."""
    folder = resources.files("gatespace.study") / "shipped"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file.read_text("utf-8") for file in files if file.name.endswith(".yaml")}


def load_study(study: str, sets: Sequence[str] = (), *, quick: bool = False) -> StudyConfig:
    """The study, with single settings set over it."""
    from gatespace.config import StudyConfig, load_config
    from gatespace.study.store import STUDY

    path = Path(study).expanduser()
    if (path / STUDY).is_file():
        path = path / STUDY
    elif path.is_dir():
        raise UsageError("this folder holds no study", got=study, why=f"it has no {STUDY}")
    if path.is_file():
        config = load_config(StudyConfig, path, sets)
    elif study in shipped():
        with resources.as_file(resources.files("gatespace.study") / "shipped" / f"{study}.yaml") as file:
            config = load_config(StudyConfig, file, sets)
    elif path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UsageError("no such file", got=study, instead="`gatespace init demo` writes one to start from")
    else:
        raise unknown_name("study", study, shipped())
    return _quick(config) if quick else config


def study_folder(config: StudyConfig, study: str, output: Path | None) -> Path:
    """Where the study lives."""
    from gatespace.study.store import STUDY

    if output is not None:
        return output
    if (Path(study).expanduser() / STUDY).is_file():
        return Path(study)
    return config.output or Path("studies") / config.name


def _quick(config: StudyConfig) -> StudyConfig:
    """The first seed and the first five points, with what they are compared with."""
    from gatespace.config import StudyConfig, dump_config, parse_config
    from gatespace.study.points import GRID

    settings = dump_config(config)
    settings |= {"name": f"{config.name}-quick", "seeds": settings["seeds"][:1], "replication": None, "output": None}
    settings["selection_seed"] = None
    points = settings["points"]
    if points == "paper":
        settings["points"] = list(GRID)
    else:
        settings["points"] = dict(list(points.items())[:5]) if isinstance(points, dict) else points[:5]
    settings["axes"]["published"] = []
    return parse_config(StudyConfig, settings)
