"""The parts of TRL that the loss hooks into, and a compatibility check."""

from __future__ import annotations

import inspect

import trl  # type: ignore[import-not-found]  # not in the environment where types are checked

from gatespace.errors import UsageError

__all__ = ["ATTRIBUTES", "INPUTS", "DistillationConfig", "DistillationTrainer", "changed", "check_seam"]

WRITTEN_FOR = "1.16"
"""The TRL version this package was written for and is tested with."""


def changed(what: str, *, got: object = None) -> UsageError:
    """Return the error for a TRL with an unexpected interface."""
    return UsageError(
        f"TRL {trl.__version__} is not the TRL that the gated loss fits into: {what}",
        got=got,
        why=f"the loss replaces a private method of DistillationTrainer as it is in TRL {WRITTEN_FOR}",
        instead=f"pip install 'trl=={WRITTEN_FOR}.*', or a gatespace that knows this TRL",
    )


try:
    from trl import DistillationConfig, DistillationTrainer
except ImportError as error:
    raise changed("it has no DistillationTrainer", got=error) from error

SIGNATURES = {
    "compute_loss": ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
    "_compute_loss": ("self", "unwrapped_student", "inputs", "num_items_in_batch"),
    "_get_last_hidden_state": ("self", "unwrapped_model", "input_ids", "attention_mask", "logits_to_keep"),
}
ATTRIBUTES = ("accelerator", "teacher_model", "temperature", "_forward_redirection", "_metrics", "_step")
INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def check_seam(base: type = DistillationTrainer) -> tuple[str, ...]:
    """Check that the loss of `base` can be replaced; raise a `UsageError` that names TRL's version if not.

    Args:
        base: TRL's trainer, or a substitute.

    Returns:
        Names of a micro-batch's model inputs besides token ids (images and the like).
    """
    further: tuple[str, ...] = ()
    for name, wanted in SIGNATURES.items():
        method = getattr(base, name, None)
        if method is None:
            raise changed(f"{base.__name__} has no method {name}")
        parameters = inspect.signature(method).parameters
        first, rest = tuple(parameters)[: len(wanted)], list(parameters.values())[len(wanted) :]
        if first != wanted or any(one.default is one.empty for one in rest) or (rest and "hidden" not in name):
            raise changed(
                f"{base.__name__}.{name} has another signature",
                got=f"({', '.join(parameters)}) instead of ({', '.join(wanted)})",
            )
        further = tuple(one.name for one in rest)
    if "_compute_loss" not in inspect.unwrap(base.compute_loss).__code__.co_names:  # type: ignore[attr-defined]
        raise changed(f"{base.__name__}.compute_loss does not call _compute_loss")
    if getattr(base, "loss_is_scaled_for_ga", None) is not True:
        raise changed(f"{base.__name__} divides the loss by the number of micro-batches")
    return further
