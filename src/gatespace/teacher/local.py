"""A teacher in this process.

A score must not depend on which batch, worker or moment computed it, or no study could be reproduced: in half precision
the same row differs visibly between batch shapes. So rows that are not in the cache are scored in canonical shapes.
Linear layers see one of a few token counts, reached by padding. A prompt attends at a length that depends on it alone;
each response attends after it, at the length of the longest possible one. At such shapes the bits of a token depend on
the tokens before it in its row, not on other rows or their number; this is probed once per model. Pass sizes at which
the bits differ are not used; if the model is not batch-invariant at all, every row has its own forward pass.

A prompt is computed once, however many responses it has, and so are their common prefixes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gatespace.errors import UsageError
from gatespace.gating.projection import Projection, logits_buffer
from gatespace.gating.vocabulary import top_entries
from gatespace.models.body import Body, KVCache, body_of
from gatespace.models.load import Model
from gatespace.models.packed import PackedBody
from gatespace.models.tree import Parents, tree_of
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.scores import Form, RowScores, Scores, ScoreSpec, TeacherStats, check_questions

_VERSION = 4
"""Incremented when the same teacher would give different bits."""
_SIZES = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Tokens of a forward pass: the smallest size that holds what is left to compute, so that few cache misses cost little.
"""
PASS = _SIZES[-1]
"""Passes are filled up to this size; longer rows take the next multiple of it."""
_STEP = 16
"""Prompts attend at multiples of this length."""
_PADDING = 64
"""Padding is cut into rows of this length."""
_batch_invariant: dict[tuple[object, ...], tuple[int, ...]] = {}
"""Results of the probe, by all that they depend on: runs of a process often share a teacher."""


_Ids = tuple[int, ...]


@dataclass
class _Pass:
    """A forward pass: prompts, and responses to prompts of this or an earlier pass."""

    size: int
    """Tokens, incl. padding."""
    free: int
    """Tokens that are not taken yet."""
    prompts: list[_Ids] = field(default_factory=list)
    responses: list[tuple[_Ids, list[_Ids]]] = field(default_factory=list)
    """Responses by prompt, without their last tokens."""


class LocalTeacher:
    """Scores with a model in this process.

    Args:
        model: The teacher; its weights must not change.
        spec: The requested scores. The KV cache of the prefix is computed once.
        cache: Scores computed before.
        packed: As in `body_of`.
        device: Where scores and a copy of the head go; None: they stay with the teacher.
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
        """Compute scores only when needed: in one process, nothing is gained by computing them earlier."""
        return lambda: self.score(prompts, responses)

    def about(self) -> dict[str, str]:
        """Empty: a run's configuration and identity have it all."""
        return {}

    def close(self) -> None:
        """No-op: nothing runs between calls."""

    # ------------------------------------------------------------------ forward passes of canonical shapes

    def _compute(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> list[Tensor]:
        rows = [(tuple(prompt), tuple(response)) for prompt, response in zip(prompts, responses, strict=True)]
        fed: dict[_Ids, set[_Ids]] = {}
        for prompt, response in rows:
            fed.setdefault(prompt, set()).add(response[:-1])  # the last token predicts nothing
        states = self._alone(fed) if self._one_by_one else self._together(fed)
        if self.spec.payload == "hidden":
            return [states[prompt, response[:-1]] for prompt, response in rows]
        tops = {row: self._top_k(states[row[0], row[1][:-1]], row[1]) for row in dict.fromkeys(rows)}
        return [tops[row] for row in rows]

    def _together(self, fed: Mapping[_Ids, set[_Ids]]) -> dict[tuple[_Ids, _Ids], Tensor]:
        """Hidden states at a prompt's last token and the response tokens, by prompt and response."""
        result: dict[tuple[_Ids, _Ids], Tensor] = {}
        kept: dict[_Ids, KVCache] = {}  # of prompts that a later pass continues
        passes = self._passes(fed)
        last = {prompt: number for number, one in enumerate(passes) for prompt, _ in one.responses}
        for number, one in enumerate(passes):
            trees = [tree_of(some) for _, some in one.responses]
            past = [prompt for prompt, _ in one.responses if prompt in kept]
            place = {prompt: at for at, prompt in enumerate([*past, *one.prompts])}
            forward, states = self._forward(
                [*one.prompts, *(tree.tokens for tree in trees)],
                [
                    *((_bucket(prompt), 0) for prompt in one.prompts),
                    *((self.spec.max_new_tokens - 1, _bucket(prompt)) for prompt, _ in one.responses),
                ],
                one.size,
                past=KVCache.joined([kept[prompt] for prompt in past]) if past else None,
                after=[*[-1] * len(one.prompts), *(place[prompt] for prompt, _ in one.responses)],
                parents=[*[None] * len(one.prompts), *(tree.parents for tree in trees)],
            )
            self.stats.computed_tokens += sum(map(len, states))
            for at, prompt in enumerate(one.prompts):
                result[prompt, ()] = states[at][-1:]
                if last.get(prompt, 0) > number:
                    kept[prompt] = forward.cache.row(at)
            for (prompt, some), tree, found in zip(one.responses, trees, states[len(one.prompts) :], strict=True):
                for response, path in zip(some, tree.paths, strict=True):
                    result[prompt, response] = torch.cat([result[prompt, ()], found[path]])
                if last[prompt] == number:
                    kept.pop(prompt, None)
        return result

    def _passes(self, fed: Mapping[_Ids, set[_Ids]]) -> list[_Pass]:
        """Pack prompts and responses into forward passes.

        First fit, longest prompt first; the responses of a prompt go into the same pass or later ones.
        """
        passes: list[_Pass] = []

        def first(length: int, tokens: int, start: int = 0) -> int:
            """The first pass for rows of this length with room for `tokens` tokens."""
            size = -(-length // PASS) * PASS
            for at in range(start, len(passes)):
                if passes[at].size == size and passes[at].free >= tokens:
                    return at
            passes.append(_Pass(size, size))
            return len(passes) - 1

        for prompt in sorted(fed, key=lambda prompt: -len(prompt)):
            at = first(len(prompt), len(prompt))
            passes[at].prompts.append(prompt)
            passes[at].free -= len(prompt)
            rest = sorted(fed[prompt] - {()})
            while rest:
                # tokens of the first response, of the first two, …
                sizes = [*accumulate((1 + max(path) for path in tree_of(rest).paths), max)]
                at = first(self.spec.max_new_tokens - 1, sizes[0], at)
                count = bisect_right(sizes, passes[at].free)
                passes[at].responses.append((prompt, rest[:count]))
                passes[at].free -= sizes[count - 1]
                rest = rest[count:]
        for one in passes:
            if one.size == PASS:
                one.size = next(size for size in self._sizes if size >= PASS - one.free)
        return passes

    def _alone(self, fed: Mapping[_Ids, set[_Ids]]) -> dict[tuple[_Ids, _Ids], Tensor]:
        """As `_together`, with every row in its own pass."""
        result: dict[tuple[_Ids, _Ids], Tensor] = {}
        longest, pad_id = self.spec.max_new_tokens - 1, self.model.pad_id
        for prompt, responses in fed.items():
            for response in responses:
                # What follows a row must not depend on its response either: it is padded to the longest one.
                row = [*prompt, *response, *[pad_id] * (longest - len(response))]
                size = -(-len(row) // PASS) * PASS if isinstance(self.body, PackedBody) else len(row)
                _, (states,) = self._forward([row], [(_bucket(prompt) + longest, 0)], size)
                self.stats.computed_tokens += len(prompt) + len(response)
                result[prompt, response] = states[len(prompt) - 1 : len(prompt) + len(response)]
        return result

    def _forward(
        self,
        rows: Sequence[Sequence[int]],
        shapes: Sequence[tuple[int, int]],
        size: int,
        *,
        past: KVCache | None = None,
        after: Sequence[int] | None = None,
        parents: Parents = None,
    ) -> tuple[Any, list[Tensor]]:
        """A pass of `size` tokens, and the hidden states of each of its rows; arguments as in `PackedBody.forward`."""
        starts = range(sum(map(len, rows)), size, _PADDING)
        padding = [[self.model.pad_id] * min(_PADDING, size - start) for start in starts]
        shapes = [*shapes, *((len(row), 0) for row in padding)]
        options: dict[str, Any] = {}
        if after is not None:
            options |= {"past": past, "after": [*after, *[-1] * len(padding)]}
            options |= {"parents": parents and [*parents, *[None] * len(padding)]}
        forward = self.body.forward([*rows, *padding], prefix=self.prefix_cache, shape=shapes.__getitem__, **options)
        self.stats.passes += 1
        states = forward.hidden.to(self.model.device).split([len(row) for row in (*rows, *padding)])
        return forward, list(states[: len(rows)])

    def _top_k(self, hidden: Tensor, response: Sequence[int]) -> Tensor:
        """(positions, 2k+1) ids and log-probabilities of the top-k, log-probability of the token itself."""
        size, count, longest = self.vocab_size, hidden.shape[0], self.spec.max_new_tokens
        # The matmul with the head has a canonical shape too.
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
        """Pass sizes at which a row's bits are the same alone, with other rows, and at any place in the batch.

        The largest, and smaller ones down to the first that differs; none if rows differ at the largest.
        """
        if not isinstance(self.body, PackedBody):
            return ()
        seen: dict[tuple[int, bool], Tensor] = {}
        if not all(self._same_bits(PASS, order, seen) for order in ([0], [3], [*range(6)] * 4)):
            return ()
        sizes = [PASS]
        for turn, size in enumerate(reversed(_SIZES[:-1])):
            # Full passes, with every row in many places.
            order = [*range(turn % 6, 6), *range(turn % 6)] * 4
            if not self._same_bits(size, order[:: 1 if turn % 2 else -1], seen):
                break
            sizes.append(size)
        return tuple(reversed(sizes))

    def _same_bits(self, size: int, order: Sequence[int], seen: dict[tuple[int, bool], Tensor]) -> bool:
        """Whether some prompts, each followed by a response, have the bits of `seen` in a pass.

        Args:
            size: Tokens of the pass.
            order: Of the prompts, as many as fit; the last one is truncated.
            seen: Hidden states of prompts and responses, to which new ones are added.
        """
        longest, vocabulary = self.spec.max_new_tokens - 1, self.model.vocab_size
        names: list[tuple[int, bool]] = []
        rows: list[list[int]] = []
        shapes: list[tuple[int, int]] = []
        after: list[int] = []
        for number in order:
            prompt = [(13 * i + 7 * number + 2) % vocabulary for i in range(5 + 9 * number)]
            response = [(11 * i + 5 * number + 3) % vocabulary for i in range(min(longest, 3 + number))]
            for answers, ids in enumerate((prompt, response)):
                if ids := ids[: size - sum(map(len, rows))]:
                    names.append((number, bool(answers)))
                    rows.append(ids)
                    shapes.append((longest, _bucket(prompt)) if answers else (_bucket(prompt), 0))
                    after.append(len(after) - 1 if answers else -1)
        for name, states in zip(names, self._forward(rows, shapes, size, after=after)[1], strict=True):
            known = seen.setdefault(name, states)
            both = min(len(known), len(states))
            if not torch.equal(known[:both], states[:both]):
                return False
            if both == len(known):
                seen[name] = states
        return True

    def _describe(self) -> str:
        """What the bits of a score depend on besides weights and tokens."""
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


def _bucket(prompt: Sequence[int]) -> int:
    """Padded length of a prompt in attention."""
    return -(-len(prompt) // _STEP) * _STEP
