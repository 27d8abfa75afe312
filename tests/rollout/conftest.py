"""A tiny pair, one that writes what it is told to, and the real texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch

from gatespace.models import Model, TinyPair, load_model


@pytest.fixture(scope="session")
def model(tiny: TinyPair) -> Model:
    return load_model(str(tiny.teacher))


@pytest.fixture
def scripted(tiny: TinyPair) -> Callable[[Sequence[int]], Model]:
    """A model that, after any token of a chain, gives nearly all mass to the next one of the chain."""

    def write(chain: Sequence[int]) -> Model:
        model = load_model(str(tiny.teacher))
        with torch.no_grad():
            for name, parameter in model.network.named_parameters():
                if "o_proj" in name or "down_proj" in name:  # nothing but the token itself counts
                    parameter.zero_()
            embedding, head = model.network.get_input_embeddings().weight, model.head.weight
            head.zero_()
            for axis, (token, following) in enumerate(pairwise(chain)):
                embedding[token] = 0
                embedding[token, axis] = 1
                head[following, axis] = 2  # the final norm makes it 2·√128 ≈ 22.6
        return model

    return write
