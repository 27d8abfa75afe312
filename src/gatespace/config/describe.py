"""List all settings of a configuration: path, type, default and description."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from gatespace.config.base import Section, default_of, fields_of, is_optional, section_of
from gatespace.config.text import write_yaml

REQUIRED = "required"
_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", type(None): "null"}


class Setting(NamedTuple):
    """One line of the settings reference, as text."""

    path: str
    type: str
    default: str
    """In YAML; `REQUIRED` if there is none."""
    doc: str


def describe(cls: type[Section]) -> list[Setting]:
    """Every setting of a configuration, in order. An optional section has its own line before its settings.

    Examples:
        >>> from gatespace.config import OptimizerConfig
        >>> describe(OptimizerConfig)[0]
        Setting(path='lr', type='number > 0', default='1e-06', doc='Learning rate.')
    """
    return _described(cls, "")


def _described(cls: type[Section], prefix: str, *, start: dict[str, Any] | None = None) -> list[Setting]:
    lines: list[Setting] = []
    for key, field in fields_of(cls).items():
        path, inner = f"{prefix}{key}", section_of(field.annotation)
        given = start is not None and key in start
        default = start[key] if start is not None and given else default_of(field)
        if inner is None or is_optional(field.annotation):
            shown = REQUIRED if field.is_required() and not given else _yaml(default)
            lines.append(Setting(path, _kind(field), shown, _doc(field)))
        if inner is not None:
            lines += _described(inner, f"{path}.", start=default)
    return lines


def _yaml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    text = write_yaml(str(value) if isinstance(value, Path) else value)
    return text.removesuffix("\n").removesuffix("...").strip()  # YAML ends a bare scalar document with dots


def _doc(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _kind(field: FieldInfo) -> str:
    return _kind_of(field.annotation) + _bounds(field.metadata)


def _kind_of(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind_of(parts[0]) + _bounds(parts[1:])
    if origin is Literal:
        return f"one of {', '.join(parts)}" if len(parts) > 1 else str(parts[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind_of(part) for part in parts))
    if origin is tuple:
        if len(parts) == 2 and parts[1] is Ellipsis:
            return f"list of {_kind_of(parts[0])}"
        return f"list of {len(parts)}: {_kind_of(parts[0])}"
    if origin is dict:
        return f"mapping of {_kind_of(parts[0])} to {_kind_of(parts[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return _NAMES.get(annotation, str(annotation))


def _bounds(metadata: Any) -> str:
    signs = {annotated_types.Ge: "≥", annotated_types.Gt: ">", annotated_types.Le: "≤", annotated_types.Lt: "<"}
    found: list[str] = []
    for item in metadata:
        for part in item.metadata if isinstance(item, FieldInfo) else [item]:
            for kind, sign in signs.items():
                if isinstance(part, kind) and (limit := getattr(part, kind.__name__.lower())) < 2**62:
                    found.append(f"{sign} {limit:g}")
    return f" {', '.join(found)}" if found else ""
