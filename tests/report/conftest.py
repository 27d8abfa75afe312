from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gatespace.evidence.analysis import analyse
from gatespace.evidence.records import StudyAnalysis
from gatespace.report import ReportFiles, build_report
from gatespace.study.records import StudyResults
from tests.sample_study import sample_results

_VOID = {"meta", "br", "hr", "img", "input", "link"}


@dataclass
class Node:
    """An element of a page."""

    tag: str
    attributes: dict[str, str]
    children: list[Node] = field(default_factory=list)
    text: str = ""

    def all(self, tag: str | None = None) -> list[Node]:
        found = [self] if tag in (None, self.tag) else []
        for child in self.children:
            found += child.all(tag)
        return found

    @property
    def words(self) -> str:
        return " ".join([self.text, *(child.words for child in self.children)])


class Tree(HTMLParser):
    """A page as a tree; a tag that is not closed, or closed twice, is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("", {})
        self._open = [self.root]
        self.feed(text)
        self.close()
        assert self._open == [self.root], [node.tag for node in self._open]

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        node = Node(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(node)
        if tag not in _VOID:
            self._open.append(node)

    def handle_endtag(self, tag):
        assert self._open[-1].tag == tag, (tag, self._open[-1].tag)
        self._open.pop()

    def handle_data(self, data):
        self._open[-1].text += data


def parse(html: str) -> Node:
    """The tree of a page."""
    return Tree(html).root


def sentences(node: Node) -> str:
    """The words of an element, with single blanks."""
    return re.sub(r"\s+", " ", node.words)


@dataclass(frozen=True)
class Built:
    """A study with its report."""

    results: StudyResults
    files: ReportFiles

    @cached_property
    def analysis(self) -> StudyAnalysis:
        return analyse(self.results)

    @property
    def html(self) -> str:
        return self.files.html.read_text(encoding="utf-8")

    def table(self, name: str, form: str = "csv") -> str:
        return (self.files.html.parent / "tables" / f"{name}.{form}").read_text(encoding="utf-8")


def made(folder: Path, **options) -> Built:
    """A sample study in `folder` and its report beside it."""
    results = sample_results(folder / "study", **options)
    return Built(results, build_report(results, folder / "report", png=False))


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Built:
    """Two tasks, three seeds, two fresh ones for a replication: everything that a report can have."""
    return made(
        tmp_path_factory.mktemp("whole"), tasks=("emotion", "hate"), replication_seeds=(7, 8), twins=("lam", "rkl"),
        rows=150, steps=12, about="What is it that a gate does?",
    )  # fmt: skip


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Built:
    """One task that the paper does not have, three seeds, four points."""
    return made(
        tmp_path_factory.mktemp("small"), tasks=("weather",), points=("G2", "G5", "H1", "H3"), rows=120, steps=8
    )
