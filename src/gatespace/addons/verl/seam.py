"""Everything of verl that the plug-in touches, and a compatibility check."""

from __future__ import annotations

import dataclasses
import inspect
from types import ModuleType
from typing import Any

from gatespace.errors import UsageError, missing_extra

try:
    import verl  # type: ignore[import-not-found]
except ModuleNotFoundError as absent:
    raise missing_extra("the loss inside verl", module=absent.name or "verl", extra="verl") from absent

TESTED = "0.9.1"
"""The verl release the plug-in was written for and is tested with."""
TOPK_STEP = ("config", "distillation_config", "data", "student_logits", "data_format")
LOSS = ("config", "distillation_config", "model_output", "data")
SETTINGS = (
    "loss_mode",
    "topk",
    "use_task_rewards",
    "use_policy_gradient",
    "loss_max_clamp",
    "log_prob_min_clamp",
    "chunked_topk_chunk_size",
)


def changed(*found: str) -> UsageError:
    """Return the error for a verl with an unexpected interface."""
    return UsageError(
        f"verl {verl.__version__} does not have the structure that gatespace's plug-in expects",
        got="; ".join(found),
        why=f"the plug-in was written for verl {TESTED} and reaches into verl.trainer.distillation.losses",
        instead=f"pip install 'verl=={TESTED}'",
    )


try:
    import verl.trainer.distillation.losses as losses  # type: ignore[import-not-found]
    from verl.utils import ulysses  # type: ignore[import-not-found]
    from verl.utils.metric import AggregationType, Metric  # type: ignore[import-not-found]
    from verl.workers.config import DistillationLossConfig  # type: ignore[import-not-found]
    from verl.workers.utils.padding import no_padding_2_padding  # type: ignore[import-not-found]
except ModuleNotFoundError as absent:
    if not (absent.name or "").startswith("verl"):  # an undeclared dependency of verl
        raise missing_extra("the loss inside verl", module=absent.name or "verl", extra="verl") from absent
    raise changed(str(absent)) from absent
except ImportError as moved:
    raise changed(str(moved)) from moved

__all__ = [
    "TESTED",
    "AggregationType",
    "DistillationLossConfig",
    "Metric",
    "changed",
    "check",
    "losses",
    "no_padding_2_padding",
    "ulysses",
]


def check(module: ModuleType = losses, settings: type = DistillationLossConfig) -> None:
    """Raise unless verl's distillation losses and their settings have the expected interface.

    Args:
        module: verl.trainer.distillation.losses.
        settings: verl.workers.config.DistillationLossConfig.
    """
    found: list[str] = []
    for name, wanted in (("compute_topk_loss", TOPK_STEP), ("compute_forward_kl_topk", LOSS)):
        got = _parameters(getattr(module, name, None))
        if got != wanted:
            how = "is missing" if got is None else f"takes ({', '.join(got)}), not ({', '.join(wanted)})"
            found.append(f"{name} {how}")
    code = getattr(getattr(module, "distillation_ppo_loss", None), "__code__", None)
    if "compute_topk_loss" not in getattr(code, "co_names", ()):
        found.append("distillation_ppo_loss does not look compute_topk_loss up when it is called")
    for name in ("register_distillation_loss", "DISTILLATION_LOSS_REGISTRY"):
        if not hasattr(module, name):
            found.append(f"{name} is missing")
    if "use_topk" not in (_parameters(getattr(module, "DistillationLossSettings", None)) or ()):
        found.append("DistillationLossSettings has no use_topk")
    fields = {field.name for field in dataclasses.fields(settings)}
    found += [f"DistillationLossConfig has no {name}" for name in SETTINGS if name not in fields]
    if found:
        raise changed(*found)


def _parameters(function: Any) -> tuple[str, ...] | None:
    return tuple(inspect.signature(function).parameters) if callable(function) else None
