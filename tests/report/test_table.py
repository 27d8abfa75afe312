"""One table in three forms: numbers in full or rounded, and text that no reader takes for anything else."""

from __future__ import annotations

import csv
import io

import pytest

from gatespace.gating.coefficients import NotApplicable
from gatespace.report.table import OTHERS, Column, Runs, Table, count, csv_text, latex_text, markdown_text, shown, text

NASTY = 'a|b & c_d $x$ 50% #1 {y} \\alpha ~^ <script>alert("1")</script> `z` *w*\nnext'


def table(*rows, **columns) -> Table:
    made = tuple(Column(key, key, kind) for key, kind in columns.items())
    return Table("name", "Title", made, rows, note="A note.", empty="Nothing.")


@pytest.mark.parametrize(
    "value, kind, text",
    [
        (0.7734123, "percent", "77.34"),
        (1.726, "signed_pp", "+1.73"),
        (-0.004, "signed_pp", "0.00"),
        (0.0, "signed_pp", "0.00"),
        (-1.5, "signed_pp", "-1.50"),
        (0.3035, "p", "0.303"),
        (0.0004, "p", "<0.001"),
        (1421, "count", "1421"),
        (0.38812, "lam", "0.388"),
        (-2.0, "coefficient", "-2"),
        (4.0, "coefficient", "+4"),
        (None, "percent", "–"),
        (NotApplicable("a = 0"), "percent", "N/A"),
        (Runs(("one", "two")), "runs", "one two"),
    ],
)
def test_a_cell_is_rounded_for_readers(value, kind, text):
    assert shown(value, kind) == text


def test_csv_has_every_digit_and_says_why_something_is_not_there():
    made = table((0.1 + 0.2, None, NotApplicable("d = 0 here")), a="percent", b="pp", c="pp")
    rows = list(csv.reader(io.StringIO(csv_text(made))))
    assert rows[0] == ["a", "b_pp", "c_pp"]  # a share has no unit
    assert float(rows[1][0]) == 0.1 + 0.2
    assert rows[1][1:] == ["", "N/A (d = 0 here)"]


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3+cmd|'x'", "@SUM(A1)", "\t=1", "\r=1", "|x", "%x"])
def test_csv_text_never_begins_a_formula(text):
    cell = next(csv.reader(io.StringIO(csv_text(table((text,), a="text")).partition("\n")[2])))[0]
    assert cell[0] == "'"
    assert cell[1:] == text.replace("\r", "\n")


@pytest.mark.parametrize("text", ["-4,0,0,0", "+2", "-1.5e-3", "G5", "entropy-only(-4)"])
def test_gates_are_no_formulas(text):
    assert next(csv.reader(io.StringIO(csv_text(table((text,), a="text")).partition("\n")[2])))[0] == text


def test_csv_keeps_text_whole():
    assert next(csv.reader(io.StringIO(csv_text(table((NASTY,), a="text")).partition("\n")[2])))[0] == NASTY


def test_markdown_keeps_text_in_its_cell():
    lines = markdown_text(table((NASTY, 1), a="text", b="count")).splitlines()
    row = next(line for line in lines if "alpha" in line)
    assert row.count("|") - row.count("\\|") == 3
    assert "<script" not in row
    assert row.endswith("| 1 |")


def test_latex_escapes_what_is_special():
    row = next(
        line for line in latex_text(table((NASTY, -1.5), a="text", b="signed_pp")).splitlines() if "alpha" in line
    )
    text = row.removesuffix(r" \\").rsplit(" & ", 1)
    assert text[1] == "$-1.50$"
    bare = text[0]
    for escaped in (r"\textbackslash{}", r"\&", r"\_", r"\$", r"\%", r"\#", r"\{", r"\}", r"\textasciitilde{}"):
        assert escaped in bare
        bare = bare.replace(escaped, "")
    bare = bare.replace("{}", "")
    assert not set(bare) & set("&_$%#{}~^"), bare


def test_latex_balances_its_braces_and_uses_booktabs():
    text = latex_text(table((NASTY,), a="text"))
    assert [text.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
    plain = text.replace(r"\{", "").replace(r"\}", "")
    assert plain.count("{") == plain.count("}")
    assert text.count(r"\begin{") == text.count(r"\end{")


def test_a_long_latex_table_may_break_over_pages():
    text = latex_text(table(*((i,) for i in range(60)), a="count"))
    assert r"\begin{longtable}" in text
    assert r"\endhead" in text


def test_a_table_without_rows_says_why():
    assert "Nothing." in markdown_text(table(a="text"))
    assert "Nothing." in latex_text(table(a="text"))
    assert csv_text(table(a="text")) == "a\n"


def test_records_become_rows():
    none = NotApplicable("one seed")
    records = [{"b": 1, "a": "x", "more": 2}, {"a": "y"}, {"a": "z", OTHERS: none}]
    made = Table.of("name", "Title", (text("a"), count("b", "number")), records)
    assert made.rows == (("x", 1), ("y", None), ("z", none))
    assert [(column.title, column.kind) for column in made.columns] == [("a", "text"), ("number", "count")]


def test_columns_are_left_out_where_they_do_not_belong():
    columns = (Column("a", "a"), Column("b", "b", forms=frozenset({"csv"})))
    made = Table("name", "Title", columns, (("x", "hidden"),))
    assert "hidden" in csv_text(made)
    assert "hidden" not in markdown_text(made) + latex_text(made)


def test_a_column_without_a_value_is_not_on_the_page():
    columns = (Column("a", "a"), Column("b", "b"), Column("c", "c"))
    made = Table("name", "Title", columns, ((None, None, None), (None, None, 0)))
    assert [column.key for column in made.cells("html")[0]] == ["a", "c"]  # a names the row
    assert [column.key for column in made.cells("csv")[0]] == ["a", "b", "c"]
