"""YAML for configurations: the YAML 1.2 core schema, plain values only.

PyYAML follows YAML 1.1, where ``lr: 1e-6`` is a string, the labels ``[yes, no]`` are true and false, and ``1:30`` is
ninety. It also silently lets the last of two equal keys win.
"""

from __future__ import annotations

import re
from typing import Any

import yaml  # type: ignore[import-untyped]

from gatespace.errors import UsageError

_DIGITS = list("-+0123456789.")
_CORE: tuple[tuple[str, str, list[str]], ...] = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", _DIGITS),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", _DIGITS),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", _DIGITS),
)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Safe YAML 1.2 core loader; no duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: dict[object, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a text", problem_mark=key_node.start_mark)
            if key_node.value in seen:
                first = seen[key_node.value]
                problem = f"the key {key_node.value!r} appears here and in line {first}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen[key_node.value] = key_node.start_mark.line + 1
        # Keys are always strings: `on:` and `1:` are names like any other.
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes any string that YAML 1.1 or 1.2 would not read as a string."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _list(dumper: Any, items: list[Any]) -> Any:
    plain = not any(isinstance(item, list | dict) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=plain)


def _integer(loader: Any, node: Any) -> int:
    text: str = loader.construct_scalar(node)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _float(loader: Any, node: Any) -> float:
    text: str = loader.construct_scalar(node)
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


for _kind, _pattern, _first in _CORE:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), _first)
_Dumper.add_representer(list, _list)
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_mapping)


def read_yaml(text: str, *, where: str) -> Any:
    """Parse a YAML document; None if it is empty.

    Args:
        text: One document.
        where: Source of the text, for errors: a path or an option.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise UsageError(f"{place}: {error.problem or error.context or 'not YAML'}", got=_line(text, mark)) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not YAML", why=str(error).splitlines()[0]) from error


def write_yaml(value: Any) -> str:
    """Write YAML that `read_yaml` reads back as an equal value."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def _line(text: str, mark: Any) -> str | None:
    lines = text.splitlines()
    if mark is None or mark.line >= len(lines):
        return None
    line: str = lines[mark.line].strip()
    return line if len(line) <= 120 else line[:120] + "…"
