"""The examples run as they are, and do what they say."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gatespace import signals
from gatespace.cli.study_file import checked_plan, load_study
from gatespace.config import TaskConfig, TeachConfig, TrainConfig, load_config, parse_config
from gatespace.models import TinyPair, build_tiny
from gatespace.plugins import load_plugins
from gatespace.tasks import synthetic_task
from gatespace.tasks.configured import load_configured_task
from gatespace.tasks.scores import find_metric
from gatespace.training.train import train

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LONGEST = 60
"""Lines of the plain loop, from its first to its last."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to work in and a cache, for all examples; one thread, since networks this small are slower on two."""
    folder, threads = tmp_path_factory.mktemp("examples"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("GATESPACE_CACHE", str(folder / "cache"))
        torch.set_num_threads(1)
        yield folder
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pair(place: Path) -> TinyPair:
    return build_tiny(synthetic_task())


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_first_loss(capsys: pytest.CaptureFixture[str]) -> None:
    load("first_loss").main()
    shown = capsys.readouterr().out
    assert "agree at every gate" in shown
    assert re.search(r"^ *G5 +\d\.\d{4}", shown, re.MULTILINE)


# ---------------------------------------------------------------------------------------------------- plain loop


def test_the_plain_loop_learns(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load("plain_loop").main(steps=16)
    lines = re.findall(r"step +(\d+)  loss ([\d.]+)  E\[λ\] ([\d.]+)  (\d+) tokens", capsys.readouterr().out)
    assert [int(line[0]) for line in lines] == list(range(1, 17))
    losses = [float(line[1]) for line in lines]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    lam = [float(line[2]) for line in lines]
    assert all(0.27 < one < 0.95 for one in lam)  # σ(-1) to σ(3), and a teacher that is neither certain nor clueless
    assert max(lam) - min(lam) > 0.01
    assert all(0 < int(line[3]) <= 24 * 8 for line in lines)


def test_the_plain_loop_takes_any_pair(pair: TinyPair, capsys: pytest.CaptureFixture[str]) -> None:
    load("plain_loop").main(str(pair.teacher), str(pair.teacher), steps=1)
    # A student that is its teacher has nothing to learn.
    assert "loss 0.0000" in capsys.readouterr().out


def test_the_plain_loop_masks_what_follows_the_end(pair: TinyPair) -> None:
    module = load("plain_loop")
    student = AutoModelForCausalLM.from_pretrained(pair.student)
    tokenizer = AutoTokenizer.from_pretrained(pair.student, padding_side="left")
    end = tokenizer.eos_token_id
    with torch.no_grad():  # an end of a response that is likely enough to come up somewhere in the middle
        student.lm_head.weight[end] += 0.5 * student.lm_head.weight.norm(dim=1).mean()
    prompts = tokenizer(["short", "one that is a good deal longer"] * 20, return_tensors="pt", padding=True)
    torch.manual_seed(0)
    ids, attention, mask = module.respond(student, prompts, 8, len(tokenizer))
    start = prompts["input_ids"].shape[1]
    assert ids.max() < len(tokenizer) < student.config.vocab_size
    lengths = set()
    for row in range(len(ids)):
        response = ids[row, start:].tolist()
        real = response.index(end) + 1 if end in response else len(response)
        assert mask[row].tolist() == [True] * real + [False] * (len(response) - real)
        assert attention[row].sum() == prompts["attention_mask"][row].sum() + real
        lengths.add(real)
    assert len(lengths) > 2, lengths  # or the test would see nothing


def test_the_plain_loop_reads_logits_where_they_are(pair: TinyPair) -> None:
    """Padded on the left in a batch, a row has the logits that it has alone."""
    module = load("plain_loop")
    model = AutoModelForCausalLM.from_pretrained(pair.teacher).double()
    tokenizer = AutoTokenizer.from_pretrained(pair.teacher, padding_side="left")
    prompts = tokenizer(["where is the bike", "we love the song, you can have it"], return_tensors="pt", padding=True)
    response = torch.tensor([[5, 9, 11], [7, 3, 20]])
    ids = torch.cat([prompts["input_ids"], response], 1)
    attention = torch.cat([prompts["attention_mask"], torch.ones_like(response)], 1)
    assert attention.min() == 0
    with torch.no_grad():
        found = module.response_logits(model, ids, attention, 3)
        for row in range(2):
            alone = model(ids[row, attention[row].bool()][None]).logits[0]
            torch.testing.assert_close(found[row], alone[-4:-1])


def test_the_plain_loop_is_short() -> None:
    assert len((EXAMPLES / "plain_loop.py").read_text().splitlines()) < LONGEST


# ---------------------------------------------------------------------------------------------------- own signal


def test_a_signal_of_ones_own(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = load("own_signal")
    if (place / "runs" / "loop-teacher" / "done").exists():  # of the same settings, and not made again
        shutil.copytree(place / "runs" / "loop-teacher", place / "own" / "teacher")
    try:
        module.in_the_loss()
        assert "the same gradient" in capsys.readouterr().out
        module.in_a_training(place / "own")
        shown = capsys.readouterr().out
        steps = re.findall(r"^step +(\d+)  loss ([\d.]+) .* margin ([\d.]+)  lag ([\d.]+)$", shown, re.MULTILINE)
        assert [int(step[0]) for step in steps] == [1, 11, 21]
        assert float(steps[-1][1]) < float(steps[0][1])
        assert all(0 < float(value) < 1 for step in steps for value in step[2:])
        assert re.search(r"^E\[λ\] 0\.\d{3} over \d+ tokens$", shown, re.MULTILINE)
    finally:
        for name in ("margin", "lag"):
            signals.unregister(name)


# ---------------------------------------------------------------------------------------------------- free text

TEXT = EXAMPLES / "text"


@pytest.fixture
def at_the_root(text_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the commands of docs/text.md are pasted."""
    monkeypatch.setenv("GATESPACE_TEXT", str(text_data))
    monkeypatch.chdir(EXAMPLES.parent)


def test_every_configuration_is_read() -> None:
    names = {file.name for file in TEXT.glob("*.yaml")}
    assert names == {"e2e.yaml", "e2e-study.yaml", "instruction.yaml", "gsm8k.yaml"}
    for name in ("e2e", "gsm8k"):
        load_config(TeachConfig, TEXT / f"{name}.yaml")
    for name in ("e2e", "gsm8k", "instruction"):
        load_config(TrainConfig, TEXT / f"{name}.yaml", ["pair.teacher=self"])
    config = load_study(str(TEXT / "e2e-study.yaml"), trust_plugins=True)
    plan = checked_plan(config)
    assert {(run.point, run.seed) for run in plan.runs.values()} == {
        (point, seed) for point in ("G4", "G5", "static:0.5") for seed in (42, 2)
    }
    assert {one.axis for one in plan.comparisons if one.status == "comparable"} == {"static"}
    # the study asks what the single runs ask
    assert parse_config(TaskConfig, config.tasks["e2e"].task) == load_config(TeachConfig, TEXT / "e2e.yaml").task


@pytest.mark.usefixtures("at_the_root")
def test_slots_are_covered_by_references() -> None:
    load_plugins([str(TEXT / "e2e_metrics.py")])
    rows = load_configured_task(load_config(TeachConfig, TEXT / "e2e.yaml").task).rows("test")
    assert len(rows) == 630
    covered, sentence = find_metric("slots"), find_metric("one_sentence")
    own = [covered(row.references[0], (), row.columns) for row in rows]
    others = [
        covered(other.references[0], (), row.columns) for row, other in zip(rows, rows[300:] + rows[:300], strict=True)
    ]
    assert sum(own) / len(own) > 0.9 > 0.5 > sum(others) / len(others)
    said = {"The Mill is a pub.": 1, "The Mill is a pub. It is old.": 0, "name[The Mill]": 0, "The Mill is": 0}
    assert {text: sentence(text, (), {}) for text in said} == said


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("at_the_root")
@pytest.mark.parametrize("name", ["e2e", "instruction", "gsm8k"])
def test_a_step_of_each(name: str, short_smollm2: Path, tmp_path: Path) -> None:
    load("text/gsm8k_messages").main(str(tmp_path / "gsm8k"))
    teacher = "self" if name == "instruction" else str(short_smollm2)
    source = [f"task.text.source={tmp_path / 'gsm8k'}"] if name == "gsm8k" else []
    smaller = [
        f"pair.student={short_smollm2}",
        f"pair.teacher={teacher}",
        "steps=1",
        "batch_size=2",
        "engine.threads=1",
    ]
    smaller += ["rollout.max_new_tokens=6", "evaluation.max_new_tokens=6", "evaluation.limit=2", "evaluation.every=0"]
    smaller += ["evaluation.final=[test]", "teacher.cache=null", f"output={tmp_path / 'run'}"]
    config = load_config(TrainConfig, TEXT / f"{name}.yaml", [*smaller, *source])
    found = train(config)["evaluation"]["test"]
    assert found["metrics"]["metric"] == {"e2e": "rouge_l", "instruction": "one_sentence", "gsm8k": "number"}[name]
    assert found["available"] == {"e2e": 630, "instruction": 630, "gsm8k": 1319}[name]
