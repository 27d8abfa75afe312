"""Look-ups and figures that tables and charts share."""

from __future__ import annotations

import math
from statistics import fmean

import pytest

from gatespace.plugins import provided
from gatespace.report.view import View, installed_references


@pytest.fixture(scope="module")
def view(whole):
    return View(whole.results, whole.analysis, {})


def accuracies(view, task, point):
    return {seed: score.accuracy for seed, score in view.scores(task, point).items()}


def test_points_of_the_family_are_first(view):
    points = view.points("hate")
    assert points[:13] == view.points("hate", "point")
    assert points[:3] == ["G1", "G2", "G3"]
    assert len(points) == len(set(points)) == len({r.spec.point for r in view.results.done if r.spec.task == "hate"})
    assert view.kind("hate", "twin(G5)") == "twin"
    assert view.gate("hate", "twin(G5)") is None  # another constant at every seed


def test_the_sweep_leaves_out_the_seeds_of_the_replication(view):
    assert [*view.scores("hate", "H1")] == [42, 2, 3, 7, 8]
    assert [*view.sweep("hate", "H1")] == [42, 2, 3]
    assert [*view.scores("hate", "H2")] == [42, 2, 3]


def test_sampling_error_is_binomial(view):
    shares = [share for point in view.points("hate", "point") for share in accuracies(view, "hate", point).values()]
    p = fmean(shares)
    assert view.sampling_se("hate") == pytest.approx(100 * math.sqrt(p * (1 - p) / 150))


def test_references_are_those_of_installed_packages():
    assert installed_references().keys() == provided("references").keys()
