"""What holds on a device that is not the CPU. `test_device.py` runs this in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gatespace import Gate, fused_gated_kl
from gatespace.cli.app import app
from gatespace.config import EngineConfig, TeachConfig, TrainConfig, parse_config
from gatespace.errors import UsageError
from gatespace.models import build_tiny, load_model
from gatespace.models.packed import PackedBody
from gatespace.tasks import synthetic_task
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import ScoreSpec
from gatespace.training.setup import Placement
from gatespace.training.train import teach, train
from tests.device import simulated

ROWS, TOKENS = 6, 6


@pytest.fixture(autouse=True, scope="session")
def device() -> None:
    """Not at import: collecting docstrings imports this file."""
    simulated.register()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer of CUDA."""
    adamw = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *args, **options: adamw(*args, **{**options, "fused": True}))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: None) -> Any:
    """Trains on a device: its metrics without what depends on the moment."""
    # The simulated device by a name that a configuration knows.
    monkeypatch.setattr("gatespace.training.distill.usable", lambda name, _: name.replace("xpu", simulated.NAME))

    def go(device: str, name: str = "", dtype: torch.dtype = torch.float32, **more: Any) -> Path:
        monkeypatch.setattr("gatespace.training.job.placement", lambda *_: Placement(device, dtype))
        settings = {
            "task": {"name": "synthetic", "brief": True},
            "pair": {"student": "tiny", "teacher": "tiny"},
            "steps": 3,
            "batch_size": ROWS,
            "rollout": {"max_new_tokens": TOKENS},
            "optimizer": {"lr": 1e-3},
            "evaluation": {"limit": 4, "final": ["test"], "every": 0, "max_new_tokens": TOKENS},
            "checkpoint": {"every": 1},
            "teacher": {"cache": str(tmp_path / "scores" / device)},
            "output": str(tmp_path / f"{device}{name}"),
            **more,
        }
        monkeypatch.setenv("GATESPACE_CHECK", settings.pop("check", ""))
        train(parse_config(TrainConfig, settings))
        return Path(settings["output"])

    return go


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


KINDS: dict[str, dict[str, Any]] = {
    "top-k": {
        "teacher": {"payload": "top_k", "k": 16, "cache": None},
        "objective": {"gate": "G5", "support": "bucket"},
    },
    "eopd, recomputed in several micro-batches": {
        "objective": {"method": "eopd"},
        "engine": {"micro_tokens": 60, "activation_checkpointing": True},
    },
    "lora, one step off policy, whole logits": {
        "pair": {"student": "tiny", "teacher": "tiny", "lora": {"r": 2}},
        "rollout": {"max_new_tokens": TOKENS, "staleness": 1},
        "check": "unfused",
    },
}


def test_a_run_in_bfloat16_and_a_teacher_in_the_making(run: Any, tmp_path: Path) -> None:
    def both(device: str) -> list[float]:
        task = {"name": "synthetic", "brief": True}
        output = tmp_path / f"{device}-teach"
        settings = {"task": task, "model": "tiny", "steps": 2, "batch_size": ROWS, "output": str(output)}
        mixed = losses(run(device, steps=2, dtype=torch.bfloat16))  # gradients are folded into float32 ones
        teach(parse_config(TeachConfig, {**settings, "evaluation": {"limit": 4, "every": 0}}))
        return [*mixed, *losses(output)]

    assert both(simulated.NAME) == pytest.approx(both("cpu"), rel=1e-2)  # rounding in bf16, after an update


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_has_the_numbers_of_the_cpu(kind: str, run: Any) -> None:
    there, here = (losses(run(device, steps=2, **KINDS[kind])) for device in (simulated.NAME, "cpu"))
    assert there == pytest.approx(here, rel=1e-5)


def test_a_teacher_on_another_device_gives_the_numbers_of_one_beside_the_student(run: Any) -> None:
    half = {"from": {"student": 0.5, "teacher": 0.5}, "max_new_tokens": TOKENS}
    here = losses(run("cpu", rollout=half, steps=2))
    for student, teacher in ((simulated.NAME, "cpu"), ("cpu", "xpu")):
        pair = {"student": "tiny", "teacher": "tiny", "teacher_device": teacher}
        there = run(student, name=f"-{teacher}", pair=pair, rollout=half, steps=2)
        assert losses(there) == pytest.approx(here, rel=1e-5)


def test_a_network_that_is_spread_over_devices() -> None:
    """Layers on two devices, with the hooks by which accelerate's device_map hands tensors on."""
    hooks = pytest.importorskip("accelerate.hooks")
    folder = str(build_tiny(synthetic_task(size=600)).teacher)
    whole, model = load_model(folder), load_model(folder)
    body: Any = model.body
    for place, module in enumerate((body.embed_tokens, *body.layers, body.norm, body.rotary_emb)):
        device = simulated.NAME if place % 2 else "cpu"
        module.to(device)
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(torch.device(device)))
    assert {p.device.type for p in body.parameters()} == {"cpu", simulated.NAME}
    spec = ScoreSpec((5, 6, 7), TOKENS, model.vocab_size)
    questions = [[11, 12, 13], [20, 21, 22, 23]], [[30, 31, 32], [40]]
    teachers = [LocalTeacher(one, spec) for one in (whole, model)]
    here, there = (teacher.score(*questions).payload for teacher in teachers)
    assert isinstance(teachers[1].body, PackedBody)
    torch.testing.assert_close(there, here, atol=1e-5, rtol=1e-5)
    with pytest.raises(UsageError, match="spread over several devices"):
        teachers[1].body.decoding(teachers[1].body.forward(questions[0]), TOKENS)


def test_a_deterministic_run(run: Any) -> None:
    """Nothing in it is what CUDA has no deterministic algorithm for; afterwards torch is as before."""
    options: dict[str, Any] = {"rollout": {"max_new_tokens": TOKENS, "top_p": 0.9}, "objective": {"method": "akl"}}
    usual, asked = (
        losses(run("cpu", name=f"-{wanted}", engine={"deterministic": wanted}, steps=2, **options))
        for wanted in (False, True)
    )
    assert usual == asked
    there = losses(run(simulated.NAME, engine={"deterministic": True}, steps=2, **options))
    assert there == pytest.approx(usual, rel=1e-5)
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_self_check_that_users_post(monkeypatch: pytest.MonkeyPatch, fused: None) -> None:
    """`gatespace doctor --device`: a run, the same on the CPU, and one that is killed and resumed."""

    def placed(engine: EngineConfig, *_: Any) -> Placement:
        return Placement("cpu" if engine.device == "cpu" else simulated.NAME, torch.float32)

    for place in ("setup", "job"):
        monkeypatch.setattr(f"gatespace.training.{place}.placement", placed)
    done = CliRunner().invoke(app, ["doctor", "--device", "cuda", "--json"])  # there is no setting of the device's name
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [check["status"] for check in found["checks"]] == ["ok"] * 3, found["checks"]


def test_a_step_waits_for_the_device_once_in_eight_tokens(run: Any) -> None:
    found = []
    for tokens in (64, 96):
        simulated.reset()
        run(
            simulated.NAME,
            name=f"-{tokens}",
            rollout={"max_new_tokens": tokens, "stop": "eos"},
            evaluation={"final": [], "every": 0},
            trace={"tokens_every": 0},
            steps=1,
        )
        found.append((simulated.waits.copy(), simulated.copies.copy(), simulated.launches.copy()))
    (waits, copies, launches), (more_waits, more_copies, more_launches) = found
    assert (more_waits - waits).total() <= 32 / 8, more_waits - waits
    assert all(line.startswith("rollout/native") for line in more_waits - waits), "scoring and update wait no more"
    # Longer responses may need one more of the teacher's passes, which have a bounded number of tokens.
    assert (more_copies - copies).total() <= 8, more_copies - copies
    clock = [sum(count for line, count in some.items() if line.startswith("training/clock")) for some, *_ in found]
    assert clock[0] == clock[1] >= 4, "rollout, score, update and optimizer end with a wait each"
    # per token and layer of the student's two: 45 of transformers, 2 to store key and value, 3 of attention
    assert (more_launches - launches).total() / 32 <= 2 * (45 + 5) + 35, more_launches - launches


@pytest.mark.parametrize("support", ["full", "hybrid"])
def test_the_fused_loss_waits_once_and_not_per_chunk(support: str) -> None:
    def waits(chunk_mb: float, recompute: bool) -> int:
        generator = torch.Generator().manual_seed(1)
        hidden, head, sent, sent_head = (
            torch.randn(*shape, generator=generator).to(simulated.NAME) for shape in [(2, 5, 16), (300, 16)] * 2
        )
        hidden.requires_grad_()
        gate, sampled = Gate(1, -1, 0, 2), torch.full((2, 5), 7)
        options: dict[str, Any] = {"support": support, "chunk_mb": chunk_mb, "recompute": recompute}
        simulated.reset()
        fused_gated_kl(hidden, head, sent, sent_head, gate=gate, sampled=sampled, **options).loss.backward()
        return simulated.waits.total()

    assert waits(0.01, False) == waits(0.01, True) == waits(60, False) <= 8, simulated.waits  # 5 chunks and 1
