"""In which order students write, teachers score and students learn: at once, or one step off.

One step off (`rollout.staleness: 1`), step n begins by letting the student write the responses of step n+1 and asking
the teacher about them; then it updates on the responses of step n, which the student wrote before update n-1. So the
teacher works while the student updates. What was written ahead is part of a checkpoint: the student that wrote it is
gone by then. Its scores are not, they are asked for again and are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gatespace.errors import RunError
from gatespace.rollout import Rollout
from gatespace.training.batches import Batches
from gatespace.training.clock import Clock
from gatespace.training.optimizer import Update
from gatespace.training.step import Ahead, Distillation, Scored

_STATE = "ahead"


class Pipeline:
    """The steps of a distillation in their order.

    Args:
        distillation: What a step does.
        batches: The rows of each step.
        steps: How many steps there are; nothing is written ahead for one that will not come.
    """

    def __init__(self, distillation: Distillation, batches: Batches, *, steps: int) -> None:
        self._distillation, self._batches, self._steps = distillation, batches, steps
        self._ahead: Ahead | None = None

    def step(self, number: int, clock: Clock, watch: Callable[[Scored], None]) -> Update:
        """Do step `number`, counted from 0. If it fails, `state` is what it was before."""
        distil, rows = self._distillation, self._batches.at
        if distil.rollout.staleness == 0:
            return distil.step(number, rows(number), clock, watch)
        if self._ahead is None or self._ahead.number != number:
            if number > 0:
                raise RunError(f"the responses of step {number + 1} were not written by the step before")
            self._ahead = distil.write(number, rows(number), clock)
        following = distil.write(number + 1, rows(number + 1), clock) if number + 1 < self._steps else None
        update = distil.step(number, rows(number), clock, watch, ahead=self._ahead)
        self._ahead = following
        return update

    def state(self) -> dict[str, Any]:
        """What was written ahead by all processes, for a checkpoint; nothing where nothing is."""
        if self._ahead is None:
            return {}
        rollouts = [part.rollout for part in self._ahead.parts]
        own = {
            "responses": [ids for rollout in rollouts for ids in rollout.responses],
            "log_probs": [values for rollout in rollouts for values in rollout.log_probs],
            "ended": [ended for rollout in rollouts for ended in rollout.ended],
            "sources": [source for part in self._ahead.parts for source in part.sources],
        }
        found = self._distillation.ranks.gather(own)
        whole = {name: [value for one in found for value in one[name]] for name in own}
        return {_STATE: {"number": self._ahead.number, **whole}}

    def restore(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Go on from what `state` gave; the rest of `state` is returned."""
        rest = {name: value for name, value in state.items() if name != _STATE}
        self._ahead = None
        if _STATE in state:
            saved = state[_STATE]
            parts = self._distillation.parts(self._batches.at(saved["number"]))
            for part in parts:
                span = slice(part.places[0], part.places[-1] + 1)
                part.rollout = Rollout(saved["responses"][span], saved["log_probs"][span], saved["ended"][span])
                part.sources = saved["sources"][span]
            ask = self._distillation.teacher.ask
            self._ahead = Ahead(saved["number"], parts, [ask(part.prompts, part.rollout.responses) for part in parts])
        return rest
