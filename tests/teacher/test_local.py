"""The teacher in this process: right scores, and the same bits in every batch, process and moment."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gatespace.errors import RunError, UsageError
from gatespace.gating.tokens import TeacherTopK
from gatespace.models import Model, TinyPair, load_model
from gatespace.models.body import body_of
from gatespace.models.packed import PackedBody
from gatespace.models.plain import PlainBody
from gatespace.teacher import local
from gatespace.teacher.cache import FILE, ScoreCache
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import ScoreSpec
from tests.conftest import rounding

ROOT = Path(__file__).resolve().parents[2]
CAP = 8
PROMPTS = (20, 35, 1, 48, 49, 60, 17, 33, 16, 90, 75, 82)
RESPONSES = (4, 1, 8, 3, 2, 7, 5, 8, 6, 8, 3, 4)


def some_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 400, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PREFIX = some_ids(37, seed=1)
QUESTIONS = [
    (some_ids(prompt, 10 + row), some_ids(response, 50 + row))
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True))
]


def local_teacher(
    model: Model,
    payload: str = "hidden",
    *,
    prefix: Sequence[int] = PREFIX,
    max_new_tokens: int = CAP,
    k: int = 5,
    vocab_size: int | None = None,
    cache: ScoreCache | None = None,
    packed: bool | None = None,
) -> LocalTeacher:
    spec = ScoreSpec(tuple(prefix), max_new_tokens, vocab_size or model.vocab_size, payload, k)
    return LocalTeacher(model, spec, cache=cache, packed=packed)


def scored(teacher: LocalTeacher, questions: Sequence[tuple[list[int], list[int]]]) -> list[Tensor]:
    """The payload of each row, bits as they are; top k as ids, log-probs and the token's own side by side."""
    payload = teacher.score([prompt for prompt, _ in questions], [response for _, response in questions]).payload
    if isinstance(payload, TeacherTopK):
        assert payload.sampled_log_probs is not None
        payload = torch.cat([payload.ids.float(), payload.log_probs, payload.sampled_log_probs[..., None]], -1)
    assert payload.shape[0] == 1
    return list(payload[0].split([len(response) for _, response in questions]))


def digests(rows: Sequence[Tensor]) -> list[str]:
    return [hashlib.sha256(row.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for row in rows]


def invariant(teacher: LocalTeacher, first: list[Tensor], *, few: bool = False) -> None:
    """The rows of QUESTIONS have the bits of `first` in every batch."""
    every = list(range(len(QUESTIONS)))
    batches = [[7], [9, 3, 0]] if few or teacher._one_by_one else [[7], [2], every[::-1], [9, 3, 0], [*every, *every]]
    for places in batches:
        again = scored(teacher, [QUESTIONS[i] for i in places])
        assert all(found.equal(first[i]) for i, found in zip(places, again, strict=True)), places
    # beside other rows, of many lengths
    others = [(some_ids(length, 900 + length), some_ids(3, length)) for length in (5, 44, 71, 30, 13)]
    mixed = scored(teacher, [others[0], QUESTIONS[5], *others[1:3], QUESTIONS[1], *others[3:]])
    assert mixed[1].equal(first[5])
    assert mixed[4].equal(first[1])
    # a response that goes on, or stops earlier, shares what it has in common
    prompt, response = QUESTIONS[7]
    parts = [[*response[:5], 7], [response[0], 9, 9], response[:1]]
    for part in parts[: 1 if few else 3]:
        (found,) = scored(teacher, [(prompt, part)])
        same = next((i for i, (a, b) in enumerate(zip(part, response, strict=False)) if a != b), len(part))
        states = found[: same + 1] if teacher.spec.payload == "hidden" else found[:same]
        assert states.equal(first[7][: len(states)])
        assert len(states)


@pytest.fixture(scope="module")
def model(tiny: TinyPair) -> Model:
    return load_model(str(tiny.teacher))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ScoreCache]:
    with ScoreCache(tmp_path / "scores", max_mb=16) as cache:
        yield cache


# ---------------------------------------------------------------------------------------------------- right scores


def logits_of(model: Model, prompt: list[int], response: list[int]) -> tuple[Tensor, Tensor]:
    """Hidden states and logits that predict the response's tokens, by the network's own forward."""
    ids = torch.tensor([[*PREFIX, *prompt, *response]])
    start = len(PREFIX) + len(prompt) - 1
    with torch.no_grad():
        hidden = model.body(input_ids=ids, use_cache=False).last_hidden_state[0]
        return hidden[start:-1], model.network(ids).logits[0, start:-1]


@pytest.mark.parametrize("mode", ["packed", "alone", "plain"])
def test_hidden_states_are_the_networks_own(mode: str, model: Model) -> None:
    teacher = local_teacher(model, packed=mode != "plain")
    assert isinstance(teacher.body, PlainBody if mode == "plain" else PackedBody)
    assert teacher._one_by_one == (mode == "plain")
    teacher._one_by_one = mode != "packed"
    scores = teacher.score(*map(list, zip(*QUESTIONS, strict=True)))
    assert scores.head is not None
    assert isinstance(scores.payload, Tensor)
    right = [logits_of(model, *question) for question in QUESTIONS]
    torch.testing.assert_close(scores.payload[0], torch.cat([hidden for hidden, _ in right]), rtol=1e-5, atol=2e-5)
    logits = scores.payload[0] @ scores.head.weight.T
    torch.testing.assert_close(logits, torch.cat([logits for _, logits in right]), rtol=1e-5, atol=2e-4)
    assert teacher.stats.rows == len(QUESTIONS)
    assert teacher.stats.tokens == sum(RESPONSES)
    assert teacher.stats.computed_tokens == sum(PROMPTS) + sum(RESPONSES) - len(QUESTIONS)
    assert teacher.stats.passes == (2 if mode == "packed" else len(QUESTIONS))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("k", "vocab_size"), [(5, None), (1, None), (64, 450), (10**6, 450)])
def test_top_k_are_the_networks_own(k: int, vocab_size: int | None, packed: bool, model: Model) -> None:
    teacher = local_teacher(model, "top_k", k=k, vocab_size=vocab_size, packed=packed)
    scores = teacher.score(*map(list, zip(*QUESTIONS, strict=True)))
    assert scores.head is None
    assert isinstance(scores.payload, TeacherTopK)
    assert scores.payload.sampled_log_probs is not None
    size = vocab_size or model.vocab_size
    whole = torch.cat([logits_of(model, *question)[1][:, :size].double().log_softmax(-1) for question in QUESTIONS])
    right = whole.topk(min(k, size))
    ids, log_probs = scores.payload.ids[0], scores.payload.log_probs[0]
    assert ids.dtype == torch.long
    torch.testing.assert_close(log_probs.double(), right.values, rtol=0, atol=1e-4)
    torch.testing.assert_close(whole.gather(1, ids), right.values, rtol=0, atol=1e-4)
    assert all(len(set(row)) == min(k, size) for row in ids.tolist())
    tokens = torch.tensor([token for _, response in QUESTIONS for token in response])
    own = whole.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(scores.payload.sampled_log_probs[0].double(), own, rtol=0, atol=1e-4)


def test_a_row_longer_than_a_pass(model: Model) -> None:
    teacher = local_teacher(model)
    # 249 + 7 fill a pass; one more takes the next size
    questions = [(some_ids(length, length), some_ids(CAP, 3)) for length in (249, 250, 510)]
    together = scored(teacher, [*questions, *QUESTIONS])
    for question, found in zip(questions, together, strict=False):
        torch.testing.assert_close(found, logits_of(model, *question)[0], rtol=1e-5, atol=2e-5)
        assert scored(teacher, [question])[0].equal(found)
    # neighbours of an odd size change nothing
    for question, found in zip(QUESTIONS, together[3:], strict=True):
        assert scored(teacher, [question])[0].equal(found)


def test_no_prefix(model: Model) -> None:
    teacher = local_teacher(model, prefix=[])
    assert teacher.prefix_cache is None
    prompt, response = QUESTIONS[0]
    (found,) = scored(teacher, [(PREFIX + prompt, response)])
    torch.testing.assert_close(found, logits_of(model, prompt, response)[0], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("prompt", "response"), [([5], [7] * (CAP + 1)), ([5], []), ([], [7, 8])], ids=["too long", "empty", "no prompt"]
)
def test_questions_that_cannot_be_scored(prompt: list[int], response: list[int], model: Model) -> None:
    teacher = local_teacher(model)
    with pytest.raises(RunError, match=r"wrong length|no token of its own"):
        teacher.score([[1], prompt], [[2], response])
    with pytest.raises(ValueError, match="zip"):
        teacher.score([[1], [2]], [[3]])


def test_unknown_payload(model: Model) -> None:
    with pytest.raises(UsageError, match="payload"):
        local_teacher(model, "logits")


# ---------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("mode", "payload"), [("packed", "hidden"), ("packed", "top_k"), ("alone", "top_k"), ("plain", "hidden")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype, payload: str, mode: str, tiny: TinyPair) -> None:
    model = load_model(str(tiny.teacher), dtype=dtype)
    teacher = local_teacher(model, payload=payload, packed=mode != "plain")
    assert teacher._one_by_one == (mode == "plain")
    teacher._one_by_one = mode != "packed"
    first = scored(teacher, QUESTIONS)
    assert first[0].dtype == (dtype if payload == "hidden" else torch.float32)
    assert len({row[0].double().sum().item() for row in first}) == len(first)
    invariant(teacher, first)


def test_passes_have_canonical_shapes(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bits depend on where they depend on a shape: tokens of a forward pass, a row's length in attention."""
    teacher = local_teacher(model)
    tokens: set[int] = set()
    own: dict[int, set[tuple[int, int]]] = {}
    answers: dict[int, set[tuple[int, int]]] = {}
    handle = model.body.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.add(kwargs["input_ids"].numel()), with_kwargs=True
    )
    forward = PackedBody.forward

    def watched(self: PackedBody, rows: Any, *, shape: Any, after: Any, past: Any, **options: Any) -> Any:
        earlier = len(past.lengths) if past is not None else 0
        for place, row in enumerate(rows):
            for prompt, _ in QUESTIONS:
                if list(row) == prompt:
                    own.setdefault(len(prompt), set()).add(shape(place))
                elif after[place] >= earlier and list(rows[after[place] - earlier]) == prompt:
                    answers.setdefault(len(prompt), set()).add(shape(place))
        return forward(self, rows, shape=shape, after=after, past=past, **options)

    monkeypatch.setattr(PackedBody, "forward", watched)
    for cut in (1, 2, CAP):
        scored(teacher, [(prompt, response[:cut]) for prompt, response in QUESTIONS])
        scored(teacher, [(QUESTIONS[5][0], QUESTIONS[5][1][:cut])])
    handle.remove()
    assert tokens <= set(teacher._sizes)
    assert 512 in tokens
    rooms = {prompt: -(-prompt // 16) * 16 for prompt in PROMPTS}
    assert own == {prompt: {(room, 0)} for prompt, room in rooms.items()}
    assert answers == {len(p): {(CAP - 1, rooms[len(p)])} for p, response in QUESTIONS if len(response) > 1}


def test_a_machine_on_which_the_model_is_not_batch_invariant(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose kernels depend on the whole of a batch: every row then has a forward pass of its own."""
    forward = PackedBody.forward

    def noisy(self: PackedBody, rows: Any, **options: Any) -> Any:
        found = forward(self, rows, **options)
        found.hidden.mul_(1 + 1e-6 * rows[0][0])  # depends on the first row
        return found

    monkeypatch.setattr(PackedBody, "forward", noisy)
    monkeypatch.setattr(local, "_batch_invariant", {})  # another machine is another process
    teacher = local_teacher(model)
    assert teacher._one_by_one
    assert "alone" in teacher.numerics
    assert teacher.stats.passes == 0
    first = scored(teacher, QUESTIONS)
    assert teacher.stats.passes == len(QUESTIONS)
    invariant(teacher, first)


def passes_of(teacher: LocalTeacher, questions: Sequence[tuple[list[int], list[int]]]) -> list[int]:
    """The tokens of each forward pass that scoring takes."""
    found: list[int] = []
    handle = teacher.model.body.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    scored(teacher, questions)
    handle.remove()
    return found


def test_a_machine_on_which_bits_depend_on_the_size_of_a_pass(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = PackedBody.forward

    def noisy(self: PackedBody, rows: Any, **options: Any) -> Any:
        found = forward(self, rows, **options)
        found.hidden.mul_(1 + 1e-6 * sum(map(len, rows)))
        return found

    monkeypatch.setattr(PackedBody, "forward", noisy)
    monkeypatch.setattr(local, "_batch_invariant", {})
    teacher = local_teacher(model)
    assert not teacher._one_by_one
    assert set(passes_of(teacher, QUESTIONS[:1]) + passes_of(teacher, QUESTIONS)) == {512}
    invariant(teacher, scored(teacher, QUESTIONS))


def test_few_misses_cost_little(model: Model, cache: ScoreCache) -> None:
    """Nine of ten rows are in the cache; every row is the one that is not, once."""
    needed = [len(prompt) + len(response) - 1 for prompt, response in QUESTIONS]
    teacher = local_teacher(model)
    alone = [passes_of(teacher, [question]) for question in QUESTIONS]
    if teacher._sizes == (512,):
        assert alone == [[512]] * len(QUESTIONS), "the size matters on this machine"
    else:
        assert sum(map(sum, alone)) <= 1.5 * sum(needed)
        assert sum(passes_of(teacher, QUESTIONS * 4)) <= 1.1 * 4 * sum(needed)
    long = (some_ids(1200, 5), some_ids(3, 6))
    assert passes_of(teacher, [long])[0] == 1536, "the next multiple, not the next power of two"


SEVERAL = [
    (QUESTIONS[row][0], response)
    for row in (3, 0, 9)
    for response in ([5, 6, 7, 8], [5, 6, 7], [5, 9, 9, 9, 9, 9, 9, 9], [5], [6, 5, 6, 7], [5, 6, 7, 8], [5, 6, 9])
]
"""Responses of one prompt: a beginning of another one, one twice, one of a single token, others that part later."""


@pytest.mark.parametrize("payload", ["hidden", "top_k"])
@pytest.mark.parametrize("mode", ["packed", "alone", "plain"])
def test_a_prompt_is_read_once(mode: str, payload: str, tiny: TinyPair) -> None:
    """However many responses it has, which have the bits that each has alone and the numbers of the network."""
    model = load_model(str(tiny.teacher), dtype=torch.float32 if payload == "hidden" else torch.bfloat16)
    teacher = local_teacher(model, payload, packed=mode != "plain")
    teacher._one_by_one = mode != "packed"
    first = scored(teacher, SEVERAL)
    if mode == "packed":
        # what is fed: 5, then 6 7 or 9 9 9 9 9 9, and 6 5 6
        assert teacher.stats.computed_tokens == sum(PROMPTS[row] for row in (3, 0, 9)) + 3 * 12
        assert teacher.stats.passes == 1
    for question, found in zip(SEVERAL, first, strict=True):
        assert scored(teacher, [question])[0].equal(found)
    for some in (SEVERAL[::-1], SEVERAL[1:9:2], [*QUESTIONS, *SEVERAL[5:], *QUESTIONS]):
        again = scored(teacher, some)
        pairs = [(found, first[SEVERAL.index(q)]) for q, found in zip(some, again, strict=True) if q in SEVERAL]
        assert pairs
        assert all(found.equal(known) for found, known in pairs)
    if payload == "hidden":
        right = [logits_of(model, *question)[0] for question in SEVERAL]
        torch.testing.assert_close(torch.cat(first), torch.cat(right), rtol=1e-5, atol=2e-5)


def test_responses_that_do_not_fit_beside_their_prompt(model: Model) -> None:
    """They go on from its KV cache in later passes, beside other prompts, with the same bits."""
    teacher = local_teacher(model)
    prompts = [QUESTIONS[9][0], some_ids(400, 7), some_ids(600, 8)]
    many = [(prompt, some_ids(CAP, 100 + 7 * row)) for prompt in prompts for row in range(40)]
    together = scored(teacher, [*QUESTIONS, *many])
    fed = 3 * 40 * (CAP - 1)
    lines = sum(PROMPTS) + 400 + 600 + sum(RESPONSES) - len(QUESTIONS) + fed
    assert lines - 40 < teacher.stats.computed_tokens <= lines  # what responses begin with is hardly ever the same
    assert teacher.stats.passes <= 2 + -(-(lines - 600) // 512)
    for place in (0, 39, 40, 47, 79, 80, 119):
        question, found = many[place], together[len(QUESTIONS) + place]
        assert scored(teacher, [question])[0].equal(found)
        torch.testing.assert_close(found, logits_of(model, *question)[0], rtol=1e-5, atol=2e-5)
    assert all(a.equal(b) for a, b in zip(scored(teacher, QUESTIONS), together, strict=False))


def test_a_process_probes_a_teacher_once(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_batch_invariant", {})

    def passes(model: Model, prefix: list[int]) -> tuple[int, list[Tensor]]:
        """Forward passes until the teacher is there, and scores of it."""
        count: list[int] = []
        body_of(model)  # has a probe of its own
        handle = model.body.register_forward_pre_hook(lambda module, args: count.append(1))
        teacher = local_teacher(model, prefix=prefix)
        handle.remove()
        return len(count), scored(teacher, QUESTIONS[:3])

    (first, scores), (again, same) = (passes(load_model(str(tiny.teacher)), PREFIX) for _ in range(2))
    assert again == 1 < first  # of the prefix, and none else
    assert all(one.equal(other) for one, other in zip(scores, same, strict=True))
    changed = load_model(str(tiny.teacher))
    with torch.no_grad():
        changed.head.weight[0, 0] += 1
    assert passes(changed, PREFIX)[0] == first
    assert passes(load_model(str(tiny.teacher)), PREFIX[:-1])[0] == first
    assert passes(load_model(str(tiny.teacher), dtype=torch.bfloat16), PREFIX)[0] == first


# ---------------------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("payload", ["hidden", "top_k"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_cached_scores_have_the_same_bits(
    dtype: torch.dtype, payload: str, packed: bool, tiny: TinyPair, cache: ScoreCache
) -> None:
    model = load_model(str(tiny.teacher), dtype=dtype)
    options: dict[str, Any] = {"payload": payload, "packed": packed}
    first = scored(local_teacher(model, **options), QUESTIONS)
    teacher = local_teacher(model, cache=cache, **options)
    assert all(a.equal(b) for a, b in zip(scored(teacher, QUESTIONS[:4]), first, strict=False))
    passes, tokens = teacher.stats.passes, sum(RESPONSES[:4])
    assert cache.stats.written == cache.stats.misses == tokens
    # some are there and some are not
    mixed = scored(teacher, QUESTIONS[2:])
    assert all(a.equal(b) for a, b in zip(mixed, first[2:], strict=True))
    assert cache.stats.hits == sum(RESPONSES[2:4])
    # all are there: no forward pass
    passes = teacher.stats.passes
    again = local_teacher(load_model(str(tiny.teacher), dtype=dtype), cache=cache, **options)
    for found in (scored(teacher, QUESTIONS[::-1])[::-1], scored(again, QUESTIONS)):
        assert all(a.equal(b) for a, b in zip(found, first, strict=True))
    assert teacher.stats.passes == passes
    assert again.stats.passes == 0
    assert cache.stats.damaged == 0


@pytest.mark.parametrize("payload", ["hidden", "top_k"])
def test_a_shorter_response_is_in_the_cache_with_the_longer_one(payload: str, model: Model, cache: ScoreCache) -> None:
    teacher = local_teacher(model, payload=payload, cache=cache)
    prompt, response = QUESTIONS[7]
    (whole,) = scored(teacher, [(prompt, response)])
    passes = teacher.stats.passes
    # hidden states say nothing of the token itself, top k come with its log-probability
    part = [*response[:4], 11] if payload == "hidden" else response[:5]
    (found,) = scored(teacher, [(prompt, part)])
    assert found.equal(whole[:5])
    assert teacher.stats.passes == passes
    (other,) = scored(teacher, [(prompt, [*response[:4], 11])])
    assert teacher.stats.passes == passes + (payload == "top_k")
    assert other[:4].equal(whole[:4])
    (longer,) = scored(teacher, [(prompt, [*response[:3], 12, 13])])
    assert teacher.stats.passes == passes + 1 + (payload == "top_k")
    assert longer[:3].equal(whole[:3])


def test_scores_of_something_else_are_not_served(model: Model, tiny: TinyPair, cache: ScoreCache) -> None:
    scored(local_teacher(model, cache=cache), QUESTIONS)
    others = [
        local_teacher(load_model(str(tiny.student)), cache=cache),
        local_teacher(load_model(str(tiny.teacher), dtype=torch.bfloat16), cache=cache),
        local_teacher(model, prefix=PREFIX[:-1], cache=cache),
        local_teacher(model, max_new_tokens=CAP + 1, cache=cache),
        local_teacher(model, packed=False, cache=cache),
        local_teacher(model, payload="top_k", cache=cache),
        local_teacher(model, payload="top_k", k=6, cache=cache),
        local_teacher(model, payload="top_k", k=6, vocab_size=450, cache=cache),
    ]
    for teacher in others:
        scored(teacher, QUESTIONS)
    assert cache.stats.hits == 0


def test_where_prefix_and_prompt_end_matters(model: Model, cache: ScoreCache) -> None:
    teacher = local_teacher(model, cache=cache)
    scored(teacher, [([5, 6, 7], [8, 9])])
    scored(teacher, [([5, 6], [7, 8, 9])])
    assert cache.stats.hits == 0
    # the same text, but another part of it is shared: other shapes, other bits
    other = local_teacher(model, prefix=PREFIX[:-1], cache=cache)
    scored(other, [([PREFIX[-1], 5, 6, 7], [8, 9])])
    assert cache.stats.hits == 0
    scored(teacher, [([5, 6, 7], [8, 9])])
    assert cache.stats.hits == 2


def test_a_damaged_entry_is_computed_again(model: Model, tmp_path: Path) -> None:
    folder = tmp_path / "scores"
    with ScoreCache(folder, max_mb=16) as cache:
        teacher = local_teacher(model, cache=cache)
        first = scored(teacher, QUESTIONS)
        needle = first[5][2].numpy().tobytes()[40:80]
    data = bytearray((folder / FILE).read_bytes())
    assert data.count(needle) == 1
    data[data.find(needle)] ^= 0x10
    (folder / FILE).write_bytes(data)
    with ScoreCache(folder, max_mb=16) as cache:
        teacher = local_teacher(model, cache=cache)
        again = scored(teacher, QUESTIONS)
        assert all(a.equal(b) for a, b in zip(again, first, strict=True))
        assert cache.stats.damaged == 1
        assert teacher.stats.passes == 1
        # and it is whole again
        scored(teacher, QUESTIONS)
        assert teacher.stats.passes == 1


# ---------------------------------------------------------------------------------------------------- other processes

_SCRIPT = """
import json, sys
import torch
from gatespace.models import load_model
from tests.teacher import test_local as t
model = load_model(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
teacher = t.local_teacher(model)
order = [3, 8, 1, 0, 9, 2]
assert not teacher._one_by_one
print(json.dumps(dict(zip(order, t.digests(t.scored(teacher, [t.QUESTIONS[i] for i in order]))))))
"""


def elsewhere(folder: Path, dtype: torch.dtype) -> dict[int, str]:
    """The bits of some of QUESTIONS as another process computes them."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _SCRIPT, str(folder), str(dtype).removeprefix("torch.")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {int(place): digest for place, digest in json.loads(done.stdout.splitlines()[-1]).items()}


def test_another_process_finds_the_same_bits(model: Model, tiny: TinyPair) -> None:
    here = digests(scored(local_teacher(model), QUESTIONS))
    there = elsewhere(tiny.teacher, torch.float32)
    assert there == {place: here[place] for place in there}


@contextmanager
def other_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_number_of_threads_does_not_matter(dtype: torch.dtype, tiny: TinyPair) -> None:
    teacher = local_teacher(load_model(str(tiny.teacher), dtype=dtype))
    first = scored(teacher, QUESTIONS)
    with other_threads():
        assert all(a.equal(b) for a, b in zip(scored(teacher, QUESTIONS), first, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="fp32"),
        pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.long),  # emulated on most CPUs
    ],
)
def test_the_real_model_is_batch_invariant(dtype: torch.dtype, short_smollm2: Path, tmp_path: Path) -> None:
    model = load_model(str(short_smollm2), dtype=dtype)
    teacher = local_teacher(model)
    assert not teacher._one_by_one
    first = scored(teacher, QUESTIONS)
    right = torch.cat([logits_of(model, *question)[0] for question in QUESTIONS[:3]]).double()
    error = (torch.cat(first[:3]).double() - right).norm() / right.norm()
    assert error < (rounding(model) if dtype == torch.float32 else 0.05)
    invariant(teacher, first, few=True)
    with other_threads():
        assert scored(teacher, [QUESTIONS[6]])[0].equal(first[6])
    there = elsewhere(short_smollm2, dtype)
    here = digests(first)
    assert there == {place: here[place] for place in there}
    with ScoreCache(tmp_path / "scores", max_mb=16) as cache:
        cached = local_teacher(model, cache=cache)
        for questions in (QUESTIONS[3:5], QUESTIONS[4:6], QUESTIONS[3:6]):
            found = scored(cached, questions)
            assert all(a.equal(first[QUESTIONS.index(q)]) for a, q in zip(found, questions, strict=True))
        assert cache.stats.hits == RESPONSES[4] + sum(RESPONSES[3:6])
    top = local_teacher(model, "top_k")  # with a product of its own
    several = scored(top, QUESTIONS[:3])
    assert scored(top, QUESTIONS[2:3])[0].equal(several[2])
