from __future__ import annotations

import json

import pytest


def test_a_run_is_evaluated_as_it_was_at_its_end(cli, taught, tmp_path):
    """Task, prompt, precision and batches are those of the run, so every prediction is."""
    result = cli("evaluate", taught.folder, "--limit", "40", "--output", tmp_path, "--quiet")
    assert result.exit_code == 0, result.stderr
    for name in ("predictions-test.jsonl", "evaluation-test.json"):
        assert (tmp_path / name).read_bytes() == (taught.folder / name).read_bytes()
    assert f"wrote {tmp_path / 'predictions-test.jsonl'}\n" in result.stdout
    assert result.stderr == ""


def test_the_tables_say_what_was_found(cli, taught):
    metrics = json.loads((taught.folder / "evaluation-test.json").read_text())["metrics"]
    lines = cli("evaluate", taught.folder / "model", "--limit", "40").stdout.splitlines()
    for row in metrics["per_label"]:
        numbers = [f"{row[key]:.3f}" for key in ("precision", "recall", "f1")]
        expected = [*row["label"].split(), *numbers, *(str(row[key]) for key in ("support", "predicted", "unparsed"))]
        assert expected in [line.split() for line in lines]
    whole = f"{metrics['accuracy']:.2f}"
    assert any(line.split()[:5] == ["test,", "first", "rows", "40", whole] for line in lines)
    assert "Only the first 40 of 800 rows, which need not be like the rest." in lines
    assert "0 of these texts also occur in train." in lines


def test_probabilities_have_tables_of_their_own(cli, taught):
    words = ("evaluate", taught.folder, "--limit", "40", "--probabilities")
    found = json.loads(cli(*words, "--json").stdout)["calibration"]
    lines = [line.split() for line in cli(*words).stdout.splitlines()]
    names = ("accuracy", "auc", "confidence", "log_loss", "brier", "ece", "aurc", "mass")
    assert [f"{found[name]:.4f}" for name in names] in lines
    for one in found["coverage_at"]:
        shown = ["not", "reached"] if one["threshold"] is None else [f"{one['threshold']:.4f}"]
        assert [f"{one['accuracy']:g}", f"{one['coverage']:.4f}", *shown] in lines


def test_samples_are_counted_beside_the_greedy_responses(cli, taught):
    words = ("evaluate", taught.folder, "--limit", "20", "--samples", "4", "--temperature", "1.5")
    found = json.loads(cli(*words, "--json").stdout)["sampled"]
    assert (found["samples"], found["temperature"], found["seed"]) == (4, 1.5, 0)
    assert 0 < found["accuracy"] < 1
    text = " ".join(cli(*words).stdout.split())
    assert f"Sampled 4 times at temperature 1.5: accuracy {found['accuracy']:.2f}, SD {found['sd']:.2f}" in text
    result = cli(*words, "--sampler", "vllm=python")
    assert result.exit_code == 2
    assert "--samples and --sampler do not go together" in result.stderr


def test_json_is_alone(cli, taught):
    result = cli("evaluate", taught.folder, "--split", "val", "--limit", "3", "--json")
    found = json.loads(result.stdout)
    assert (found["split"], found["metrics"]["count"], found["task"]) == ("val", 3, "synthetic")
    assert found["without_duplicates"]["status"] == "n/a"
    assert found["model"] == str(taught.folder / "model")


def test_duplicates_have_a_row_of_their_own(cli, taught, tmp_path):
    rows = [json.loads(line) for line in (taught.folder / "predictions-test.jsonl").read_text().splitlines()]
    table = [json.dumps({"text": row["text"], "label": row["references"][0]}) for row in rows]
    (tmp_path / "train.jsonl").write_text("\n".join(table[:20]))
    (tmp_path / "val.jsonl").write_text("\n".join(table[20:30]))
    (tmp_path / "test.jsonl").write_text("\n".join(table[10:40]))
    labels = ["good news", "bad news", "open question", "open offer"]
    section = {"table": {"source": str(tmp_path), "labels": labels}, "brief": True}
    (tmp_path / "own.yaml").write_text(json.dumps({"task": section}))
    result = cli("evaluate", taught.folder, "--config", tmp_path / "own.yaml", "--precision", "fp32")
    assert result.exit_code == 0, result.stderr
    right = [row["references"] == [row["response"]] for row in rows]
    lines = [line.split() for line in result.stdout.splitlines()]
    assert next(line for line in lines if line[:1] == ["test"])[1:3] == ["30", f"{sum(right[10:40]) / 30:.2f}"]
    without = next(line for line in lines if line[:3] == ["test", "without", "10"])
    assert f"{sum(right[20:40]) / 20:.2f}" in without
    assert "20" in without


def test_options_say_otherwise_than_the_run(cli, taught):
    def accuracy(*words):
        result = cli("evaluate", taught.folder, "--limit", "40", "--json", *words)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)["metrics"]["accuracy"]

    assert accuracy("--no-brief") < accuracy("--brief") == accuracy()
    short = cli("evaluate", taught.folder, "--limit", "5", "--json", "--max-new-tokens", "1")
    assert json.loads(short.stdout)["ended"] == 0


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_a_task_of_a_plugin_needs_the_plugin_to_be_named(cli, taught, tmp_path, monkeypatch, command):
    monkeypatch.setattr("gatespace.tasks.load._registered", {})
    config, plugin, name = tmp_path / "own.yaml", tmp_path / "my_task.py", f"task-to-{command}"
    config.write_text(json.dumps({"plugins": [str(plugin)], "task": {"name": name, "brief": True}}))
    plugin.write_text(
        "from gatespace.tasks import register\n"
        "from gatespace.tasks.synthetic import synthetic_task\n"
        f"register({name!r})(synthetic_task)\n"
    )
    words = [command, taught.folder, "--config", config, "--quiet"]
    words += ["--limit", "3"] if command == "evaluate" else []
    result = cli(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: task.name: unknown task {name!r}\n")
    assert result.stderr.endswith(f"  instead: --plugin {plugin}\n")
    result = cli(*words, "--plugin", plugin, stdin="such good news\n")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        (["{run}", "--split", "tset"], "error: unknown split 'tset'\n  instead: did you mean 'test'?"),
        (["{run}", "--task", "sythetic"], "error: task.name: unknown task 'sythetic'\n"),
        (["{run}", "--prefill", "nonsense"], "error: task.prefill: a prefill is the beginning of every right answer\n"),
        (["{run}", "--device", "tpu"], "error: device: must be auto, cpu, cuda"),
        (["{run}", "--config", "missing.yaml"], "error: missing.yaml cannot be read\n"),
        (["no-such", "--task", "synthetic"], "error: MODEL: no such model\n  got: 'no-such'\n"),
        (["smollm2"], "error: which task?\n"),
        (["no/such/folder"], "error: no such model folder, "),
        (["{run}", "--sampler", "vllm=x", "--probabilities"], "error: --probabilities and --sampler do not go"),
    ],
)
def test_mistakes_exit_2(cli, taught, words, message):
    result = cli("evaluate", *(word.format(run=taught.folder) for word in words))
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stdout == ""
