"""Expected rollouts in training: the likeliest part of every prompt's tree of responses, instead of samples."""

from __future__ import annotations

from dataclasses import dataclass

from gatespace.models.body import Forward
from gatespace.rollout import Rollout, expand
from gatespace.seeding import generator
from gatespace.training.rollouts import Ahead, MicroBatch, OnPolicy


@dataclass
class Expected(OnPolicy):
    """Paths of the student's response trees; a token's weight is the probability of its prefix."""

    def _respond(self, step: int, batch: MicroBatch, forward: Forward) -> None:
        """Replace each prompt's row by the paths of its tree."""
        settings, expected = self.settings, self.settings.expected
        assert expected is not None
        draws = [generator(self.seed, "rollout", step, place).random for place in batch.places]
        batch.trees = trees = expand(
            self.student,
            forward,
            vocab_size=self.vocab_size,
            max_new_tokens=settings.max_new_tokens,
            stop=self._stop(self.student),
            mass=expected.mass,
            max_nodes=expected.max_nodes,
            draws=draws if expected.rest == "sample" else (),
        )
        paths = [(prompt, path) for prompt, tree in enumerate(trees) for path in range(len(tree.responses))]
        batch.rows = [batch.rows[prompt] for prompt, _ in paths]
        # A tree has at most as many paths as nodes, plus a sampled one.
        batch.places = [batch.places[prompt] * (expected.max_nodes + 1) + path for prompt, path in paths]
        batch.parents, batch.samples = [prompt for prompt, _ in paths], list(range(len(paths)))
        batch.sources = ["student"] * len(paths)
        batch.weights = [trees[prompt].weights[path] for prompt, path in paths]
        batch.rollout = Rollout(
            [trees[prompt].responses[path] for prompt, path in paths],
            [[]] * len(paths),
            [trees[prompt].ended[path] for prompt, path in paths],
        )

    def _merge(self, batch: MicroBatch) -> None:
        """Merge nothing: paths are distinct. If prompts are not shared, every path has its own pass."""
        if not self.share:
            batch.parents, batch.forward = list(range(len(batch.rows))), None


@dataclass
class ExpectedAhead(Expected, Ahead):
    """`Expected` before the update begins, for a sharded student."""
