"""Teacher service over ZMQ: one model shared by many students, in other processes or on other machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gatespace.addons.service.client import RemoteTeacher
    from gatespace.config import TrainConfig
    from gatespace.models import Model
    from gatespace.teacher.cache import ScoreCache
    from gatespace.teacher.scores import ScoreSpec
    from gatespace.training.setup import Placement


def open_teacher(
    config: TrainConfig,
    student: Model,
    spec: ScoreSpec,
    *,
    place: Placement,
    cache: ScoreCache | None,
    report: Callable[[str], None],
    setting: str = "pair.teacher",
) -> RemoteTeacher:
    """Connect to the teacher at zmq://HOST:PORT; raise, naming the `setting`, if it cannot teach this student."""
    from gatespace.addons.service.client import Options, RemoteTeacher
    from gatespace.addons.service.keys import client_keys
    from gatespace.addons.service.wire import vocabulary_digest
    from gatespace.config import in_setting, parse_config

    with in_setting("teacher.options"):
        options = parse_config(Options, dict(config.teacher.options))
        keys = client_keys(options.client_key, options.server_key)
    with in_setting(setting):
        teacher = RemoteTeacher(
            str(config.pair.teacher),
            spec,
            tokenizer_digest=vocabulary_digest(student.tokenizer.get_vocab()),
            keys=keys,
            timeout=options.timeout,
            patience=options.patience,
            cache=cache,
            report=report,
            device=place.device,
        )
    if teacher.dtype != place.dtype:
        report(f"the teacher computes in {str(teacher.dtype).removeprefix('torch.')}, this run in {place.precision}")
    return teacher
