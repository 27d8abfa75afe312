"""A teacher that is the exponential moving average of its student's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gatespace.errors import RunError
from gatespace.models.load import Model
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import ScoreSpec


class AverageTeacher(LocalTeacher):
    """Scores with the average of a student's weights: after each update, decay · itself + (1 - decay) · the student.

    It has no cache: its weights change at every step, and no later run would find its scores. For a student with
    adapters, the two factors of each adapter are averaged like any other trained weights.

    Args:
        model: Loaded like the student, in float32, with its initial weights and trainable parameters; it becomes the
            teacher's own.
        spec: The requested scores.
        decay: Weight of the old average in an update.
        dtype: Compute precision; averages are float32.
        packed: As in `LocalTeacher`.
        device: As in `LocalTeacher`.
    """

    def __init__(
        self,
        model: Model,
        spec: ScoreSpec,
        *,
        decay: float,
        dtype: torch.dtype,
        packed: bool | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        self._own = {name: p for name, p in model.network.named_parameters() if p.requires_grad}
        self._averages = {name: p.detach() for name, p in self._own.items()}
        for parameter in model.network.requires_grad_(False).parameters():
            if parameter.is_floating_point():  # quantised layers stay as they are
                parameter.data = parameter.data.to(dtype)
        super().__init__(model, spec, packed=packed, device=device)
        self._decay = decay

    def follow(self, weights: Mapping[str, Tensor]) -> None:
        """Update the averages from the student's weights."""
        if weights.keys() != self._averages.keys():
            raise RunError("the teacher self-ema has other weights than the student", got=len(weights))
        with torch.no_grad():
            for name, average in self._averages.items():
                average.lerp_(weights[name].detach().to(average.device, average.dtype), 1 - self._decay)
        self._publish()

    def tensors(self) -> dict[str, Tensor]:
        """Checkpoint tensors."""
        return {f"average/{name}": average for name, average in self._averages.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        for name, average in self._averages.items():
            average.copy_(tensors[f"average/{name}"])
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Load the averages into the network, and refresh what depends on its weights."""
        for name, parameter in self._own.items():
            parameter.copy_(self._averages[name])
        self.prefix_cache = self.body.prefix_cache(self.spec.prefix)
        if self._form.head is not None:
            self._form = replace(self._form, head=self.model.head.to(self._form.device))
