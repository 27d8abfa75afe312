"""Tables, and their text in Markdown, LaTeX and CSV.

A cell holds a plain value. Its column defines the rounding for display; CSV has full precision. What does not exist is
None or a `NotApplicable` with its reason, never NaN or 0. Equal tables have equal bytes in every format.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gatespace.gating.coefficients import NotApplicable

Kind = Literal["text", "count", "percent", "pp", "signed_pp", "p", "number", "lam", "coefficient", "runs"]
Form = Literal["md", "tex", "csv", "html"]
Forms = frozenset[Form]
EVERYWHERE: Forms = frozenset({"md", "tex", "csv", "html"})
NOT_IN_PRINT: Forms = frozenset({"md", "csv", "html"})
FILES_ONLY: Forms = frozenset({"md", "csv"})
CSV_ONLY: Forms = frozenset({"csv"})


class Runs(NamedTuple):
    """The runs that a row was computed from."""

    ids: tuple[str, ...]


Value = str | int | float | Runs | NotApplicable | None
Record = Mapping[str, Any]
"""A row by column key; a missing key is an empty cell."""
OTHERS = "*"
"""Key of a record that stands for all columns it does not name."""
ABSENT = "–"
_DECIMALS: Mapping[str, int] = {"percent": 2, "pp": 2, "signed_pp": 2, "number": 2, "lam": 3}
_SMALLEST_P = 0.001
_LONG = 45
"""Rows beyond which a LaTeX table may break across pages."""


@dataclass(frozen=True)
class Column:
    """A column."""

    key: str
    title: str
    """Its heading, with the unit of the displayed cells."""
    kind: Kind = "text"
    """How a cell is displayed. A percent is a share, and stays one in CSV; pp are percentage points everywhere."""
    forms: Forms = EVERYWHERE
    """The formats that include it; ids are too long for print."""

    @property
    def csv_name(self) -> str:
        """Its name in CSV: the key, with the unit if it is pp."""
        return f"{self.key}_pp" if self.kind in ("pp", "signed_pp") else self.key

    @property
    def numeric(self) -> bool:
        """Whether cells are right-aligned."""
        return self.kind not in ("text", "runs")


def _of_kind(kind: Kind) -> Callable[..., Column]:
    def column(key: str, title: str = "", forms: Forms = EVERYWHERE) -> Column:
        return Column(key, title or key, kind, forms)

    return column


# count("rows", "test rows") is a column of counts; without a title its key is the heading.
text, count, number, lam = _of_kind("text"), _of_kind("count"), _of_kind("number"), _of_kind("lam")
percent, pp, signed_pp, p_value = _of_kind("percent"), _of_kind("pp"), _of_kind("signed_pp"), _of_kind("p")


@dataclass(frozen=True)
class Table:
    """A table."""

    name: str
    """Name of its files."""
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    """One cell per column each."""
    note: str = ""
    """How to read it, in a sentence or two."""
    stub: int = 1
    """Number of leading columns that name the row."""
    empty: str = ""
    """Text shown if there are no rows."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise AssertionError(f"{self.name}: {len(row)} cells for {len(self.columns)} columns")

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        columns: Sequence[Column],
        records: Iterable[Record],
        *,
        note: str = "",
        stub: int = 1,
        empty: str = "",
    ) -> Table:
        """Build a table from records; keys without a column are ignored."""
        rows = tuple(tuple(record.get(c.key, record.get(OTHERS)) for c in columns) for record in records)
        return cls(name, title, tuple(columns), rows, note, stub, empty)

    def cells(self, form: Form) -> tuple[list[Column], list[list[Value]]]:
        """Return the columns and rows of a format. On the page, columns without any value are left out."""
        kept = [i for i, column in enumerate(self.columns) if form in column.forms]
        if form == "html" and self.rows:
            kept = [i for i in kept if i < self.stub or any(row[i] is not None for row in self.rows)]
        return [self.columns[i] for i in kept], [[row[i] for i in kept] for row in self.rows]


def shown(value: Value, kind: Kind) -> str:
    """Format a cell for display, rounded.

    Examples:
        >>> shown(0.77338, "percent"), shown(-0.004, "signed_pp"), shown(1.7, "signed_pp"), shown(0.0002, "p")
        ('77.34', '0.00', '+1.70', '<0.001')
    """
    if value is None:
        return ABSENT
    if isinstance(value, NotApplicable):
        return "N/A"
    if isinstance(value, Runs):
        return " ".join(value.ids)
    if isinstance(value, str):
        return value
    if kind == "p":
        return f"{value:.3f}" if value >= _SMALLEST_P else f"<{_SMALLEST_P}"
    if kind == "coefficient":
        return f"{value:+g}" if value else "0"
    if kind in ("count", "text", "runs") and float(value).is_integer():
        return str(int(value))
    number = value * 100 if kind == "percent" else value
    text = f"{number:.{_DECIMALS.get(kind, 2)}f}"
    if float(text) == 0:
        return text.removeprefix("-")
    return f"+{text}" if kind == "signed_pp" and number > 0 else text


def signed(value: float | None) -> str:
    """Format a difference in pp for a sentence, with a minus instead of a hyphen."""
    return shown(value, "signed_pp").replace("-", "−")


# ---------------------------------------------------------------------------------------------------- formats


def markdown_text(table: Table) -> str:
    """Return the table in Markdown, with its title above and its note below."""
    columns, rows = table.cells("md")
    lines = [f"**{_markdown(table.title)}**", ""]
    if rows:
        lines.append(_markdown_row([_markdown(column.title) for column in columns]))
        lines.append(_markdown_row(["---:" if column.numeric else ":---" for column in columns]))
        for row in rows:
            cells = zip(row, columns, strict=True)
            lines.append(_markdown_row([_markdown(shown(value, column.kind)) for value, column in cells]))
    else:
        lines.append(_markdown(table.empty))
    if table.note:
        lines += ["", _markdown(table.note)]
    return "\n".join(lines) + "\n"


def latex_text(table: Table) -> str:
    """Return the table in LaTeX; needs booktabs, and longtable for long tables."""
    columns, rows = table.cells("tex")
    long = len(rows) > _LONG
    layout = "".join("r" if column.numeric else "l" for column in columns)
    caption = rf"\caption{{{_latex(table.title)}. {_latex(table.note)}}}"
    label = rf"\label{{tab:{table.name}}}"
    head = " & ".join(_latex(column.title) for column in columns) + r" \\"
    body = [
        " & ".join(_latex_cell(value, column) for value, column in zip(row, columns, strict=True)) + r" \\"
        for row in rows
    ] or [rf"\multicolumn{{{len(columns)}}}{{l}}{{{_latex(table.empty)}}} \\"]
    if long:
        lines = [
            "% needs the packages booktabs and longtable",
            r"\begingroup\small",
            rf"\begin{{longtable}}{{{layout}}}",
            caption + label + r" \\",
            *(r"\toprule", head, r"\midrule", r"\endfirsthead"),
            *(r"\toprule", head, r"\midrule", r"\endhead"),
            *(r"\bottomrule", r"\endfoot"),
            *body,
            r"\end{longtable}",
            r"\endgroup",
        ]
    else:
        lines = [
            "% needs the package booktabs",
            r"\begin{table}[t]",
            r"\centering\small",
            rf"\begin{{tabular}}{{{layout}}}",
            *(r"\toprule", head, r"\midrule", *body, r"\bottomrule"),
            r"\end{tabular}",
            caption,
            label,
            r"\end{table}",
        ]
    return "\n".join(lines) + "\n"


def csv_text(table: Table) -> str:
    """Return the table as CSV: numbers in full precision, text escaped against spreadsheet formulas."""
    columns, rows = table.cells("csv")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.csv_name for column in columns])
    for row in rows:
        writer.writerow([_csv(value) for value in row])
    return out.getvalue()


# ---------------------------------------------------------------------------------------------------- escaping

_MARKDOWN = re.compile(r"([\\`*_\[\]|~#])")
_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    '"': r"\textquotedbl{}", "|": r"\textbar{}", "'": r"\textquotesingle{}", "`": r"\textasciigrave{}",
    "λ": r"$\lambda$", "Δ": r"$\Delta$", "Σ": r"$\Sigma$", "σ": r"$\sigma$", "β": r"$\beta$", "α": r"$\alpha$",
    "τ": r"$\tau$", "±": r"$\pm$", "×": r"$\times$", "≥": r"$\ge$", "≤": r"$\le$", "−": "$-$", "–": "--",
    "·": r"$\cdot$",
    "→": r"$\to$", "≠": r"$\ne$", "≈": r"$\approx$", "…": r"\dots{}", "\u00a0": "~",
}  # fmt: skip
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%")
_HARMLESS = re.compile(r"[-+]?\d[\d.,eE+\-]*")
"""A gate such as -4,0,0,0, which begins like a formula but is harmless."""


def _one_line(text: str) -> str:
    return re.sub(r"\s*[\r\n\u2028\u2029]+\s*", " ", text).strip()


def _markdown(text: str) -> str:
    escaped = _MARKDOWN.sub(r"\\\1", _one_line(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(char, char) for char in _one_line(text) if char.isprintable() or char == "\u00a0")


def _latex_cell(value: Value, column: Column) -> str:
    text = shown(value, column.kind)
    if isinstance(value, int | float) and text.startswith(("-", "+", "<")):
        return f"${text}$"  # a minus, not a hyphen
    return _latex(text)


def _csv(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, NotApplicable):
        return _plain(f"N/A ({value.reason})")
    if isinstance(value, Runs):
        return _plain(" ".join(value.ids))
    if isinstance(value, str):
        return _plain(value)
    return repr(value)


def _plain(text: str) -> str:
    text = text.replace("\r\n", "\n").replace("\r", "\n")  # a bare CR ends a row for some readers
    if text.startswith(_FORMULA) and not _HARMLESS.fullmatch(text):
        return "'" + text
    return text
