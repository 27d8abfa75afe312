"""Convert pydantic's validation errors into `gatespace.errors`: each problem's dotted path, and the nearest name."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import ValidationError

from gatespace.config.base import Fault, Section, field_of, fields_of, section_of
from gatespace.errors import UsageError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_WORDS = {
    "missing": "is needed and not given",
    "model_type": "must be a mapping of settings",
    "model_attributes_type": "must be a mapping of settings",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a text",
    "bool_type": "must be true or false",
    "string_too_short": "must not be empty",
}


@dataclass(frozen=True)
class Problem:
    """One invalid setting."""

    path: str
    what: str
    got: str | None = None
    instead: str = ""

    def __str__(self) -> str:
        got = f", got {self.got}" if self.got is not None else ""
        return f"{self.path}: {self.what}{got}" + (f" (instead: {self.instead})" if self.instead else "")


def usage_error(cls: type[Section], error: ValidationError, *, where: str, overridden: Mapping[str, str]) -> UsageError:
    """All problems of a configuration as one error.

    Args:
        cls: The configuration class.
        error: The error from pydantic.
        where: The file, or "" if there is none.
        overridden: Dotted path set on the command line → how: problems there are not attributed to the file.
    """
    problems = [_problem(cls, part) for part in error.errors(include_url=False)]
    problems = [replace(problem, path=_named(problem.path, where, overridden)) for problem in problems]
    if len(problems) == 1:
        (problem,) = problems
        return UsageError(f"{problem.path}: {problem.what}", got=problem.got, instead=problem.instead)
    lines = [str(problem) for problem in problems]
    return UsageError("\n  ".join([f"{len(lines)} settings are wrong", *lines]))


@contextmanager
def in_setting(path: str) -> Iterator[None]:
    """Prefix any `UsageError` raised inside with the dotted path of a setting."""
    try:
        yield
    except UsageError as error:
        raise type(error)(f"{path}: {error.what}", got=error.got, why=error.why, instead=error.instead) from error


def _named(path: str, where: str, overridden: Mapping[str, str]) -> str:
    """A setting as the user gave it: an option, ``--set PATH``, or ``FILE: PATH``."""
    if path in overridden:
        return overridden[path]
    if any(path.startswith(f"{other}.") for other in overridden):
        return f"--set {path}"
    if where:
        return f"{where}: {path}"
    return f"--set {path}" if any(other.startswith(f"{path}.") for other in overridden) else path


def _problem(cls: type[Section], error: Any) -> Problem:
    kind, value = error["type"], error["input"]
    path, owner = _path(cls, error["loc"])
    if kind == "extra_forbidden":
        known = list(fields_of(owner))
        return Problem(path, "unknown key", instead=_nearest(str(error["loc"][-1]), known))
    if kind == "value_error" and isinstance(cause := error["ctx"]["error"], Fault):
        place = ".".join(part for part in (path, cause.field) if part)
        return Problem(place or "the configuration", cause.what, _at(value, cause.field), cause.instead)
    if kind == "value_error":
        return Problem(path, str(error["ctx"]["error"]), _shown(value))
    if kind == "missing":
        return Problem(path, _WORDS[kind])
    if kind == "literal_error" and (options := _options(cls, error["loc"])):
        return Problem(
            path, f"must be one of {', '.join(options)}", _shown(value), _nearest(str(value), options, all_=False)
        )
    if kind == "too_long":
        return Problem(path, f"must have {error['ctx']['max_length']} items at most", _shown(value))
    what = _WORDS.get(kind) or error["msg"].replace("Input should", "must").replace("String should", "must")
    return Problem(path or "the configuration", what, _shown(value))


def _shown(value: object) -> str:
    return "null" if value is None else _SHORT.repr(value)


def _at(value: Any, path: str) -> str | None:
    """The value given at `path`, or None if it was left at its default."""
    for part in path.split(".") if path else ():
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return _shown(value)


def _nearest(name: str, known: Sequence[str], *, all_: bool = True) -> str:
    near = difflib.get_close_matches(name.casefold(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else ""
    return f"{hint} known: {', '.join(known)}".strip() if all_ else hint


def _path(cls: type[Section], loc: Sequence[str | int]) -> tuple[str, type[Section]]:
    """The dotted path, and the section it ends in."""
    parts: list[str] = []
    section: type[Section] | None = cls
    owner = cls
    for part in loc:
        if section is not None:
            owner = section
            parts.append(str(part))
            field = field_of(section, part)
            section = section_of(field.annotation) if field else None
        elif part != "[key]":
            parts.append(str(part))
    return ".".join(parts), owner


def _options(cls: type[Section], loc: Sequence[str | int]) -> list[str]:
    """The values of the literal at `loc`."""
    section: type[Section] | None = cls
    annotation: Any = None
    for part in loc:
        if section is None:
            break
        field = field_of(section, part)
        annotation = field.annotation if field else None
        section = section_of(annotation)
    return _literals(annotation)


def _literals(annotation: Any) -> list[str]:
    found: list[str] = []
    for part in get_args(annotation):
        found += [part] if isinstance(part, str) else _literals(part)
    return found
