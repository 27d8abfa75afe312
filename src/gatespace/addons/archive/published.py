"""A study's records as they are published: without the paths, hosts and users of the machine that made them.

Run ids are hashes of settings, also of where data and models are. So a study file whose places are shortened has other
ids, and the folders of its runs are named by them: an archive is a whole study of its own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gatespace.config import StudyConfig, dump_config, dump_yaml, parse_config
from gatespace.config.text import read_yaml, write_yaml
from gatespace.runs import StudyFolder
from gatespace.study.plan import ROLES, baseline_name, make_plan, model_name

_FILES = ("config.yaml", "baseline.json", "error.json", "environment.json")
"""The records that can name places."""
_OF_A_TASK = ("summary.json", "evaluation-")
"""Those that name the task beside numbers and labels. The rest holds numbers and texts."""
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*://)([^\s/?#:@]*(?::[^\s/?#@]*)?@)?(\[[^\]\s]*\]|[^\s/?#:@]+)", re.I)
_FILE = re.compile(r"\bfile:(?=/)", re.I)
_PATH = re.compile(r"(?<![\w.:/~-])(?:~\w*)?/+(?! )(?:[^/'\"(),;:\n]+/+)+([^\s/'\"(),;:]*)")
"""An absolute path within a text. Folders may have blanks in their names, so that a text with a second path after a
blank can lose words between them: rather that than a name."""


def without_places(value: Any) -> Any:
    """A value of settings or records: of an absolute path its last part, of an address no host.

    Examples:
        >>> without_places({"root": "/home/me/my data/tweets", "teacher": "zmq://10.0.0.7:5555", "steps": 30})
        {'root': 'tweets', 'teacher': 'zmq://host:5555', 'steps': 30}
        >>> without_places("no such file: /home/me/x.csv (line 3)")
        'no such file: x.csv (line 3)'
    """
    if isinstance(value, dict):
        return {key: without_places(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_places(one) for one in value]
    if not isinstance(value, str):
        return value
    text = _URL.sub(r"\1host", _FILE.sub("", value))
    whole = text.startswith(("/", "~")) and "\n" not in text and " (" not in text
    if whole and len(parts := [part for part in text.split("/") if part]) > 1:
        return parts[-1]
    return _PATH.sub(lambda found: found[1] or found[0].rstrip("/").rpartition("/")[2], text)


class Published:
    """The records of a study by the names and with the contents that others get.

    Args:
        folder: The study.
    """

    def __init__(self, folder: StudyFolder) -> None:
        self.folder = folder
        own = folder.config()  # with full paths of plugins, whose source counts
        settings = dump_config(own)
        shortened = without_places({**settings, "plugins": []}) | {"plugins": settings["plugins"], "about": own.about}
        plain = own
        self._names: dict[str, str] = {}
        if shortened != settings:
            plain = parse_config(StudyConfig, shortened, where="the study as it is published")
            self._names = _renamed(own, plain, {task: base.point for task, base in folder.bases().items()})
        # As the study's folder spells them, by hash: plugins/HASH/NAME.py.
        plugins = ["/".join(Path(name).parts[-3:]) if name.endswith(".py") else name for name in own.plugins]
        self.config = plain.model_copy(update={"plugins": tuple(plugins)})

    def name(self, path: Path) -> str:
        """The published name of a file or folder of the study, relative to it."""
        parts = path.relative_to(self.folder.path).parts
        return "/".join(self._names.get(part, part) if place == 1 else part for place, part in enumerate(parts))

    def content(self, path: Path) -> bytes:
        """The published bytes of a file. Places in the study's folder are relative; an error has no traceback."""
        if path == self.folder.study_file and self._names:
            return dump_yaml(self.config).encode()
        data = path.read_bytes()
        if path.name not in _FILES and not path.name.startswith(_OF_A_TASK):
            return data
        text = data.decode().replace(f"{os.fspath(self.folder.path)}/", "./")
        for before, after in self._names.items():
            text = text.replace(before, after)
        if path.suffix == ".yaml":
            return write_yaml(without_places(read_yaml(text, where=path.name))).encode()
        found = json.loads(text)
        plain = without_places(found) if path.name in _FILES else _task_without_places(found)
        if path.name == "error.json":
            plain["details"] = ""
        return data if plain == json.loads(data) else (json.dumps(plain, indent=2) + "\n").encode()


def _renamed(own: StudyConfig, plain: StudyConfig, bases: Mapping[str, str]) -> dict[str, str]:
    """Names of runs, baselines and models by the study's own file → by the published one."""
    names = dict(zip(*(make_plan(config, bases).runs for config in (own, plain)), strict=True))
    for task in own.tasks:
        for role in ROLES:
            for name in (baseline_name, model_name):
                before, after = (name(config, task, role) for config in (own, plain))
                if before is not None and after is not None:
                    names[before] = after
    return names


def _task_without_places(found: Any) -> Any:
    """The name of a task may be that of its table; labels stay as they are."""
    if not isinstance(found, dict):
        return found
    named = {key: without_places(one) for key, one in found.items() if key == "task"}
    return {key: _task_without_places(one) for key, one in found.items()} | named
