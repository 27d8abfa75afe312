"""A TRL that has changed is met with an error that names it, and not with numbers of another objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("trl", reason="no TRL here; `make test-engines` makes an environment with it")

import trl
from trl import DistillationTrainer

from gatespace.addons.trl import GatedDistillationConfig, GatedDistillationTrainer, check_seam
from gatespace.errors import UsageError


class OtherSignature(DistillationTrainer):
    def _compute_loss(self, student: Any, batch: Any) -> Any:
        raise AssertionError("never called")


class OneMore(DistillationTrainer):
    def _compute_loss(self, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any, weights: Any) -> Any:
        raise AssertionError("never called")


class OtherHidden(DistillationTrainer):
    def _get_last_hidden_state(self, unwrapped_model: Any, packed: Any) -> Any:
        raise AssertionError("never called")


class NeedsMore(DistillationTrainer):
    def _get_last_hidden_state(
        self, unwrapped_model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: Any, position_ids: Any
    ) -> Any:
        raise AssertionError("never called")


class NotCalled(DistillationTrainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return self._divergence(model, inputs)


class DividesAgain(DistillationTrainer):
    loss_is_scaled_for_ga = False


class Missing(DistillationTrainer):
    _get_last_hidden_state = None


CHANGES = {
    OtherSignature: r"OtherSignature\._compute_loss has another signature",
    OneMore: r"OneMore\._compute_loss has another signature",
    OtherHidden: r"OtherHidden\._get_last_hidden_state has another signature",
    NeedsMore: r"NeedsMore\._get_last_hidden_state has another signature",
    NotCalled: r"NotCalled\.compute_loss does not call _compute_loss",
    DividesAgain: r"DividesAgain divides the loss",
    Missing: r"Missing has no method _get_last_hidden_state",
}


@pytest.mark.parametrize("base", CHANGES, ids=lambda base: base.__name__)
def test_changes_are_seen_before_anything_is_loaded(base: type) -> None:
    changed = type("Changed", (GatedDistillationTrainer, base), {})
    with pytest.raises(UsageError, match=CHANGES[base]) as caught:
        changed("no such student", "no such teacher", GatedDistillationConfig("out", use_cpu=True, bf16=False))
    assert f"TRL {trl.__version__}" in str(caught.value)
    assert "pip install 'trl==1.16.*'" in str(caught.value)


def test_this_trl_has_what_is_needed() -> None:
    assert "pixel_values" in check_seam()


def test_attributes_that_are_gone(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from gatespace.addons.trl import trainer

    monkeypatch.setattr(trainer, "ATTRIBUTES", (*trainer.ATTRIBUTES, "_no_such_buffer"))
    with pytest.raises(UsageError, match="has no attribute _no_such_buffer"):
        make()


def test_batches_that_lack_a_part(make: Callable[..., Any], batch: dict[str, Any]) -> None:
    trainer = make()
    del batch["completion_mask"]
    with pytest.raises(UsageError, match="a batch has no completion_mask"):
        trainer.compute_loss(trainer.model, batch)


def test_a_loss_that_was_made_elsewhere(
    make: Callable[..., Any], batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """compute_loss still names the method, and goes another way."""
    trainer = make()
    monkeypatch.setattr(DistillationTrainer, "compute_loss", lambda *arguments, **options: 0.0)
    with pytest.raises(UsageError, match="did not call the gated loss"):
        trainer.compute_loss(trainer.model, batch)
