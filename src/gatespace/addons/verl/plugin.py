"""Registers the loss with verl: one registry entry, and one wrapper around its top-K step.

verl computes a top-K loss in two places. While the logits exist, `compute_topk_loss` turns them into numbers per token;
later the registered function turns these into losses and metrics. The registry covers only the second, so the first is
wrapped: for `gated_kl_topk` ours is called, for every other mode verl's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from gatespace.addons.verl import seam
from gatespace.addons.verl.losses import TELEMETRY, prompt_entropy, token_losses
from gatespace.addons.verl.packed import Packed
from gatespace.addons.verl.settings import LOSS_MODE, GatedLossConfig
from gatespace.errors import RunError, UsageError
from gatespace.gating.coefficients import SATURATION, Gate
from gatespace.gating.tokens import TeacherTopK

STRATEGIES = ("fsdp", "fsdp2", "veomni")
"""Strategies whose workers have full rows of logits."""
COLUMN = "gate_{}"
"""Model-output name of a per-token number, on its way to the metrics."""
METRIC = "distillation/gate/{}"

_PLACELESS = (
    "student_entropy",
    "log_ratio",
    "overlap",
    "overlap_mass",
)  # extra signals that depend only on the token itself


def install() -> None:
    """Register the loss with verl in this process; idempotent."""
    if LOSS_MODE in getattr(seam.losses, "DISTILLATION_LOSS_REGISTRY", ()):
        return
    seam.check()
    seam.losses.compute_topk_loss = _around(seam.losses.compute_topk_loss)
    settings = seam.losses.DistillationLossSettings(names=[LOSS_MODE], use_topk=True)
    seam.losses.register_distillation_loss(settings)(gated_kl_topk)


# ---------------------------------------------------------------------- with logits


def _around(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def compute_topk_loss(
        config: Any, distillation_config: Any, data: Any, student_logits: Tensor, data_format: str
    ) -> Any:
        if distillation_config.distillation_loss.loss_mode != LOSS_MODE:
            return original(config, distillation_config, data, student_logits, data_format)
        return topk_step(config, distillation_config, data, student_logits)

    return compute_topk_loss


def topk_step(config: Any, distillation_config: Any, data: Any, student_logits: Tensor) -> dict[str, Tensor]:
    """Compute numbers per position of the packed batch, (1, P) each, from the logits (1, P, V) of this rank.

    Losses carry gradient. Positions that predict no unmasked response token are 0 and are ignored.
    """
    loss_config = _loss_config(distillation_config)
    _check_strategy(config.strategy)
    settings = loss_config.for_student(student_logits.shape[-1])
    if student_logits.dim() != 3 or student_logits.shape[0] != 1:
        raise RunError(
            "the gated loss works on packed logits (1, positions, vocabulary)", got=tuple(student_logits.shape)
        )
    packed = Packed.of(data)
    ids, log_probs = _teacher(data, packed, student_logits.device)
    start, stop = _slice(packed.positions, student_logits.shape[1], settings.objective.further_signals())

    index, sample, first = (part.to(student_logits.device) for part in (packed.index, packed.sample, packed.first))
    u = prompt_entropy(TeacherTopK(ids[index[first]], log_probs[index[first]]), settings)
    here = ((index >= start) & (index < stop)).nonzero().squeeze(-1)
    index, sample, u = index[here], sample[here], u[here]
    teacher = TeacherTopK(ids[index], log_probs[index])
    losses, columns = token_losses(
        student_logits[0],
        index - start,
        teacher,
        sample=sample,
        u=u,
        temperature=_temperature(data, student_logits.device)[sample],
        settings=settings,
    )
    mass = teacher.log_probs.float().exp().sum(-1)
    columns = {COLUMN.format(name): values for name, values in columns.items()}
    columns |= {"student_mass": 1 - columns[COLUMN.format("tail_mass")], "teacher_mass": mass}

    def placed(values: Tensor) -> Tensor:
        return values.new_zeros(student_logits.shape[1]).index_put((index - start,), values)[None]

    return {"distillation_losses": placed(losses), **{name: placed(values) for name, values in columns.items()}}


def _loss_config(distillation_config: Any) -> GatedLossConfig:
    found = distillation_config.distillation_loss
    if not isinstance(found, GatedLossConfig):
        raise UsageError(
            f"the loss mode {LOSS_MODE} needs a gate, and this configuration has no place for one",
            got=f"distillation.distillation_loss of type {type(found).__name__}",
            instead="distillation.distillation_loss._target_=gatespace.integrations.verl.GatedLossConfig",
        )
    return found


def _check_strategy(strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise UsageError(
            f"the gated loss cannot be computed under the strategy {strategy!r}",
            why="it needs whole rows of logits, and there each worker has a part of the vocabulary"
            if strategy == "megatron"
            else "verl gives no logits to a distillation loss there",
            instead="actor_rollout_ref.actor.strategy: " + ", ".join(STRATEGIES),
        )


def _teacher(data: Any, packed: Packed, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the teacher's ids and log-probabilities, (P, K) each."""
    ids, log_probs = data["teacher_ids"], data["teacher_logprobs"]
    if not (ids.is_nested and log_probs.is_nested):
        raise RunError("the teacher's numbers are not nested tensors", why="verl packs them like the input ids")
    ids, log_probs = ids.values().to(device), log_probs.values().to(device)
    if ids.shape != log_probs.shape or ids.shape[:1] != (packed.positions,):
        raise RunError(
            "the teacher's numbers are not of this micro-batch",
            got=f"ids {tuple(ids.shape)}, log-probabilities {tuple(log_probs.shape)}, positions {packed.positions}",
        )
    return ids, log_probs


def _slice(positions: int, rows: int, further: tuple[str, ...]) -> tuple[int, int]:
    """Return the range of positions whose logits this rank has. Beyond `positions` is padding at the end."""
    size = seam.ulysses.get_ulysses_sequence_parallel_world_size()
    start = seam.ulysses.get_ulysses_sequence_parallel_rank() * rows if size > 1 else 0
    if -(-positions // size) != rows:
        raise RunError(
            "the student's logits are not of this micro-batch",
            got=f"{rows} rows on each of {size} ranks for {positions} positions",
        )
    placed = [name for name in further if name not in _PLACELESS]
    if size > 1 and placed:
        raise UsageError(
            f"the signal {placed[0]!r} cannot be computed under sequence parallelism",
            why="it may depend on other tokens of the response, which are on other workers",
            instead="ulysses_sequence_parallel_size: 1, or a gate of h, u and gap",
        )
    return start, start + rows


def _temperature(data: Any, device: torch.device) -> Tensor:
    """(B,) temperature by which the student's logits were divided."""
    value = torch.as_tensor(data["temperature"], dtype=torch.float32, device=device)
    return value.reshape(-1).clamp(min=1e-8).expand(data["input_ids"].shape[0])  # the floor is verl's own


# ---------------------------------------------------------------------- aggregation


def gated_kl_topk(
    config: Any, distillation_config: Any, model_output: Mapping[str, Tensor], data: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Return losses (B, longest response) for verl to aggregate, and metrics of the micro-batch.

    Means are over the tokens of the whole mini-batch: each micro-batch contributes its sum divided by the global count,
    and verl adds these up, so that means do not depend on how the batch was split.
    """
    loss_config = _loss_config(distillation_config)
    _check_strategy(config.strategy)
    if COLUMN.format("lam") not in model_output:
        raise UsageError(
            "there are no logits to compute the gated loss from",
            got="model outputs " + (", ".join(sorted(model_output)) or "of no kind"),
            why="fused kernels go from hidden states to log-probabilities, past the distillation loss",
            instead="actor_rollout_ref.model.use_fused_kernels: false",
        )
    losses = seam.no_padding_2_padding(model_output["distillation_losses"], data)
    mask = data["response_mask"].bool()
    mask = mask.to_padded_tensor(False) if mask.is_nested else mask
    further = tuple(Gate.parse(loss_config.gate).extra)
    columns = {
        name: seam.no_padding_2_padding(model_output[COLUMN.format(name)], data)[mask]
        for name in (*TELEMETRY, *further)
    }
    masses = {
        name: seam.no_padding_2_padding(model_output[name], data)[mask] for name in ("student_mass", "teacher_mass")
    }
    return losses, _metrics(columns, masses, share=data["dp_size"] / data["batch_num_tokens"])


def _metrics(columns: Mapping[str, Tensor], masses: Mapping[str, Tensor], *, share: float) -> dict[str, Any]:
    def mean(values: Tensor) -> Any:
        return seam.Metric(seam.AggregationType.SUM, values.double().sum() * share)

    lam = columns["lam"].double()  # Σλ² - (Σλ)²/N loses the digits of a small spread
    saturated = torch.minimum(lam, 1 - lam) <= SATURATION
    means = {"lam_mean": lam, "lam_square": lam.square(), "lam_saturated": saturated}
    means |= {name: values for name, values in columns.items() if name != "lam"}
    found = {METRIC.format(name): mean(values) for name, values in means.items()}
    found |= {f"distillation/{name}": mean(values) for name, values in masses.items()}
    spread = {METRIC.format("lam"): lam, **{f"distillation/{name}": values for name, values in masses.items()}}
    found |= {f"{name}_min": seam.Metric(seam.AggregationType.MIN, values.min()) for name, values in spread.items()}
    found |= {f"{name}_max": seam.Metric(seam.AggregationType.MAX, values.max()) for name, values in spread.items()}
    return found
