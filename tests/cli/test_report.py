"""`gatespace report` on the folder of a study, as it is written by `gatespace run`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from gatespace.config import StudyConfig, parse_config
from gatespace.evaluation.metrics import measure
from gatespace.gating.coefficients import Gate
from gatespace.runs import RunFolder, StudyFolder
from gatespace.study.plan import baseline_name, make_plan

LABELS = ("sun", "rain")


def evaluation(run: RunFolder, split: str, rng: random.Random, accuracy: float) -> dict:
    gold = [LABELS[i % 2] for i in range(50)]
    said = [label if rng.random() < accuracy else LABELS[label == "sun"] for label in gold]
    rows = [{"gold": one, "label": other} for one, other in zip(gold, said, strict=True)]
    run.predictions_file(split).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "split": split,
        "metrics": measure(gold, said, LABELS).as_json(),
        "duplicates": 0,
        "without_duplicates": {},
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    """A study of two points and two seeds; one run of it has failed."""
    settings = {
        "name": "small",
        "tasks": {"weather": {"task": {"name": "synthetic"}}},
        "points": ["G4", "G5"],
        "seeds": [42, 2],
        "train": {"pair": {"teacher": "tiny", "student": "tiny"}},
    }
    config = parse_config(StudyConfig, settings)
    study = StudyFolder(tmp_path / "study")
    study.begin(config, workers=1, threads=1)
    rng = random.Random(0)
    plan = make_plan(config)
    for number, spec in enumerate(plan.runs.values()):
        run = study.run(spec.id)
        run.path.mkdir(parents=True)
        if number == 0:
            run.fail("RunError: the loss is not finite")
            continue
        scores = {split: evaluation(run, split, rng, 0.8) for split in ("val", "test")}
        stats = {
            "lam_mean": 0.5, "lam_sd": 0.1, "lam_saturated": 0.0, "lam_hist": [0] * 9 + [5, 5] + [0] * 9,
            "lam_rkl_mean": 0.5, "tokens": 10, "steps": 1,
        }  # fmt: skip
        gate = Gate(*spec.gate) if spec.gate is not None else Gate.static(0.5)
        record = {"step": 1, "loss": 1.0, "lam_mean": 0.5, "forward_kl": 1.0, "reverse_kl": 1.0}
        timing = {"step": 1, "wall": {"all": 1.0}, "cpu": {"all": 1.0}, "teacher_tokens": 3}
        files = {
            "summary.json": {"evaluation": scores, "run": stats, "fingerprint": f"print{number}"},
            "identity.json": {"identity": "0", "content": {"gate": str(gate)}},
            "environment.json": {"gatespace": "0", "commit": "abc", "python": "3.11", "packages": {"torch": "2"}},
            "metrics.jsonl": record,
            "timings.jsonl": timing,
            "reads.jsonl": {"split": "test", "rows": 50},
        }
        for name, content in files.items():
            (run.path / name).write_text(json.dumps(content) + "\n")
        run.mark_done()
    for role in ("student", "teacher"):
        run = study.baseline(baseline_name(config, "weather", role))
        run.path.mkdir(parents=True)
        for split in ("val", "test"):
            run.evaluation_file(split).write_text(json.dumps(evaluation(run, split, rng, 0.6)))
        run.finish_baseline({"task": "synthetic", "digest": "0"})
    return study.path


def test_it_writes_and_says_where(run, folder):
    result = run("report", str(folder), "--no-png")
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "this report is partial" in words
    assert "Mean-matched constant" in words
    assert "report.html" in result.output
    assert (folder / "report.html").is_file()
    assert {path.suffix for path in (folder / "tables").iterdir()} == {".md", ".tex", ".csv"}
    assert {path.suffix for path in (folder / "figures").iterdir()} == {".svg"}
    assert "the loss is not finite" in (folder / "report.html").read_text()


def test_json_names_findings_and_files(run, folder, tmp_path):
    out = tmp_path / "elsewhere"
    result = run("report", str(folder), "--output", str(out), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["partial"] is True
    assert found["html"] == str(out / "report.html")
    assert all(Path(path).is_file() for path in (*found["tables"], *found["figures"]))
    assert {claim["axis"] for claim in found["claims"]} == {"restriction", "isolation", "static"}
    assert not (folder / "report.html").exists()


def test_a_folder_without_a_study_is_a_mistake(run, tmp_path):
    result = run("report", str(tmp_path))
    assert result.exit_code == 2
    assert "not the folder of a study" in result.stderr


def test_it_needs_no_torch(python, folder):
    code = (
        "import sys; from gatespace.cli.report import write_report; from pathlib import Path;"
        f"write_report(Path({str(folder)!r}), png=False, quiet=True); sys.exit('torch' in sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
