"""Several responses of a prompt share its pass, and equal ones a row: the numbers are those of repeated rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gatespace.config import TrainConfig
from gatespace.files import read
from gatespace.models import Model, load_model
from gatespace.models.body import body_of
from gatespace.rollout import Rollout
from gatespace.tasks import Example, Task, synthetic_task
from gatespace.training.batches import Row
from gatespace.training.rollouts import MicroBatch
from gatespace.training.train import train

from .conftest import Lab, Stepped
from .test_distill import WITH_GAP, assert_is, assert_same_gradient, gated

OFTEN: dict[str, Any] = {"per_prompt": 4, "temperature": 0.6}
"""Low enough for a response to be sampled again."""


def perturbed(folder: str, by: float) -> Model:
    model = load_model(folder)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.network.parameters():
            p += by * p.std() * torch.randn(p.shape, generator=draw)
    return model


@pytest.fixture
def skilled(taught: Path, teacher: Model, synthetic: Task) -> Lab:
    """A student that answers in the right form, so that it answers the same twice."""
    return Lab(perturbed(str(taught / "model"), 0.5), teacher, synthetic, synthetic.train[:40], brief=True)


def assert_same_step(found: Stepped, wanted: Stepped, rel: float = 1e-5) -> None:
    assert found.responses == wanted.responses
    assert found.sources == wanted.sources
    assert sum(one.output.tokens for one in found.scored) == sum(one.output.tokens for one in wanted.scored)
    assert found.loss == pytest.approx(wanted.loss, rel=rel)
    assert_same_gradient(found.gradients, wanted.gradients, rel)


def rows_of(stepped: Stepped) -> int:
    return sum(len(one.part.rows) for one in stepped.scored)


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("micro_tokens", [10**9, 130])
def test_loss_and_gradient_are_those_of_repeated_rows(skilled: Lab, reuse: bool, micro_tokens: int) -> None:
    settings: dict[str, Any] = {"objective": {"gate": list(WITH_GAP)}, "rollout": OFTEN, "reuse": reuse}
    shared = skilled.step(micro_tokens=micro_tokens, **settings)
    apart = skilled.step(share_prompt=False, **settings)
    assert (len(shared.scored) > 1) == (micro_tokens == 130)
    assert rows_of(shared) < rows_of(apart) == 24
    assert_same_step(shared, apart)
    assert_is(skilled, shared, gated(WITH_GAP))


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout": {**OFTEN, "from": {"student": 0.4, "teacher": 0.4, "gold": 0.2}}},
        {"objective": {"gate": list(WITH_GAP), "shuffle": True}},
        {"objective": {"gate": list(WITH_GAP), "support": "hybrid"}, "rollout": {**OFTEN, "top_p": 0.9}},
        {"rollout": {**OFTEN, "max_new_tokens": 1}},
        {"payload": "top_k", "objective": {"gate": "G5", "support": "bucket"}},
        {"packed": False, "rows": 2},
        {"fused": False},
    ],
    ids=["sources", "shuffled", "hybrid", "single tokens", "top k", "plain", "not fused"],
)
def test_whatever_the_settings(skilled: Lab, settings: dict[str, Any]) -> None:
    settings = {"rollout": OFTEN, **settings}
    shared, apart = skilled.step(**settings), skilled.step(share_prompt=False, **settings)
    assert_same_step(shared, apart)
    # A permutation of λ is over all tokens.
    assert (rows_of(shared) < rows_of(apart)) == (not settings.get("objective", {}).get("shuffle", False))


def test_a_bound_on_what_is_decoded_together_does_not_show(skilled: Lab) -> None:
    whole, bounded = (skilled.step(rollout=OFTEN, rollout_tokens=bound) for bound in (10**9, 120))
    assert_same_step(bounded, whole)


@contextmanager
def tokens_through(model: Model) -> Iterator[list[int]]:
    """How many tokens every pass of a network has."""
    found: list[int] = []
    handle = model.network.get_input_embeddings().register_forward_hook(
        lambda module, args, output: found.append(output.shape[:-1].numel())
    )
    yield found
    handle.remove()


@pytest.mark.parametrize("reuse", [True, False])
def test_a_prompt_is_read_once_however_many_responses_it_has(skilled: Lab, reuse: bool) -> None:
    body_of(skilled.student)  # which probes the network once
    passes: list[list[int]] = []
    for per_prompt in (1, 8):
        with tokens_through(skilled.student) as found:
            stepped = skilled.step(rollout={"per_prompt": per_prompt, "temperature": 0.6}, reuse=reuse)
        passes.append(found)
    prompts = passes[0][0]
    assert passes[1][0] == prompts > 100  # what sampling begins with
    further = sum(len(ids) - 1 for one in stepped.scored for ids in one.part.rollout.responses)
    assert rows_of(stepped) > 6
    assert passes[1][-1] <= further + (0 if reuse else prompts)  # the update


@pytest.mark.slow
@pytest.mark.parametrize("micro_tokens", [10**9, 150])
def test_on_the_real_architecture(micro_tokens: int, short_smollm2: Path) -> None:
    task = synthetic_task(size=60)
    place = str(short_smollm2)
    lab = Lab(load_model(place), perturbed(place, 0.25), task, task.train[:3], brief=True)
    settings: dict[str, Any] = {
        "objective": {"gate": list(WITH_GAP)},
        "rollout": {"per_prompt": 4, "temperature": 0.3, "max_new_tokens": 5},
        "rows": 3,
    }
    shared = lab.step(micro_tokens=micro_tokens, **settings)
    apart = lab.step(share_prompt=False, reuse=False, **settings)
    assert rows_of(shared) < rows_of(apart)
    assert_same_step(shared, apart, rel=3e-5)


# ---------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize(
    "engine, more",
    [({}, {}), ({"micro_tokens": 150}, {"staleness": 1, "from": {"student": 0.6, "gold": 0.4}})],
    ids=["one micro-batch", "several, stale"],
)
def test_the_records_of_a_run_are_those_of_repeated_rows(
    train_config: Callable[..., TrainConfig],
    taught: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: dict[str, Any],
    more: dict[str, Any],
) -> None:
    perturbed(str(taught / "model"), 0.5).save(tmp_path / "student")  # answers the same twice
    shared, apart = (
        train_config(
            pair={"student": str(tmp_path / "student")},
            objective={"gate": list(WITH_GAP)},
            rollout={**OFTEN, **more},
            engine=engine,
            trace={"tokens_every": 1, "rollouts": 3},
            optimizer={"lr": 1e-5},  # large steps turn rounding into another token before long
            output=str(tmp_path / name),
        )
        for name in ("shared", "apart")
    )
    summaries = []
    for config, check in ((shared, ""), (apart, "no-prompt")):
        monkeypatch.setenv("GATESPACE_CHECK", check)
        summaries.append(train(config)["run"])
    assert_alike(*summaries)
    assert summaries[0]["rows"] == 3 * 6 * 4
    found, wanted = (read(config.output / "metrics.jsonl") for config in (shared, apart))
    for one, other in zip(found, wanted, strict=True):
        assert_alike(one, other)
    found, wanted = (read(config.output / "tokens.jsonl") for config in (shared, apart))
    assert len(found) == 3 * 3
    for one, other in zip(found, wanted, strict=True):
        values, expected_values = one.pop("values"), other.pop("values")
        for name in ("student_top", "teacher_top"):
            del one[name], other[name]  # where probabilities are equal but for rounding, so is their order
        assert one == other
        assert_alike(values, expected_values)


def assert_alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        close = value if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)
        assert found[name] == close, name


# ---------------------------------------------------------------------------------------------------- merging


def test_equal_responses_of_a_prompt_are_one_row() -> None:
    rows = [Row(i // 3, Example(f"text {i // 3}", None), [i // 3], []) for i in range(6)]
    batch = MicroBatch(rows, [*range(12, 18)], [0, 0, 0, 1, 1, 1])
    batch.rollout = Rollout(
        [[5, 6], [7], [5, 6], [7], [7], [7]],
        [[-0.1, -0.2], [-0.3], [-0.1, -0.2], [-0.4], [-0.4], [0.0]],
        [True, False, True, True, True, True],
    )
    batch.sources = ["student"] * 5 + ["gold"]
    batch.merge()
    assert batch.samples == [0, 1, 0, 2, 2, 3]
    assert batch.rollout.responses == [[5, 6], [7], [7], [7]]
    assert batch.rollout.log_probs == [[-0.1, -0.2], [-0.3], [-0.4], [0.0]]
    assert batch.weights == [[2.0, 2.0], [1.0], [2.0], [1.0]]
    assert batch.sources == ["student", "student", "student", "gold"]
    assert (batch.parents, batch.prompts) == ([0, 0, 1, 1], [[0], [1]])
    assert batch.families == [[[5, 6], [7]], [[7], [7]]]
    assert batch.places == [*range(12, 18)]
