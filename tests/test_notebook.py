"""The notebook runs from top to bottom, and is kept with the outputs that its code gives.

`python -m tests.test_notebook` runs it and writes them anew.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "gatespace.ipynb"
_CHANGING = re.compile(r"(running: |\[\d+/\d+\] |\d+ of \d+ done).*\n")
"""Lines on progress, which depend on the machine."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def _read() -> Any:
    return pytest.importorskip("nbformat").read(NOTEBOOK, as_version=4)


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _executed(folder: Path) -> Any:
    client = pytest.importorskip("nbclient")
    return client.execute(_read(), cwd=str(folder), timeout=1800)  # an error in a cell raises


def _text(cell: Any) -> str:
    """What a cell has printed, without colours, progress and paths."""
    text = re.sub(r"\x1b\[[\d;]*m", "", "".join(output.get("text", "") for output in cell.outputs))
    return re.sub(r"/\S*/tmp\w+/", "", _CHANGING.sub("", text))


def test_the_notebook_is_kept_with_outputs() -> None:
    cells = _code(_read())
    assert len(cells) == 4
    for cell in cells:
        (output,) = cell.outputs  # no pages, which a viewer would not show
        assert output.output_type == "stream"
        assert output.text == _text(cell)
        assert cell.execution_count is not None
        assert cell.metadata == {}  # no times
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(cells[0].source, {})
    assert _text(cells[0]) == printed.getvalue()


@pytest.mark.slow
@pytest.mark.long
def test_the_notebook_gives_its_outputs(tmp_path: Path) -> None:
    cells = _code(_executed(tmp_path))
    study = "".join(output.get("text", "") for output in cells[1].outputs)
    # No progress bar, of which a notebook would keep every frame: bold text is all that terminals have to know.
    assert not re.search(r"\x1b\[[\d;?]*[^\d;?m]", study)
    assert "<iframe srcdoc=" in cells[3].outputs[-1].data["text/html"]
    for cell, kept in zip(cells, _code(_read()), strict=True):
        assert _NUMBER.sub("#", _text(cell)).split() == _NUMBER.sub("#", _text(kept)).split()
    # Another kind of CPU rounds otherwise.
    records, kept_records = (map(float, _NUMBER.findall(_text(each[2]))) for each in (cells, _code(_read())))
    assert [*records] == pytest.approx([*kept_records], abs=0.05)


if __name__ == "__main__":
    import nbformat

    with tempfile.TemporaryDirectory() as place:
        notebook = _executed(Path(place))
    for one in _code(notebook):
        one.outputs, one.metadata = [nbformat.v4.new_output("stream", text=_text(one))], {}
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, NOTEBOOK)
