"""Checks that a run fits its models: K within the vocabulary, prompt and response within the context window.

Made before the first step of `train` and `teach`, and for a whole study before any of its runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gatespace.config import ObjectiveConfig, TeachConfig, TrainConfig
from gatespace.errors import UsageError
from gatespace.models import Model, PairReport, check_pair
from gatespace.models.encode import Encoder
from gatespace.tasks.data import Example
from gatespace.training.setup import Material

_MUCH = 16
"""A limit on new tokens above this many times the longest gold response gets a note."""


class Demand(NamedTuple):
    """The most tokens that some prompts and their responses need."""

    setting: str
    """The setting that limits responses; "" if they are the gold ones."""
    rows: Sequence[Example]
    new_tokens: int
    models: dict[str, Model]
    """Setting → model whose context window must hold both."""


def check_models(config: TrainConfig, student: Model, teacher: Model) -> PairReport:
    """Raise unless the objective can compare the two models."""
    try:
        return check_pair(student, teacher)
    except UsageError:
        if not config.objective.over_labels or config.pair.teachers is not None:  # several score the student's tokens
            raise
        note = f"{student.name} and {teacher.name} have different tokens; each scores labels in its own"
        return PairReport(student.vocab_size, (note,))


def check_fit(config: TrainConfig | TeachConfig, data: Material, encoder: Encoder, **models: Model) -> list[str]:
    """Raise if a run cannot work; returns notes for the user.

    Args:
        config: The run.
        data: Its task.
        encoder: The task in the trained model's tokens.
        models: By setting: `model`, or `student` and any `teacher` or `teachers.NAME` in this process.
    """
    notes = check_teachers(config, data)
    learner = models.get("model") or models["student"]
    longest = encoder.longest_gold(data.rows, learner.turn_end)
    splits = dict.fromkeys((*config.evaluation.final, *([config.evaluation.split] if config.evaluation.every else [])))
    held_out = [row for split in splits for row in data.task.rows(split)[: config.evaluation.limit_of(split)]]
    named = {name if name == "model" else f"pair.{name}": model for name, model in models.items()}
    own = {name: model for name, model in named.items() if model is learner}
    demands = [Demand("evaluation.max_new_tokens", held_out, config.evaluation.max_new_tokens, own)] if splits else []
    if isinstance(config, TrainConfig):
        check_top_k(config.objective, learner.vocab_size)
        if config.teacher.payload == "top_k":
            _check_k("teacher.k", config.teacher.k, learner.vocab_size)
        demands.append(Demand("rollout.max_new_tokens", data.rows, config.rollout.max_new_tokens, named))
    else:
        demands.append(Demand("", data.rows, longest, named))
    notes += data.task.notes
    for demand in demands:
        encoder.check(demand.rows)
        _check_window(demand, encoder, longest)
        if not data.prompt.closes and demand.new_tokens < longest:
            notes.append(
                f"{demand.setting} is {demand.new_tokens}, and the longest right response has {longest} tokens: such a "
                "response is cut"
            )
        if demand.new_tokens > _MUCH * longest:
            notes.append(
                f"{demand.setting} is {demand.new_tokens}, and the longest right response has {longest} tokens: one "
                "that does not end costs all of it"
            )
    return notes


def check_teachers(config: TrainConfig | TeachConfig, data: Material) -> list[str]:
    """Raise if a row names none of several teachers; returns notes about teachers that no row names."""
    if not isinstance(config, TrainConfig) or (teachers := config.pair.teachers) is None:
        return []
    for number, row in enumerate(data.rows, start=1):
        if row.teacher not in teachers:
            raise UsageError(
                f"{row.where or f'{data.task.name}, row {number}'}: the row names no teacher of pair.teachers",
                got=repr(row.teacher),
                instead=f"one of {', '.join(teachers)}",
            )
    unused = teachers.keys() - {row.teacher for row in data.rows}
    return [f"pair.teachers.{name}: no row that is distilled on names it" for name in sorted(unused)]


def check_top_k(objective: ObjectiveConfig, vocab_size: int, where: str = "objective") -> None:
    """Raise if a K is larger than the vocabulary."""
    for name, k in (("top_k", objective.top_k), ("support_k", objective.support_k)):
        _check_k(f"{where}.{name}", k, vocab_size)
    _check_k(f"{where}.params.top_k", objective.params.get("top_k"), vocab_size)


def _check_k(setting: str, k: object, vocab_size: int) -> None:
    if isinstance(k, int) and k > vocab_size:
        raise UsageError(
            f"{setting}: larger than the vocabulary",
            got=f"{k}, of a vocabulary of {vocab_size}",
            instead=f"at most {vocab_size}",
        )


def _check_window(demand: Demand, encoder: Encoder, right: int) -> None:
    setting, new = demand.setting, demand.new_tokens
    lengths = [len(encoder.prefix) + len(encoder.suffix(row.text)) for row in demand.rows]
    longest = max(lengths, default=0)
    for role, model in demand.models.items():
        if model.window is None or longest + new <= model.window:
            continue
        room = model.window - longest
        over = sum(length + new > model.window for length in lengths)
        where = demand.rows[lengths.index(longest)].where
        instead = f"{setting}: {room} or less" if room >= right else ""
        raise UsageError(
            f"{setting + ': ' if setting else ''}prompt and response do not fit into the context window of {role}",
            got=f"{longest} tokens of the longest prompt{where and f' ({where})'} and {new} of a response, of "
            f"{model.window} ({model.name}); {over} of {len(lengths)} prompts are too long for it",
            why="a model's numbers mean nothing beyond the positions that it was made for",
            instead=instead or f"{encoder.prompt.shorter}, or a model with a longer context window",
        )
