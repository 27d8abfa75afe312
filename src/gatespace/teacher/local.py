"""A teacher in this process.

A score must not depend on which batch, worker or moment computed it, or no study could be repeated: in half precision
the same row differs visibly from one batch shape to another. So rows that are not in the cache are scored in canonical
shapes. Linear layers see one of a few numbers of tokens, made up by padding, and in attention a row's shape is a
function of its prompt alone. At such shapes a row's bits depend neither on the other rows of the batch nor on its size;
this is probed once per model. Where the size matters, all passes have the largest; where the model is not
batch-invariant at all, every row has a forward pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gatespace.errors import UsageError
from gatespace.gating.projection import Projection, logits_buffer
from gatespace.gating.vocabulary import top_entries
from gatespace.models.body import Body, body_of
from gatespace.models.load import Model
from gatespace.models.packed import PackedBody
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.scores import Form, RowScores, Scores, ScoreSpec, TeacherStats, check_questions

_VERSION = 3
"""Counts up when the same teacher would give other bits than before."""
_SIZES = (32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Tokens of a forward pass: the smallest that holds what is left to compute, so that few misses of a cache cost little.
"""
PASS = _SIZES[-1]
"""Passes are filled up to this size; longer rows take the next multiple of it."""
_STEP = 16
"""Prompts attend at multiples of this length."""
_PADDING = 64
"""Padding is cut into rows of this length."""
_batch_invariant: dict[tuple[object, ...], tuple[int, ...]] = {}
"""The results of the probe, by all that it depends on: many runs of a process have one teacher."""


class LocalTeacher:
    """Scores with a model in this process.

    Args:
        model: The teacher; its weights must not change.
        spec: What is asked. The prefix' keys and values are computed once.
        cache: Scores computed before.
        packed: As in `body_of`.
        device: Where scores go, and with them a copy of the head; None: they stay where the teacher is.
    """

    def __init__(
        self,
        model: Model,
        spec: ScoreSpec,
        *,
        cache: ScoreCache | None = None,
        packed: bool | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        if spec.payload not in ("hidden", "top_k"):
            raise UsageError("a payload is 'hidden' or 'top_k'", got=spec.payload)
        self.model, self.spec = model, spec
        self.vocab_size = spec.vocab_size
        self.stats = TeacherStats()
        self.body: Body = body_of(model, packed=packed)
        self.fingerprint = model.fingerprint()
        self._cache = cache
        self._k = min(spec.k, spec.vocab_size)
        self._dtype = model.head.weight.dtype
        self._one_by_one = False
        self._sizes: tuple[int, ...] = (PASS,)
        probe = (self.fingerprint, self._describe(), *spec.prefix, model.vocab_size, model.pad_id)
        probe = (*probe, str(model.device), torch.get_num_threads())
        with torch.no_grad():
            self.prefix_cache = self.body.prefix_cache(spec.prefix)
            if probe not in _batch_invariant:
                _batch_invariant[probe] = self._invariant_sizes()
        self._sizes = _batch_invariant[probe] or (PASS,)
        self._one_by_one = not _batch_invariant[probe]
        self.stats = TeacherStats()
        self.numerics = self._describe()
        goal = model.device if device is None else torch.device(device)
        self._form = Form(
            self.fingerprint,
            self.numerics,
            spec.payload,
            self._k,
            self._dtype if spec.payload == "hidden" else torch.float32,
            goal,
            model.head.to(goal) if spec.payload == "hidden" else None,
        )

    # ------------------------------------------------------------------ scores

    @torch.no_grad()
    def score(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Scores:
        """The scores of all tokens of `responses`, each the continuation of its prompt (after the shared prefix)."""
        check_questions(prompts, responses, self.spec.max_new_tokens)
        self.stats.rows += len(responses)
        self.stats.tokens += sum(map(len, responses))
        rows = RowScores(self._form, self._cache, self.spec.prefix, prompts, responses)
        missing = rows.missing
        rows.fill(missing, self._compute([prompts[i] for i in missing], [responses[i] for i in missing]))
        return rows.scores()

    def ask(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Callable[[], Scores]:
        """The scores when they are needed: in one process nothing is gained by computing them earlier."""
        return lambda: self.score(prompts, responses)

    def about(self) -> dict[str, str]:
        """Nothing: a run's configuration and identity say it all."""
        return {}

    def close(self) -> None:
        """Nothing is under way between two calls."""

    # ------------------------------------------------------------------ forward passes of canonical shapes

    def _compute(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> list[Tensor]:
        rows = [[*prompt, *response[:-1]] for prompt, response in zip(prompts, responses, strict=True)]
        result: list[Tensor | None] = [None] * len(rows)
        for size, members in self._batches([len(prompt) for prompt in prompts], [len(row) for row in rows]):
            hidden = self._forward([rows[i] for i in members], [len(prompts[i]) for i in members], size)
            for i, states in zip(members, hidden, strict=True):
                states = states[len(prompts[i]) - 1 :]
                result[i] = states if self.spec.payload == "hidden" else self._top_k(states, responses[i])
        return [entry for entry in result if entry is not None]

    def _batches(self, prompts: Sequence[int], rows: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Which rows go through the network together: (tokens of the forward pass, rows).

        Args:
            prompts: The prompts' lengths.
            rows: The rows' lengths. The longest comes first, and each goes where it fits first.
        """
        batches: list[tuple[int, list[int]]] = []
        room: list[int] = []
        for row in sorted(range(len(rows)), key=lambda i: (-rows[i], i)):
            size = -(-(prompts[row] + self.spec.max_new_tokens - 1) // PASS) * PASS
            for place, (other, members) in enumerate(batches):
                if not self._one_by_one and other == size and room[place] >= rows[row]:
                    members.append(row)
                    room[place] -= rows[row]
                    break
            else:
                batches.append((size, [row]))
                room.append(size - rows[row])
        return [
            (size if size > PASS else next(some for some in self._sizes if some >= size - left), members)
            for (size, members), left in zip(batches, room, strict=True)
        ]

    def _forward(self, rows: Sequence[Sequence[int]], prompts: Sequence[int], size: int) -> list[Tensor]:
        lengths = [len(row) for row in rows]
        longest, pad_id = self.spec.max_new_tokens, self.model.pad_id
        if self._one_by_one:
            # The padding after a row must not depend on its response either: the row is padded to the longest one.
            rows = [
                [*row, *[pad_id] * (prompt + longest - 1 - len(row))] for row, prompt in zip(rows, prompts, strict=True)
            ]
        left = size - sum(map(len, rows)) if isinstance(self.body, PackedBody) else 0
        padding = [[pad_id] * min(_PADDING, left - start) for start in range(0, left, _PADDING)]
        shapes = [-(-prompt // _STEP) * _STEP + longest - 1 for prompt in prompts]
        shapes += [len(row) for row in padding]
        forward = self.body.forward([*rows, *padding], prefix=self.prefix_cache, shape=shapes.__getitem__)
        self.stats.passes += 1
        self.stats.computed_tokens += sum(lengths)
        states = forward.hidden.to(self.model.device).split([len(row) for row in (*rows, *padding)])
        return [part[:length] for part, length in zip(states, lengths, strict=False)]

    def _top_k(self, hidden: Tensor, response: Sequence[int]) -> Tensor:
        """(positions, 2k+1) ids and log-probabilities of the top k, log-probability of the token itself."""
        size, count, longest = self.vocab_size, hidden.shape[0], self.spec.max_new_tokens
        # The product with the head has a canonical shape too.
        padded = torch.cat([hidden, hidden.new_zeros(longest - count, hidden.shape[1])])
        projection = Projection(padded, self.model.head, size)
        out = logits_buffer(padded, longest, size, projection.dtype)
        logits = projection.into(out, slice(0, longest), 0, size)[:count].contiguous()
        log_probs = torch.log_softmax(logits, -1).float()
        values, ids = top_entries(log_probs, self._k)
        sampled = log_probs.gather(1, torch.tensor(response, device=ids.device)[:, None])
        return torch.cat([ids.float(), values, sampled], 1)  # float32 holds every id of a vocabulary exactly

    # ------------------------------------------------------------------ what the bits depend on

    def _invariant_sizes(self) -> tuple[int, ...]:
        """The sizes of passes in which a row's bits are the same: alone, beside other rows, in any place of the batch.

        All of them, the largest only, or none.
        """
        if not isinstance(self.body, PackedBody):
            return ()
        every = list(range(6))
        alone = [(PASS, [0]), (PASS, [3])]
        # Full ones, with every row in many places.
        full = [
            (size, ([*every[turn % 6 :], *every[: turn % 6]] * 4)[:: -1 if turn % 2 else 1])
            for turn, size in enumerate(reversed(_SIZES))
        ]
        if self._same_bits([*alone, *full]):
            return _SIZES
        fixed = [*alone, (PASS, every), (PASS, every[::-1]), (PASS, [2, 0, 5, 3])]
        return (PASS,) if self._same_bits(fixed) else ()

    def _same_bits(self, passes: Sequence[tuple[int, list[int]]]) -> bool:
        """Whether rows have the same bits in all passes: (size, rows in order, the last one cut off where it ends)."""
        rows = [[(13 * i + 7 * row + 2) % self.model.vocab_size for i in range(5 + 9 * row)] for row in range(6)]
        seen: dict[int, Tensor] = {}
        for size, order in passes:
            members: list[list[int]] = []
            for row in order:
                if left := size - sum(map(len, members)):
                    members.append(rows[row][:left])
            results = self._forward(members, [len(rows[row]) for row in order[: len(members)]], size)
            for row, hidden in zip(order, results, strict=False):
                known = seen.setdefault(row, hidden)[: len(hidden)]
                if not torch.equal(known, hidden[: len(known)]):
                    return False
        return True

    def _describe(self) -> str:
        """All that the bits of a score depend on beside weights and tokens."""
        device, spec = self.model.device, self.spec
        place = (
            f"cpu-{torch.backends.cpu.get_cpu_capability()}"
            if device.type == "cpu"
            else f"{device.type}-{torch.cuda.get_device_name(device) if device.type == 'cuda' else ''}"
        )
        return "/".join(
            (
                f"v{_VERSION}",
                spec.payload if spec.payload == "hidden" else f"top{self._k}-of-{self.vocab_size}",
                f"prefix{len(spec.prefix)}",
                f"response{spec.max_new_tokens}",
                f"pass{'-alone' if self._one_by_one else ''}{PASS}",
                type(self.body).__name__,
                str(self._dtype),
                f"torch-{torch.__version__}",
                place,
            )
        )
