"""The live page in a real browser: a real study that is killed and resumed, and folders in every state."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gatespace.addons.pages.watch import watch_server
from gatespace.config import StudyConfig, parse_config
from gatespace.study.plan import make_plan
from tests.addons.pages.test_explore_browser import AXE, settle
from tests.addons.pages.watched import begin, finish, under_way

if TYPE_CHECKING:
    from playwright.sync_api import Page

REAL: dict[str, Any] = {
    "name": "live",
    "tasks": {"messages": {"task": {"name": "synthetic", "brief": True, "split": {"teacher": 0.5, "distill": 0.1}}}},
    "train": {
        "pair": {"student": "tiny-student", "teacher": "tiny"},
        "steps": 3000,
        "batch_size": 4,
        "rollout": {"max_new_tokens": 4},
        "evaluation": {"every": 5, "max_new_tokens": 4, "batch_size": 20, "limit": 10},
        "engine": {"precision": "fp32"},
        "checkpoint": {"every": 4},
    },
    "points": ["G4", "G5"],
    "axes": {"restrictions": False, "static": []},
    "seeds": [1],
}
GONE = "net::ERR_(CONNECTION_(REFUSED|RESET|CLOSED)|SOCKET_NOT_CONNECTED|EMPTY_RESPONSE)"
EVIL = "</script><img src=x onerror=\"alert('in')\">"


@pytest.fixture(autouse=True)
def own_cache(runs, monkeypatch):
    """That of the runs, where the tiny models are already."""
    monkeypatch.setenv("GATESPACE_CACHE", str(runs.parent / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def pages(browser) -> Iterator[Callable[..., Page]]:
    """Opens pages that may not complain, but for a server that was taken away."""
    contexts, complaints = [], []

    def visit(url: str, *, width: int = 1280, height: int = 900, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)  # the machine may be busy with a study
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(url)
        page.wait_for_selector("main h2")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert [text for text in complaints if not re.search(GONE, text)] == []


@contextmanager
def served(folder: Path) -> Iterator[str]:
    watch = watch_server(folder)
    with watch.server as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield watch.url
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def command(*words: object) -> Iterator[subprocess.Popen[str]]:
    """A gatespace of its own, killed at the end with all that it has started."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gatespace", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def cell(page: Page, run: str, column: int) -> str:
    return page.locator(f"tr[data-run='{run}'] > *").nth(column).inner_text()


def step_of(page: Page, run: str) -> int:
    return int(cell(page, run, 5).partition("/")[0])


def until(page: Page, run: str, condition: str) -> None:
    """Wait for a row's cells c to be so."""
    row = f"document.querySelector(`tr[data-run='{run}']`)"
    page.wait_for_function(
        f"() => {{ const c = [...({row}?.children ?? [])].map((e) => e.innerText); return c.length && {condition}; }}"
    )


@pytest.mark.slow
@pytest.mark.long
def test_a_real_study_from_before_its_beginning_through_kills_and_restarts(pages, tmp_path):
    folder = tmp_path / "live"
    (tmp_path / "live.json").write_text(json.dumps(REAL))
    names = {spec.point: spec.id for spec in make_plan(parse_config(StudyConfig, REAL)).runs.values()}
    study = ("run", tmp_path / "live.json", "--output", folder, "--quiet")
    with command("watch", folder) as server:
        url = server.stdout.readline().split()[0]
        page = pages(url)
        page.get_by_role("heading", name="Nothing has begun").wait_for()
        # The records of another run: training refuses to go on in this folder.
        broken = folder / "runs" / names["G4"]
        broken.mkdir(parents=True)
        (broken / "identity.json").write_text('{"identity": "other", "content": {}}')
        with command(*study):
            until(page, names["G5"], "c[4] === 'running' && parseInt(c[5]) >= 6 && c[8] !== ''")
            assert page.locator("h1").inner_text() == "live"
            assert page.locator("[data-name=headline]").inner_text().startswith("2 of 6 done · 1 running · 1 failed")
            assert cell(page, names["G4"], 4) == "failed"
            error = json.loads((broken / "error.json").read_text())["error"]
            assert page.locator(".failures .error").inner_text() == error
            before = step_of(page, names["G5"])
            until(page, names["G5"], f"parseInt(c[5]) > {before}")
            assert 0 < float(cell(page, names["G5"], 6)) < 1
            label = page.get_by_role("img", name="Mean λ over the steps").get_attribute("aria-label")
            assert "G5, seed 1 0." in label
        until(page, names["G5"], "c[4] === 'stopped'")
        assert page.locator("[data-name=state]").inner_text() == "stopped"
        assert "No process is working on it" in page.locator("main").inner_text()
    page.locator(".banner.lost").wait_for()
    recorded = (folder / "runs" / names["G5"] / "metrics.jsonl").read_text().count("\n")
    with command(*study), command("watch", folder) as server:
        assert server.stdout.readline().split()[0] == url
        page.locator(".banner.lost").wait_for(state="hidden")
        until(page, names["G5"], f"c[4] === 'running' && parseInt(c[5]) > {recorded}")


# ---------------------------------------------------------------------- folders in every state


@pytest.fixture
def study(tmp_path):
    """Runs in every state; the folder and one run are held for the length of a test."""
    study, work = begin(tmp_path / "study")
    under_way(work["messages G4 seed 1"].folder, 10, accuracy=0.5)
    finish(work["messages G4 seed 1"].folder, 0.8)
    under_way(work["messages G5 seed 1"].folder, 4, accuracy=0.25)
    under_way(work["messages static:0.5 seed 1"].folder, 7)
    work["messages todi seed 1"].folder.fail(f"it {EVIL}", "Traceback (most recent call last): …")
    with study.claim(), work["messages G5 seed 1"].folder.claim():
        yield study.path, work


def checked(page: Page) -> list[str]:
    boxes = page.locator("tbody input[type=checkbox]:checked").all()
    return [str(box.get_attribute("aria-label")).removeprefix("curves of messages ") for box in boxes]


def shown(page: Page) -> list[str]:
    return page.locator("tbody tr > th").evaluate_all("(all) => all.map((e) => e.firstChild.data)")


def test_table_filters_choices_and_link(pages, study):
    with served(study[0]) as url:
        page = pages(url)
        assert page.locator("img").count() == 0
        assert EVIL in page.locator(".failures .error").inner_text()
        page.get_by_text("where it happened").click()
        assert "Traceback" in page.locator(".failures details pre").inner_text()
        assert checked(page) == ["G4, seed 1", "G5, seed 1", "static:0.5, seed 1"]
        row = [
            page.locator(f"tr[data-run='{study[1]['messages G4 seed 1'].name}'] > *").nth(i).inner_text()
            for i in range(9)
        ]
        assert row[1:6] == ["G4", "messages", "1", "done", "10/10"]
        assert row[8] == "80.0 %"
        page.get_by_label("curves of messages G4, seed 1").uncheck()
        page.get_by_label("state", exact=True).select_option("waiting")
        page.get_by_label("name has").fill("twin")
        page.get_by_role("button", name="seed").click()
        page.get_by_role("button", name="seed").click()
        settle(page)
        assert shown(page) == ["twin(G4)", "twin(G5)", "twin(G4)", "twin(G5)"]
        assert page.locator("th[aria-sort=descending]").inner_text().startswith("seed")
        assert "#" in page.url
        page.reload()
        page.wait_for_selector("tbody tr")
        assert shown(page) == ["twin(G4)", "twin(G5)", "twin(G4)", "twin(G5)"]
        page.get_by_label("state", exact=True).select_option("")
        page.get_by_label("name has").fill("")
        settle(page)
        assert checked(page) == ["static:0.5, seed 1", "G5, seed 1"] or checked(page) == [
            "G5, seed 1",
            "static:0.5, seed 1",
        ]
        page.get_by_role("button", name="Draw what is running").click()
        settle(page)
        assert len(checked(page)) == 3


def test_the_keyboard_is_enough(pages, study):
    with served(study[0]) as url:
        page = pages(url)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "runs"
        for _ in range(30):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.type") == "checkbox":
                break
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "curves of messages G4, seed 1"
        page.keyboard.press("Space")
        settle(page)
        assert checked(page) == ["G5, seed 1", "static:0.5, seed 1"]
        # What comes from the server meanwhile leaves the focus where it is.
        under_way(study[1]["messages G5 seed 1"].folder, 1, first=5)
        until(page, study[1]["messages G5 seed 1"].name, "c[5].startsWith('5/')")
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "curves of messages G4, seed 1"


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
def test_axe_finds_nothing(pages, study, scheme, width):
    if not AXE.is_file():
        pytest.skip("no axe-core here: npm ci in web/")
    with served(study[0]) as url:
        page = pages(url, color_scheme=scheme, width=width, is_mobile=width < 500, has_touch=width < 500)
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.get_by_text("where it happened").click()
        settle(page)
        page.evaluate(AXE.read_text())
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']}).then((r) => r.violations)")
    assert [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in found] == []


def test_a_run_alone_and_a_folder_that_vanishes(pages, gated, tmp_path):
    shutil.copytree(gated, tmp_path / "run")
    with served(tmp_path / "run") as url:
        page = pages(url)
        assert page.locator("[data-name=state]").inner_text() == "done"
        assert cell(page, "run", 5) == "4/4"
        assert page.title() == "1/1 · run – gatespace watch"
        shutil.rmtree(tmp_path / "run")
        page.get_by_role("heading", name="Nothing has begun").wait_for()


def test_a_void_address_is_told(browser, study):
    with served(study[0]) as url:
        page = browser.new_page()
        reply = page.goto(url + "x")
        assert reply.status == 403
        page.goto(url)
        page.wait_for_selector("main h2")
        page.evaluate("history.replaceState(null, '', '/?token=other')")  # the page keeps the token it came with
        page.reload()
        assert "token" in page.locator("body").inner_text()
        page.close()
