"""The identity of a run: a hash of everything that can change its numbers, and of nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gatespace.config.base import Section, key_of
from gatespace.config.sections import ALARMS
from gatespace.errors import unknown_name

_VERSION = "gatespace.config.1"  # changing it gives every run a new identity

LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        "output": "where the run is written",
        "engine.device": "where it is computed; recorded with the run's environment",
        "pair.teacher_device": "where it is computed",
        "engine.threads": "where it is computed; recorded with the run's environment",
        "engine.parallel": "how several processes divide the work; where there are several, that counts by content",
        "teacher.cache": "where scores are cached; a score does not depend on it",
        "teacher.cache_mb": "how many scores are cached",
        "teacher.options": "how a teacher behind an address is reached; its scores do not depend on that",
        "rollout.options": "where a sampler is; that it samples counts (rollout.engine)",
        "evaluation.every": "when the student is evaluated during training, which does not change it",
        "evaluation.split": "which rows are evaluated on during training",
        "checkpoint.every": "how much of a killed run is computed again",
        "checkpoint.keep": "how many checkpoints stay",
        "checkpoint.model": "whether the trained weights are kept",
        **{
            f"alarms.{name}": "when a run warns, or is ended before it is done"
            for name in (*ALARMS, "window", "stop_on")
        },
        "trace.tokens_every": "what is written down",
        "trace.rollouts": "what is written down",
        "trace.trackers": "where it is written down",
    }
)
"""Setting → why it cannot change a run's numbers. Every setting not listed here counts.

That includes `engine.micro_tokens`: it is exact up to the order of sums, but runs are bit-reproducible.
"""

LATER: Mapping[str, Any] = MappingProxyType(
    {
        "objective.shuffle": False,
        "pair.teacher_quantization": None,
        "pair.student_quantization": None,
        "rollout.staleness": 0,
        "rollout.engine": "native",
        "evaluation.engine": "native",
        "evaluation.probabilities": False,
        "engine.deterministic": False,
        "optimizer.states": "fp32",
        "evaluation.patience": None,
        "checkpoint.select": "last",
        "plugins": [],
        "task.text": None,
        "teacher.prompt": None,
        "pair.teachers": None,
        "pair.ema_decay": 0.95,
        "task.table.teacher_column": None,
        "task.text.teacher_column": None,
    }
)
"""Setting added later → the value that behaves as before it existed, and so keeps old runs' identities."""

_ALWAYS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "engine": {"engine.packed": None, "engine.share_prefix": True},
        "objective": {"engine.reuse_rollout": True, "engine.fused": True},
    }
)
"""Section → former settings of runs with it and the values that all runs had, so that stored studies stay readable."""

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    dict.fromkeys(("evaluation.patience", "checkpoint.select"), ("evaluation.every", "evaluation.split"))
)
"""Setting → settings that count only if it is set: those of the evaluations it selects by."""

CONTENT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "task": ("task.name", "task.root", "task.table", "task.text"),
        "student": ("pair.student", "pair.student_revision", "pair.student_quantization"),
        "teacher": ("pair.teacher", "pair.teachers", "pair.teacher_revision", "pair.teacher_quantization"),
        "model": ("model", "revision"),
        "gate": ("objective.gate",),
        "precision": ("engine.precision",),
        "processes": (),
        "plugins": ("plugins",),
    }
)
"""Resolved content → the settings that only say where or how to find it."""


def identity(config: Section, *, content: Mapping[str, str] | None = None) -> str:
    """SHA-256, in hexadecimal, of all settings that can change the run's numbers (all but `LEFT_OUT`).

    Args:
        config: A complete configuration.
        content: What the settings resolved to, by the names of `CONTENT`: ``task`` a digest of the rows, ``student``,
            ``teacher`` and ``model`` fingerprints of weights, ``gate`` the coefficients, ``precision`` what auto
            became. It replaces those settings, so that the identity depends on a model's content and not its folder,
            and on a gate's coefficients and not its name.

    Examples:
        >>> from gatespace.config import PairConfig, TrainConfig
        >>> here, there = (TrainConfig(pair=PairConfig(teacher=place)) for place in ("here", "there"))
        >>> identity(here) == identity(there)
        False
        >>> identity(here, content={"teacher": "f00d"}) == identity(there, content={"teacher": "f00d"})
        True
    """
    found = dict(content or {})
    replaced: list[str] = []
    for name in found:
        if name not in CONTENT:
            raise unknown_name("content of a configuration", name, CONTENT)
        replaced += CONTENT[name]
    settings = {
        path: value
        for path, value in counted(config).items()
        if not any(path == other or path.startswith(f"{other}.") for other in replaced)
    }
    whole = {"version": _VERSION, "kind": type(config).__name__, "settings": settings, "content": found}
    text = json.dumps(whole, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def counted(config: Section) -> dict[str, Any]:
    """Dotted path → value of the settings that can change a run's numbers."""
    settings = settings_of(config)
    found = {path: value for path, value in settings.items() if not (path in LATER and value == LATER[path])}
    for section, values in _ALWAYS.items():
        if section in type(config).model_fields:
            found |= values
    chosen_by = {path for name, paths in CHOICES.items() if name in found for path in paths}
    return {path: value for path, value in found.items() if path not in LEFT_OUT or path in chosen_by}


def settings_of(config: Section) -> dict[str, Any]:
    """Dotted path → JSON value of all settings. A null section is one setting."""
    flat: dict[str, Any] = {}
    dumped = config.model_dump(mode="json", by_alias=True)
    for name, field in type(config).model_fields.items():
        key, value = key_of(name, field), getattr(config, name)
        if isinstance(value, Section):
            flat |= {f"{key}.{path}": inner for path, inner in settings_of(value).items()}
        else:
            flat[key] = dumped[key]
    return flat
