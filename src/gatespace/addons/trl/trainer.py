"""TRL's trainer with the loss replaced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gatespace.addons.trl.seam import ATTRIBUTES, INPUTS, DistillationTrainer, changed, check_seam
from gatespace.addons.trl.settings import GatedDistillationConfig
from gatespace.addons.trl.telemetry import STUDENT_ENTROPY, Telemetry, Watched
from gatespace.errors import UsageError
from gatespace.gating.fused import fused_distillation_loss
from gatespace.gating.inputs import LossInputs
from gatespace.gating.projection import Head
from gatespace.models.load import network_head
from gatespace.seeding import generator, permutation


class GatedDistillationTrainer(DistillationTrainer):  # type: ignore[misc]  # as for the settings
    """`trl.DistillationTrainer` with a gatespace objective in place of its divergence.

    Takes TRL's arguments. `args` is a `GatedDistillationConfig`, and the teacher must be in this process: its hidden
    states and head give the full vocabulary, without materializing a (tokens, vocabulary) tensor. Logs add gate
    statistics to TRL's own: `gate/lam_mean`, `gate/lam_sd`, `gate/h`, `gate/forward_kl` and so on, with all tokens of
    the step weighted equally.
    """

    _tag_names: ClassVar[list[str]] = [*DistillationTrainer._tag_names, "gatespace"]
    _paper: ClassVar[dict[str, str]] = {}  # TRL's paper is about another method

    def __init__(
        self,
        model: Any,
        teacher_model: Any = None,
        args: GatedDistillationConfig | None = None,
        *more: Any,
        **options: Any,
    ) -> None:
        order = type(self).__mro__
        self._further_inputs = check_seam(order[order.index(GatedDistillationTrainer) + 1])
        if args is None:
            name = model if isinstance(model, str) else model.config.name_or_path
            args = GatedDistillationConfig(f"{name.rstrip('/').rpartition('/')[2] or 'model'}-gated")
        if not isinstance(args, GatedDistillationConfig):
            raise UsageError(
                "args must be a GatedDistillationConfig", got=type(args).__name__, why="it names the objective"
            )
        if teacher_model is None:
            raise UsageError(
                "a teacher_model is needed: a model, or its name or folder",
                why="the loss is made from the teacher's hidden states, in this process",
                instead="teacher_model=args.teacher_model_name_or_path where the command line names it",
            )
        objective = args.objective()
        self._objective = Watched(objective)
        self._telemetry = Telemetry(objective)
        self._seen: Tensor | None = None
        point = f"gate {args.gate}" if args.gate is not None else args.method
        self._name = f"gated on-policy distillation (gatespace, {point})"
        super().__init__(model, teacher_model, args, *more, **options)
        missing = [name for name in ATTRIBUTES if not hasattr(self, name)]
        if missing:
            raise changed(f"{DistillationTrainer.__name__} has no attribute {', '.join(missing)}")

    def gate_summary(self) -> dict[str, float | None]:
        """Return λ statistics over all tokens trained on: E[λ] for a mean-matched static gate, its spread and more.

        `lam_rkl_mean` weights each token by its reverse KL: the constant λ that would have given reverse KL the same
        total. After a resume, counting starts at the resumed step.
        """
        return self._telemetry.summary()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Run TRL's `compute_loss`, which calls `_compute_loss`, then gather telemetry over processes.

        Gathering comes last because a collective inside the forward of a wrapped model may deadlock.
        """
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._seen is None:
            raise changed("its compute_loss did not call the gated loss")
        mode = "train" if self.model.training else "eval"
        self._telemetry.add(self.accelerator.gather(self._seen[None]), self._metrics[mode], mode)
        self._seen = None
        return result

    def _compute_loss(
        self, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (loss, Σ student entropy, N) of a micro-batch; called inside the forward of the wrapped student."""
        missing = [name for name in INPUTS if name not in inputs]
        if missing:
            raise changed(f"a batch has no {', '.join(missing)}", got=", ".join(inputs))
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)  # tool outputs are not the student's tokens
        question = (ids, attention, inputs["completion_ids"].shape[1])
        further = {name: inputs[name] for name in self._further_inputs if name in inputs}

        student_hidden = self._get_last_hidden_state(unwrapped_student, *question, **further)
        # Through the teacher's own wrapper, which gathers sharded weights.
        self.teacher_model.eval()
        teacher = self.accelerator.unwrap_model(self.teacher_model)
        with torch.no_grad():
            teacher_hidden = self._forward_redirection(
                self.teacher_model, teacher, self._get_last_hidden_state, teacher, *question, **further
            )
        student_head = _head(unwrapped_student, student_hidden.dtype)
        teacher_head = _head(teacher, teacher_hidden.dtype)
        device = student_head.weight.device
        if teacher_head.weight.device != device:
            raise UsageError(
                "both heads must be on one device",
                got=f"student {device}, teacher {teacher_head.weight.device}",
                instead="place both on the same device in their device_map",
            )
        mask = mask.to(device)
        total = num_items_in_batch.to(device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
        out = fused_distillation_loss(
            student_hidden.to(device),
            student_head,
            teacher_hidden.to(device),
            teacher_head,
            objective=self._objective,
            inputs=LossInputs(
                mask=mask,
                top_k=self.args.signal_top_k,
                temperature=self.temperature if self.args.loss_temperature is None else self.args.loss_temperature,
                entropy=self.args.entropy,
                sampled=inputs["completion_ids"],
                total_tokens=total,
                lam_order=self._order(int(mask.sum())) if self.args.shuffle else None,
                noise=self._noise(mask) if "selection" in self._objective.inner.needs else None,
            ),
            chunk_mb=self.args.chunk_mb,
        )
        self._seen = self._telemetry.row(out, mask)
        return out.loss, out.signals[STUDENT_ENTROPY].sum(), mask.sum()

    def _order(self, tokens: int) -> Tensor:
        """(N,) index of the token whose λ each token gets; reproducible on resume."""
        return torch.tensor(permutation(tokens, self.args.seed, "trl", "shuffle", *self._place()))

    def _noise(self, mask: Tensor) -> Tensor:
        """(B, T) random numbers for an objective that selects tokens; reproducible on resume."""
        draw = generator(self.args.seed, "trl", "select", *self._place()).random
        return torch.tensor([draw() for _ in range(mask.numel())], dtype=torch.float64).view(mask.shape)

    def _place(self) -> tuple[int, int, int]:
        """Step, micro-batch and rank, which seed the random numbers."""
        part = self._step % self.args.gradient_accumulation_steps
        return self.state.global_step, part, self.accelerator.process_index


def _head(network: Any, dtype: torch.dtype) -> Head:
    """Return the output head of a network, gathered if FSDP2 has sharded it."""
    head = network_head(network)
    if not hasattr(head.weight, "full_tensor"):
        return head
    # Gather once: the loss uses the head in many slices, and each would gather it again.
    return replace(head, weight=_whole(head.weight).to(dtype), bias=None if head.bias is None else _whole(head.bias))


def _whole(parameter: Any) -> Tensor:
    """Gather a sharded parameter. Its gradient is averaged over processes, as FSDP does for the others."""
    from torch.distributed.tensor import Partial

    # A plain full_tensor() treats one process's gradient as that of all.
    whole: Tensor = parameter.full_tensor(grad_placements=[Partial("avg")] * parameter.device_mesh.ndim)
    return whole
