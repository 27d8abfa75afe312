"""A teacher that follows its student: the exponential moving average of its weights."""

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

    It has no cache: its weights are others at every step, and no later run would find its scores. Of a student with
    adapters the two factors of each adapter are averaged, as any other trained weights.

    Args:
        model: Loaded as the student is, in float32, with the weights that it starts from and its parameters that are
            trained; it becomes the teacher's own.
        spec: What is asked.
        decay: Its share of itself in an update.
        dtype: The precision in which it computes; averages are float32.
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
        """Take in the student's trained weights after an update."""
        if weights.keys() != self._averages.keys():
            raise RunError("the teacher self-ema has other weights than the student", got=len(weights))
        with torch.no_grad():
            for name, average in self._averages.items():
                average.lerp_(weights[name].detach().to(average.device, average.dtype), 1 - self._decay)
        self._publish()

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {f"average/{name}": average for name, average in self._averages.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Resume from what `tensors` gave."""
        for name, average in self._averages.items():
            average.copy_(tensors[f"average/{name}"])
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Compute with the averages, and make again what was made of the weights before."""
        for name, parameter in self._own.items():
            parameter.copy_(self._averages[name])
        self.prefix_cache = self.body.prefix_cache(self.spec.prefix)
        if self._form.head is not None:
            self._form = replace(self._form, head=self.model.head.to(self._form.device))
