"""The notebook runs from top to bottom, and is kept without its outputs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "gatespace.ipynb"


def _read() -> Any:
    return pytest.importorskip("nbformat").read(NOTEBOOK, as_version=4)


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = [cell for cell in _read().cells if cell.cell_type == "code"]
    assert cells
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


@pytest.mark.slow
@pytest.mark.long
def test_the_notebook_runs(tmp_path: Path) -> None:
    client = pytest.importorskip("nbclient")
    notebook = client.execute(_read(), cwd=str(tmp_path), timeout=1800)  # an error in a cell raises
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    loss, study, records, _ = ["".join(output.get("text", "") for output in each) for each in outputs]
    assert loss.startswith("loss ")
    assert "G5" in study
    # No progress bar, of which a notebook would keep every frame: bold text is all that terminals have to know.
    assert not re.search(r"\x1b\[[\d;?]*[^\d;?m]", study)
    assert records.count("step ") == 5
    assert "<iframe srcdoc=" in outputs[-1][-1].data["text/html"]
