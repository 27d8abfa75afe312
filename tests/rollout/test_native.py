"""The sampler: its distribution against exact probabilities, and when it stops."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from gatespace.errors import UsageError
from gatespace.models import Model
from gatespace.models.packed import PackedBody, PackedDecoding
from gatespace.models.plain import PlainBody
from gatespace.rollout import native
from gatespace.rollout.native import Rollout, Sampling, sample
from gatespace.seeding import generator

PROMPT = [40, 41, 42, 300, 7]
TRUNK = [9, 8, 200, 6]
LAST = math.nextafter(1.0, 0.0)  # the largest number that random() gives


def never(ids: list[int]) -> bool:
    return False


def streams(count: int, seed: int = 0) -> list[Callable[[], float]]:
    return [generator(seed, "rollout", row).random for row in range(count)]


def exact(model: Model, ids: Sequence[int], vocab_size: int, temperature: float = 1.0, top_p: float = 1.0) -> Any:
    """The next token's probabilities, by the whole network and NumPy."""
    with torch.no_grad():
        logits = model.network(torch.tensor([list(ids)])).logits[0, -1, :vocab_size].double().numpy()
    return truncated(logits, temperature, top_p)


def truncated(logits: Any, temperature: float, top_p: float) -> Any:
    mass = np.exp(logits / temperature - np.max(logits / temperature))
    mass /= mass.sum()
    kept: list[int] = []
    for index in sorted(range(len(mass)), key=lambda i: (-mass[i], i)):
        kept.append(index)
        if sum(mass[kept]) >= top_p:
            break
    result = np.zeros_like(mass)
    result[kept] = mass[kept] / mass[kept].sum()
    return result


def choose(logits: torch.Tensor, sampling: Sampling, uniform: list[float]) -> tuple[list[int], list[float]]:
    tokens, log_probs = native.choose(logits, sampling, torch.tensor(uniform, dtype=torch.float64)[:, None])
    return tokens[:, 0].tolist(), log_probs[:, 0].tolist()


def write(model: Model, rows: Sequence[Sequence[int]], sampling: Sampling, **options: Any) -> Rollout:
    body = options.pop("body", PackedBody)(model)
    forward = body.forward(rows, prefix=options.pop("prefix", TRUNK))
    return sample(body, forward, **({"vocab_size": model.vocab_size, "stop": never} | options), sampling=sampling)


# ---------------------------------------------------------------------------------------------------- distribution


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.7), (1.7, 0.9)])
def test_samples_have_the_models_distribution(temperature: float, top_p: float, model: Model) -> None:
    # A vocabulary of seven, so that all pairs of tokens are met often enough; the other ids count as padding.
    size, count = 7, 3000
    first = exact(model, TRUNK + PROMPT, size, temperature, top_p)
    pairs = {
        (a, b): first[a] * exact(model, [*TRUNK, *PROMPT, a], size, temperature, top_p)[b]
        for a, b in itertools.product(range(size), repeat=2)
    }
    rollout = write(
        model,
        [PROMPT] * count,
        Sampling(temperature=temperature, top_p=top_p, max_new_tokens=2),
        vocab_size=size,
        draws=streams(count),
    )
    found = Counter(tuple(response) for response in rollout.responses)
    possible = [pair for pair, mass in pairs.items() if mass > 0]
    assert set(found) <= set(possible)
    singles = Counter(response[0] for response in rollout.responses)
    tokens = [token for token in range(size) if first[token] > 0]
    assert chisquare([singles[t] for t in tokens], [count * first[t] for t in tokens]).pvalue > 1e-3
    observed = [found[pair] for pair in possible]
    assert chisquare(observed, [count * pairs[pair] for pair in possible]).pvalue > 1e-3
    # The same counts tell this distribution from a warmer one.
    other = exact(model, TRUNK + PROMPT, size, temperature * 1.5, 1.0)
    other = [other[token] for token in tokens] / sum(other[token] for token in tokens)
    assert len(tokens) == 1 or chisquare([singles[t] for t in tokens], count * other).pvalue < 1e-3


@pytest.mark.parametrize("body", [PackedBody, PlainBody])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8), (0.0, 1.0)])
def test_log_probs_are_those_of_the_distribution(body: Any, temperature: float, top_p: float, model: Model) -> None:
    rows = [PROMPT, [5], [3, 4] * 20]
    sampling = Sampling(temperature=temperature, top_p=top_p, max_new_tokens=5)
    rollout = write(model, rows, sampling, draws=streams(3), body=body)
    for row, response, log_probs in zip(rows, rollout.responses, rollout.log_probs, strict=True):
        assert len(response) == len(log_probs) == 5
        for place, (token, log_prob) in enumerate(zip(response, log_probs, strict=True)):
            whole = [*TRUNK, *row, *response[:place]]
            mass = exact(model, whole, model.vocab_size, temperature or 1.0, top_p)
            assert log_prob == pytest.approx(math.log(mass[token]), abs=2e-5)
            if temperature == 0:
                assert token == mass.argmax()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.93, 1.0])
def test_the_shares_of_the_unit_interval(temperature: float, top_p: float) -> None:
    logits = torch.randn(23, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2
    logits[4] = logits[9]  # of equals the first comes first
    count = 5000
    uniform = [(i + 0.5) / count for i in range(count)]
    tokens, log_probs = choose(logits.expand(count, -1), Sampling(temperature, top_p), uniform)
    mass = truncated(logits.numpy(), temperature, top_p)
    found = np.bincount(tokens, minlength=23) / count
    assert np.abs(found - mass).max() <= 1 / count + 1e-12
    assert not found[mass == 0].any()
    assert np.allclose(log_probs, np.log(mass[tokens]), atol=1e-12)
    # the inverse of a cumulative distribution rises
    assert tokens == sorted(tokens)


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.2499, 1), (0.25, 3), (0.4999, 3), (0.5, 4), (LAST, 4)], ids=str
)
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_ids_without_mass_are_never_drawn(uniform: float, token: int, top_p: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, math.log(2), -torch.inf, -1e30]])
    tokens, log_probs = choose(logits, Sampling(top_p=top_p), [uniform])
    assert tokens == [token]
    assert log_probs[0] == pytest.approx(math.log(0.5 if token == 4 else 0.25))


def test_the_ends_of_the_interval_with_many_tokens() -> None:
    # Sums of many terms are not exactly 1; the last id has no mass, and the first has none either.
    for seed in range(20):
        logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(seed)) * 3
        logits[0, [0, 1, -2, -1]] = -torch.inf
        for top_p in (1.0, 0.99):
            for uniform in (0.0, LAST):
                (token,), (log_prob,) = choose(logits, Sampling(top_p=top_p), [uniform])
                assert 2 <= token < 4998
                assert math.isfinite(log_prob)


def test_extremes_of_temperature_and_top_p() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    for sampling in (Sampling(temperature=1e-6), Sampling(top_p=1e-9), Sampling(temperature=0)):
        for uniform in (0.0, 0.5, LAST):
            tokens, log_probs = choose(logits, sampling, [uniform])
            assert tokens == [1]
            assert log_probs[0] == pytest.approx(-0.40760596 if sampling.temperature == 0 else 0)


# ---------------------------------------------------------------------------------------------------- companions


def test_a_row_does_not_depend_on_its_companions(model: Model) -> None:
    rows = [PROMPT, [5], [3, 4] * 20, [77, 78, 79], PROMPT]
    sampling = Sampling(max_new_tokens=6)
    together = write(model, rows, sampling, draws=streams(5))
    # same prompt, other numbers: other words
    assert together.responses[0] != together.responses[4]
    for places in ([2], [4, 0], [3, 2, 1]):
        draws = streams(5)
        found = write(model, [rows[i] for i in places], sampling, draws=[draws[i] for i in places])
        assert found.responses == [together.responses[i] for i in places]
        for place, log_probs in zip(places, found.log_probs, strict=True):
            assert log_probs == pytest.approx(together.log_probs[place], abs=1e-4)


@pytest.mark.parametrize("body", [PackedBody, PlainBody])
@pytest.mark.parametrize(
    ("temperature", "sparse", "ahead"),
    [(1, 0.0, 1), (1, 0.5, 1), (1, 1.0, 1), (1, 2.0, 1), (1, 1.0, 3), (1, 2.0, 2), (1, 0.5, 8), (0, 1.0, 3)],
)
def test_rows_that_have_ended_leave_no_trace(
    temperature: float, sparse: float, ahead: int, body: Any, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[20 + i, 30 + i] for i in range(8)]
    lengths = [3, 1, 7, 2, 5, 1, 4, 8]

    def numbers(row: int) -> Callable[[], float]:
        return generator(1, row).random

    alone = [
        write(model, [row], Sampling(temperature, max_new_tokens=length), draws=[numbers(place)], body=body)
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True))
    ]
    wanted = [rollout.responses[0] for rollout in alone]
    monkeypatch.setattr(native, "_SPARSE", sparse)
    together = write(
        model,
        rows,
        Sampling(temperature, max_new_tokens=9),
        draws=[numbers(row) for row in range(8)] if temperature else (),
        body=body,
        stop=wanted.__contains__,
        sync_every=ahead,
    )
    assert together.responses == wanted
    assert together.ended == [True] * 8
    for log_probs, rollout in zip(together.log_probs, alone, strict=True):
        assert log_probs == pytest.approx(rollout.log_probs[0], abs=1e-4)


@pytest.mark.parametrize("body", [PackedBody, PlainBody])
@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("sampling", [Sampling(0.5), Sampling(0.7, 0.8), Sampling(0)], ids=str)
def test_samples_of_a_prompt_are_what_they_would_be_alone(
    sampling: Sampling, ahead: int, body: Any, model: Model
) -> None:
    sampling = replace(sampling, max_new_tokens=6)
    rows = [PROMPT, [5], [3, 4] * 20]
    parents = [0] * 12 + [1] + [2] * 4

    def stop(ids: list[int]) -> bool:
        return sum(ids) % 4 == 0

    def written(**options: Any) -> Rollout:
        draws = streams(len(parents)) if sampling.temperature else ()
        return write(model, sampling=sampling, draws=draws, stop=stop, body=body, vocab_size=7, **options)

    shared = written(rows=rows, parents=parents, sync_every=ahead)
    apart = written(rows=[rows[parent] for parent in parents], sync_every=ahead)
    assert shared.responses == apart.responses
    assert shared.ended == apart.ended
    for found, wanted in zip(shared.log_probs, apart.log_probs, strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)
    if sampling.temperature:  # some ended where others of the same row went on
        assert 1 < len({tuple(ids) for ids in shared.responses[:12]}) < 12
        assert len({len(ids) for ids in shared.responses[:12]}) > 1


def test_samples_are_one_row_of_the_network_until_they_differ(model: Model) -> None:
    body = PackedBody(model)
    rows: list[int] = []
    step = PackedDecoding.step

    class Counted(PackedDecoding):
        def step(self, ids: torch.Tensor) -> torch.Tensor:
            rows.append(len(ids))
            return step(self, ids)

    body.decoding = lambda forward, room: Counted(body, forward, room)  # type: ignore[method-assign, assignment]
    found = sample(
        body,
        body.forward([PROMPT, [5]], prefix=TRUNK),
        vocab_size=7,
        sampling=Sampling(0.5, max_new_tokens=5),
        stop=never,
        draws=streams(20),
        parents=[0] * 12 + [1] * 8,
    )
    beginnings = [
        {(parent, *ids[:place]) for parent, ids in zip([0] * 12 + [1] * 8, found.responses, strict=True)}
        for place in range(1, 5)
    ]
    assert rows == [len(some) for some in beginnings]
    assert 2 < rows[0] < rows[-1] <= 20


# ---------------------------------------------------------------------------------------------------- the end


def test_where_a_response_ends(scripted: Callable[[Sequence[int]], Model]) -> None:
    chain = [10, 11, 12, 13, 14, 15, 16]
    model = scripted(chain)
    rows = [[50, 10], [12], [99, 98, 14], [10]]
    draws = streams(4)

    def stop(ids: list[int]) -> bool:
        return ids[-1] == 15 or ids == [11, 12, 13]

    rollout = write(model, rows, Sampling(max_new_tokens=4), stop=stop, draws=draws)
    assert rollout.responses == [[11, 12, 13], [13, 14, 15], [15], [11, 12, 13]]
    assert rollout.ended == [True] * 4
    for cap in (1, 2):
        rollout = write(model, rows, Sampling(max_new_tokens=cap), stop=stop, draws=draws)
        assert rollout.responses == [[11, 12][:cap], [13, 14][:cap], [15], [11, 12][:cap]]
        assert rollout.ended == [False, False, True, False]
    # an end that comes with the last token is an end
    assert write(model, [[10]], Sampling(max_new_tokens=3), stop=stop, draws=draws[:1]).ended == [True]


def test_padding_of_the_head_is_never_written(model: Model) -> None:
    padded = model.head.weight[model.vocab_size :]
    assert len(padded)
    before = padded.detach().clone()
    with torch.no_grad():
        states = PackedBody(model).forward([PROMPT], prefix=TRUNK).last()
        padded[0] = states[0] * 100  # the largest logit by far
    try:
        assert model.network(torch.tensor([TRUNK + PROMPT])).logits[0, -1].argmax() == model.vocab_size
        rollout = write(model, [PROMPT], Sampling(temperature=0, max_new_tokens=3))
        assert max(rollout.responses[0]) < model.vocab_size
    finally:
        with torch.no_grad():
            padded.copy_(before)


def test_greedy_needs_no_numbers_and_sampling_does(model: Model) -> None:
    assert len(write(model, [PROMPT], Sampling(temperature=0, max_new_tokens=2)).responses[0]) == 2
    with pytest.raises(UsageError, match="random numbers per row"):
        write(model, [PROMPT, PROMPT], Sampling(max_new_tokens=2), draws=streams(1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"max_new_tokens": 0},
    ],
    ids=str,
)
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Sampling(**wrong)


def test_a_pass_with_gradient_can_be_sampled_from_and_trained_with(model: Model) -> None:
    body = PackedBody(model)
    forward = body.forward([PROMPT], prefix=TRUNK)
    sample(
        body, forward, vocab_size=model.vocab_size, sampling=Sampling(max_new_tokens=4), stop=never, draws=streams(1)
    )
    forward.hidden.sum().backward()
    assert model.network.get_input_embeddings().weight.grad[PROMPT[0]].any()
    model.network.zero_grad(set_to_none=True)
