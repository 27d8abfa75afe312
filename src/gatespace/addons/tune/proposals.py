"""Optuna's proposals as a function of the known scores and a named stream: its state is rebuilt for every round."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gatespace.addons.tune.gates import Place
from gatespace.addons.tune.settings import TuneConfig
from gatespace.errors import missing_extra
from gatespace.seeding import stream

_SMALL = 0.25
"""A channel with a smaller share of the largest is left out of a proposal, so that some have fewer channels."""


class Proposal(NamedTuple):
    """A place in the search space, and a learning rate; None: the study's."""

    place: Place
    lr: float | None


def propose(
    count: int, config: TuneConfig, channels: Sequence[str], known: Sequence[tuple[Proposal, float]], *, first: int
) -> list[Proposal]:
    """Return `count` proposals.

    Args:
        count: Number of proposals.
        config: The `tune` section.
        channels: Those that a gate can depend on.
        known: Candidates with their scores at the first rung; higher is better.
        first: Index of the first one among all proposals; it names the random stream.
    """
    optuna = require_optuna()
    space = _space(config, channels)
    seed = stream(config.seed, "tune", "propose", first) % 2**32
    startup = min(config.batch, 10)
    if config.sampler == "tpe":
        sampler: Any = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=startup)
    else:
        sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=startup)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for proposal, score in known:
        values = _values(proposal, channels)
        # a named point may lie outside the space, or have no learning rate
        if all(name in values and one.low <= values[name] <= one.high for name, one in space.items()):
            values = {name: values[name] for name in space}
            study.add_trial(optuna.create_trial(params=values, distributions=space, value=score))
    found = [study.ask(fixed_distributions=space).params for _ in range(count)]
    return [_proposal(values, config, channels) for values in found]


def require_optuna() -> Any:
    """Import Optuna and silence it."""
    try:
        import optuna
    except ImportError as error:
        raise missing_extra("gatespace tune", module="optuna", extra="tune") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def _space(config: TuneConfig, channels: Sequence[str]) -> dict[str, Any]:
    floats = require_optuna().distributions.FloatDistribution
    space = {"spread": floats(*config.spread, log=True), **{f"to {name}": floats(-1.0, 1.0) for name in channels}}
    if len(config.lam) > 1:  # continuous, rounded to the nearest level, because the levels are ordered
        space["lam"] = floats(config.lam[0], config.lam[-1])
    if len(config.lr) > 1:
        space["lr"] = floats(config.lr[0], config.lr[-1], log=True)
    return space


def _values(proposal: Proposal, channels: Sequence[str]) -> dict[str, float]:
    lam, spread, direction = proposal.place
    values = {"lam": lam, "spread": spread, **{f"to {name}": direction.get(name, 0.0) for name in channels}}
    return values if proposal.lr is None else {**values, "lr": proposal.lr}


def _proposal(values: Mapping[str, float], config: TuneConfig, channels: Sequence[str]) -> Proposal:
    weights = {name: values[f"to {name}"] for name in channels}
    if not (most := max(map(abs, weights.values()))):
        weights, most = {channels[0]: 1.0}, 1.0
    weights = {name: w if abs(w) > _SMALL * most else 0.0 for name, w in weights.items()}
    length = math.hypot(*weights.values())
    lam = min(config.lam, key=lambda level: abs(level - values.get("lam", level)))
    lr = None
    if config.lr:
        lr = min(config.lr, key=lambda level: abs(math.log(level / values.get("lr", level))))
    return Proposal(Place(lam, values["spread"], {name: w / length for name, w in weights.items()}), lr)
