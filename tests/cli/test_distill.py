from __future__ import annotations

import json


def test_one_command_from_a_table_to_a_model(cli, tmp_path):
    data = tmp_path / "rows.csv"
    data.write_text("mr,ref\n" + "".join(f"thing {i},The thing number {i} is good.\n" for i in range(30)))
    words = [
        "distill", data, "--teacher", "tiny-teacher", "--student", "tiny-student", "--steps", "2", "--batch-size", "4",
        "--metric", "token_f1", "--set", "engine.precision=fp32", "-o", tmp_path / "run",
    ]  # fmt: skip
    result = cli(*words)
    assert result.exit_code == 0, result.stderr
    assert "a text task: prompt '{mr}', right response 'ref', judged by token_f1" in result.stderr
    firsts = [line.strip().partition("  ")[0] for line in result.stdout.splitlines()]
    assert [one for one in firsts if one in ("teacher", "student before", "student after")] == [
        "teacher", "student before", "student after",
    ]  # fmt: skip
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    again = json.loads(cli(*words, "--json", "--quiet").stdout)
    run = json.loads((tmp_path / "run" / "evaluation-test.json").read_text())
    assert again["models"]["student after"]["score"] == run["metrics"]["score"]
    assert again["models"]["teacher"]["parameters"] > again["models"]["student after"]["parameters"] > 0
    assert run["max_new_tokens"] > 8
