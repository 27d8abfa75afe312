"""Training with a vLLM server as teacher, as sampler, or as both: from a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gatespace.config import TrainConfig, parse_config
from gatespace.config.identity import identity
from gatespace.errors import UsageError


def settings(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "pair": {"student": "smollm2", "teacher": "vllm://127.0.0.1:8000"},
        "teacher": {"payload": "top_k", "k": 8},
        "objective": {"support": "hybrid", "support_k": 8},
    }
    return base | changes


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"teacher": {"payload": "hidden"}}, "first choices only"),
        ({"pair": {"teacher": "vllm://127.0.0.1"}}, "is not an address"),
        ({"pair": {"teacher": "zmq://127.0.0.1:5555/model"}}, "is not an address"),
        ({"pair": {"teacher": "http://127.0.0.1:8000"}}, "no kind of teacher"),
        ({"rollout": {"engine": "vllm"}}, "rollout.vllm"),
        ({"rollout": {"vllm": ".venv-vllm/bin/python"}}, "rollout.vllm"),
        ({"rollout": {"engine": "vllm", "vllm": "zmq://127.0.0.1:5555"}}, "not the address of a vLLM server"),
        ({"rollout": {"from": {"teacher": 1.0}}}, "writes none"),
    ],
)
def test_a_mistake_is_found_before_anything_runs(change, text):
    with pytest.raises(UsageError, match=text):
        parse_config(TrainConfig, settings(**change))


def test_who_writes_counts_in_the_identity_and_where_it_is_does_not():
    native = parse_config(TrainConfig, settings())
    one, two = (parse_config(TrainConfig, settings(rollout={"engine": "vllm", "vllm": v})) for v in ("a", "b"))
    assert identity(native) != identity(one) == identity(two)


@pytest.mark.slow
def test_a_step_with_teacher_and_rollouts_by_vllm(served, vllm_python, smollm2, tweeteval, tmp_path):
    from gatespace.training.run import train

    config = parse_config(
        TrainConfig,
        settings(
            task={"name": "tweeteval/emotion", "root": str(tweeteval)},
            pair={"student": str(smollm2), "teacher": served.address},
            rollout={"engine": "vllm", "vllm": vllm_python, "max_new_tokens": 6},
            engine={"precision": "fp32"},
            evaluation={"final": []},
            optimizer={"lr": 1e-5},
            steps=2,
            batch_size=4,
            output=str(tmp_path / "run"),
        ),
    )
    summary = train(config)
    first, second = [json.loads(line) for line in (Path(config.output) / "metrics.jsonl").read_text().splitlines()]
    # Teacher and student are one model before the first update, and no longer after it.
    assert first["forward_kl"] == pytest.approx(0, abs=1e-4)
    assert first["reverse_kl"] == pytest.approx(0, abs=1e-4)
    assert second["forward_kl"] > 0
    assert summary["run"]["rows"] == 8
    assert json.loads((config.output / "environment.json").read_text())["teacher"]["address"] == served.address
    assert not (config.output / "vllm").exists()
