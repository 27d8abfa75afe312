"""What a study says about one of its runs, against numbers that are computed here from the runs' scores."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest
from scipy import stats

from gatespace.addons.publish.card import Evidence
from gatespace.addons.publish.evidence import point_evidence, run_in
from gatespace.runs import RunFolder
from gatespace.study.records import RunResult, StudyResults
from tests.sample_study import sample_results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> StudyResults:
    place = tmp_path_factory.mktemp("point")
    return sample_results(place, seed=3, tasks=("emotion", "hate"), points=["G4", "G5", "H1"], rows=60, steps=2)


def found(results: StudyResults, task: str, point: str, seed: int) -> tuple[RunResult, Evidence]:
    run = results.run(task, point, seed)
    assert run is not None
    return run, point_evidence(results, run)


def accuracies(results: StudyResults, task: str, point: str) -> dict[int, float]:
    runs = [run for run in results.done if (run.spec.task, run.spec.point) == (task, point)]
    return {run.spec.seed: 100 * run.scores["test"].correct / run.scores["test"].count for run in runs}


def test_accuracy_over_seeds(results: StudyResults) -> None:
    _, evidence = found(results, "emotion", "G5", 2)
    own = accuracies(results, "emotion", "G5")
    assert evidence.point[0].startswith(
        f"G5 on emotion: {own[2]:.1f} % of the test texts are right at this model's seed 2, and "
        f"{fmean(own.values()):.1f} % on average over 3 seeds (42, 2, 3), SD {stdev(own.values()):.2f} pp; "
        "the student before training is at "
    )


@pytest.mark.parametrize("point, other", [("G5", "twin(G5)"), ("twin(G5)", "G5"), ("H1", "gap-only(+2)")])
def test_differences_are_seen_from_the_point(results: StudyResults, point: str, other: str) -> None:
    _, evidence = found(results, "emotion", point, 42)
    (sentence,) = [text for text in evidence.point if text.startswith(f"Against {other} (")]
    one, two = accuracies(results, "emotion", point), accuracies(results, "emotion", other)
    differences = [one[seed] - two[seed] for seed in one]
    mean, half = fmean(differences), stats.t.ppf(0.975, 2) * stdev(differences) / 3**0.5
    numbers = re.search(r": ([−+]?[\d.]+) pp over 3 seeds, 95 % CI \[([−+]?[\d.]+), ([−+]?[\d.]+)\]", sentence)
    assert numbers is not None, sentence
    said = [float(text.replace("−", "-")) for text in numbers.groups()]
    assert said == pytest.approx([mean, mean - half, mean + half], abs=0.0051)
    assert sentence.endswith("described, not claimed.")


def test_groups_are_those_of_the_point(results: StudyResults) -> None:
    _, evidence = found(results, "emotion", "G5", 42)
    about = {text.split(":")[0].split(" (")[0] for text in evidence.groups}
    # G5 has no gap signal, so no gap-only restriction; the control of this study is its own.
    assert about == {
        "Entropy-only restrictions", "Mean-matched constant", "Shuffled λ", "Constant λ = 0.5", "Published methods",
    }  # fmt: skip
    _, evidence = found(results, "emotion", "todi", 42)
    assert {text.split(":")[0].split(" (")[0] for text in evidence.groups} == {"Published methods"}


def test_other_tasks_stay_out(results: StudyResults) -> None:
    _, evidence = found(results, "hate", "G4", 42)
    text = " ".join([*evidence.point, *evidence.limits])
    assert "hate: " in text
    assert "emotion" not in text


def test_what_was_picked_is_told(results: StudyResults) -> None:
    means = {
        point: fmean(
            run.scores["val"].accuracy for run in results.done if (run.spec.task, run.spec.point) == ("emotion", point)
        )
        for point in ("G4", "G5", "H1")
    }
    best = max(means, key=means.__getitem__)
    for point in means:
        _, evidence = found(results, "emotion", point, 3)
        text = " ".join(evidence.point)
        assert ("is the point of the family with the best mean" in text) == (point == best)
        assert (f"best on validation, which is {best}" in text) == (point != best)
        assert "choices were made by" not in text
    _, evidence = found(results, "emotion", best, 42)
    assert "Its seed 42 is the one that choices were made by" in " ".join(evidence.point)


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    one = sample_results(tmp_path, points=["G5"], seeds=(42,), rows=60, steps=2, shuffled=(), published=())
    _, evidence = found(one, "emotion", "G5", 42)
    text = " ".join(evidence.point)
    assert "CI" not in text
    assert "on average" not in text
    assert re.search(r"Against twin\(G5\) \(a constant λ of the same mean\): [−+]?[\d.]+ pp at 1 seed\.", text)
    assert all("descriptive only" in group for group in evidence.groups)


def test_a_run_is_found_by_folder_or_identity(results: StudyResults, tmp_path: Path) -> None:
    run = results.done[3]
    assert run_in(results, RunFolder(run.folder)) is run
    assert run_in(results, RunFolder(tmp_path)) is None
    for place, name in ((run.folder, "this"), (results.done[0].folder, "that"), (tmp_path, "this")):
        (place / "identity.json").write_text(json.dumps({"identity": name, "content": {}}))
    try:
        assert run_in(results, RunFolder(tmp_path)) is run
    finally:
        for place in (run.folder, results.done[0].folder):
            (place / "identity.json").unlink()
