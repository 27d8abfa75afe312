"""A study's records for publication: without paths, hosts and users of the original machine.

Run ids are hashes of settings, including the paths of data and models. So a study file with shortened paths has other
ids, and its run folders are renamed accordingly: an archive is a complete study of its own.
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
"""Records that can contain paths or hosts."""
_OF_A_TASK = ("summary.json", "evaluation-")
"""Records with the task's name, numbers and labels. All others have only numbers and texts."""
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*://)([^\s/?#:@]*(?::[^\s/?#@]*)?@)?(\[[^\]\s]*\]|[^\s/?#:@]+)", re.I)
_FILE = re.compile(r"\bfile:(?=/)", re.I)
_PATH = re.compile(r"(?<![\w.:/~-])(?:~\w*)?/+(?! )(?:[^/'\"(),;:\n]+/+)+([^\s/'\"(),;:]*)")
"""An absolute path within a text. Folder names may contain spaces, so words between two paths can be lost: better that
than to leak a name."""


def without_places(value: Any) -> Any:
    """Strip a value of settings or records: absolute paths to their last part, addresses of their host.

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
    """The records of a study with their published names and contents.

    Args:
        folder: The study.
    """

    def __init__(self, folder: StudyFolder) -> None:
        self.folder = folder
        own = folder.config()  # with full paths of plugins, whose source is hashed
        settings = dump_config(own)
        shortened = without_places({**settings, "plugins": []}) | {"plugins": settings["plugins"], "about": own.about}
        plain = own
        self._names: dict[str, str] = {}
        if shortened != settings:
            plain = parse_config(StudyConfig, shortened, where="the study as it is published")
            self._names = _renamed(own, plain, {task: base.point for task, base in folder.bases().items()})
        # As in the study's folder: plugins/HASH/NAME.py.
        plugins = ["/".join(Path(name).parts[-3:]) if name.endswith(".py") else name for name in own.plugins]
        self.config = plain.model_copy(update={"plugins": tuple(plugins)})

    def name(self, path: Path) -> str:
        """The published name of a file or folder, relative to the study's folder."""
        parts = path.relative_to(self.folder.path).parts
        return "/".join(self._names.get(part, part) if place == 1 else part for place, part in enumerate(parts))

    def content(self, path: Path) -> bytes:
        """The published bytes of a file. Paths in the study's folder become relative; tracebacks are removed."""
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
    """Original name → published name of runs, baselines and models."""
    names = dict(zip(*(make_plan(config, bases).runs for config in (own, plain)), strict=True))
    for task in own.tasks:
        for role in ROLES:
            for name in (baseline_name, model_name):
                before, after = (name(config, task, role) for config in (own, plain))
                if before is not None and after is not None:
                    names[before] = after
    return names


def _task_without_places(found: Any) -> Any:
    """Strip only the task's name, which may be its table's; keep labels."""
    if not isinstance(found, dict):
        return found
    named = {key: without_places(one) for key, one in found.items() if key == "task"}
    return {key: _task_without_places(one) for key, one in found.items()} | named
