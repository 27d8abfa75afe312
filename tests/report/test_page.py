"""The page: whole in itself, correct HTML, and the same for those who do not see it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from gatespace.report import build_report
from gatespace.report.table import shown
from gatespace.study.records import Look
from tests.sample_study import sample_results

from .conftest import made, parse, sentences

NASTY = '<script>alert(1)</script> & "quotes" $x$ {{ 7*7 }} #ffffff id="g" \'single\' 感情'
WIDTH = 390


@pytest.fixture(scope="module")
def page(whole):
    return parse(whole.html)


def test_nothing_is_fetched(whole, page):
    assert "http" not in re.sub(r'<meta http-equiv="Content-Security-Policy"', "", whole.html)
    policy = next(n for n in page.all("meta") if "http-equiv" in n.attributes).attributes["content"]
    assert policy.startswith("default-src 'none'")
    assert not page.all("script") + page.all("link") + page.all("iframe") + page.all("img")
    for node in page.all():
        for name, value in node.attributes.items():
            assert not name.startswith("on"), name
            if name in ("href", "src", "xlink:href"):
                assert value.startswith("#"), value
        assert not re.search(r"url\((?!#)|@import", node.attributes.get("style", ""))
    assert not re.search(r"url\(|@import", page.all("style")[0].text)


def test_ids_are_unique_and_links_lead_somewhere(page):
    ids = [node.attributes["id"] for node in page.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    for node in page.all():
        for name in ("href", "xlink:href"):
            assert node.attributes.get(name, "#" + ids[0]).removeprefix("#") in ids
        for target in re.findall(r"url\(#([^)]+)\)", " ".join(node.attributes.values())):
            assert target in ids
        for target in node.attributes.get("aria-labelledby", "").split():
            assert target in ids


def test_headings_go_down_one_by_one(page):
    levels = [int(node.tag[1]) for node in page.all() if re.fullmatch(r"h[1-6]", node.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_tables_have_headings_and_rows_have_names(page):
    for table in page.all("table"):
        assert table.all("caption")[0].text
        width = len(table.all("thead")[0].all("th"))
        for row in table.all("tbody")[0].all("tr"):
            assert len([child for child in row.children if child.tag in ("th", "td")]) == width
            assert row.children[0].tag == "th"
            assert row.children[0].attributes["scope"] == "row"


def test_the_first_screen_is_first_and_complete(whole, page):
    section = next(node for node in page.all("section"))
    assert section.attributes["id"] == "findings"
    words = sentences(section).replace("\u00a0", " ")
    found = whole.files.findings
    for text in (found.headline, *found.notable, *found.training, *found.limits):
        assert text in words
    table = section.all("table")[-1]
    rows = [sentences(row) for row in table.all("tbody")[0].all("tr")]
    assert len(rows) == len(found.claims)
    for claim, row in zip(found.claims, rows, strict=True):
        for text in (claim.about, claim.verdict_text, shown(claim.claim.mean, "signed_pp").replace("-", "−")):
            assert text in row


def test_the_ranking_is_before_every_sentence(whole):
    """One plot per task with all points, start, teacher and best constant; then what means hide; then the claims."""
    section = parse(whole.html).all("section")[0]
    for task in whole.results.tasks:
        figure = next(n for n in section.all("figure") if n.attributes["id"] == f"figure-ranking-{task}")
        rows = [row.children[0].text for row in figure.all("tbody")[0].all("tr")]
        assert set(rows) == {*whole.results.points(task), "start", "teacher", "best constant"}
    text = whole.html
    places = [text.index(part) for part in ("<figure", "What the comparisons support</h3>", "What limits it")]
    assert places == sorted(places)


def test_what_means_hide_stands_before_the_claims(tmp_path):
    built = made(
        tmp_path, points=("G5",), rows=100, steps=4, twins=(), shuffled=(), start=0.6,
        published=("todi", "akl", "eopd"), collapsed={"eopd": 35.0},
    )  # fmt: skip
    section = parse(built.html).all("section")[0]
    words = sentences(section)
    assert "eopd (published method) ends below its start" in words
    assert words.index("ends below its start") < words.index("What the comparisons support")
    assert "; driven by eopd alone" in words


def test_a_section_without_content_is_not_there(tmp_path):
    """Neither on the page nor in its contents; the glossary is called that."""
    options = {"twins": (), "shuffled": (), "published": (), "duplicates": 0}
    built = made(tmp_path, points=("G5",), rows=40, steps=4, seeds=(1, 2), **options)
    page = parse(built.html)
    titles = [node.text for node in page.all("h2")]
    assert "Replication on fresh seeds" not in titles
    assert "Glossary" in titles
    tables = [details for details in page.all("details") if details.attributes.get("class") == "table"]
    assert tables
    assert all(table.all("td") for table in tables)
    for section in page.all("section"):
        assert (
            section.all("figure") + section.all("details") + section.all("ul") + section.all("ol") + section.all("dl")
        )


def test_every_run_has_an_anchor(whole, page):
    ids = {node.attributes.get("id") for node in page.all("tr")}
    assert {f"run-{name}" for name in whole.results.runs} <= ids


def test_text_of_users_is_text(tmp_path):
    tasks = {"mine": ("own/<b>data</b>", (NASTY, "-other", "=cmd|x"))}
    built = made(
        tmp_path, tasks=tasks, points=("G2", "G5", "H1"), rows=60, steps=4, seeds=(1, 2), about=NASTY,
        text=NASTY, failed={"H1": f"RunError: {NASTY}\n  got: {{% raw %}}"},
    )  # fmt: skip
    page = parse(built.html)
    assert not page.all("script") + page.all("b")
    about = next(node for node in page.all("p") if node.attributes.get("class") == "about")
    assert about.text == NASTY
    assert NASTY in sentences(page)
    wrong = next(node for node in page.all("details") if node.attributes.get("id") == "table-wrong-texts")
    assert NASTY in sentences(wrong)
    assert "{% raw %}" in built.html
    for path in built.files.figures:
        text = path.read_text(encoding="utf-8")
        assert "<script" not in text
    confusion = next(path for path in built.files.figures if path.name.startswith("confusion"))
    assert "&lt;script&gt;" in confusion.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "options",
    [
        {"seeds": (42,)},
        {"waiting": ("G2", "G5", "H1")},
        {"failed": {"static:0.5": "RunError: x"}},
        {"twins": (), "shuffled": (), "published": ()},
        {"duplicates": 0},
        {"noise": 0.0, "seeds": (1, 2)},
    ],
    ids=["one seed", "no point done", "no static", "few axes", "no duplicates", "no noise"],
)
def test_a_part_of_a_study_gives_a_part_of_a_report(tmp_path, options):
    built = made(tmp_path, **{"points": ("G2", "G5", "H1"), "rows": 40, "steps": 4, "seeds": (1, 2), **options})
    page = parse(built.html)
    assert built.files.partial == any(run.state != "done" for run in built.results.runs.values())
    if built.files.partial:
        assert "this report is partial" in sentences(page)
        failures = next(node for node in page.all() if node.attributes.get("id") == "failures")
        assert len(failures.all("tbody")[0].all("tr")) == sum(r.state != "done" for r in built.results.runs.values())
    ids = {node.attributes.get("id") for node in page.all()}
    assert all(n.attributes["href"][1:] in ids for n in page.all("a"))


def test_equal_results_give_equal_files(tmp_path):
    """What a machine and a moment add, seconds, is in no table."""
    options = {"points": ("G2", "G5", "H1"), "rows": 60, "steps": 6, "seeds": (1, 2)}
    one = sample_results(tmp_path / "one", **options)
    two = sample_results(tmp_path / "two", **options)
    slower = {
        name: replace(run, cost=replace(run.cost, seconds=run.cost.seconds * 3, cpu_seconds=1.5))
        for name, run in two.runs.items()
    }
    two = replace(two, runs=slower)
    first = build_report(one, tmp_path / "a", png=False)
    second = build_report(two, tmp_path / "b", png=False)
    assert [path.name for path in first.tables] == [path.name for path in second.tables]
    for left, right in zip((*first.tables, *first.figures), (*second.tables, *second.figures), strict=True):
        assert left.read_bytes() == right.read_bytes(), left.name


def test_files_of_an_earlier_report_do_not_stay(tmp_path):
    results = sample_results(tmp_path / "study", points=("G2", "H1"), rows=40, steps=4, seeds=(1,))
    out = tmp_path / "report"
    (out / "tables").mkdir(parents=True)
    (out / "tables" / "old.csv").write_text("a\n")
    (out / "tables" / "mine.txt").write_text("keep")
    build_report(results, out, png=False)
    assert not (out / "tables" / "old.csv").exists()
    assert (out / "tables" / "mine.txt").exists()


def test_a_report_is_not_too_large_for_a_mail(whole):
    assert whole.files.html.stat().st_size < 3_200_000


# ---------------------------------------------------------------------------------------------------- in a browser

_PROBE = """<script>
window.addEventListener("load", () => {
  document.querySelectorAll("details").forEach(one => { one.open = OPEN; });
  const page = document.documentElement, out = [];
  document.querySelectorAll("body *").forEach(one => {
    const box = one.getBoundingClientRect();
    if (box.right > page.clientWidth + 1 && !one.closest(".scroll") && !one.closest("svg") && !one.closest("caption"))
      out.push(one.tagName + "." + one.className);
  });
  const seen = [...document.querySelectorAll("svg.chart text")].filter(one => one.getBoundingClientRect().width);
  const small = seen.map(one => {
    const size = parseFloat(getComputedStyle(one).fontSize), svg = one.ownerSVGElement;
    return size * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  });
  document.title = JSON.stringify([page.clientWidth, page.scrollWidth, out.slice(0, 5), Math.min(...small)]);
});
</script></head>"""
_FRAME = f"""<iframe src="copy.html" width="{WIDTH}" height="800" style="border: 0" id="phone"></iframe><script>
window.addEventListener("load", () => setTimeout(() => {{
  document.title = document.getElementById("phone").contentDocument.title;
}}, 100));
</script>"""


@pytest.mark.parametrize("opened", [False, True], ids=["closed", "all details open"])
def test_a_phone_needs_no_sideways_scrolling(whole, tmp_path, opened):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    # A copy that may run a script; the report itself has none and allows none.
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", whole.html)
    copy = tmp_path / "copy.html"
    copy.write_text(text.replace("</head>", _PROBE.replace("OPEN", str(opened).lower()), 1), encoding="utf-8")
    # Windows are at least 500 wide, so the phone is a frame.
    frame = tmp_path / "frame.html"
    frame.write_text(_FRAME, encoding="utf-8")
    client, scroll, outside, letters = _title(chromium, frame, tmp_path)
    assert client == WIDTH
    assert scroll <= client, outside
    assert outside == []
    assert letters >= 7.5


def _title(chromium: str, page: Path, folder: Path):
    done = subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=800,900",
            "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000",
            "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    found = re.search(r"<title>(\[.*?\])</title>", done.stdout)
    assert found, done.stderr[-500:]
    return json.loads(found[1])


def test_a_second_look_is_in_verdict_interval_and_limits(tmp_path):
    options = {"points": ("G2", "G5"), "rows": 120, "steps": 4, "published": (), "seeds": tuple(range(1, 10))}
    results = sample_results(tmp_path / "study", **options, effect=12.0, noise=0.3)
    looks = tuple(Look(str(i), 10, {}) for i in range(2))
    files = build_report(replace(results, looks=looks), tmp_path / "report", png=False)
    words = sentences(parse(files.html.read_text(encoding="utf-8")).all("section")[0])
    assert "98.75 % interval" in words
    assert "95 % interval" not in words.partition("What the comparisons support")[2].partition("What limits it")[0]
    assert "supported at a second look" in words
    assert "at look 2 their level is .05 / 2²" in words
