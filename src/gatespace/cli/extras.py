"""What the installed gatespace says that it needs: its requirements and its extras, read from its own metadata."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

DISTRIBUTION = "gatespace"
FOR_DEVELOPMENT = frozenset({"dev", "docs", "test", "lint", "bench"})
"""Extras for working on gatespace itself. Any other extra adds something to use."""

_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?\s*([^;]*)")
_EXTRA_MARKER = re.compile(r"""\(?\s*extra\s*==\s*(['"])([^'"]+)\1\s*\)?""")


@dataclass(frozen=True)
class Requirement:
    """One line of the metadata's Requires-Dist."""

    name: str
    asked_extras: tuple[str, ...]
    versions: str
    extra: str | None
    marker: str

    @property
    def text(self) -> str:
        """The requirement without its marker."""
        asked = f"[{','.join(self.asked_extras)}]" if self.asked_extras else ""
        return f"{self.name}{asked}{self.versions}"


@dataclass(frozen=True)
class Extra:
    """An extra of gatespace, what is still missing of it, and the command that adds it."""

    name: str
    missing: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command that adds this extra."""
        return f"pip install '{DISTRIBUTION}[{self.name}]'"


def requirements() -> list[Requirement] | None:
    """All requirements of the installed gatespace; None where it is not installed."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    return [parse_requirement(line) for line in lines]


def parse_requirement(line: str) -> Requirement:
    """Read one line of Requires-Dist, e.g. ``matplotlib<4,>=3.8; extra == 'plot'``."""
    text, _, marker = line.partition(";")
    match = _NAME.match(text)
    if match is None:
        return Requirement(text.strip(), (), "", None, marker.strip())
    asked = tuple(part.strip() for part in (match[2] or "").split(",") if part.strip())
    extra = _EXTRA_MARKER.search(marker)
    rest = _EXTRA_MARKER.sub("", marker)
    rest = re.sub(r"^\s*and\b|\band\s*$", "", rest.strip()).strip()
    return Requirement(match[1], asked, match[3].strip(), extra[2] if extra else None, rest)


def extras() -> list[Extra]:
    """The extras of the installed gatespace, in the order of its metadata."""
    known = requirements()
    if known is None:
        return []
    names = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    return [Extra(name, tuple(missing(_of_extra(name, known)))) for name in names]


def extra_with(package: str) -> Extra | None:
    """The extra that adds `package` for use, or None."""
    known = requirements() or []
    for extra in extras():
        adds = {_fold(requirement.name) for requirement in _of_extra(extra.name, known)}
        if extra.name not in FOR_DEVELOPMENT and _fold(package) in adds:
            return extra
    return None


def missing(wanted: Iterable[Requirement]) -> list[str]:
    """The requirements that are not met here; one that is met by a wrong version says so."""
    unmet: dict[str, None] = {}
    for requirement in wanted:
        if not _applies(requirement.marker):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            unmet[requirement.text] = None
            continue
        if not _allows(requirement.versions, version):
            unmet[f"{requirement.text} (found {version})"] = None
    return list(unmet)


def _of_extra(name: str, known: list[Requirement], seen: frozenset[str] = frozenset()) -> list[Requirement]:
    """The requirements of an extra, with those of gatespace's other extras that it asks for."""
    found: list[Requirement] = []
    for requirement in known:
        if requirement.extra is None or _fold(requirement.extra) != _fold(name):
            continue
        if _fold(requirement.name) != DISTRIBUTION:
            found.append(requirement)
            continue
        for other in requirement.asked_extras:
            if other not in seen:
                found += _of_extra(other, known, seen | {name})
    return found


def _applies(marker: str) -> bool:
    if not marker:
        return True
    try:
        from packaging.markers import InvalidMarker, Marker
    except ImportError:
        # Without packaging, a requirement counts everywhere: asking for too much is the safe side of a diagnosis.
        return True
    try:
        return Marker(marker).evaluate()
    except InvalidMarker:
        return True


def _allows(versions: str, installed: str) -> bool:
    if not versions:
        return True
    try:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet
    except ImportError:
        return True
    try:
        return SpecifierSet(versions.strip("() ")).contains(installed, prereleases=True)
    except InvalidSpecifier:
        return True


def _fold(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
