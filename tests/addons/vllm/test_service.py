"""`gatespace teacher serve --engine vllm`: vLLM behind our service, against scripted servers and a real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gatespace.addons.service.backend import VllmBackend
from gatespace.addons.service.client import RemoteTeacher
from gatespace.addons.service.server import TeacherServer
from gatespace.addons.service.wire import vocabulary_digest
from gatespace.addons.vllm.source import VllmSource, vllm_source
from gatespace.errors import RunError, UsageError
from gatespace.gating.tokens import TeacherTopK
from gatespace.models import Model, load_model
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import ScoreSpec
from tests.addons.service.raw_client import Brake, until
from tests.addons.vllm.scripted import Reply, Scripted, later, members

ROOT = Path(__file__).resolve().parents[3]
PREFIX = [5, 9, 11]
PROMPTS = [[7, 8], [21, 22, 23, 24], [40]]
RESPONSES = [[3, 4, 5], [60], [17, 18]]


@pytest.fixture(scope="module")
def source(tiny: Model) -> VllmSource:
    return vllm_source(tiny.name, weights=True)


@pytest.fixture
def service(scripted: Scripted, tiny: Model) -> Iterator[TeacherServer]:
    backend = VllmBackend(tiny.name, scripted.address)
    try:
        with TeacherServer(backend, "tcp://127.0.0.1:0") as server:
            yield server
    finally:
        backend.close()


def spec(model: Model, payload: str = "top_k") -> ScoreSpec:
    return ScoreSpec(tuple(PREFIX), 4, model.vocab_size, payload, 5)


def client(address: str, model: Model, *, payload: str = "top_k", digest: str = "", **changes: Any) -> RemoteTeacher:
    digest = digest or vocabulary_digest(model.tokenizer.get_vocab())
    options: dict[str, Any] = {"timeout": 10.0, "patience": 60.0} | changes
    return RemoteTeacher(address, spec(model, payload), tokenizer_digest=digest, **options)


def local(model: Model, prompts: Any = PROMPTS, responses: Any = RESPONSES) -> TeacherTopK:
    found = LocalTeacher(model, spec(model)).score(prompts, responses).payload
    assert isinstance(found, TeacherTopK)
    return found


def same(found: Any, right: TeacherTopK, atol: float = 1e-4) -> None:
    assert torch.equal(found.payload.ids, right.ids)
    torch.testing.assert_close(found.payload.log_probs, right.log_probs, atol=atol, rtol=0)
    torch.testing.assert_close(found.payload.sampled_log_probs, right.sampled_log_probs, atol=atol, rtol=0)


# ---------------------------------------------------------------------------------------------------- it goes well


def test_scores_over_the_wire_are_those_of_the_model(service: TeacherServer, tiny: Model) -> None:
    with client(service.address, tiny) as remote:
        same(remote.score(PROMPTS, RESPONSES), local(tiny))
        assert (remote.stats.rows, remote.stats.tokens, remote.stats.passes) == (3, 6, 1)
        assert remote.numerics.startswith("vllm-0.0.1/top5")


def test_clients_share_requests_and_have_their_own_rows(
    service: TeacherServer, scripted: Scripted, tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    brake = Brake(monkeypatch)
    # Beforehand: the scripted server computes with the same network, in a thread of its own.
    rights = local(tiny, [[9, 9]], [[1, 2]]), local(tiny), local(tiny, PROMPTS[::-1], RESPONSES[::-1])
    with ExitStack() as stack:
        one, two, three = (stack.enter_context(client(service.address, tiny)) for _ in range(3))
        first = one.ask([[9, 9]], [[1, 2]])
        brake.reached()
        scripted.asked.clear()
        waiting = [two.ask(PROMPTS, RESPONSES), three.ask(PROMPTS[::-1], RESPONSES[::-1])]
        until(lambda: service.status().queued == 3)
        brake.go(2)
        for answer, right in zip([first, *waiting], rights, strict=True):
            same(answer(), right)
    asked = [body["prompt"] for path, body in scripted.asked if path == "/v1/completions"]
    assert sorted(map(len, asked)) == [1, 6]  # one request of one client, and one of two
    assert service.status().merged == 1


def test_hidden_states_are_refused_at_hello(service: TeacherServer, tiny: Model) -> None:
    with pytest.raises(UsageError, match="does not give the payload hidden") as caught:
        client(service.address, tiny, payload="hidden")
    assert "top_k" in caught.value.instead


def test_another_tokenizer_is_refused_at_hello(service: TeacherServer, tiny: Model) -> None:
    with pytest.raises(UsageError, match="do not have the same vocabulary"):
        client(service.address, tiny, digest="another one")


def test_rows_are_as_long_as_the_server_takes(service: TeacherServer, tiny: Model) -> None:
    with client(service.address, tiny) as remote:  # 256 tokens, of which one is written
        remote.score([[7] * 250], [[1, 2]])
        with pytest.raises(RunError, match="too long"):
            remote.score([[7] * 251], [[1, 2]])


def test_nothing_is_cached_of_a_server_that_sends_no_hash(
    service: TeacherServer, scripted: Scripted, tiny: Model, tmp_path: Path
) -> None:
    with ScoreCache(tmp_path / "scores") as cache, client(service.address, tiny, cache=cache) as remote:
        remote.score(PROMPTS, RESPONSES)
        scripted.asked.clear()
        remote.score(PROMPTS, RESPONSES)
        assert len(scripted.asked) == 1
        assert cache.stats.hits == cache.stats.misses == 0


def test_a_fingerprint_is_of_the_content(source: VllmSource, tiny: Model, tmp_path: Path) -> None:
    tiny.save(tmp_path / "copy")
    copy = vllm_source(str(tmp_path / "copy"), weights=True)
    before = copy.fingerprint()
    assert before == copy.fingerprint() != source.folder
    weights = next((tmp_path / "copy").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert copy.fingerprint() != before
    weights.unlink()
    with pytest.raises(UsageError, match="are not here"):
        copy.fingerprint()
    assert (source.vocab_size, source.rows, source.reach) == (tiny.vocab_size, len(tiny.head.weight), 1024)


# ---------------------------------------------------------------------------------------------------- it goes away


def test_clients_wait_for_a_server_that_has_gone(service: TeacherServer, scripted: Scripted, tiny: Model) -> None:
    successor = Scripted(tiny, port=scripted.port)
    with client(service.address, tiny) as remote, ExitStack() as stack:
        remote.score(PROMPTS, RESPONSES)
        scripted.stop()
        later(1.0, lambda: stack.enter_context(successor))
        same(remote.score(PROMPTS[::-1], RESPONSES[::-1]), local(tiny, PROMPTS[::-1], RESPONSES[::-1]))
        assert service.status().failures > 0  # each of them an invitation to ask again
        assert any(path == "/v1/models" for path, _ in successor.asked)  # whether it is the same one


def test_newcomers_wait_too(service: TeacherServer, scripted: Scripted, tiny: Model) -> None:
    scripted.stop()
    with ExitStack() as stack:
        later(1.0, lambda: stack.enter_context(Scripted(tiny, port=scripted.port)))
        with client(service.address, tiny) as remote:
            same(remote.score(PROMPTS, RESPONSES), local(tiny))
        assert service.status().failures > 0


def test_a_server_that_stays_away_is_an_error_in_the_end(
    service: TeacherServer, scripted: Scripted, tiny: Model
) -> None:
    with client(service.address, tiny, patience=2.0, timeout=1.0) as remote:
        remote.score(PROMPTS, RESPONSES)
        scripted.stop()
        with pytest.raises(RunError, match="has not replied for"):
            remote.score(PROMPTS, [[9], [9], [9]])


def _broken(times: int, server: Scripted) -> Callable[[dict[str, Any]], Any]:
    left = [Reply(b'{"error": {"message": "EngineDeadError"}}', 500)] * times
    return lambda body: left.pop() if left else server.complete(body)


def test_an_engine_that_died_is_waited_for(service: TeacherServer, scripted: Scripted, tiny: Model) -> None:
    with client(service.address, tiny) as remote:
        remote.score(PROMPTS, RESPONSES)
        scripted.script["/health"] = lambda body: Reply(b"", 503)
        scripted.script["/v1/completions"] = _broken(4, scripted)
        same(remote.score(PROMPTS, RESPONSES), local(tiny))
        assert service.status().failures == 1


def test_an_error_of_a_server_that_is_well_is_the_answer(
    service: TeacherServer, scripted: Scripted, tiny: Model
) -> None:
    with client(service.address, tiny) as remote:
        scripted.script["/v1/completions"] = _broken(3, scripted)
        with pytest.raises(RunError, match="EngineDeadError"):
            remote.score(PROMPTS, RESPONSES)
        same(remote.score(PROMPTS, RESPONSES), local(tiny))


# ---------------------------------------------------------------------------------------------------- a real vLLM


@contextmanager
def serving(*words: str, patience: float = 400.0) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any], list[str]]]:
    """The command in a process of its own: what it printed when it was ready, and all that it prints after that."""
    command = [sys.executable, "-m", "gatespace", "teacher", "serve", "--json", "--bind", "tcp://127.0.0.1:0", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    watch = threading.Timer(patience, process.kill)
    watch.start()
    said: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                break
        else:
            raise AssertionError(process.communicate()[1])
        out = process.stdout
        reader = threading.Thread(target=lambda: said.extend(out), daemon=True)
        reader.start()
        yield process, event, said
    finally:
        watch.cancel()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_vllm_that_is_killed_is_restarted(vllm_python: str, taught: Path, tmp_path: Path) -> None:
    model = load_model(str(taught / "model"))
    words = ["--model", str(taught), "--engine", "vllm", "--vllm", vllm_python, "--precision", "fp32"]
    with serving(*words, "--cache", str(tmp_path / "served")) as (process, ready, said):
        notes: list[str] = []
        settings: dict[str, Any] = {"patience": 300.0, "report": notes.append}
        with (
            ScoreCache(tmp_path / "scores") as cache,
            client(ready["address"], model, cache=cache, **settings) as remote,
        ):
            # vLLM counts padding among the outcomes, as its softmax goes over all rows of the head.
            before = remote.score(PROMPTS, RESPONSES)
            same(before, local(model), atol=0.2)
            assert remote.score(PROMPTS, RESPONSES).payload.ids.equal(before.payload.ids)
            assert cache.stats.hits == 6  # its weights are known by their content
            os.killpg(ready["vllm_pid"], signal.SIGKILL)
            same(remote.score(PROMPTS, [[9], [8], [7]]), local(model, PROMPTS, [[9], [8], [7]]), atol=0.2)
        events = [json.loads(line)["text"] for line in said]
        assert "vLLM has ended; restarting it" in events
        assert "vLLM is back" in events
        again = int(subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()[0])
        assert members(again)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert not members(again)
        assert not members(ready["vllm_pid"])
