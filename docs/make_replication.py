"""Fill the results of docs/replication.md from the archive of the study, and draw its picture.

python docs/make_replication.py results/replication/replication.tar.xz
python docs/make_replication.py results/replication/replication.tar.xz --check    fail if the page is out of date
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from gatespace.evidence.analysis import analyse
from gatespace.report.beside import beside_charts, both
from gatespace.report.drawing import render
from gatespace.report.findings import find
from gatespace.report.table import markdown_text
from gatespace.report.tables import file_tables
from gatespace.report.view import View
from gatespace.study.records import StudyResults
from gatespace.study.results import read_results

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "replication.md"
PICTURE = ROOT / "docs" / "images" / "replication.png"
_PART = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, results: StudyResults) -> str:
    """The page with everything between `<!-- begin NAME -->` and `<!-- end -->` as the results have it."""
    view = View(results, analyse(results))
    findings = find(view)
    parts = {table.name: markdown_text(table).partition("\n\n")[2] for table in file_tables(view)}
    parts["status"] = f"**Status:** {findings.state}"
    parts["found"] = "".join(f"- {claim.about}: {claim.verdict_text}. {claim.text}\n" for claim in findings.claims)
    parts["found"] += "".join(f"- {text}\n" for text in findings.beside[:1])
    parts["limits"] = "".join(f"- {text}\n" for text in (*findings.notable, *findings.limits))
    parts["detectable"] = "".join(_detectable(view))
    parts["picture"] = f"![{findings.beside[0] if findings.beside else ''}](images/{PICTURE.name})"
    parts["machines"] = "".join(_machines(results))
    return _PART.sub(lambda found: f"{found[1]}\n{parts[found[2]].strip()}\n\n{found[3]}", page)


def _detectable(view: View) -> Iterator[str]:
    """What comparisons can detect where runs learned, and the smallest p, adjusted over all that were planned."""
    rows = [row for reference in view.references.values() for row in both(view, reference)]
    for row in rows:
        if row.learned and row.ours is not None and row.ours.mde is not None:
            yield (
                f"- {row.task}, {row.left} minus {row.right}: {row.ours.mde:.1f} pp, in 80 % of repetitions, by one "
                f"unadjusted t-test over {row.ours.n} seeds (SD {row.ours.sd:.1f} pp).\n"
            )
    if ps := [row.ours.p for row in rows if row.ours is not None and row.ours.p is not None]:
        smallest = min(1.0, len(rows) * min(ps))
        yield f"- The smallest p of all, after Holm over the {len(rows)} planned comparisons: {smallest:.2f}.\n"


def _machines(results: StudyResults) -> Iterator[str]:
    """CPU hours of all trainings by task, and the machines and versions that computed them."""
    yield "| task | runs | hours | CPU hours |\n|---|---:|---:|---:|\n"
    for task in results.tasks:
        costs = [run.cost for run in results.done if run.spec.task == task and run.cost is not None]
        hours, cpu = (sum(getattr(cost, key) for cost in costs) / 3600 for key in ("seconds", "cpu_seconds"))
        yield f"| {task} | {len(costs)} | {hours:.1f} | {cpu:.1f} |\n"
    yield "\nSteps alone, without evaluations, teachers and baselines.\n\n"
    kinds = Counter(
        f"{env.get('machine')} {env.get('cpu')}, {env.get('cores')} cores, {env.get('threads')} threads, "
        f"{env.get('precision')}, torch {env.get('packages', {}).get('torch')}, gatespace {env.get('gatespace')} "
        f"({str(env.get('commit'))[:12]})"
        for env in (run.environment for run in results.done)
    )
    for kind, runs in sorted(kinds.items()):
        yield f"- {runs} runs: {kind}\n"


def main(archive: Path, *, check: bool) -> None:
    """Write the page and its picture, or check the page."""
    results = read_results(archive)
    page = PAGE.read_text(encoding="utf-8")
    new = filled(page, results)
    if check:
        sys.exit(0 if new == page else f"{PAGE.name} is out of date: run docs/make_replication.py")
    PAGE.write_text(new, encoding="utf-8")
    for drawn in render(beside_charts(View(results, analyse(results)))):
        if drawn.png is not None:
            PICTURE.write_bytes(drawn.png)


if __name__ == "__main__":
    main(Path(sys.argv[1]), check="--check" in sys.argv)
