"""Expected rollouts: the student's tree of responses, likeliest first, in place of samples.

A loss that looks at the distributions after a prefix, and not at the token that was sampled there, has the mean

    E_y Σ_t L(y_<t) = Σ_n P(n)·L(n)

over responses y: n are the prefixes after which a token is written, the nodes of the tree, and P(n) is the probability
that the student writes n, a constant for the gradient as it is in sampling. Here the likeliest nodes are found and the
sum is taken over them, without sampling noise.

What the tree leaves out can be sampled, one response per prompt. Let D be the prefixes that leave the tree, each a node
of it and one token more, and R = Σ P(d) over D the mass of the responses that begin with one. Such a response is drawn
with probability P(y)/R, and its nodes from d on count with weight R. A node m outside of the tree, which is or follows
exactly one d, is on it with probability P(m)/R; so it counts R·P(m)/R = P(m) in the mean, and the mean of the whole sum
is the full expectation, whatever the tree covers. A prefix d that ends a response adds nothing: it is no node.
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
"""Nodes whose distributions over the vocabulary, in float64, are in memory together."""
_TOKENS = 64
"""Likeliest tokens of a node that are looked at, or as many as the tree may have nodes where that is more."""
_LEAST = 1e-2
"""Where a tree is full, ended responses of less than this share of what may be left out are not looked for."""
_NOTHING = 1e-12
"""Mass below which float64 cannot tell what is left from rounding."""


@dataclass
class Expansion:
    """The part of one prompt's tree that is learned from."""

    responses: list[list[int]] = field(default_factory=list)
    """Paths that have all nodes, the likeliest first. The last token of each is the likeliest one at its last node.
    Where the rest is sampled its response stands last."""
    weights: list[list[float]] = field(default_factory=list)
    """Of every token, the weight of the node that predicts it; 0 where an earlier path has that node."""
    ended: list[bool] = field(default_factory=list)
    """Whether the response came to an end by itself."""
    nodes: int = 0
    """How many nodes the tree has."""
    finished: float = 0.0
    """Probability that a response comes to an end by itself, of those in the tree and of the sampled rest."""
    uncovered: float = 0.0
    """Mass of the responses that leave the tree. An ended response that the search has not come to counts here too."""


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
    """The likeliest part of every prompt's tree, at temperature 1.

    A prompt's tree grows by its likeliest prefix, of equals by that with the lower token ids, whatever the prompts
    beside it. All prompts share the forward passes; each pass reads, after the KV cache of the prompts, the paths to
    the prefixes that the trees will need next. Reading a path again costs less, where responses are short, than copying
    the KV cache of a prompt for every branch.

    Args:
        body: The body that ran over the prompts.
        forward: Its forward pass over them.
        vocab_size: Ids from here on are padding and have no mass.
        max_new_tokens: The longest response.
        stop: Whether a response, its last token included, is at its end.
        mass: The search is over when ended responses of this mass have been found,
        max_nodes: or when the tree has this many nodes.
        draws: Per prompt, a source of uniform numbers in [0, 1), from which one response of what is left is drawn;
            empty: what is left is left out.
    """
    count = len(forward.cache.lengths)
    if not 0 < mass <= 1 or max_nodes < 1 or max_new_tokens < 1:
        raise UsageError(
            "a tree has a mass in (0, 1], and at least one node and one token", got=(mass, max_nodes, max_new_tokens)
        )
    if draws and len(draws) != count:
        raise UsageError("sampling needs a source of random numbers per row", got=f"{len(draws)} for {count} rows")
    ends = cache(lambda path: stop([*path]))  # the same few prefixes are asked about for every prompt
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
    """The tree of one prompt: a function of `known` alone, not of when that became known."""

    def __init__(self, mass: float, max_nodes: int, longest: int, ends: Callable[[_Prefix], bool]) -> None:
        self._mass, self._max_nodes, self._longest, self._ends = mass, max_nodes, longest, ends
        self._least = _LEAST * (1 - mass)
        self.known: dict[_Prefix, list[tuple[int, float]]] = {}
        """Prefix → its likeliest next tokens and their probabilities, likeliest first."""
        self.nodes: dict[_Prefix, float] = {}
        """Prefix → its probability."""
        self.inside: dict[_Prefix, dict[int, float]] = {}
        """Node → next tokens that lead to nodes and to ended responses, with their mass; see `leaving`."""
        self._finished = 0.0

    def run(self) -> list[_Prefix]:
        """Search as far as distributions are known; the prefixes whose distributions are missing, none at the end.

        A missing prefix counts as a node and its whole mass as covered, and the search goes on. What it asks for then
        will be in the tree, unless likelier continuations of a missing prefix fill it before. All missing prefixes of
        one length are asked for together, so that there are as many rounds as the tree is deep.
        """
        self.nodes, self.inside, self._finished = {}, {}, 0.0
        missing: list[_Prefix] = []
        covered, count = 0.0, 0
        heap: list[tuple[float, _Prefix, int]] = [(-1.0, (), 0)]

        def push(parent: _Prefix, rank: int) -> None:
            # one child of a node at a time: the next one when this one's turn has come
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
                continue  # it stays outside, but a response that follows may have ended
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
        """Mass of the last tokens with which a response ends by itself, and not because it is the longest."""
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
    """Add a response to every expansion that leaves something out; the head of this module says how it is weighted."""
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
    """(N, H) hidden states at the ends of prefixes of every prompt, one prompt after another."""
    # As the states that predict one token more. A prompt that asks for none is given the empty prefix.
    responses = [[[*prefix, 0] for prefix in some or [()]] for some in prefixes]
    states = response_states(body, [()] * len(responses), responses, forward=forward)
    ends = accumulate(len(response) for some in responses for response in some)
    asked = [bool(some) for some in prefixes for _ in some or [()]]
    index = [end - 1 for end, wanted in zip(ends, asked, strict=True) if wanted]
    return states[torch.tensor(index, device=states.device)]


def _likeliest(logits: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` likeliest ids of each row of (N, V) with their probabilities; of equals the lower id comes first."""
    mass = torch.softmax(logits.double(), -1)
    if bool(mass.isnan().any()):
        raise RunError("the student's logits are not finite", instead="a smaller learning rate, or fp32")
    values, ids = mass.topk(count)
    least = values[:, -1:]
    if bool(((mass == least).sum(-1) > (values == least).sum(-1))[least[:, 0] > 0].any()):
        values, ids = mass.sort(stable=True, dim=-1, descending=True)  # `topk` has any of the equals at its end
    else:
        ids, order = ids.sort(-1)
        values, order = values.gather(1, order).sort(stable=True, dim=-1, descending=True)
        ids = ids.gather(1, order)
    pairs = zip(ids[:, :count].tolist(), values[:, :count].tolist(), strict=True)
    return [list(zip(*pair, strict=True)) for pair in pairs]
