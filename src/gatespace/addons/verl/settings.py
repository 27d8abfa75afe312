"""The section `distillation.distillation_loss` of a verl configuration, with a gate in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gatespace.addons.verl import seam
from gatespace.addons.verl.losses import LossSettings
from gatespace.errors import UsageError
from gatespace.gating.coefficients import Gate
from gatespace.gating.inputs import LossInputs
from gatespace.gating.objectives import Gated

LOSS_MODE = "gated_kl_topk"
"""The name of the loss in verl's registry."""
SUPPORTS = ("bucket", "renorm")
ENTROPIES = ("top_k", "bucket")


@dataclass
class GatedLossConfig(seam.DistillationLossConfig):  # type: ignore[misc]
    """verl's settings of a distillation loss, plus the point (a, b, c, d).

    `topk` of the base is how many tokens the teacher sends; `chunked_topk_chunk_size` is always the number of rows of
    logits per chunk. Other base fields mean what they mean in verl; settings that this loss cannot honour raise.
    """

    loss_mode: str = LOSS_MODE
    topk: int | None = 64
    use_task_rewards: bool = False
    use_policy_gradient: bool = False
    loss_max_clamp: float | None = None
    log_prob_min_clamp: float | None = None
    chunked_topk_chunk_size: int = 512

    gate: Any = "G5"
    """A name (G5, H2, static:0.388), [a, b, c, d], or a mapping such as {a: 4, c: -1, student_entropy: 2}."""
    signal_top_k: int = 8
    """K of the signals h and u. Coefficients are not comparable across it. At most `topk`."""
    entropy: str = "top_k"
    """How h and u are normalised: top_k (over log K), or bucket (with the tail, over log (K + 1))."""
    support: str = "bucket"
    """What both KLs sum over: bucket is a valid KL; renorm exists to reproduce others' results."""
    support_k: int | None = None
    """K of the support; null: all tokens the teacher sends."""
    stop_gradient: bool = False
    """Treat λ as a constant in the gradient. By default gradient flows through the gate, as in the paper."""
    vocab_size: int | None = None
    """Real length of the tokenizer: rows of the student's head beyond it are left out. null: all rows."""

    def __post_init__(self) -> None:
        self._check()
        super().__post_init__()

    def for_student(self, rows: int) -> LossSettings:
        """Loss settings for a student head with `rows` rows."""
        size = rows if self.vocab_size is None else self.vocab_size
        if size > rows:
            raise UsageError(
                "vocab_size is more than the student has logits", got=f"{size} of {rows}", instead="null, or less"
            )
        objective = Gated(Gate.parse(self.gate), self.support, self.support_k, self.stop_gradient)
        inputs = LossInputs(top_k=self.signal_top_k, entropy=self.entropy, vocab_size=size, total_tokens=1.0)
        return LossSettings(objective, inputs, size, self.chunked_topk_chunk_size)

    def _check(self) -> None:
        if self.loss_mode != LOSS_MODE:
            raise UsageError(
                f"GatedLossConfig is for the loss mode {LOSS_MODE}",
                got=self.loss_mode,
                instead="_target_: verl.workers.config.DistillationLossConfig for verl's own losses",
            )
        for name, value, known in (("support", self.support, SUPPORTS), ("entropy", self.entropy, ENTROPIES)):
            if value not in known:
                raise UsageError(
                    f"{name} cannot be {value!r} in verl",
                    why="verl hands over the teacher's top-K alone, without the token that was sampled",
                    instead=", ".join(known),
                )
        for name in ("topk", "signal_top_k", "chunked_topk_chunk_size"):
            _whole(name, getattr(self, name))
        for name in ("support_k", "vocab_size"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name))
        for name in ("signal_top_k", "support_k"):
            if (getattr(self, name) or 0) > (self.topk or 0):
                raise UsageError(
                    f"{name} is more than the teacher sends",
                    got=f"{name}={getattr(self, name)}, topk={self.topk}",
                    instead=f"topk: {getattr(self, name)} or more (64 resolves most of a distribution)",
                )
        if self.use_policy_gradient:
            raise UsageError(
                "the gated loss is not a reward",
                got="use_policy_gradient: true",
                why="a policy gradient moves the sampled token alone, and no gradient would reach the distribution or "
                "the gate",
                instead="use_policy_gradient: false",
            )
        if self.log_prob_min_clamp is not None:
            raise UsageError(
                "log_prob_min_clamp has no place in this loss",
                got=self.log_prob_min_clamp,
                why="clamped probabilities no longer add up to 1, and the KL of them is none",
                instead="null: the bucket keeps every term finite",
            )
        objective = Gated(Gate.parse(self.gate))  # raises unless it is a gate of known signals
        if "sampled" in objective.needs:
            raise UsageError(
                "this gate has a signal of the sampled token",
                got=f"gate {self.gate}",
                why="verl hands over the teacher's top-K alone, without its probability of the token that was sampled",
                instead="a gate without trust, drift and advantage",
            )


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is a whole number of at least 1", got=repr(value))
