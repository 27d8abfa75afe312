"""Resolve the STUDY argument: a shipped study, a file, or a study's folder."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatespace.cli.run_options import with_code
from gatespace.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from gatespace.config import StudyConfig
    from gatespace.evidence.reach import Reach
    from gatespace.runs import StudyFolder
    from gatespace.study.plan import Plan

MANY_RUNS = 10_000
"""More runs than this are treated as a mistake, unless the user confirms."""

Study = Annotated[
    str,
    typer.Argument(
        metavar="STUDY",
        show_default=False,
        help="The name of a shipped study (`gatespace init --help`); a file; or a study's folder.",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", show_default=False, help="Any setting, e.g. train.steps=20."),
]
Quick = Annotated[bool, typer.Option("--quick", help="One seed and few points, in a folder of its own.")]
Yes = Annotated[bool, typer.Option("--yes", help=f"Continue if there are more than {MANY_RUNS} runs.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", show_default=False, help="The study's folder, else studies/NAME."),
]


def shipped() -> dict[str, str]:
    """Name → text of the studies shipped with gatespace."""
    folder = resources.files("gatespace.study") / "shipped"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file.read_text("utf-8") for file in files if file.name.endswith(".yaml")}


def load_study(
    study: str,
    sets: Sequence[str] = (),
    *,
    quick: bool = False,
    plugins: Sequence[str] | None = None,
    trust_plugins: bool = False,
    trust_remote_code: bool = False,
) -> StudyConfig:
    """Load a study, apply overrides, and import its plugins.

    Args:
        study: A shipped study, a file, or a study's folder.
        sets: ``path=value`` each.
        quick: One seed, at most five points, no published methods.
        plugins: Files or modules named by the user: imported, and added to those of the study.
        trust_plugins: Also import the plugins that only the study names.
        trust_remote_code: Allow the study to run code that comes with a model.
    """
    from gatespace.config import StudyConfig, load_config
    from gatespace.runs import StudyFolder

    path, folder = Path(study).expanduser(), StudyFolder(study)
    if folder.exists:
        path = folder.study_file
    elif path.is_dir():
        raise UsageError("this folder holds no study", got=study, why=f"it has no {folder.study_file.name}")
    if path.is_file():
        config = load_config(StudyConfig, path, sets)
    elif study in shipped():
        with resources.as_file(resources.files("gatespace.study") / "shipped" / f"{study}.yaml") as file:
            config = load_config(StudyConfig, file, sets)
    elif path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UsageError("no such file", got=study, instead="`gatespace init demo` writes one to start from")
    else:
        raise unknown_name("study", study, shipped())
    config = finished(config, path.parent, plugins, trust_plugins, trust_remote_code)
    return _quick(config) if quick else config


def finished(
    config: StudyConfig, folder: Path, plugins: Sequence[str] | None, trust_plugins: bool, trust_remote_code: bool
) -> StudyConfig:
    """Complete a study read from a file in `folder`: resolve its model folders and import its plugins."""
    config = _with_model_folders(config).with_plugins_from(folder)
    return with_code(config, plugins, trust_plugins, trust_remote_code).with_plugins_from(Path())


def checked_plan(config: StudyConfig, *, yes: bool = False) -> Plan:
    """The plan of a study, with its settings, methods, parameters and signals validated.

    Args:
        config: The study file.
        yes: The user has confirmed a very large number of runs.
    """
    from gatespace.gating.configured import build_objective
    from gatespace.study.plan import check, least_runs, objective, train_config

    if not yes:
        _check_size(least_runs(config), "at least ")  # before they are planned
    plan = check(config)
    if not yes:
        _check_size(len(plan.runs))
    for (task, _), point in plan.points.items():
        path = "points." if point.method is None else "axes.published."
        run = train_config(config, task, config.seeds[0], objective(point, lam=0.5), rollout=point.rollout)
        build_objective(run.objective, path=path, run=run)
    return plan


def _check_size(runs: int, about: str = "") -> None:
    if runs > MANY_RUNS:
        raise UsageError(
            "this study has very many runs", got=f"{about}{runs:,}", instead=f"--yes, to have more than {MANY_RUNS:,}"
        )


def support(plan: Plan) -> Reach:
    """The claims that a study could support at best."""
    from gatespace.evidence.reach import reach

    return reach(plan.comparisons, plan.config.choosing_seed)


def out_of_reach(found: Reach) -> str:
    """The message for a study that can support no claim."""
    if not found.claims:
        return "this study compares nothing"
    return f"whatever the result, this study can support no claim: that takes at least {found.seeds_needed} seeds"


def study_folder(config: StudyConfig, study: str, output: Path | None) -> StudyFolder:
    """The folder of the study."""
    from gatespace.runs import StudyFolder

    if output is None and StudyFolder(study).exists:
        return StudyFolder(study)
    return StudyFolder(output or config.output or Path("studies") / config.name)


def _with_model_folders(config: StudyConfig) -> StudyConfig:
    """The study with run folders replaced by their model folders, as in `train`."""
    from gatespace.cli.found_model import model_folder

    def found(settings: dict[str, Any], *keys: str) -> dict[str, Any]:
        return {
            key: model_folder(value) if key in keys and isinstance(value, str) else value
            for key, value in settings.items()
        }

    def trained(settings: dict[str, Any]) -> dict[str, Any]:
        pair = settings.get("pair")
        if not isinstance(pair, dict):
            return settings
        several = pair.get("teachers")
        more = {"teachers": found(several, *several)} if isinstance(several, dict) else {}
        return settings | {"pair": found(pair, "student", "teacher") | more}

    tasks = {name: task.model_copy(update={"train": trained(task.train)}) for name, task in config.tasks.items()}
    made = {role: found(given, "model") for role in ("teacher", "student") if (given := getattr(config.teach, role))}
    teach = config.teach.model_copy(update=made)
    return config.model_copy(update={"train": trained(config.train), "tasks": tasks, "teach": teach})


def _quick(config: StudyConfig) -> StudyConfig:
    """Reduce to the first seed and the first five points, without published methods."""
    from gatespace.config import StudyConfig, dump_config, parse_config
    from gatespace.study.points import GRID

    settings = dump_config(config)
    settings |= {"name": f"{config.name}-quick", "seeds": settings["seeds"][:1], "output": None}
    if config.replication is not None and config.replication.seeds:
        settings["replication"] = None
    settings["selection_seed"] = None
    points = settings["points"]
    if points == "paper":
        settings["points"] = list(GRID)
    else:
        settings["points"] = dict(list(points.items())[:5]) if isinstance(points, dict) else points[:5]
    settings["axes"]["published"] = []
    return parse_config(StudyConfig, settings)
