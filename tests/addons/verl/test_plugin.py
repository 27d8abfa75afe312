"""How the plug-in comes into verl: by a configuration, by the environment, into Ray's workers; and when it refuses."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl has an environment of its own: make test-engines")

import verl
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy, need_teacher_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import DistillationLossConfig

from gatespace import Gate
from gatespace.addons.verl import GatedLossConfig, install, seam
from gatespace.errors import UsageError

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "verl"
FILES = ["data.train_files=a.jsonl", "data.val_files=b.jsonl", "reward.custom_reward_function.path=c.py"]


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(EXAMPLES), version_base=None):
        return compose("gated_distillation", overrides=[*FILES, *overrides])


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=400
    )


# ---------------------------------------------------------------------- the shipped configuration


def test_verl_accepts_the_shipped_configuration() -> None:
    config = composed()
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    assert need_teacher_policy(config)
    assert not need_critic(config)
    assert not need_reference_policy(config)
    distillation = omega_conf_to_dataclass(config.distillation)
    loss = distillation.distillation_loss
    assert isinstance(loss, GatedLossConfig)
    assert loss.loss_settings.use_topk
    assert loss.for_student(151936).objective.gate == Gate.named("G5")
    # what verl derives: the teacher has its whole pool, room for prompt and response, and as many choices as asked for
    teacher = distillation.teacher_models["default"]
    assert teacher.world_size == 2
    assert teacher.inference.engine_kwargs["vllm"]["max_logprobs"] == 64
    assert teacher.inference.prompt_length == 512 + 32


@pytest.mark.parametrize(
    ("override", "gate"),
    [
        ("gate=H2", Gate.named("H2")),
        ("gate=[4,0,-1,0]", Gate(4, 0, -1, 0)),
        ("gate='static:0.388'", Gate.static(0.388)),
        ("gate='HG4,d+2'", Gate.named("HG4,d+2")),
        ("gate={a:4,c:-1,student_entropy:2}", Gate(4, 0, -1, 0, {"student_entropy": 2})),
    ],
)
def test_a_gate_on_verls_command_line(override: str, gate: Gate) -> None:
    config = composed(f"distillation.distillation_loss.{override}")
    assert Gate.parse(omega_conf_to_dataclass(config.distillation).distillation_loss.gate) == gate


def test_the_prompt_ends_where_gatespace_would_end_it() -> None:
    """The same text as `Prompt.render` gives to the tokenizer of a chat model."""
    from jinja2 import Template

    from gatespace.tasks import Prompt, synthetic_task

    template = composed().actor_rollout_ref.model.custom_chat_template
    prompt = Prompt.of(synthetic_task(size=60))
    seen: list[str] = []

    class Chat:
        chat_template = "… enable_thinking …"

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            assert options == {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
            content = messages[0]["content"]
            return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            seen.append(text)
            return [0]

    prompt.render(Chat(), "some text")
    assert Template(template).render(messages=prompt.messages("some text"), add_generation_prompt=True) == seen[0]


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"gate": "G9"}, "unknown gate 'G9'"),
        ({"gate": [1, 2, 3]}, "this is not a gate"),
        ({"gate": None}, "this is not a gate"),
        ({"gate": "4,0,-1,0,nothing=1"}, "unknown signal 'nothing'"),
        ({"support": "full"}, "support cannot be 'full'"),
        ({"support": "hybrid"}, "support cannot be 'hybrid'"),
        ({"entropy": "full"}, "entropy cannot be 'full'"),
        ({"topk": None}, "topk is a whole number"),
        ({"topk": 4}, "signal_top_k is more than the teacher sends"),
        ({"topk": 16, "support_k": 17}, "support_k is more than the teacher sends"),
        ({"chunked_topk_chunk_size": 0}, "chunked_topk_chunk_size is a whole number"),
        ({"vocab_size": True}, "vocab_size is a whole number"),
        ({"use_policy_gradient": True}, "not a reward"),
        ({"log_prob_min_clamp": -10.0}, "log_prob_min_clamp has no place"),
        ({"loss_mode": "k3"}, "for the loss mode gated_kl_topk"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what) as error:
        GatedLossConfig(**fields)
    assert error.value.instead or error.value.got
    section = {"_target_": "gatespace.integrations.verl.GatedLossConfig", **fields}
    with pytest.raises(InstantiationException, match=what):  # as verl's trainer would show it
        omega_conf_to_dataclass(OmegaConf.create(section))


def test_no_tokens_are_clamped_unless_asked_for() -> None:
    """verl's own dataclass clamps losses and log-probabilities at 10, which drops gradient silently."""
    assert DistillationLossConfig(loss_mode="forward_kl_topk").loss_max_clamp == 10.0
    ours = GatedLossConfig()
    assert ours.loss_max_clamp is None
    assert ours.log_prob_min_clamp is None
    assert not ours.use_policy_gradient
    assert not ours.use_task_rewards


# ---------------------------------------------------------------------- ways in


def test_the_configuration_alone_brings_the_plugin_in() -> None:
    code = """
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.trainer.distillation import losses
assert "gated_kl_topk" not in losses.DISTILLATION_LOSS_REGISTRY
omega_conf_to_dataclass(OmegaConf.create({"_target_": "gatespace.integrations.verl.GatedLossConfig", "gate": "H2"}))
assert "gated_kl_topk" in losses.DISTILLATION_LOSS_REGISTRY and hasattr(losses.compute_topk_loss, "__wrapped__")
"""
    done = python(code)
    assert done.returncode == 0, done.stderr[-2000:]


def test_verls_environment_variable_brings_the_plugin_in() -> None:
    code = """
import verl
from verl.trainer.distillation import losses
assert "gated_kl_topk" in losses.DISTILLATION_LOSS_REGISTRY and hasattr(losses.compute_topk_loss, "__wrapped__")
"""
    done = python(code, VERL_USE_EXTERNAL_MODULES="gatespace.integrations.verl")
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_ray_worker_computes_the_loss_from_the_configuration_it_is_sent() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import ray, torch
from omegaconf import OmegaConf

@ray.remote
def worker(section):
    import sys
    sys.path.insert(0, {str(ROOT)!r})
    from verl.trainer.distillation import distillation_ppo_loss
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import DistillationConfig
    config = DistillationConfig(distillation_loss=omega_conf_to_dataclass(section))
    from tests.addons.verl.batches import Batch, actor
    batch = Batch()
    found = distillation_ppo_loss(
        config=actor(), distillation_config=config, data=batch.data(), student_logits=batch.logits()
    )
    return found["distillation_losses"].detach()

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
section = {{"_target_": "gatespace.integrations.verl.GatedLossConfig", "gate": "H2", "topk": 12}}
there = ray.get(worker.remote(OmegaConf.create(section)))
here = worker._function(OmegaConf.create(section))
torch.testing.assert_close(there, here, rtol=1e-12, atol=0)
assert there.abs().sum() > 0
ray.shutdown()
"""
    done = python(code, RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0")
    assert done.returncode == 0, done.stderr[-3000:]


def test_installing_twice_wraps_once() -> None:
    install()
    assert not hasattr(seam.losses.compute_topk_loss.__wrapped__, "__wrapped__")


# ---------------------------------------------------------------------- another verl


def losses_with(**changes: Any) -> types.ModuleType:
    """verl's module with some names changed; None takes a name away."""
    made = types.ModuleType("losses")
    made.__dict__.update(vars(seam.losses))
    for name, value in changes.items():
        if value is None:
            delattr(made, name)
        else:
            setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"compute_topk_loss": None}, "compute_topk_loss is missing"),
        (
            {"compute_topk_loss": lambda config, data, student_logits: None},
            r"compute_topk_loss takes \(config, data, student_logits\)",
        ),
        ({"compute_forward_kl_topk": lambda inputs, response_mask, config: None}, "compute_forward_kl_topk takes"),
        ({"distillation_ppo_loss": lambda **fields: None}, "does not look compute_topk_loss up"),
        ({"register_distillation_loss": None}, "register_distillation_loss is missing"),
        ({"DistillationLossSettings": lambda names, use_teacher_topk: None}, "has no use_topk"),
    ],
)
def test_a_verl_that_is_made_otherwise_is_named_with_its_version(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what) as error:
        seam.check(losses_with(**changes))
    assert verl.__version__ in error.value.what
    assert f"verl=={seam.TESTED}" in error.value.instead


def test_settings_that_verl_no_longer_has_are_named() -> None:
    fewer = dataclasses.make_dataclass("DistillationLossConfig", [("loss_mode", str), ("topk", int)])
    with pytest.raises(UsageError, match="DistillationLossConfig has no chunked_topk_chunk_size"):
        seam.check(settings=fewer)


def test_the_verl_that_is_here_passes() -> None:
    seam.check()


@pytest.mark.parametrize(
    ("block", "what"),
    [
        ("verl", "needs the package 'verl', which is not installed"),
        ("orjson", "needs the package 'orjson', which is not installed"),
        ("verl.trainer.distillation", "verl 0.9.1 does not have the structure that gatespace's plug-in expects"),
    ],
)
def test_what_is_not_installed_is_named(block: str, what: str) -> None:
    done = python(f"import sys; sys.modules[{block!r}] = None; import gatespace.addons.verl")
    assert done.returncode == 1
    assert what in done.stderr, done.stderr[-1500:]
