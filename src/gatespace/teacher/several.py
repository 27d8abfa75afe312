"""Several teachers as one `Teacher`: every row is scored by the teacher that it names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from itertools import groupby

from gatespace.errors import RunError, UsageError
from gatespace.teacher.scores import Scores, Teacher, TeacherStats


class Addressed(list[int]):
    """The ids of a prompt, with the name of the teacher that scores its responses."""

    def __init__(self, ids: Iterable[int], teacher: str) -> None:
        super().__init__(ids)
        self.teacher = teacher


class MixedScores(Scores):
    """Scores of rows of several teachers, whose hidden sizes may differ: only parts of one teacher can be used.

    Args:
        runs: Tokens and scores of adjacent rows with the same teacher.
    """

    runs: Sequence[tuple[slice, Scores]]

    def __init__(self, runs: Sequence[tuple[slice, Scores]]) -> None:
        object.__setattr__(self, "runs", runs)  # scores are frozen

    def part(self, tokens: slice) -> Scores:
        """The scores of some tokens, all of the same teacher."""
        for run, scores in self.runs:
            if run.start <= tokens.start and tokens.stop <= run.stop:
                return scores.part(slice(tokens.start - run.start, tokens.stop - run.start))
        raise RunError("scores of several teachers cannot be one tensor", got=f"tokens {tokens.start}-{tokens.stop}")


class Teachers:
    """Scores every row with the teacher that its prompt is `Addressed` to.

    Args:
        teachers: By name, all with the same `ScoreSpec`. One may have several names.
    """

    def __init__(self, teachers: Mapping[str, Teacher]) -> None:
        self.teachers = dict(teachers)
        self._each = list({id(teacher): teacher for teacher in teachers.values()}.values())
        self.fingerprint = joint_fingerprint({name: one.fingerprint for name, one in teachers.items()})
        self.numerics = json.dumps({name: one.numerics for name, one in teachers.items()}, sort_keys=True)
        self.vocab_size = self._each[0].vocab_size

    @property
    def stats(self) -> TeacherStats:
        """Sums over all."""
        return TeacherStats(*map(sum, zip(*(astuple(one.stats) for one in self._each), strict=True)))

    def score(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Scores:
        """The scores of all tokens of `responses`, each by the teacher of its prompt."""
        return self.ask(prompts, responses)()

    def ask(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Callable[[], Scores]:
        """Ask each teacher once for all of its rows, without waiting."""
        owners = [self._owner(prompt) for prompt in prompts]
        pending: list[tuple[list[int], Callable[[], Scores]]] = []
        for number in dict.fromkeys(owners):
            rows = [row for row, owner in enumerate(owners) if owner == number]
            asked = self._each[number].ask([prompts[row] for row in rows], [responses[row] for row in rows])
            pending.append((rows, asked))
        if len(pending) == 1:
            return pending[0][1]
        return lambda: _in_order([(rows, asked()) for rows, asked in pending], [len(ids) for ids in responses])

    def about(self) -> dict[str, str]:
        """Empty: a run records each teacher by itself."""
        return {}

    def close(self) -> None:
        """Close all."""
        for teacher in self._each:
            teacher.close()

    def _owner(self, prompt: Sequence[int]) -> int:
        """Index of a prompt's teacher."""
        name = prompt.teacher if isinstance(prompt, Addressed) else ""
        if name not in self.teachers:
            raise UsageError("a prompt names no teacher of the run", got=repr(name), instead=", ".join(self.teachers))
        return next(i for i, one in enumerate(self._each) if one is self.teachers[name])


def joint_fingerprint(fingerprints: Mapping[str, str]) -> str:
    """One fingerprint for all named teachers."""
    return hashlib.sha256(json.dumps(dict(fingerprints), sort_keys=True).encode()).hexdigest()


def _in_order(found: Sequence[tuple[Sequence[int], Scores]], lengths: Sequence[int]) -> Scores:
    """The scores of all rows in row order; `found` has the row indices and scores of each teacher."""
    owner = {row: number for number, (rows, _) in enumerate(found) for row in rows}
    runs: list[tuple[slice, Scores]] = []
    used, token = [0] * len(found), 0
    for number, rows in groupby(range(len(lengths)), key=owner.__getitem__):
        count = sum(lengths[row] for row in rows)
        own = slice(used[number], used[number] + count)
        runs.append((slice(token, token + count), found[number][1].part(own)))
        used[number], token = own.stop, token + count
    return MixedScores(runs)
