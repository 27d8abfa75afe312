"""Figures as files and inside the page."""

from __future__ import annotations

import re

from gatespace.report import build_report
from tests.sample_study import sample_results


def test_figures_follow_the_pages_colours(whole):
    drawn = "".join(re.findall(r"<svg.*?</svg>", whole.html, flags=re.DOTALL))
    assert "var(--ink)" in drawn
    assert not re.findall(r"(?:fill|stroke): ?#[0-9a-f]{3,6}", drawn)
    assert "prefers-color-scheme: dark" in whole.html
    assert "@media print" in whole.html


def test_a_single_png_is_drawn_from_the_same_figures(tmp_path):
    results = sample_results(tmp_path / "s", points=("G2", "H1"), rows=30, steps=3, seeds=(1,), published=(), twins=())
    files = build_report(results, tmp_path / "r")
    kinds = {kind: {path.stem for path in files.figures if path.suffix == kind} for kind in (".svg", ".png")}
    assert kinds[".svg"] == kinds[".png"] != set()
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in files.figures if path.suffix == ".png")
