"""A vLLM teacher, against servers that reply well, badly, slowly or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gatespace.addons.vllm.server import VllmServer, server_address
from gatespace.addons.vllm.teacher import VllmTeacher
from gatespace.errors import GatespaceError, RunError, UsageError
from gatespace.gating.tokens import TeacherTopK
from gatespace.models import Model
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import ScoreSpec, TeacherAwayError
from tests.addons.vllm.scripted import Reply, Scripted, later

PREFIX = [5, 9, 11]
PROMPTS = [[7, 8], [21, 22, 23, 24], [40]]
RESPONSES = [[3, 4, 5], [60], [17, 18]]
TOKENS = 6


def spec(model: Model, *, max_new_tokens: int = 4, k: int = 5) -> ScoreSpec:
    return ScoreSpec(tuple(PREFIX), max_new_tokens, model.vocab_size, "top_k", k)


def teacher(
    server: Scripted, model: Model, *, model_name: str = "", max_new_tokens: int = 4, k: int = 5, **options: Any
) -> VllmTeacher:
    options = {"timeout": 5.0, "patience": 10.0} | options
    asked = spec(model, max_new_tokens=max_new_tokens, k=k)
    return VllmTeacher(f"{server.address}{model_name}", asked, model.tokenizer, **options)


def payload(scores: Any) -> TeacherTopK:
    assert scores.head is None
    assert isinstance(scores.payload, TeacherTopK)
    return scores.payload


# ---------------------------------------------------------------------------------------------------- it goes well


def test_scores_are_those_of_the_model_itself(scripted: Scripted, tiny: Model) -> None:
    local = payload(LocalTeacher(tiny, spec(tiny)).score(PROMPTS, RESPONSES))
    with teacher(scripted, tiny) as remote:
        found = payload(remote.score(PROMPTS, RESPONSES))
        assert remote.stats.rows == 3
        assert remote.stats.tokens == TOKENS
    assert found.ids.shape == (1, TOKENS, 5)
    torch.testing.assert_close(found.ids, local.ids)
    torch.testing.assert_close(found.log_probs, local.log_probs, atol=1e-4, rtol=0)
    assert local.sampled_log_probs is not None
    torch.testing.assert_close(found.sampled_log_probs, local.sampled_log_probs, atol=1e-4, rtol=0)
    # the sampled tokens are arbitrary, so that some are outside the top-k, where only the map has them
    assert not bool((found.ids[0] == torch.tensor([t for row in RESPONSES for t in row])[:, None]).any(1).all())


def test_the_request_is_the_ids_and_nothing_else(scripted: Scripted, tiny: Model) -> None:
    with teacher(scripted, tiny) as remote:
        scripted.asked.clear()
        remote.score(PROMPTS, RESPONSES)
    ((path, body),) = scripted.asked
    assert path == "/v1/completions"
    assert body["prompt"] == [[*PREFIX, *p, *r] for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    assert (body["prompt_logprobs"], body["max_tokens"], body["temperature"]) == (5, 1, 0.0)


def test_equal_log_probs_are_in_the_order_of_ids(scripted: Scripted, tiny: Model) -> None:
    def equal(body: dict[str, Any]) -> Any:
        choices = []
        for index, ids in enumerate(body["prompt"]):
            scored: list[Any] = [None]
            scored += [
                {str(id): {"logprob": -2.0} for id in (90, 30, 70, 50, 10)} | {str(t): {"logprob": -9.0}}
                for t in ids[1:]
            ]
            choices.append({"index": index, "prompt_token_ids": ids, "prompt_logprobs": scored})
        return {"choices": choices, "usage": {"prompt_tokens": sum(map(len, body["prompt"]))}}

    with teacher(scripted, tiny) as remote:
        scripted.script["/v1/completions"] = equal
        found = payload(remote.score([[7]], [[3]]))
    assert found.ids.tolist() == [[[10, 30, 50, 70, 90]]]
    assert found.sampled_log_probs is not None
    assert found.sampled_log_probs.tolist() == [[-9.0]]


def test_padding_in_the_top_k_is_replaced_by_tokens(tiny: Model) -> None:
    local = payload(LocalTeacher(tiny, spec(tiny)).score(PROMPTS, RESPONSES))
    with Scripted(tiny, padding=3) as server, teacher(server, tiny) as remote:
        found = payload(remote.score(PROMPTS, RESPONSES))
    torch.testing.assert_close(found.ids, local.ids)
    with (
        Scripted(tiny, padding=30) as server,
        teacher(server, tiny) as remote,
        pytest.raises(UsageError, match="--max-logprobs"),
    ):
        remote.score(PROMPTS, RESPONSES)


def test_what_is_in_the_cache_costs_no_request(scripted: Scripted, tiny: Model, tmp_path: Path) -> None:
    with ScoreCache(tmp_path / "scores") as cache, teacher(scripted, tiny, cache=cache) as remote:
        first = payload(remote.score(PROMPTS, RESPONSES))
        scripted.asked.clear()
        again = payload(remote.score(PROMPTS[::-1], RESPONSES[::-1]))
        assert not scripted.asked
        remote.score([PROMPTS[0]], [[3, 4, 6]])
        assert len(scripted.asked) == 1

    order = [4, 5, 3, 0, 1, 2]
    torch.testing.assert_close(again.log_probs, first.log_probs[:, order], rtol=0, atol=0)


def test_large_batches_go_in_several_requests(scripted: Scripted, tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with teacher(scripted, tiny) as remote:
        whole = payload(remote.score(PROMPTS, RESPONSES))
        monkeypatch.setattr("gatespace.addons.vllm.teacher._REPLY_BYTES", 16 * 80 * 6)  # rows of 8, 8 and 6 tokens
        scripted.asked.clear()
        parts = payload(remote.ask(PROMPTS, RESPONSES)())
        assert len(scripted.asked) == 2
    torch.testing.assert_close(parts.ids, whole.ids)


# ---------------------------------------------------------------------------------------------------- another pair


def test_another_tokenizer_is_refused(scripted: Scripted, tiny: Model) -> None:
    scripted.script["/tokenize"] = lambda body: {"tokens": [1, *tiny.tokenizer.encode(body["prompt"])]}
    with pytest.raises(UsageError, match="another tokenizer"):
        teacher(scripted, tiny)


def test_a_server_that_hides_its_tokenizer_is_refused(scripted: Scripted, tiny: Model) -> None:
    scripted.script["/tokenize"] = lambda body: Reply(b'{"detail":"Not Found"}', 404)
    with pytest.raises(UsageError, match="how it tokenises"):
        teacher(scripted, tiny)


def test_a_larger_k_names_the_flag(scripted: Scripted, tiny: Model) -> None:
    with pytest.raises(UsageError, match="--max-logprobs 17"):
        teacher(scripted, tiny, k=17)


def test_models_are_chosen_by_name(scripted: Scripted, tiny: Model) -> None:
    scripted.script["/v1/models"] = lambda body: {"data": [{"id": "org/a"}, {"id": "org/b"}]}
    with pytest.raises(UsageError, match="org/a, org/b"):
        teacher(scripted, tiny)
    with teacher(scripted, tiny, model_name="/org/b") as remote:
        assert remote.about()["model"] == "org/b"
        assert remote.about()["address"] == f"{scripted.address}/org/b"
    with pytest.raises(UsageError, match="org/a, org/b"):
        teacher(scripted, tiny, model_name="/org/c")


def test_rows_that_do_not_fit_are_named(scripted: Scripted, tiny: Model) -> None:
    with teacher(scripted, tiny) as remote:
        with pytest.raises(RunError, match="wrong length"):
            remote.score([[7]], [[1, 2, 3, 4, 5]])
        with pytest.raises(RunError, match="--max-model-len"):
            remote.score([[7] * 252], [[3]])
    with pytest.raises(UsageError, match="--max-model-len"):
        teacher(scripted, tiny, max_new_tokens=253)


@pytest.mark.parametrize("address", ["vllm://host", "vllm://host:0", "vllm://host:70000", "http://a:1", "vllm://a b:1"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(UsageError, match="address"):
        server_address(address)


# ---------------------------------------------------------------------------------------------------- bad replies


def _edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Scripted, dict[str, Any]], Any]:
    def reply(server: Scripted, body: dict[str, Any]) -> Any:
        found = server.complete(body)
        change(found)
        return found

    return reply


def _raw(content: bytes) -> Callable[[Scripted, dict[str, Any]], Any]:
    return lambda server, body: Reply(content)


def _last(found: dict[str, Any]) -> dict[str, Any]:
    last: dict[str, Any] = found["choices"][0]["prompt_logprobs"][-1]
    return last


def _first_value(value: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        last = _last(found)
        last[next(iter(last))] = {"logprob": value}

    return change


BAD = {
    "nothing": _raw(b""),
    "no JSON": _raw(b"<html>"),
    "half": _raw(b'{"choices": [{"index": 0, "prompt_lo'),
    "not UTF-8": _raw(b'{"choices": "\xff\xfe"}'),
    "a list": _raw(b"[1, 2]"),
    "null": _raw(b"null"),
    "deep": _raw(b"[" * 100_000),
    "no choices": _raw(b'{"choices": [], "usage": {"prompt_tokens": 6}}'),
    "a row twice": _edited(lambda found: found["choices"].append(found["choices"][0])),
    "a row less": _edited(lambda found: found["choices"].pop()),
    "another index": _edited(lambda found: found["choices"][0].update(index=7)),
    "no usage": _edited(lambda found: found.pop("usage")),
    "other counts": _edited(lambda found: found["usage"].update(prompt_tokens=1)),
    "other ids": _edited(lambda found: found["choices"][0]["prompt_token_ids"].__setitem__(0, 0)),
    "no log-probs": _edited(lambda found: found["choices"][0].update(prompt_logprobs=None)),
    "a position less": _edited(lambda found: found["choices"][0]["prompt_logprobs"].pop()),
    "a null position": _edited(lambda found: found["choices"][0]["prompt_logprobs"].__setitem__(-1, None)),
    "an empty position": _edited(lambda found: found["choices"][0]["prompt_logprobs"].__setitem__(-1, {})),
    "a number as position": _edited(lambda found: found["choices"][0]["prompt_logprobs"].__setitem__(-1, -1.5)),
    "a null value": _edited(_first_value(None)),
    "a text": _edited(_first_value("-1.5")),
    "not a number": _edited(_first_value(float("nan"))),
    "infinity": _edited(_first_value(float("-inf"))),
    "more than 1": _edited(_first_value(0.7)),
    "too few choices": _edited(lambda found: [_last(found).pop(key) for key in list(_last(found))[1:]]),
    "without the token": _edited(lambda found: _last(found).pop("18")),
    "words for ids": _edited(lambda found: _last(found).update(word={"logprob": -1.0})),
    "a negative id": _edited(lambda found: _last(found).update({"-4": {"logprob": -1.0}})),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_reply_is_an_error_and_never_a_number(name: str, scripted: Scripted, tiny: Model) -> None:
    with teacher(scripted, tiny) as remote:
        scripted.script["/v1/completions"] = lambda body: BAD[name](scripted, body)
        with pytest.raises(RunError):
            remote.score(PROMPTS, RESPONSES)
        del scripted.script["/v1/completions"]
        assert payload(remote.score(PROMPTS, RESPONSES)).ids.shape == (1, TOKENS, 5)


def test_replies_are_not_larger_than_we_take(scripted: Scripted, tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with teacher(scripted, tiny) as remote:
        monkeypatch.setattr("gatespace.addons.vllm.server.LARGEST", 100)
        with pytest.raises(RunError, match="too large"):
            remote.score(PROMPTS, RESPONSES)


# ---------------------------------------------------------------------------------------------------- slow or away


def _once(reply: Reply, server: Scripted) -> Callable[[dict[str, Any]], Any]:
    left = [reply]
    return lambda body: left.pop() if left else server.complete(body)


PASSING = {
    "busy": Reply(b'{"error": {"message": "later"}}', 503),
    "too many": Reply(b"", 429),
    "broken within": Reply(b"Internal Server Error", 500),
    "cut off": Reply(b'{"choices": [', length=5000),
    "no status": Reply(b"garbage", head=b""),
    "nothing at all": Reply(head=b""),
}


@pytest.mark.parametrize("name", list(PASSING))
def test_what_passes_is_retried(name: str, scripted: Scripted, tiny: Model) -> None:
    with teacher(scripted, tiny) as remote:
        expected = payload(remote.score(PROMPTS, RESPONSES))
        scripted.script["/v1/completions"] = _once(PASSING[name], scripted)
        found = payload(remote.score(PROMPTS, RESPONSES))
    assert torch.equal(found.log_probs, expected.log_probs)


def test_a_slow_reply_is_waited_for_longer(scripted: Scripted, tiny: Model) -> None:
    notes: list[str] = []
    with teacher(scripted, tiny, timeout=0.4, patience=60.0, report=notes.append) as remote:
        slow = json.dumps(scripted.complete({"prompt": [[*PREFIX, 7, 3]], "prompt_logprobs": 5})).encode()
        replies = [Reply(slow, before=0.6)]  # longer than the first deadline, shorter than the second
        scripted.script["/v1/completions"] = lambda body: (
            replies[0] if len(body["prompt"][0]) == 5 else (scripted.complete(body))
        )
        assert payload(remote.score([[7]], [[3]])).ids.shape == (1, 1, 5)
    assert any("has not replied" in note for note in notes)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX-Long: ", None])
def test_single_bytes_do_not_put_off_the_deadline(head: bytes | None, scripted: Scripted, tiny: Model) -> None:
    with teacher(scripted, tiny, timeout=0.3, patience=0.8) as remote:
        scripted.script["/v1/completions"] = lambda body: Reply(b" " * 10_000, head=head, every=0.05)
        with pytest.raises(TeacherAwayError, match="has not replied"):
            remote.score(PROMPTS, RESPONSES)


def test_a_server_that_goes_away_for_good(scripted: Scripted, tiny: Model) -> None:
    with teacher(scripted, tiny, patience=1.0) as remote:
        scripted.stop()
        with pytest.raises(TeacherAwayError, match="checkpoint"):
            remote.score(PROMPTS, RESPONSES)


def test_a_server_that_was_never_there(tiny: Model) -> None:
    with pytest.raises(TeacherAwayError, match=r"vllm://127\.0\.0\.1:9"):
        VllmTeacher("vllm://127.0.0.1:9", spec(tiny), tiny.tokenizer, patience=0.5)


def test_500_is_believed_in_the_end(scripted: Scripted, tiny: Model) -> None:
    with teacher(scripted, tiny) as remote:
        scripted.script["/v1/completions"] = lambda body: Reply(b'{"error": {"message": "EngineDeadError"}}', 500)
        with pytest.raises(RunError, match="EngineDeadError"):
            remote.score(PROMPTS, RESPONSES)


def test_another_model_at_the_address_is_not_taken_for_the_old_one(scripted: Scripted, tiny: Model) -> None:
    with teacher(scripted, tiny) as remote:
        scripted.script["/v1/completions"] = _once(Reply(head=b""), scripted)
        scripted.script["/v1/models"] = lambda body: {"data": [{"id": "model", "root": "/models/other"}]}
        with pytest.raises(RunError, match="not the one that this run began with"):
            remote.score(PROMPTS, RESPONSES)


def test_other_weights_under_the_same_name_are_noticed(scripted: Scripted, tiny: Model) -> None:
    def other(body: dict[str, Any]) -> Any:
        found = scripted.complete(body)
        for choice in found["choices"]:
            for position in choice["prompt_logprobs"][1:]:
                for entry in position.values():
                    entry["logprob"] -= 1.0
        return found

    with teacher(scripted, tiny) as remote:
        left = [Reply(head=b"")]
        scripted.script["/v1/completions"] = lambda body: left.pop() if left else other(body)
        with pytest.raises(RunError, match="not the one that this run began with"):
            remote.score(PROMPTS, RESPONSES)


def test_closing_ends_what_is_under_way(scripted: Scripted, tiny: Model) -> None:
    remote = teacher(scripted, tiny, timeout=60.0, patience=600.0)
    scripted.script["/v1/completions"] = lambda body: Reply(before=600.0)
    waiting = remote.ask(PROMPTS, RESPONSES)
    later(0.2, remote.close)
    with pytest.raises(GatespaceError):
        waiting()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gatespace-vllm")]


def test_many_threads_get_their_own_replies(scripted: Scripted, tiny: Model) -> None:
    with VllmServer(scripted.address) as server:
        body = {"model": "model", "prompt_logprobs": 2}
        asked = [[[i, i + 1, i + 2]] for i in range(20)]
        running = [server.submit(lambda rows=rows: server.complete(rows, body)) for rows in asked]
        for rows, request in zip(asked, running, strict=True):
            assert request.result()[0].prompt_token_ids == rows[0]
