"""A teacher in this process.

A score must not depend on which batch, worker or moment computed it, or no study could be repeated: in half precision
the same row differs visibly from one batch shape to another. So rows that are not in the cache are scored in canonical
shapes. Linear layers always see the same number of tokens, filled up with idle ones, and in attention a row's shape is
a function of its prompt alone. At a fixed shape a row's bits do not depend on its companions; this is probed once per
model, and where it does not hold, every row is scored alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gatespace.errors import UsageError
from gatespace.gating.projection import Projection, logits_buffer
from gatespace.gating.vocabulary import top_entries
from gatespace.models.body import Body, body_of
from gatespace.models.load import Model
from gatespace.models.packed import PackedBody
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.kept import Form, RowScores
from gatespace.teacher.scores import Scores, check_questions

_VERSION = 1
"""Counts up when the same teacher would give other bits than before."""
_PASS = 512
"""Tokens of a pass; longer rows take the next power of two."""
_STEP = 16
"""Prompts attend at multiples of this length."""
_IDLE = 64
"""Idle tokens are cut into rows of this length."""
_probed: dict[tuple[object, ...], bool] = {}
"""Whether companions leave no trace, by all that the answer depends on: many runs of a process have one teacher."""


@dataclass
class LocalStats:
    """What a teacher has done so far."""

    rows: int = 0
    tokens: int = 0
    """Response tokens that were asked about."""
    computed_tokens: int = 0
    """Prompt and response tokens that went through the network."""
    passes: int = 0


class LocalTeacher:
    """Scores with a model in this process.

    Args:
        model: The teacher; its weights must not change.
        prefix: What all prompts begin with; its keys and values are computed once.
        max_new_tokens: The longest response that will be scored.
        payload: ``hidden``: last hidden states, exact for the whole vocabulary. ``top_k``: the `k` first choices.
        k: How many first choices.
        vocab_size: Ids from here on are padding. None: the length of the teacher's tokenizer.
        cache: Scores computed before.
        packed: As in `body_of`.
    """

    def __init__(
        self,
        model: Model,
        prefix: Sequence[int],
        *,
        max_new_tokens: int = 32,
        payload: str = "hidden",
        k: int = 64,
        vocab_size: int | None = None,
        cache: ScoreCache | None = None,
        packed: bool | None = None,
    ) -> None:
        if payload not in ("hidden", "top_k"):
            raise UsageError("a payload is 'hidden' or 'top_k'", got=payload)
        self.model = model
        self.prefix = list(prefix)
        self.stats = LocalStats()
        self._longest = max_new_tokens
        self._vocab_size = vocab_size or model.vocab_size
        self._payload, self._k = payload, min(k, self._vocab_size)
        self._cache = cache
        self.body: Body = body_of(model, packed=packed)
        self._device, self._dtype = model.device, model.head.weight.dtype
        self._fingerprint = model.fingerprint()
        self._alone = False
        probe = (self._fingerprint, self._describe(), *self.prefix, model.vocab_size, model.pad_id)
        probe = (*probe, str(self._device), torch.get_num_threads())
        with torch.no_grad():
            self.prefix_cache = self.body.prefix_cache(self.prefix)
            if probe not in _probed:
                _probed[probe] = self._companions_leave_no_trace()
        self._alone = not _probed[probe]
        self.stats = LocalStats()
        self.numerics = self._describe()
        """Everything beside teacher and question that the bits of a score depend on."""
        self._form = Form(
            self._fingerprint,
            self.numerics,
            payload,
            self._k,
            self._dtype if payload == "hidden" else torch.float32,
            self._device,
            model.head,
        )

    # ------------------------------------------------------------------ scores

    @torch.no_grad()
    def score(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Scores:
        """The scores of all tokens of `responses`, each the continuation of its prompt (after the shared prefix)."""
        check_questions(prompts, responses, self._longest)
        self.stats.rows += len(responses)
        self.stats.tokens += sum(map(len, responses))
        rows = RowScores(self._form, self._cache, self.prefix, prompts, responses)
        missing = rows.missing
        rows.fill(missing, self._compute([prompts[i] for i in missing], [responses[i] for i in missing]))
        return rows.scores()

    def ask(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Callable[[], Scores]:
        """The scores when they are wanted: in one process nothing is gained by computing them earlier."""
        return lambda: self.score(prompts, responses)

    def close(self) -> None:
        """Nothing is under way between two calls."""

    # ------------------------------------------------------------------ canonical passes

    def _compute(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> list[Tensor]:
        rows = [[*prompt, *response[:-1]] for prompt, response in zip(prompts, responses, strict=True)]
        result: list[Tensor | None] = [None] * len(rows)
        for size, members in self._passes([len(prompt) for prompt in prompts], [len(row) for row in rows]):
            hidden = self._pass([rows[i] for i in members], [len(prompts[i]) for i in members], size)
            for i, states in zip(members, hidden, strict=True):
                states = states[len(prompts[i]) - 1 :]
                result[i] = states if self._payload == "hidden" else self._first_choices(states, responses[i])
        return [entry for entry in result if entry is not None]

    def _passes(self, prompts: Sequence[int], rows: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Which rows go through the network together: (tokens of the pass, rows). The longest row first, each where
        it fits first."""
        passes: list[tuple[int, list[int]]] = []
        room: list[int] = []
        for row in sorted(range(len(rows)), key=lambda i: (-rows[i], i)):
            size = _PASS
            while size < prompts[row] + self._longest - 1:
                size *= 2
            for place, (other, members) in enumerate(passes):
                if not self._alone and other == size and room[place] >= rows[row]:
                    members.append(row)
                    room[place] -= rows[row]
                    break
            else:
                passes.append((size, [row]))
                room.append(size - rows[row])
        return passes

    def _pass(self, rows: Sequence[Sequence[int]], prompts: Sequence[int], size: int) -> list[Tensor]:
        lengths = [len(row) for row in rows]
        idle = self.model.pad_id
        if self._alone:
            # What stands beside a row must not depend on its response either: it is filled up to the longest one.
            rows = [
                [*row, *[idle] * (prompt + self._longest - 1 - len(row))]
                for row, prompt in zip(rows, prompts, strict=True)
            ]
        left = size - sum(map(len, rows)) if isinstance(self.body, PackedBody) else 0
        filling = [[idle] * min(_IDLE, left - start) for start in range(0, left, _IDLE)]
        shapes = [-(-prompt // _STEP) * _STEP + self._longest - 1 for prompt in prompts]
        shapes += [len(row) for row in filling]
        forward = self.body.forward([*rows, *filling], prefix=self.prefix_cache, shape=shapes.__getitem__)
        self.stats.passes += 1
        self.stats.computed_tokens += sum(lengths)
        states = forward.hidden.split([len(row) for row in (*rows, *filling)])
        return [part[:length] for part, length in zip(states, lengths, strict=False)]

    def _first_choices(self, hidden: Tensor, response: Sequence[int]) -> Tensor:
        """(positions, 2k+1) ids and log-probabilities of the first choices, log-probability of the token itself."""
        size, count = self._vocab_size, hidden.shape[0]
        # The product with the head has a canonical shape too.
        padded = torch.cat([hidden, hidden.new_zeros(self._longest - count, hidden.shape[1])])
        projection = Projection(padded, self.model.head, size)
        out = logits_buffer(padded, self._longest, size, projection.dtype)
        logits = projection.into(out, slice(0, self._longest), 0, size)[:count].contiguous()
        log_probs = torch.log_softmax(logits, -1).float()
        values, ids = top_entries(log_probs, self._k)
        sampled = log_probs.gather(1, torch.tensor(response, device=ids.device)[:, None])
        return torch.cat([ids.float(), values, sampled], 1)  # float32 holds every id of a vocabulary exactly

    # ------------------------------------------------------------------ what the bits depend on

    def _companions_leave_no_trace(self) -> bool:
        """Whether a row's bits are the same alone, in company, and in another place of the pass."""
        if not isinstance(self.body, PackedBody):
            return False
        size = self.model.vocab_size
        rows = [[(13 * i + 7 * row + 2) % size for i in range(5 + 9 * row)] for row in range(6)]
        every = list(range(len(rows)))
        arrangements = ([0], [3], every, every[::-1], [2, 0, 5, 3])
        seen: dict[int, Tensor] = {}
        for arrangement in arrangements:
            members = [rows[i] for i in arrangement]
            results = self._pass(members, [len(row) for row in members], _PASS)
            for i, hidden in zip(arrangement, results, strict=True):
                if not torch.equal(seen.setdefault(i, hidden), hidden):
                    return False
        return True

    def _describe(self) -> str:
        """Everything beside teacher and question that the bits of a score depend on."""
        device = self._device
        place = (
            f"cpu-{torch.backends.cpu.get_cpu_capability()}"
            if device.type == "cpu"
            else f"{device.type}-{torch.cuda.get_device_name(device) if device.type == 'cuda' else ''}"
        )
        payload = self._payload if self._payload == "hidden" else f"top{self._k}-of-{self._vocab_size}"
        return "/".join(
            (
                f"v{_VERSION}",
                payload,
                f"prefix{len(self.prefix)}",
                f"response{self._longest}",
                f"pass{'-alone' if self._alone else ''}{_PASS}",
                type(self.body).__name__,
                str(self._dtype),
                f"torch-{torch.__version__}",
                place,
            )
        )
