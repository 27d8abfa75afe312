"""Options shared by several commands, and how `teach` and `train` build a configuration from them.

An option is shorthand for a setting: it overrides the configuration file, and errors about the setting name the
option.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gatespace.errors import UsageError

if TYPE_CHECKING:
    from gatespace.config import TaskConfig
    from gatespace.config.base import Section

Config = TypeVar("Config", bound="Section")

File = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG.yaml", show_default=False, help="A file of settings; options override it."),
]
Task = Annotated[
    str | None,
    typer.Option(
        "--task", metavar="NAME", show_default=False, help="tweeteval/emotion, another task of TweetEval, or synthetic."
    ),
]
Prompt = Annotated[
    str | None,
    typer.Option(
        "--prompt", metavar="TEXT", show_default=False, help='The prompt, with columns in braces: "Describe: {mr}".'
    ),
]
Answer = Annotated[
    str | None,
    typer.Option("--answer", metavar="NAME", show_default=False, help="The column of the right responses."),
]
Metric = Annotated[
    str | None,
    typer.Option("--metric", metavar="NAME", show_default=False, help="How responses are judged, e.g. rouge_l."),
]
Root = Annotated[
    Path | None,
    typer.Option("--root", metavar="DIR", show_default=False, help="A folder of TweetEval's files; default: the Hub."),
]
Brief = Annotated[
    bool | None,
    typer.Option(
        "--brief/--no-brief", show_default=False, help="Show the model the labels only, without instructions."
    ),
]
Steps = Annotated[int | None, typer.Option("--steps", metavar="N", show_default=False, help="Number of updates.")]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", metavar="N", show_default=False, help="Rows per update.")
]
LearningRate = Annotated[
    float | None, typer.Option("--lr", metavar="RATE", show_default=False, help="Learning rate of AdamW.")
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", show_default=False, help="Seed for the order of rows and for sampling."),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="NAME", show_default="auto", help="Device of the trained model: cpu, cuda, cuda:1."
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="DIR", show_default=False, help="The folder of the run. A killed run resumes."
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", show_default=False, help="Any other setting, e.g. engine.precision=fp32."
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        show_default=False,
        help="Import this Python file first (signals, objectives, tasks).",
    ),
]
TrustPlugins = Annotated[
    bool, typer.Option("--trust-plugins", help="Run the code that the file names: plugins, and a server's interpreter.")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes with a model where the file asks for it."),
]
Processes = Annotated[
    int, typer.Option("--processes", metavar="N", min=1, help="Processes on this machine that train together.")
]
ListSettings = Annotated[bool, typer.Option("--settings", help="List every setting with its default, and exit.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print all settings and an estimate of the cost; train nothing.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

Option = tuple[str, str, Any]
"""A command-line option, the setting that it stands for, and its value: None if it was not given."""
_RESETS: dict[str, dict[str, Any]] = {
    "task.name": {"task.table": None, "task.text": None},
    "pair.teacher": {"pair.teachers": None},
    "objective.gate": {"objective.method": "gated", "objective.params": {}},
    "objective.method": {"objective.gate": None},
}
"""Setting → settings of the file that an option for it replaces."""


def load(
    cls: type[Config],
    file: Path | None,
    options: Sequence[Option],
    sets: Sequence[str],
    plugins: Sequence[str] | None,
    *,
    trust_plugins: bool = False,
    trust_remote_code: bool = False,
) -> Config:
    """Load the configuration: the file's settings, overridden by options, then by `--set`; import its plugins."""
    from gatespace.config import load_config

    given: list[Option] = []
    for option, path, value in options:
        if value is not None:
            resets = {} if (path, value) == ("objective.method", "gated") else _RESETS.get(path, {})
            if path == "task.name" and not value.startswith("tweeteval/"):
                resets = {**resets, "task.root": None}
            given += [(option, other, reset) for other, reset in resets.items()]
            given.append((option, path, str(value) if isinstance(value, Path) else value))
    config = load_config(cls, file, sets, given)
    asked = file is None  # all settings are from the command line
    return with_code(config, plugins, trust_plugins or asked, trust_remote_code or asked)


def with_code(config: Config, plugins: Sequence[str] | None, trust_plugins: bool, trust_remote_code: bool) -> Config:
    """The one rule for code that a file asks for: without its flag none of it runs, in any command.

    Args:
        config: A run or a study, as its file has it.
        plugins: Files or modules that the user named: trusted, and added to those of the file. All are imported.
        trust_plugins: Also import plugins that only the file names, and start the interpreter that it names.
        trust_remote_code: Allow ``trust_remote_code: true`` anywhere in the file.
    """
    from gatespace.config import dump_config
    from gatespace.plugins import load_plugins, plugin_hash

    settings = dump_config(config)
    listed = {plugin_hash(plugin): plugin for plugin in settings["plugins"]}
    added = {plugin_hash(plugin): plugin for plugin in plugins or ()}
    unnamed = [f"{plugin} (sha256 {digest})" for digest, plugin in listed.items() if digest not in added]
    programs = _asked(settings, ".rollout.options.server")
    untrusted: dict[str, list[str]] = {}
    if (unnamed or programs) and not trust_plugins:
        untrusted["--trust-plugins" + ", or --plugin FILE for each" * (not programs)] = unnamed + programs
    if not trust_remote_code and (places := _asked(settings, ".trust_remote_code")):
        untrusted["--trust-remote-code"] = places
    if untrusted:
        raise UsageError(
            "this file asks for code that you have not named",
            got=", ".join(item for items in untrusted.values() for item in items),
            why="such code can do whatever you can do on this machine, so read it first",
            instead="; and ".join(untrusted),
        )
    names = [*listed.values(), *(plugin for digest, plugin in added.items() if digest not in listed)]
    load_plugins(names)
    return config.model_copy(update={"plugins": tuple(names)})


def _asked(settings: dict[str, Any], setting: str, path: str = "") -> list[str]:
    """Where the settings have this one, with a value that is neither false nor an address."""
    from gatespace.config.address import is_address

    places: list[str] = []
    for key, value in settings.items():
        if isinstance(value, dict):
            places += _asked(value, setting, f"{path}.{key}")
        elif f"{path}.{key}".endswith(setting) and value and not is_address(str(value)):
            places.append(f"{path}.{key}: {json.dumps(value)}".removeprefix("."))
    return places


def task_command(task: TaskConfig) -> list[str]:
    """The options that select this task in another command."""
    from gatespace.config import TaskConfig, dump_config

    defaults, found = dump_config(TaskConfig()), dump_config(task)
    words: list[str] = []
    for key, value in found.items():
        if value == defaults[key] or (key == "name" and value is None):
            continue
        if key in ("name", "root"):
            words += ["--task" if key == "name" else "--root", str(value)]
        elif key == "brief":
            words.append("--brief")
        elif key in ("table", "text"):
            given = getattr(task, key).model_dump(mode="json", exclude_defaults=True)
            words += ["--set", f"task.{key}={json.dumps(given, ensure_ascii=False)}"]
        elif key == "prefill" and task.text is not None and not value:
            continue  # the default for free text
        else:
            words += ["--set", f"task.{key}={json.dumps(value, ensure_ascii=False)}"]
    return words
