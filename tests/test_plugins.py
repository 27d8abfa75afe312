"""A user's own code by name, and what is found by entry points."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gatespace.cli.app import app
from gatespace.config import TrainConfig
from gatespace.errors import UsageError
from gatespace.files import read
from gatespace.gating import signals
from gatespace.plugins import GROUPS, load_plugins, plugin_hash, plugins_digest, provided, provider
from gatespace.runs import RunFolder
from gatespace.training.train import train
from tests.training.conftest import own_cache, shared_place, synthetic, taught, tiny, train_config

__all__ = ["own_cache", "shared_place", "synthetic", "taught", "tiny", "train_config"]

MARGIN = """
from gatespace import signals


@signals.register("{name}", range=(0.0, 1.0))
def margin(tokens):
    "The teacher's lead: its first probability minus its second, (N,)."
    first, second = tokens.teacher_top(2).log_probs.exp().unbind(-1)
    return {factor} * (first - second)
"""


@pytest.fixture
def plugin(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Path]:
    """A file with a signal of the test's own; the signal is forgotten afterwards."""
    from gatespace import plugins

    made: list[str] = []
    loaded = dict(plugins._loaded)  # other tests of this process have plugins of their own

    def make(name: str, factor: float = 1.0, file: str = "my_signal.py") -> Path:
        path = tmp_path / file
        path.write_text(MARGIN.format(name=name, factor=factor))
        made.append(name)
        return path

    yield make  # type: ignore[misc]
    for name in set(made):
        if name in signals.names():
            signals.unregister(name)
    plugins._loaded.clear()
    plugins._loaded.update(loaded)


def test_a_run_knows_the_signal_of_a_file(
    train_config: Callable[..., TrainConfig], plugin: Callable[..., Path], tmp_path: Path
) -> None:
    file = plugin("lead")
    settings = {"objective": {"gate": {"a": 4, "c": -1, "lead": -2}}, "steps": 2, "plugins": [str(file)]}
    config = train_config(**settings)
    train(config)
    run = RunFolder(config.output)
    assert all(0 < record["lead"] < 1 for record in run.log("metrics"))
    assert run.identity()["content"]["plugins"] == plugins_digest([str(file)])
    (copy,) = run.plugins.iterdir()
    assert copy.read_bytes() == file.read_bytes()


def test_another_source_is_another_run(
    train_config: Callable[..., TrainConfig], plugin: Callable[..., Path], tmp_path: Path
) -> None:
    from gatespace import plugins
    from gatespace.config import dump_yaml

    config = train_config(objective={"gate": {"a": 4, "c": -1, "lead": -2}}, steps=1)
    (tmp_path / "run.yaml").write_text(dump_yaml(config))

    def run(*, output: str) -> Result:
        plugins._loaded.clear()  # as in a process of its own: one imports a file once
        if "lead" in signals.names():
            signals.unregister("lead")
        words = ["train", str(tmp_path / "run.yaml"), "--plugin", str(tmp_path / "my_signal.py"), "--quiet"]
        return CliRunner().invoke(app, [*words, "--output", str(tmp_path / output)])

    plugin("lead")
    first = run(output="one")
    assert first.exit_code == 0, first.stderr
    plugin("lead", factor=0.5)
    second = run(output="one")
    assert second.exit_code == 2
    assert "changed: plugins" in second.stderr
    third = run(output="two")
    assert third.exit_code == 0, third.stderr
    one, two = (read(tmp_path / name / "metrics.jsonl")[0]["lead"] for name in ("one", "two"))
    assert two == pytest.approx(0.5 * one, rel=1e-6)


def test_a_plugin_counts_by_its_source_alone(plugin: Callable[..., Path]) -> None:
    one = plugin("lead")
    same = plugin("lead", file="copy.py")
    other = plugin("lead", factor=2.0, file="other.py")
    assert plugin_hash(str(one)) == plugin_hash(str(same)) != plugin_hash(str(other))
    assert plugins_digest([str(one), str(other)]) == plugins_digest([str(other), str(same)])
    load_plugins([str(one), str(same)])  # the same source is imported once, and no name is taken twice
    assert "lead" in signals.names()


@pytest.mark.parametrize(
    "content, expected",
    [(None, "there is no such file"), ("1 / 0", "ZeroDivisionError"), ("def (:", "SyntaxError")],
)
def test_a_plugin_that_cannot_be_imported(tmp_path: Path, content: str | None, expected: str) -> None:
    file = tmp_path / "broken.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match=expected):
        load_plugins([str(file)])
    with pytest.raises(UsageError, match="there is no such module"):
        load_plugins(["no_such_package.signals"])


def test_a_task_of_a_file(tmp_path: Path) -> None:
    from gatespace import plugins
    from gatespace.config import TaskConfig, parse_config
    from gatespace.tasks import load
    from gatespace.tasks.configured import load_configured_task

    (tmp_path / "my_task.py").write_text(
        "from gatespace.tasks import Example, Task, register\n"
        "@register('colours')\n"
        "def colours():\n"
        "    rows = [Example('grass', 'green'), Example('sky', 'blue')]\n"
        "    words = {'green': 'like leaves', 'blue': 'like the sea'}\n"
        "    return Task('colours', rows, rows, rows, tuple(words), words)\n"
    )
    config = parse_config(TaskConfig, {"name": "colours"})
    with pytest.raises(UsageError, match=r"task\.name: unknown task 'colours'"):
        load_configured_task(config)
    load_plugins([str(tmp_path / "my_task.py")])
    try:
        assert load_configured_task(config).labels == ("green", "blue")
    finally:
        del load._registered["colours"]
        del plugins._loaded[str(tmp_path / "my_task.py")]


def test_every_entry_point_of_the_add_ons_loads() -> None:
    for group in GROUPS:
        for name in provided(group):
            assert callable(provider(group, name)) or group == "commands"
    with pytest.raises(UsageError, match="unknown tracker 'tensorbord'"):
        provider("trackers", "tensorbord")
