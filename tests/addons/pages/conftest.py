"""Real runs of a tiny pair, and a real browser where there is one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gatespace.config import TeachConfig, TrainConfig, parse_config
from gatespace.training.train import teach, train

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

TASK = {"name": "synthetic", "brief": True}
ENGINE = {"precision": "fp32", "threads": 1}
GATE = "4,4,-1.5,2,student_entropy=1"


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a gate that reads a further signal, and one of a published method."""
    place = tmp_path_factory.mktemp("explore")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATESPACE_CACHE", str(place / "cache"))
        settings = {"task": TASK, "model": "tiny", "steps": 10, "optimizer": {"lr": 5e-3}, "engine": ENGINE}
        settings |= {"evaluation": {"every": 0, "limit": 20, "final": ["val"]}, "output": str(place / "taught")}
        teach(parse_config(TeachConfig, settings))
        for name, objective in {"gated": {"gate": GATE}, "todi": {"method": "todi"}}.items():
            settings = {
                "task": TASK,
                "pair": {"student": "tiny-student", "teacher": str(place / "taught" / "model")},
                "objective": objective,
                "rollout": {"max_new_tokens": 6},
                "trace": {"tokens_every": 2, "rollouts": 8},
                "evaluation": {"every": 0, "limit": 20, "max_new_tokens": 6, "final": ["val"]},
                "checkpoint": {"model": False},
                "engine": ENGINE,
                "steps": 4,
                "batch_size": 8,
                "seed": 3,
                "output": str(place / "runs" / name),
            }
            train(parse_config(TrainConfig, settings))
    return place / "runs"


@pytest.fixture(scope="session")
def gated(runs: Path) -> Path:
    return runs / "gated"


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of tokens.jsonl, read without the code that is tested."""
    return [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]


def own_copy(folder: Path, place: Path, change: Callable[[list[dict[str, Any]]], None] = lambda lines: None) -> Path:
    """A copy of a run whose recorded responses may be changed."""
    shutil.copytree(folder, place)
    lines = records(place)
    change(lines)
    (place / "tokens.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


# ---------------------------------------------------------------------- the browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install '.[dev]'")
    found = os.environ.get("GATESPACE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium on this machine; $GATESPACE_CHROMIUM may name one")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """Opens pages and keeps what they complain about, and what they fetch."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.complaints: list[str] = []
        self.fetched: list[str] = []

    def __call__(self, url: str, *, width: int = 1280, height: int = 900, offline: bool = True, **options: Any) -> Page:
        context = self._browser.new_context(viewport={"width": width, "height": height}, offline=offline, **options)
        self._contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.on("console", lambda message: self.complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        page.on("request", lambda request: self.fetched.append(request.url))
        page.goto(url)
        page.wait_for_selector(".response")
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Pages that must not complain, and must fetch nothing but themselves."""
    visit = Visit(browser)
    yield visit
    visit.close()
    assert visit.complaints == []
    assert {url.partition("#")[0] for url in visit.fetched} <= {url.partition("#")[0] for url in visit.fetched[:1]}
