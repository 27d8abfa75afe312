"""The teachers of a run, of which each row is scored by one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple

from gatespace.errors import UsageError
from gatespace.teacher.scores import Teacher, TeacherStats


class Teachers:
    """The teachers of a run by name.

    Args:
        by_name: All with the same `ScoreSpec`. One may have several names; an only teacher has the name "".
    """

    def __init__(self, by_name: Mapping[str, Teacher]) -> None:
        self._by_name = dict(by_name)
        self.distinct = list({id(teacher): teacher for teacher in by_name.values()}.values())

    def __getitem__(self, name: str) -> Teacher:
        if name not in self._by_name:
            names = ", ".join(filter(None, self._by_name)) or "one teacher without a name"
            raise UsageError("a row names no teacher of the run", got=repr(name), instead=names)
        return self._by_name[name]

    @property
    def stats(self) -> TeacherStats:
        """Sums over all."""
        return TeacherStats(*map(sum, zip(*(astuple(teacher.stats) for teacher in self.distinct), strict=True)))


def joint_fingerprint(fingerprints: Mapping[str, str]) -> str:
    """One fingerprint for all named teachers."""
    return hashlib.sha256(json.dumps(dict(fingerprints), sort_keys=True).encode()).hexdigest()
