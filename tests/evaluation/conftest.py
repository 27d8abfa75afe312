from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gatespace.tasks import Prompt, Task, synthetic_task

if TYPE_CHECKING:
    from gatespace.models import Model, TinyPair


@pytest.fixture(scope="session")
def task() -> Task:
    return synthetic_task(seed=3, size=240)


@pytest.fixture(scope="session")
def prompt(task: Task) -> Prompt:
    return Prompt.of(task, brief=True)


@pytest.fixture(scope="session")
def pair(task: Task, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    from gatespace.models import build_tiny

    return build_tiny(task, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def blank(pair: TinyPair) -> Model:
    """A model that has learnt nothing."""
    from gatespace.models import load_model

    return load_model(str(pair.student))


@pytest.fixture(scope="session")
def trained(pair: TinyPair, task: Task, prompt: Prompt) -> Model:
    """A model that answers in the right form and is right more often than not."""
    import torch

    from gatespace.models import load_model

    model = load_model(str(pair.student))
    draw = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.network.parameters(), lr=3e-3)
    for _ in range(50):
        rows = [task.train[i] for i in torch.randint(len(task.train), (16,), generator=draw).tolist()]
        asked = [prompt.render(model.tokenizer, row.text) for row in rows]
        said = [
            [*model.tokenizer.encode(prompt.gold_response(row.label), add_special_tokens=False), model.end_ids[-1]]
            for row in rows
        ]
        width = max(len(a) + len(b) for a, b in zip(asked, said, strict=True))
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        targets = torch.full_like(ids, -100)
        for place, (a, b) in enumerate(zip(asked, said, strict=True)):
            ids[place, : len(a) + len(b)] = torch.tensor(a + b)
            targets[place, len(a) : len(a) + len(b)] = torch.tensor(b)
        optimizer.zero_grad()
        model.network(input_ids=ids, labels=targets).loss.backward()
        optimizer.step()
    return model
