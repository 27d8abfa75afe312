"""Free text on the command line: the commands of a run say its metric, and predict gives a response per line."""

from __future__ import annotations

import json

import pytest

ROWS = [(f"thing {i}", f"{i} is good") for i in range(40)]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "rows.csv"
    path.write_text("mr,ref\n" + "".join(f"{mr},{ref}\n" for mr, ref in ROWS))
    return path


@pytest.fixture(scope="module")
def teach(cli, table):
    """A run of a text task, and the command that made it."""
    folder = table.parent / "run"
    words = ["teach", table, "--prompt", "Say: {mr}", "--metric", "token_f1", "--model", "tiny", "--lr", "0.003"]
    words += ["--steps", "30"]
    result = cli(*words, "--set", "evaluation.max_new_tokens=10", "--set", "evaluation.every=15", "--output", folder)
    assert result.exit_code == 0, result.stderr
    return folder, result


def test_a_run_says_its_metric(teach):
    _, result = teach
    assert "token_f1" in result.stdout
    assert "accuracy" not in result.stdout
    assert "val token_f1 by step" in result.stdout
    assert "val token_f1 0." in result.stderr
    assert "task.text" in result.stdout
    assert result.stdout.count("rollout.max_new_tokens=") == 1


def test_its_card_says_its_prompt_and_metric(teach):
    pytest.importorskip("gatespace.addons.publish")
    folder, _ = teach
    card = (folder / "model" / "README.md").read_text()
    assert "responds to the prompts of" in card
    assert "Say: {mr}" in card
    assert "token_f1" in card


def test_evaluate_gives_the_bytes_of_the_run(cli, teach, tmp_path):
    folder, _ = teach
    result = cli("evaluate", folder, "--output", tmp_path, "--quiet")
    assert result.exit_code == 0, result.stderr
    for name in ("predictions-test.jsonl", "evaluation-test.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    found = json.loads(cli("evaluate", folder, "--json", "--samples", "2").stdout)
    assert found["metrics"]["metric"] == "token_f1"
    assert 0 <= found["sampled"]["accuracy"] <= 1
    assert "Sampled 2 times at temperature 1: token_f1" in cli("evaluate", folder, "--samples", "2").stdout
    refused = cli("evaluate", folder, "--probabilities")
    assert refused.exit_code == 2
    assert "only labels have probabilities" in refused.stderr


def test_predict_gives_a_response_per_line(cli, teach, tmp_path):
    folder, _ = teach
    rows = [json.loads(line) for line in (folder / "predictions-test.jsonl").read_text().splitlines()]
    asked = [row["text"].removeprefix("Say: ") for row in rows]
    lines = cli("predict", folder, stdin="\n".join([*asked[:2], "", *asked[2:]])).stdout.split("\n")
    said = [" ".join(row["response"].splitlines()) for row in rows]
    assert lines == [*said[:2], "", *said[2:], ""]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps({"mr": mr, "id": 1}) + "\n" for mr in asked))
    found = [json.loads(line) for line in cli("predict", folder, tmp_path / "new.jsonl", "--json").stdout.splitlines()]
    assert found == [
        {"line": i, "response": row["response"], "text": row["text"], "raw": row["raw"], "mr": mr, "id": 1}
        for i, (row, mr) in enumerate(zip(rows, asked, strict=True), start=1)
    ]
    result = cli("predict", folder, tmp_path / "new.jsonl", "-o", tmp_path / "out.csv")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "out.csv").read_text().splitlines()[0] == "line,response,text,raw,mr,id"
    # an empty cell keeps its place, as an empty line does
    (tmp_path / "gap.csv").write_text(f"id,mr\n1,{asked[0]}\n2,\n3, \n4,{asked[1]}\n")
    assert cli("predict", folder, tmp_path / "gap.csv").stdout.split("\n") == [said[0], "", "", said[1], ""]
    (tmp_path / "other.jsonl").write_text('{"meaning": "x"}\n')
    missing = cli("predict", folder, tmp_path / "other.jsonl")
    assert missing.exit_code == 2
    assert "other.jsonl:1 has no column 'mr'" in missing.stderr
    renamed = cli("predict", folder, tmp_path / "other.jsonl", "--field", "meaning", "--json")
    assert json.loads(renamed.stdout)["text"] == "Say: x"


def test_a_chat_model_responds_to_a_plain_line(cli, tmp_path):
    def turns(mr):
        return [{"role": "user", "content": mr}]

    rows = [{"messages": [*turns(mr), {"role": "assistant", "content": ref}]} for mr, ref in ROWS]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tmp_path / "run"
    result = cli("teach", tmp_path / "chats.jsonl", "--model", "tiny", "--lr", "0.003", "--steps", "5", "-o", run)
    assert result.exit_code == 0, result.stderr
    assert "note: a text task: 'messages' holds conversations" in result.stderr
    wanted = cli("predict", run, "--json", stdin="thing 1\n\n[1] thing\n")
    assert wanted.exit_code == 0, wanted.stderr
    found = [json.loads(line) for line in wanted.stdout.splitlines()]
    assert [one["text"] for one in found] == [json.dumps(turns("thing 1")), "", json.dumps(turns("[1] thing"))]
    as_chat = cli("predict", run, "--json", stdin=json.dumps(turns("thing 1")) + "\n")
    assert json.loads(as_chat.stdout) == found[0]
    (tmp_path / "lines.csv").write_text("id;ask\n7;thing 1\n")
    table = json.loads(cli("predict", run, tmp_path / "lines.csv", "--column", "ask", "--json").stdout)
    assert table == {**found[0], "id": "7", "ask": "thing 1"}


def test_bad_rows_are_said_before_a_model_is_loaded(cli, tmp_path):
    (tmp_path / "bad.csv").write_text("mr,ref\na,b\n,c\n")
    task = json.dumps({"source": str(tmp_path / "bad.csv"), "prompt": "{mr}", "answer": "ref"})
    result = cli("teach", "--set", f"task.text={task}", "--model", "nowhere", "-o", tmp_path / "run")
    assert result.exit_code == 2
    assert "task.text: " in result.stderr
    assert "bad.csv:3: the prompt is empty" in result.stderr
