"""Expected rollouts: the most probable part of the student's response tree, instead of samples.

A loss that depends only on the distributions after a prefix, not on the token sampled there, has the expectation

    E_y Σ_t L(y_<t) = Σ_n P(n)·L(n)

over responses y, where the nodes n of the tree are the prefixes after which a token is generated, and P(n) is the
student's probability of n, without gradient as in sampling. This module finds the most probable nodes and sums over
them, without sampling noise.

The rest can be sampled, one response per prompt. Let D be the prefixes that leave the tree, each a node plus one token,
and R = Σ P(d) over D the mass of the responses that begin with one. Such a response is drawn with probability P(y)/R,
and its nodes from d on get weight R. A node m outside the tree, which equals or extends exactly one d, is on it with
probability P(m)/R, so its expected weight is R·P(m)/R = P(m): the estimate of the full expectation is unbiased,
whatever the tree covers. A prefix d that ends a response adds nothing: it is not a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from itertools import accumulate

import torch
from torch import Tensor

from gatespace.errors import RunError, UsageError
from gatespace.models.body import Body, Forward, response_states
from gatespace.rollout.native import Sampling, choose, next_logits, sample

_Prefix = tuple[int, ...]
_AT_ONCE = 64
"""Nodes whose float64 distributions over the vocabulary are in memory at once."""
_TOKENS = 64
"""Most probable tokens considered per node, or `max_nodes` if that is larger."""
_LEAST = 1e-2
"""In a full tree, ended responses below this share of the mass that may be left out are not searched for."""
_NOTHING = 1e-12
"""Remaining mass below this is indistinguishable from float64 rounding."""


@dataclass
class Expansion:
    """The part of one prompt's tree to train on."""

    responses: list[list[int]] = field(default_factory=list)
    """Paths that cover all nodes, most probable first. Each ends with the most probable token at its last node. A
    sampled rest comes last."""
    weights: list[list[float]] = field(default_factory=list)
    """Per token, the weight of the node that predicts it; 0 if an earlier path has that node."""
    ended: list[bool] = field(default_factory=list)
    """Whether the response ended by itself."""
    nodes: int = 0
    """Number of nodes in the tree."""
    finished: float = 0.0
    """Probability that a response ends by itself, over the tree and the sampled rest."""
    uncovered: float = 0.0
    """Mass of the responses that leave the tree, including ended responses that the search did not reach."""


@torch.no_grad()
def expand(
    body: Body,
    forward: Forward,
    *,
    vocab_size: int,
    max_new_tokens: int,
    stop: Callable[[list[int]], bool],
    mass: float = 0.99,
    max_nodes: int = 64,
    draws: Sequence[Callable[[], float]] = (),
) -> list[Expansion]:
    """Return the most probable part of every prompt's tree, at temperature 1.

    A tree grows by its most probable prefix (ties: lower token ids), independently of the other prompts. All prompts
    share the forward passes; each pass appends to the prompts' KV cache the paths to the prefixes that the trees need
    next. For short responses, recomputing a path is cheaper than copying a prompt's KV cache for every branch.

    Args:
        body: The body that ran over the prompts.
        forward: Its forward pass over them.
        vocab_size: Ids from here on are padding and have no mass.
        max_new_tokens: Maximum response length.
        stop: Whether a response, including its last token, is complete.
        mass: Stop when ended responses of this mass have been found,
        max_nodes: or when the tree has this many nodes.
        draws: Per prompt, a source of uniform numbers in [0, 1) for sampling one response of the rest; empty: the
            rest is left out.
    """
    count = len(forward.cache.lengths)
    if not 0 < mass <= 1 or max_nodes < 1 or max_new_tokens < 1:
        raise UsageError(
            "a tree has a mass in (0, 1], and at least one node and one token", got=(mass, max_nodes, max_new_tokens)
        )
    if draws and len(draws) != count:
        raise UsageError("sampling needs a source of random numbers per row", got=f"{len(draws)} for {count} rows")
    ends = cache(lambda path: stop([*path]))  # all prompts query the same few prefixes
    looked_at = min(vocab_size, max(max_nodes, _TOKENS))
    searches = [_Search(mass, max_nodes, max_new_tokens, ends) for _ in range(count)]
    wanted: list[list[_Prefix]] = [[()] for _ in searches]
    while any(wanted := [search.run() if before else [] for search, before in zip(searches, wanted, strict=True)]):
        states = _states(body, forward, wanted)
        found = [
            tokens
            for some in states.split(_AT_ONCE)
            for tokens in _likeliest(next_logits(some, body.model.head, vocab_size), looked_at)
        ]
        places = iter(found)
        for search, prefixes in zip(searches, wanted, strict=True):
            for prefix in prefixes:
                search.known[prefix] = next(places)
    expansions = [search.result() for search in searches]
    if draws:
        sampling = Sampling(max_new_tokens=max_new_tokens)
        _sample_rest(
            body,
            forward,
            searches,
            expansions,
            vocab_size=vocab_size,
            sampling=sampling,
            stop=stop,
            draws=draws,
        )
    return expansions


class _Search:
    """The tree of one prompt: a function of `known` alone, not of the order in which it was filled."""

    def __init__(self, mass: float, max_nodes: int, longest: int, ends: Callable[[_Prefix], bool]) -> None:
        self._mass, self._max_nodes, self._longest, self._ends = mass, max_nodes, longest, ends
        self._least = _LEAST * (1 - mass)
        self.known: dict[_Prefix, list[tuple[int, float]]] = {}
        """Prefix → its top next tokens and their probabilities, most probable first."""
        self.nodes: dict[_Prefix, float] = {}
        """Prefix → its probability."""
        self.inside: dict[_Prefix, dict[int, float]] = {}
        """Node → next tokens that lead to nodes or ended responses, with their mass; see `leaving`."""
        self._finished = 0.0

    def run(self) -> list[_Prefix]:
        """Search as far as distributions are known; return the prefixes whose distributions are missing, if any.

        A missing prefix counts as a node and its whole mass as covered, and the search goes on. The prefixes requested
        then will be in the tree, unless more probable continuations of a missing prefix fill it first. All missing
        prefixes of one length are requested together, so there are as many rounds as the tree is deep.
        """
        self.nodes, self.inside, self._finished = {}, {}, 0.0
        missing: list[_Prefix] = []
        covered, count = 0.0, 0
        heap: list[tuple[float, _Prefix, int]] = [(-1.0, (), 0)]

        def push(parent: _Prefix, rank: int) -> None:
            # one child of a node at a time: the next is pushed when this one is popped
            tokens = self.known[parent]
            if rank < len(tokens) and (probability := self.nodes[parent] * tokens[rank][1]) > 0:
                heappush(heap, (-probability, (*parent, tokens[rank][0]), rank))

        while heap and covered < self._mass:
            minus, prefix, rank = heappop(heap)
            probability, parent = -minus, prefix[:-1]
            if prefix:
                push(parent, rank + 1)
            if prefix and self._ends(prefix):
                covered, self._finished = covered + probability, self._finished + probability
            elif count == self._max_nodes:
                if missing or probability < self._least:
                    break
                continue  # outside the tree, but a later prefix may be an ended response
            elif prefix not in self.known:
                missing.append(prefix)
                covered, count = covered + probability, count + 1
                continue
            else:
                self.nodes[prefix], self.inside[prefix] = probability, {}
                count += 1
                if len(prefix) + 1 == self._longest:  # every token ends the response
                    covered += probability
                    self._finished += self._ended_after(prefix)
                else:
                    push(prefix, 0)
            if prefix:
                self.inside[parent][prefix[-1]] = probability
        return missing

    def _ended_after(self, node: _Prefix) -> float:
        """Mass of the last tokens that end a response by themselves, not by its maximum length."""
        shares = ((token, self.nodes[node] * share) for token, share in self.known[node])
        return math.fsum(mass for token, mass in shares if mass > self._least and self._ends((*node, token)))

    def leaving(self) -> dict[_Prefix, float]:
        """Node → the mass of responses that leave the tree there."""
        return {
            node: max(0.0, probability - math.fsum(self.inside[node].values()))
            for node, probability in self.nodes.items()
            if len(node) + 1 < self._longest
        }

    def result(self) -> Expansion:
        last = self.nodes.keys() - {node[:-1] for node in self.nodes if node}
        paths = [(-self.nodes[node] * self.known[node][0][1], (*node, self.known[node][0][0])) for node in last]
        left = math.fsum(self.leaving().values())
        found = Expansion(nodes=len(self.nodes), finished=self._finished, uncovered=left)
        counted: set[_Prefix] = set()
        for _, path in sorted(paths):
            nodes = [path[:place] for place in range(len(path))]
            found.responses.append([*path])
            found.weights.append([0.0 if node in counted else self.nodes[node] for node in nodes])
            found.ended.append(self._ends(path))
            counted.update(nodes)
        return found


def _sample_rest(
    body: Body,
    forward: Forward,
    searches: Sequence[_Search],
    expansions: Sequence[Expansion],
    *,
    vocab_size: int,
    sampling: Sampling,
    stop: Callable[[list[int]], bool],
    draws: Sequence[Callable[[], float]],
) -> None:
    """Add a sampled response to every expansion with uncovered mass; weights as in the module docstring."""
    nodes: list[_Prefix] = []
    for search, draw in zip(searches, draws, strict=True):
        leaving = search.leaving()
        sums = [*accumulate(leaving.values())]
        point = draw() * sums[-1] if sums else 0.0
        nodes.append(next((node for node, upto in zip(leaving, sums, strict=True) if upto > point), ()))
    logits = next_logits(_states(body, forward, [[node] for node in nodes]), body.model.head, vocab_size)
    for row, (search, node) in enumerate(zip(searches, nodes, strict=True)):
        logits[row, [*search.inside[node]]] = -math.inf
    uniform = torch.tensor([[draw()] for draw in draws], dtype=torch.float64, device=logits.device)
    tokens, _ = choose(logits, sampling, uniform)
    begun = [[*node, *token] for node, token in zip(nodes, tokens.tolist(), strict=True)]
    rows = []
    for row, found in enumerate(expansions):
        if found.uncovered > _NOTHING:
            if stop(begun[row]):
                found.finished += found.uncovered
            else:
                rows.append(row)
    if not rows:
        return
    rollout = sample(
        body,
        forward,
        vocab_size=vocab_size,
        sampling=sampling,
        stop=stop,
        draws=[draws[row] for row in rows],
        parents=rows,
        begun=[begun[row] for row in rows],
    )
    for row, response, ended in zip(rows, rollout.responses, rollout.ended, strict=True):
        found, inside = expansions[row], len(begun[row])
        found.responses.append(response)
        found.weights.append([0.0] * inside + [found.uncovered] * (len(response) - inside))
        found.ended.append(ended)
        found.finished += found.uncovered * ended


def _states(body: Body, forward: Forward, prefixes: Sequence[Sequence[_Prefix]]) -> Tensor:
    """(N, H) hidden states at the ends of the prefixes, prompt by prompt."""
    # The states that predict one more token. A prompt without prefixes gets the empty one.
    responses = [[[*prefix, 0] for prefix in some or [()]] for some in prefixes]
    states = response_states(body, [()] * len(responses), responses, forward=forward)
    ends = accumulate(len(response) for some in responses for response in some)
    asked = [bool(some) for some in prefixes for _ in some or [()]]
    index = [end - 1 for end, wanted in zip(ends, asked, strict=True) if wanted]
    return states[torch.tensor(index, device=states.device)]


def _likeliest(logits: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Top `count` ids of each row of (N, V) with their probabilities; ties: the lower id first."""
    mass = torch.softmax(logits.double(), -1)
    if bool(mass.isnan().any()):
        raise RunError("the student's logits are not finite", instead="a smaller learning rate, or fp32")
    values, ids = mass.topk(count)
    least = values[:, -1:]
    if bool(((mass == least).sum(-1) > (values == least).sum(-1))[least[:, 0] > 0].any()):
        values, ids = mass.sort(stable=True, dim=-1, descending=True)  # `topk` breaks ties at its end arbitrarily
    else:
        ids, order = ids.sort(-1)
        values, order = values.gather(1, order).sort(stable=True, dim=-1, descending=True)
        ids = ids.gather(1, order)
    pairs = zip(ids[:, :count].tolist(), values[:, :count].tolist(), strict=True)
    return [list(zip(*pair, strict=True)) for pair in pairs]
