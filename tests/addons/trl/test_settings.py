"""The settings: every way to say a gate, the command line, and what is refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="no TRL here; `make test-engines` makes an environment with it")

from transformers import HfArgumentParser
from trl import DistillationConfig, TrlParser

from gatespace import Gate
from gatespace.addons.trl import GatedDistillationConfig, GatedDistillationTrainer
from gatespace.errors import UsageError
from gatespace.gating import EOPD, Gated, Static, ToDi


def config(**settings: Any) -> GatedDistillationConfig:
    return GatedDistillationConfig("out", use_cpu=True, bf16=False, **settings)


@pytest.mark.parametrize(
    "gate", ["G5", "4,0,-1,0", Gate(a=4, c=-1), (4, 0, -1, 0), [4.0, 0.0, -1.0, 0.0], {"a": 4, "c": -1}, None], ids=str
)
def test_a_gate_in_every_spelling(gate: Any) -> None:
    made = config(gate=gate)
    objective = made.objective()
    assert isinstance(objective, Gated)
    assert objective.gate == Gate.named("G5")
    assert json.loads(made.to_json_string())["gate"] in ("G5", "4,0,-1,0")  # as trackers and cards get it


def test_further_signals_and_infinite_points_survive_as_text() -> None:
    gate = Gate(a=4, c=-1, extra={"student_entropy": 2})
    for one in (gate, Gate.static(1), Gate.static(0.388)):
        made = config(gate=one)
        assert isinstance(made.gate, str)
        assert config(gate=made.gate).objective().gate == one  # type: ignore[attr-defined]


def test_methods_and_what_they_are_given() -> None:
    eopd = config(method="eopd", params={"tau": 1, "pg": "exact"}).objective()
    assert (type(eopd), eopd.tau, eopd.pg) == (EOPD, 1.0, "exact")  # type: ignore[attr-defined]
    assert isinstance(eopd.tau, float)  # type: ignore[attr-defined]
    static = config(method="static", params={"lam": 0.25}, support="bucket", support_k=5).objective()
    assert isinstance(static, Static)
    assert (static.gate, static.support, static.support_k) == (Gate.static(0.25), "bucket", 5)
    gated = config(gate="H2", support="renorm", stop_gradient=True).objective()
    assert isinstance(gated, Gated)
    assert (gated.support, gated.stop_gradient) == ("renorm", True)


def test_command_line() -> None:
    arguments = "--output_dir out --use_cpu --gate=-4,0,0,0 --support bucket --support_k 4 --signal_top_k 16 --top_k 3"
    more = "--stop_gradient --loss_temperature 2 --temperature 0.7 --chunk_mb 5 --learning_rate 1e-4"
    (made,) = HfArgumentParser(GatedDistillationConfig).parse_args_into_dataclasses(f"{arguments} {more}".split())
    objective = made.objective()
    assert (objective.gate, objective.support, objective.support_k) == (Gate(a=-4), "bucket", 4)
    assert (made.signal_top_k, made.top_k, made.loss_temperature, made.temperature) == (16, 3, 2.0, 0.7)
    assert (objective.stop_gradient, made.chunk_mb, made.learning_rate) == (True, 5.0, 1e-4)

    arguments = ["--output_dir", "out", "--use_cpu", "--method", "todi", "--params", '{"beta": 0.5}']
    (made,) = TrlParser((GatedDistillationConfig,)).parse_args_and_config(arguments)
    assert made.objective() == ToDi(beta=0.5)
    (made,) = HfArgumentParser(GatedDistillationConfig).parse_args_into_dataclasses(
        ["--output_dir", "out", "--use_cpu", "--gate", '{"a": 2, "jsd": 3}']
    )
    assert made.objective().gate == Gate(a=2, extra={"jsd": 3})


def test_yaml_file_of_trl(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: out\nuse_cpu: true\nmethod: eopd\nparams:\n  tau: 0.5\n", encoding="utf-8")
    (made,) = TrlParser((GatedDistillationConfig,)).parse_args_and_config(["--config", str(file)])
    assert made.objective() == EOPD(tau=0.5)


def test_help_of_every_setting_can_be_shown() -> None:
    text = HfArgumentParser(GatedDistillationConfig).format_help()
    assert "--signal_top_k" in text


@pytest.mark.parametrize(
    "settings, what",
    [
        ({"gate": "G55"}, "gate: unknown gate 'G55'"),
        ({"gate": (1, 2, 3)}, "gate: must have four coefficients"),
        ({"gate": {"a": 1, "no_signal": 2}}, "no_signal"),
        ({"method": "tody"}, "method: unknown objective 'tody'"),
        ({"method": "todi", "gate": "G5"}, "gate: the method todi has no gate"),
        ({"method": "todi", "params": {"tau": 1}}, "params.tau: unknown parameter of todi"),
        ({"method": "eopd", "params": {"tau": "much"}}, "params.tau: must be a valid number"),
        ({"method": "static", "params": {"support": "full"}}, "params.support: unknown parameter"),
        ({"method": "static", "params": {"lam": 3}}, "params: a static λ lies in"),
        ({"params": {"a": 1}}, "params: the method gated has no parameters"),
        ({"method": "todi", "params": "beta=1"}, "params: must be a mapping"),
        ({"method": "todi", "stop_gradient": True}, "stop_gradient"),
        ({"support": "top"}, "support: must be one of"),
        ({"support_k": 4}, "support_k: the support full has no K"),
        ({"entropy": "all"}, "entropy: must be one of"),
        ({"signal_top_k": 0}, "signal_top_k must be"),
        ({"signal_top_k": 2.5}, "signal_top_k must be"),
        ({"loss_temperature": 0.0}, "loss_temperature must be positive"),
        ({"chunk_mb": 0}, "chunk_mb must be positive"),
        ({"beta": 0.5}, "beta is TRL's own divergence"),
        ({"gate": "static:0.5", "shuffle": True}, "shuffle: a static gate"),
        ({"method": "taid"}, "needs a state over steps"),
        ({"method": "distillm2"}, "needs responses of student and teacher"),
        ({"method": "revisiting_opd"}, "needs the tokenizer's special tokens"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what.replace("(", r"\(")):
        config(**settings)


@pytest.mark.parametrize(
    "objective",
    [
        {"support": "hybrid"},
        {"method": "sampled_reverse_kl"},
        {"method": "eopd"},
        {"method": "iw_opd"},
        {"gate": {"trust": 1.0}},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "sampler",
    [
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.1},
        {"repetition_penalty": 1.2},
        {"generation_kwargs": {"do_sample": False}},
        {"generation_kwargs": {"top_p": 0.5}},
    ],
    ids=str,
)
def test_sampled_terms_need_the_students_own_samples(objective: dict[str, Any], sampler: dict[str, Any]) -> None:
    config(**objective)
    config(**sampler)
    with pytest.raises(UsageError, match="uses the sampled tokens"):
        config(**objective, **sampler)


def test_exact_policy_gradient_needs_no_samples() -> None:
    assert config(method="eopd", params={"pg": "exact"}, temperature=0.7).temperature == 0.7


def test_the_trainer_asks_for_what_it_needs(make: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="args must be a GatedDistillationConfig"):
        GatedDistillationTrainer("student", "teacher", DistillationConfig("out", use_cpu=True, bf16=False))
    with pytest.raises(UsageError, match="teacher_model is needed"):
        GatedDistillationTrainer("student", args=config())
