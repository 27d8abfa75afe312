"""Trees of responses against all responses there are, enumerated in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gatespace.errors import RunError, UsageError
from gatespace.models import Model
from gatespace.models.body import response_states
from gatespace.models.packed import PackedBody
from gatespace.models.plain import PlainBody
from gatespace.rollout.expected import Expansion, expand
from gatespace.rollout.native import Sampling, sample
from gatespace.seeding import generator
from tests.models.architectures import made

PREFIX = [9, 8, 200, 6]
PROMPTS = [[40, 41, 42, 300, 7], [5], [3, 4] * 20]
SIZE, LONGEST = 5, 4
Prefix = tuple[int, ...]


def stop(ids: Sequence[int]) -> bool:
    """Ends at a token, and at a pair of tokens, as a closing brace ends a JSON object."""
    return ids[-1] == 2 or tuple(ids[-2:]) == (0, 3)


@pytest.fixture(scope="module")
def small(model: Model) -> Model:
    return made(model.tokenizer, "Llama", dtype=torch.float64, std=0.35)


def grow(model: Model, kind: Any = PackedBody, prompts: Sequence[Sequence[int]] = PROMPTS, **more: Any) -> Any:
    body = kind(model)
    forward = body.forward(prompts, prefix=PREFIX)
    return expand(body, forward, **{"vocab_size": SIZE, "max_new_tokens": LONGEST, "stop": stop, **more})


@cache
def share(model: Model, prompt: tuple[int, ...]) -> dict[Prefix, Any]:
    """Prefix → the next token's probabilities, by the whole network and NumPy."""
    known: dict[Prefix, Any] = {}
    for length in range(LONGEST):
        prefixes = [*itertools.product(range(SIZE), repeat=length)]
        rows = torch.tensor([[*PREFIX, *prompt, *prefix] for prefix in prefixes])
        with torch.no_grad():
            logits = model.network(rows).logits[:, -1, :SIZE].numpy()
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        known |= zip(prefixes, weights / weights.sum(-1, keepdims=True), strict=True)
    return known


def responses(next_token: dict[Prefix, Any]) -> Iterator[tuple[Prefix, float]]:
    """Every response there is, with its probability."""
    for ids in itertools.product(range(SIZE), repeat=LONGEST):
        ends = next((n for n in range(1, LONGEST) if stop(ids[:n])), LONGEST)
        if any(ids[ends:]):  # the same response was there before, with zeros after its end
            continue
        yield ids[:ends], math.prod(next_token[ids[:n]][ids[n]] for n in range(ends))


def every_node(model: Model, prompt: Sequence[int]) -> dict[Prefix, float]:
    """Prefix → how often it is written from, in the mean over all responses."""
    nodes: dict[Prefix, float] = {}
    for response, probability in responses(share(model, tuple(prompt))):
        for place in range(len(response)):
            nodes[response[:place]] = nodes.get(response[:place], 0.0) + probability
    return nodes


def likeliest_first(model: Model, prompt: Sequence[int], mass: float, most: int) -> tuple[dict[Prefix, float], float]:
    """The tree by its definition: one node after another, all candidates looked at every time."""
    next_token, all_nodes = share(model, tuple(prompt)), every_node(model, prompt)
    nodes: dict[Prefix, float] = {}
    waiting: dict[Prefix, float] = {(): 1.0}
    covered = 0.0
    while waiting and covered < mass:
        best = min(waiting, key=lambda prefix: (-waiting[prefix], prefix))
        probability = waiting.pop(best)
        if best not in all_nodes:  # ended
            covered += probability
        elif len(nodes) < most:
            nodes[best] = probability
            if len(best) == LONGEST - 1:
                covered += probability
            else:
                waiting |= {(*best, token): probability * next_token[best][token] for token in range(SIZE)}
    return nodes, 1 - covered


def weights_of(found: Expansion) -> dict[Prefix, float]:
    """Node → its weight; fails where a node counts twice."""
    nodes: dict[Prefix, float] = {}
    for response, weights in zip(found.responses, found.weights, strict=True):
        for place, weight in enumerate(weights):
            if weight > 0:
                assert tuple(response[:place]) not in nodes
                nodes[tuple(response[:place])] = weight
    return nodes


# ---------------------------------------------------------------------------------------------------- the tree


@pytest.mark.parametrize("kind", [PackedBody, PlainBody])
def test_the_whole_tree_is_the_mean_over_all_responses(kind: Any, small: Model) -> None:
    for prompt, found in zip(PROMPTS, grow(small, kind, mass=1.0, max_nodes=1000), strict=True):
        right = every_node(small, prompt)
        assert weights_of(found) == pytest.approx(right, rel=1e-10)
        assert found.nodes == len(right)
        assert found.uncovered < 1e-12
        # the mean of anything that depends on the prefix alone, here of the length
        mean = sum(len(response) * probability for response, probability in responses(share(small, tuple(prompt))))
        assert sum(map(sum, found.weights)) == pytest.approx(mean)
        assert found.ended == [stop(response) for response in found.responses]
        finished = sum(
            probability for response, probability in responses(share(small, tuple(prompt))) if stop(response)
        )
        assert found.finished == pytest.approx(finished, rel=1e-10)


@pytest.mark.parametrize(("mass", "most"), [(0.3, 99), (0.9, 99), (0.99, 99), (1.0, 7), (0.9, 1), (0.5, 12), (1.0, 40)])
def test_the_likeliest_come_first_up_to_either_limit(mass: float, most: int, small: Model) -> None:
    for prompt, found in zip(PROMPTS, grow(small, mass=mass, max_nodes=most), strict=True):
        nodes, uncovered = likeliest_first(small, prompt, mass, most)
        assert weights_of(found) == pytest.approx(nodes, rel=1e-10)
        assert found.nodes == len(nodes) <= most
        assert found.uncovered == pytest.approx(uncovered, abs=1e-12)
        assert found.uncovered <= 1 - mass + 1e-12 or found.nodes == most


def test_paths_have_every_node_once_and_the_likeliest_comes_first(small: Model) -> None:
    for prompt, found in zip(PROMPTS, grow(small, mass=0.9), strict=True):
        next_token = share(small, tuple(prompt))
        mass = [math.prod(next_token[tuple(ids[:n])][ids[n]] for n in range(len(ids))) for ids in found.responses]
        assert mass == sorted(mass, reverse=True)
        inner = {tuple(ids[:-1]) for ids in found.responses}
        assert len(inner) == len(found.responses) > 3
        for ids in found.responses:
            assert ids[-1] == next_token[tuple(ids[:-1])].argmax()
            assert len(ids) <= LONGEST
            assert not any(stop(ids[:n]) for n in range(1, len(ids)))


def test_a_tree_depends_neither_on_other_prompts_nor_on_the_time(small: Model) -> None:
    together = grow(small, mass=0.9, max_nodes=20)
    assert together == grow(small, mass=0.9, max_nodes=20)
    for prompt, found in zip(PROMPTS, together, strict=True):
        (alone,) = grow(small, prompts=[prompt], mass=0.9, max_nodes=20)
        assert alone.responses == found.responses
        assert [w for row in alone.weights for w in row] == pytest.approx([w for row in found.weights for w in row])


def test_of_equals_the_lower_ids_come_first(small: Model) -> None:
    flat = made(small.tokenizer, "Llama", dtype=torch.float64)
    with torch.no_grad():
        flat.head.weight.zero_()
    for found in grow(flat, mass=1.0, max_nodes=5):
        assert set(weights_of(found)) == {(), (0,), (1,), (3,), (4,)}  # 2 ends
        assert found.responses == [[0, 0], [1, 0], [3, 0], [4, 0]]
    for size in (SIZE, 100):  # of which not all are looked at
        for found in grow(flat, mass=1.0, max_nodes=3, vocab_size=size):
            assert found.responses == [[0, 0], [1, 0]]


def test_a_response_of_one_token_is_the_root_alone(small: Model) -> None:
    for found in grow(small, max_new_tokens=1):
        assert (found.nodes, found.weights, found.uncovered) == (1, [[1.0]], 0.0)


def test_a_pass_reads_the_paths_that_it_needs(small: Model) -> None:
    body, seen = PackedBody(small), []
    forward = body.forward(PROMPTS, prefix=PREFIX)
    run = body._run
    body._run = lambda ids, *rest: seen.append(len(ids)) or run(ids, *rest)  # type: ignore[method-assign]
    found = expand(body, forward, vocab_size=SIZE, max_new_tokens=LONGEST, stop=stop, mass=0.9)
    # the root is known from the pass over the prompts; a pass per level, not per node
    assert len(seen) <= LONGEST + 2
    assert sum(one.nodes - 1 for one in found) <= sum(seen)


@pytest.mark.parametrize("wrong", [{"mass": 0.0}, {"mass": 1.1}, {"max_nodes": 0}, {"draws": [lambda: 0.5]}])
def test_wrong_settings_are_refused(wrong: dict[str, Any], small: Model) -> None:
    with pytest.raises(UsageError):
        grow(small, **wrong)


def test_logits_that_are_not_finite_are_an_error(small: Model) -> None:
    broken = made(small.tokenizer, "Llama", dtype=torch.float64)
    with torch.no_grad():
        broken.head.weight[3] = math.nan
    with pytest.raises(RunError, match="not finite"):
        grow(broken)


# ---------------------------------------------------------------------------------------------------- sampling


def streams(count: int, seed: int = 0) -> list[Callable[[], float]]:
    return [generator(seed, "rollout", row).random for row in range(count)]


@pytest.mark.parametrize("most", [1, 4])
def test_what_is_left_is_sampled_without_bias(most: int, small: Model) -> None:
    prompt, count = PROMPTS[0], 2000
    right, (tree,) = every_node(small, prompt), grow(small, prompts=[prompt], max_nodes=most)
    inside, left = weights_of(tree), tree.uncovered
    assert 0.2 < left < 1
    found = grow(small, prompts=[prompt] * count, max_nodes=most, draws=streams(count))
    hits = dict.fromkeys(right, 0)
    for one in found:
        assert one.uncovered == pytest.approx(left)
        for node, weight in weights_of(one).items():
            if node not in inside:
                assert weight == one.uncovered
                hits[node] += 1
            else:
                assert weight == pytest.approx(right[node])
        for ids in one.responses:
            ends = [n for n in range(1, len(ids) + 1) if stop(ids[:n])]
            assert not ends or ends == [len(ids)]
        assert all(one.ended[i] == stop(ids) for i, ids in enumerate(one.responses))
    outside = [node for node in right if node not in inside]
    assert len(outside) > 50
    for node in outside:
        # Binomial; 5 standard deviations, and a little where a node is hardly ever met.
        chance = right[node] / left
        assert abs(hits[node] - count * chance) <= 5 * math.sqrt(count * chance) + 2, node
    # The same counts tell responses that leave the tree from responses of any kind.
    mean = sum(right[node] for node in outside)
    assert sum(hits.values()) / count == pytest.approx(mean / left, rel=0.03)
    assert sum(hits.values()) / count != pytest.approx(mean, rel=0.03)


def test_a_sample_of_the_rest_repeats_and_is_the_rows_own(small: Model) -> None:
    def run(prompts: list[list[int]], draws: list[Callable[[], float]]) -> Any:
        return grow(small, prompts=prompts, max_nodes=2, draws=draws)

    together = run(PROMPTS, streams(3))
    assert together == run(PROMPTS, streams(3))
    assert together != run(PROMPTS, streams(3, seed=1))
    assert [one.responses for one in run(PROMPTS[1:], streams(3)[1:])] == [one.responses for one in together[1:]]


def test_nothing_is_sampled_where_nothing_is_left(small: Model) -> None:
    whole = grow(small, mass=1.0, max_nodes=1000)
    assert grow(small, mass=1.0, max_nodes=1000, draws=streams(3)) == whole


# ---------------------------------------------------------------------------------------------------- gradients


def losses(model: Model, states: Tensor) -> Tensor:
    """(N,) reverse KL to a teacher that prefers low ids: an arbitrary loss of the distributions alone."""
    log_s = model.head.logits(states).double()[:, :SIZE].log_softmax(-1)
    log_t = torch.linspace(1.0, -1.0, SIZE, dtype=torch.float64).log_softmax(-1)
    return (log_s.exp() * (log_s - log_t)).sum(-1)


def gradient(model: Model, prompt: list[int], found: Sequence[Sequence[int]], weights: Any) -> Tensor:
    """Of the weighted sum of losses at all nodes of some responses."""
    model.network.zero_grad()
    states = response_states(PackedBody(model), [prompt], [found], prefix=PREFIX)
    (losses(model, states) * torch.as_tensor([w for row in weights for w in row])).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.network.parameters() if p.grad is not None])


def test_sampled_gradients_converge_to_the_expected_one(small: Model) -> None:
    prompt, count = PROMPTS[0], 3000
    body = PackedBody(small)
    with torch.no_grad():
        forward = body.forward([prompt] * count, prefix=PREFIX)
    sampled = sample(
        body,
        forward,
        vocab_size=SIZE,
        sampling=Sampling(max_new_tokens=LONGEST),
        stop=stop,
        draws=streams(count),
    ).responses
    # one gradient per distinct response, along a few directions
    draw = torch.Generator().manual_seed(1)
    width = sum(p.numel() for p in small.network.parameters())
    directions = torch.randn(6, width, generator=draw, dtype=torch.float64)
    along = {
        ids: directions @ gradient(small, prompt, [ids], [[1.0] * len(ids)]) for ids in {tuple(ids) for ids in sampled}
    }
    values = torch.stack([along[tuple(ids)] for ids in sampled])
    mean, error = values.mean(0), values.std(0) / math.sqrt(count)

    def distance(weights: Any, found: Expansion) -> float:
        expected = directions @ gradient(small, prompt, found.responses, weights)
        return float(((expected - mean) / error).abs().max())

    (whole,) = grow(small, prompts=[prompt], mass=1.0, max_nodes=1000)
    assert distance(whole.weights, whole) < 4
    # The same samples tell it from a tree that leaves a part out, and from one whose nodes all count alike.
    (part,) = grow(small, prompts=[prompt], mass=0.7)
    assert distance(part.weights, part) > 4
    assert distance([[float(w > 0) for w in row] for row in whole.weights], whole) > 4
