"""A real vLLM server with SmolLM2: its scores, its samples, and whether it takes new weights.

These need an environment with vLLM (`make test-vllm`) and are skipped where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gatespace.addons.vllm.process import VllmProcess
from gatespace.addons.vllm.sampler import VllmSampler, save_untied
from gatespace.addons.vllm.server import RefusedError, VllmServer
from gatespace.addons.vllm.teacher import VllmTeacher
from gatespace.errors import RunError, UsageError
from gatespace.gating.tokens import TeacherTopK
from gatespace.models import Model, build_tiny, load_model
from gatespace.rollout import Sampling
from gatespace.seeding import stream
from gatespace.tasks import synthetic_task
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import ScoreSpec, TeacherAwayError
from tests.addons.vllm.scripted import members

pytestmark = pytest.mark.slow

K = 12
TEXTS = ["I am so happy today", "what a terrible, terrible film", "nothing to see here @user #tag"]
ANSWERS = ['joy"}', 'anger"}', "neutral, perhaps"]


@pytest.fixture(scope="module")
def rows(student: Model) -> tuple[list[int], list[list[int]], list[list[int]]]:
    encode = student.tokenizer.encode
    prefix = encode("Classify the emotion of a tweet.\nTweet: ")
    return prefix, [encode(f'{text}\n{{"label": "') for text in TEXTS], [encode(answer) for answer in ANSWERS]


@pytest.fixture(scope="module")
def untied(vllm_python: str, student: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    """SmolLM2 with a head of its own."""
    place = tmp_path_factory.mktemp("untied")
    save_untied(student, place / "model")
    log = place / "vllm.log"
    options = ["--logprobs-mode", "processed_logprobs"]
    with VllmProcess(vllm_python, place / "model", log=log, dtype="float32", weights=True, options=options) as process:
        yield process


@torch.no_grad()
def log_probs(model: Model, whole: list[int]) -> Tensor:
    """(T-1, V) by transformers alone."""
    network: Any = model.network
    return torch.log_softmax(network(input_ids=torch.tensor([whole])).logits[0, :-1].float(), -1)


def spec(prefix: list[int], model: Model, k: int = K) -> ScoreSpec:
    return ScoreSpec(tuple(prefix), 32, model.vocab_size, "top_k", k)


# ---------------------------------------------------------------------------------------------------- scores


def test_scores_equal_transformers(served: VllmProcess, student: Model, rows: Any) -> None:
    prefix, prompts, responses = rows
    with VllmTeacher(served.address, spec(prefix, student), student.tokenizer) as teacher:
        found = teacher.score(prompts, responses).payload
        assert teacher.vocab_size == student.vocab_size
    assert isinstance(found, TeacherTopK)
    assert found.sampled_log_probs is not None
    place, outside = 0, 0
    for prompt, response in zip(prompts, responses, strict=True):
        expected = log_probs(student, [*prefix, *prompt, *response])[-len(response) :]
        for position, token in zip(expected, response, strict=True):
            values, ids = position.topk(K)
            torch.testing.assert_close(found.log_probs[0, place], values, atol=1e-3, rtol=0)
            assert (found.log_probs[0, place].diff() <= 0).all()
            torch.testing.assert_close(position[found.ids[0, place]], values, atol=1e-3, rtol=0)
            torch.testing.assert_close(found.sampled_log_probs[0, place], position[token], atol=1e-3, rtol=0)
            outside += token not in ids.tolist()
            place += 1
    assert place == found.ids.shape[1]
    assert outside > 0  # tokens that are scored although they are not in the top-k


def test_scores_equal_the_teacher_in_this_process(served: VllmProcess, student: Model, rows: Any) -> None:
    prefix, prompts, responses = rows
    local = LocalTeacher(student, spec(prefix, student)).score(prompts, responses).payload
    with VllmTeacher(served.address, spec(prefix, student), student.tokenizer) as teacher:
        found = teacher.score(prompts, responses).payload
    assert isinstance(local, TeacherTopK)
    assert isinstance(found, TeacherTopK)
    assert torch.equal(found.ids, local.ids)
    torch.testing.assert_close(found.log_probs, local.log_probs, atol=1e-3, rtol=0)
    torch.testing.assert_close(found.sampled_log_probs, local.sampled_log_probs, atol=1e-3, rtol=0)


def test_another_tokenizer_is_refused(served: VllmProcess, tmp_path: Path) -> None:
    tiny = load_model(str(build_tiny(synthetic_task(size=600), tmp_path).teacher))
    with pytest.raises(UsageError, match="another tokenizer"):
        VllmTeacher(served.address, spec([5], tiny, 4), tiny.tokenizer)


def test_a_larger_k_names_the_flag(served: VllmProcess, student: Model) -> None:
    with pytest.raises(UsageError, match="--max-logprobs 17"):
        VllmTeacher(served.address, spec([5], student, 17), student.tokenizer)


# ---------------------------------------------------------------------------------------------------- weights


def test_a_tied_head_that_stays_old_is_noticed(
    served: VllmProcess, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = load_model(str(smollm2))
    with VllmSampler(served.address, learner, tmp_path, rehearse=False) as sampler:
        with torch.no_grad():
            learner.head.weight.mul_(1.1)
        with monkeypatch.context() as patch:
            # A normal folder has the shared matrix once, as the embedding; vLLM loads it and says nothing.
            patch.setattr("gatespace.addons.vllm.sampler.save_untied", lambda model, folder, dtype: model.save(folder))
            with pytest.raises(RunError, match="does not have the weights of"):
                sampler.sync()
        assert sampler.sync() < 1e-3
    with VllmSampler(served.address, load_model(str(smollm2)), tmp_path) as sampler:  # for the other tests
        assert sampler.sync() < 1e-3


def test_new_weights_are_seen(untied: VllmProcess, student: Model, smollm2: Path, tmp_path: Path, rows: Any) -> None:
    prefix, prompts, _ = rows
    learner = load_model(str(smollm2))
    asked = [[*prefix, *prompt] for prompt in prompts]
    greedy = Sampling(temperature=0, max_new_tokens=6)
    with VllmSampler(untied.address, learner, tmp_path) as sampler:
        before = sampler.sample(asked, sampling=greedy, stop=lambda ids: False)
        target = learner.tokenizer.encode(" zebra")[0]
        with torch.no_grad():  # the head and the embedding are one: both change
            weight = learner.head.weight
            weight[target] += 0.3 * weight[before.responses[0][0]]
            learner.network.model.layers[3].mlp.down_proj.weight.mul_(1.5)  # type: ignore[union-attr, index]
        assert sampler.sync() < 2e-3
        after = sampler.sample(asked, sampling=greedy, stop=lambda ids: False)
        for prompt, ids, found in zip(asked, after.responses, after.log_probs, strict=True):
            expected = log_probs(learner, [*prompt, *ids])[-len(ids) :]
            assert expected.argmax(-1).tolist() == ids
            torch.testing.assert_close(torch.tensor(found), expected.max(-1).values, atol=2e-3, rtol=0)
        assert after.log_probs != before.log_probs


def test_a_server_that_lost_the_weights_is_not_sampled_from(
    untied: VllmProcess, student: Model, tmp_path: Path
) -> None:
    with VllmSampler(untied.address, student, tmp_path / "weights", rehearse=False) as sampler:
        # somebody else gives the server other weights: what the next check compares is no longer the student
        other = load_model(student.source if Path(student.source).is_dir() else str(student.name))
        with torch.no_grad():
            other.head.weight.mul_(1.1)
        save_untied(other, tmp_path / "other")
        with VllmServer(untied.address) as server:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "other")}}
            server.command("/collective_rpc", body)
        with pytest.raises(RunError, match="does not have the weights of"):
            VllmSampler(untied.address, student)
        assert sampler.sync() < 2e-3


def test_weights_of_another_shape_are_refused(untied: VllmProcess, student: Model, tmp_path: Path) -> None:
    tiny = load_model(str(build_tiny(synthetic_task(size=600), tmp_path / "tiny").teacher))
    with pytest.raises((RefusedError, RunError)):
        VllmSampler(untied.address, tiny, tmp_path / "weights", rehearse=False)
    with VllmSampler(untied.address, student, tmp_path / "weights", rehearse=False) as sampler:
        assert sampler.sync() < 2e-3


# ---------------------------------------------------------------------------------------------------- samples


def test_samples_have_the_log_probs_they_were_drawn_with(
    untied: VllmProcess, student: Model, tmp_path: Path, rows: Any
) -> None:
    prefix, prompts, _ = rows
    asked = [[*prefix, *prompts[i % 3]] for i in range(9)]
    seeds = [stream(7, "rollout", 0, place) for place in range(9)]
    ends = set(student.end_ids)
    with VllmSampler(untied.address, student, tmp_path, rehearse=False) as sampler:

        def drawn(sampling: Sampling, seeds: list[int]) -> Any:
            return sampler.sample(asked, sampling=sampling, stop=lambda ids: ids[-1] in ends, seeds=seeds)

        plain = drawn(Sampling(max_new_tokens=5), seeds)
        again = drawn(Sampling(max_new_tokens=5), seeds)
        other = drawn(Sampling(max_new_tokens=5), [seed + 1 for seed in seeds])
        warm = drawn(Sampling(temperature=0.7, max_new_tokens=5), seeds)
    assert plain.responses == again.responses
    assert plain.responses != other.responses
    assert len({tuple(ids) for ids in plain.responses}) > 3  # rows of one prompt have numbers of their own
    for rollout, temperature in ((plain, 1.0), (warm, 0.7)):
        for prompt, ids, found in zip(asked, rollout.responses, rollout.log_probs, strict=True):
            expected = torch.log_softmax(log_probs(student, [*prompt, *ids])[-len(ids) :] / temperature, -1)
            expected = expected.gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(found), expected, atol=5e-3, rtol=0)


def test_responses_end_where_they_are_said_to(untied: VllmProcess, student: Model, tmp_path: Path, rows: Any) -> None:
    prefix, prompts, _ = rows
    with VllmSampler(untied.address, student, tmp_path, rehearse=False) as sampler:
        sampling = Sampling(temperature=0, max_new_tokens=8)
        whole = sampler.sample([[*prefix, *prompts[0]]], sampling=sampling, stop=lambda ids: False)
        cut = sampler.sample([[*prefix, *prompts[0]]], sampling=sampling, stop=lambda ids: len(ids) == 3)
    assert cut.responses[0] == whole.responses[0][:3]
    assert cut.ended == [True]
    assert len(cut.log_probs[0]) == 3
    assert whole.ended == [False]


# ---------------------------------------------------------------------------------------------------- faults


def test_log_probs_before_temperature_are_refused(vllm_python: str, student: Model, tmp_path: Path, rows: Any) -> None:
    """And, with the same server: one that is killed."""
    prefix, prompts, responses = rows
    save_untied(student, tmp_path / "model")
    with VllmProcess(
        vllm_python, tmp_path / "model", log=tmp_path / "vllm.log", dtype="float32", weights=True
    ) as process:
        with VllmSampler(process.address, student, tmp_path / "weights") as sampler:
            with pytest.raises(UsageError, match="processed_logprobs"):
                sampler.sample([prefix], sampling=Sampling(temperature=0.5), stop=lambda ids: False, seeds=[1])
            sampler.sample([prefix], sampling=Sampling(max_new_tokens=2), stop=lambda ids: False, seeds=[1])
        with VllmTeacher(process.address, spec(prefix, student, 4), student.tokenizer, patience=2.0) as teacher:
            teacher.score(prompts, responses)
            process.kill()
            with pytest.raises(TeacherAwayError, match="has not replied"):
                teacher.score(prompts, responses)


def test_a_server_without_development_mode_takes_no_weights(vllm_python: str, student: Model, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    save_untied(student, tmp_path / "model")
    with (
        VllmProcess(vllm_python, tmp_path / "model", log=log, dtype="float32") as process,
        pytest.raises(UsageError, match="VLLM_SERVER_DEV_MODE"),
    ):
        VllmSampler(process.address, student, tmp_path / "weights")
    assert not members(process.pid)


def test_a_server_that_cannot_start_says_why(vllm_python: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="ended before it was ready"):
        VllmProcess(vllm_python, tmp_path / "nothing", log=tmp_path / "vllm.log")
