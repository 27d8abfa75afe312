"""The sampler, against scripted servers that load new weights: all of them, or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gatespace.addons.vllm.sampler import VllmSampler, save_untied
from gatespace.errors import RunError, UsageError
from gatespace.models import Model, load_model
from gatespace.rollout import Sampling
from tests.addons.vllm.scripted import Reply, Scripted

GREEDY = Sampling(temperature=0, max_new_tokens=4)
PROMPTS = [[5, 9, 11, 7], [5, 9, 11, 21, 22]]


@pytest.fixture
def folder(tiny: Model) -> str:
    """Of a model whose head is tied to its embedding."""
    return str(Path(tiny.name).with_name("student"))


@pytest.fixture
def student(folder: str) -> Model:
    return load_model(folder)


@pytest.fixture
def server(folder: str) -> Iterator[Scripted]:
    with Scripted(load_model(folder), all_rows=True, weights=True) as server:
        yield server


def opened(server: Scripted, student: Model, folder: Path | None = None, *, rehearse: bool = True) -> VllmSampler:
    return VllmSampler(server.address, student, folder, rehearse=rehearse, patience=20.0)


def change(model: Model) -> None:
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.add_(parameter.roll(1, 0), alpha=0.3)


def test_a_folder_with_an_untied_head_has_the_same_weights(student: Model, tmp_path: Path) -> None:
    network: Any = student.network
    assert network.get_input_embeddings().weight is network.get_output_embeddings().weight
    save_untied(student, tmp_path / "untied")
    untied: Any = load_model(str(tmp_path / "untied")).network
    assert untied.get_input_embeddings().weight is not untied.get_output_embeddings().weight
    ids = torch.tensor(PROMPTS[:1])
    assert torch.equal(untied(input_ids=ids).logits, network(input_ids=ids).logits)
    assert network.config.tie_word_embeddings


def test_the_server_samples_with_the_weights_of_the_last_sync(server: Scripted, student: Model, tmp_path: Path) -> None:
    with opened(server, student, tmp_path) as sampler:
        change(student)
        assert sampler.sync() < 1e-3
        rollout = sampler.sample(PROMPTS, sampling=GREEDY, stop=lambda ids: False)
        network: Any = student.network
        for prompt, ids, log_probs in zip(PROMPTS, rollout.responses, rollout.log_probs, strict=True):
            with torch.no_grad():
                logits = network(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits[:, : student.vocab_size].float(), -1)
            assert expected.argmax(-1).tolist() == ids
            torch.testing.assert_close(torch.tensor(log_probs), expected.max(-1).values, atol=1e-3, rtol=0)
    assert not list(tmp_path.iterdir())  # weights do not stay on the disk


def test_responses_end_where_stop_says(server: Scripted, student: Model) -> None:
    with opened(server, student) as sampler:
        whole = sampler.sample(PROMPTS, sampling=GREEDY, stop=lambda ids: False)
        cut = sampler.sample(PROMPTS, sampling=GREEDY, stop=lambda ids: len(ids) == 2)
    assert cut.responses == [ids[:2] for ids in whole.responses]
    assert [len(values) for values in cut.log_probs] == [2, 2]
    assert (cut.ended, whole.ended) == ([True, True], [False, False])


def test_a_server_that_keeps_its_old_head_is_refused(server: Scripted, student: Model, tmp_path: Path) -> None:
    """As vLLM's CPU build does with tied weights. The rehearsal finds it before there is any update."""
    old = student.head.weight.detach().clone()

    def load(body: dict[str, Any]) -> Any:
        reply = server.load(body)
        with torch.no_grad():
            server.model.head.weight.copy_(old)
        return reply

    server.script["/collective_rpc"] = load
    with opened(server, student, tmp_path, rehearse=False):
        pass  # before an update the old head is the right one
    with pytest.raises(RunError, match="does not have the weights of"):
        opened(server, student, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_server_without_development_mode_takes_no_weights(scripted: Scripted, student: Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="VLLM_SERVER_DEV_MODE"):
        opened(scripted, student, tmp_path)


def test_weights_are_sent_again_after_an_interruption(server: Scripted, student: Model, tmp_path: Path) -> None:
    old = server.model
    change(student)
    with opened(server, student, tmp_path) as sampler:
        expected = sampler.sample(PROMPTS, sampling=GREEDY, stop=lambda ids: False)
        left = [Reply(head=b"")]

        def restarted(body: dict[str, Any]) -> Any:
            if left:
                server.model = old  # it has come back with the weights that it was started with
                return left.pop()
            return server.complete(body)

        server.script["/v1/completions"] = restarted
        found = sampler.sample(PROMPTS, sampling=GREEDY, stop=lambda ids: False)
    assert found.log_probs == expected.log_probs


BAD = {
    "no log-probability": {"logprobs": {"token_logprobs": [None] * 4}},
    "more than 1": {"logprobs": {"token_logprobs": [0.5] * 4}},
    "too many tokens": {"token_ids": [3] * 9, "logprobs": {"token_logprobs": [-1.0] * 9}},
    "padding": {"token_ids": [3, 3, 3, 1 << 20]},
    "an early end": {"token_ids": [3], "logprobs": {"token_logprobs": [-1.0]}},
    "nothing": {"token_ids": None},
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_response_is_an_error(name: str, server: Scripted, student: Model) -> None:
    with opened(server, student) as sampler:

        def bad(body: dict[str, Any]) -> Any:
            found = server.complete(body)
            found["choices"][0].update(BAD[name])
            return found

        server.script["/v1/completions"] = bad
        with pytest.raises(RunError, match="the vLLM server"):
            sampler.sample(PROMPTS, sampling=GREEDY, stop=lambda ids: False)
