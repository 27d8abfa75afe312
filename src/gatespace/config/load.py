"""Load a configuration from a file and overrides, and dump it to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from gatespace.config.base import Section, default_of, field_of, section_of
from gatespace.config.problems import usage_error
from gatespace.config.text import read_yaml, write_yaml
from gatespace.errors import UsageError

Config = TypeVar("Config", bound=Section)


def load_config(
    cls: type[Config],
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    options: Sequence[tuple[str, str, Any]] = (),
) -> Config:
    """Load a configuration from a YAML file and apply overrides.

    Args:
        cls: `TrainConfig`, `TeachConfig` or one of their sections.
        path: The file; None: defaults and overrides only.
        overrides: ``a.b.c=value`` each, the value in YAML: ``objective.gate=G5``, ``evaluation.final=[test]``,
            ``optimizer.clip=null``, ``rollout.from.teacher=0.5``. An override changes one value of the file or the
            defaults; the last one for a path wins.
        options: (option, path, value) each, e.g. ("--lr", "optimizer.lr", 0.001), applied before the overrides; errors
            name the option.

    Examples:
        >>> from gatespace.config import TrainConfig
        >>> config = load_config(TrainConfig, overrides=["pair.teacher=runs/teach", "objective.gate=[4, 0, -1, 0]"])
        >>> config.objective.gate, config.steps
        ((4.0, 0.0, -1.0, 0.0), 100)
    """
    data: Any = _read(Path(path)) if path is not None else {}
    where = str(path) if path is not None else ""
    changed: dict[str, str] = {}
    for option, setting, value in options:
        data = _with(data, setting.split("."), value, section=cls, override=setting)
        changed[setting] = option
    for override in overrides:
        data, name = _set(cls, data, override)
        changed[name] = f"--set {name}"
    return parse_config(cls, data, where=where, overridden=changed)


def parse_config(
    cls: type[Config], data: Mapping[str, Any], *, where: str = "", overridden: Mapping[str, str] | None = None
) -> Config:
    """Build a configuration from nested mappings, as a file contains them.

    Args:
        cls: `TrainConfig`, `TeachConfig` or one of their sections.
        data: Nested mappings.
        where: Their source, for errors.
        overridden: Dotted path set on the command line → how, for errors.
    """
    try:
        return cls.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        raise usage_error(cls, error, where=where, overridden=overridden or {}) from None


def dump_config(config: Section) -> dict[str, Any]:
    """The configuration as nested mappings of JSON values, including all defaults."""
    return config.model_dump(mode="json", by_alias=True)


def dump_yaml(config: Section) -> str:
    """The complete configuration as YAML that `load_config` reads back as an equal one."""
    return write_yaml(dump_config(config))


def _read(path: Path) -> Any:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError("no such file", got=path) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8", got=f"byte {error.object[error.start]:#04x}") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read", why=error.strerror or str(error)) from error
    data = read_yaml(text, where=str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(f"{path}: a configuration is a mapping of settings", got=type(data).__name__)
    return data


def _set(cls: type[Section], data: dict[str, Any], override: str) -> tuple[dict[str, Any], str]:
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise UsageError(f"--set {override}: not a setting", instead="section.key=value, e.g. objective.gate=G5")
    value = read_yaml(text, where=f"--set {name.strip()}")
    return _with(data, keys, value, section=cls, override=override), ".".join(keys)


def _with(data: Any, keys: Sequence[str], value: Any, *, section: type[Section] | None, override: str) -> Any:
    """A copy of `data` with the value at `keys`. Never in place: YAML aliases share objects."""
    key, *rest = keys
    if isinstance(data, list | tuple):
        if not key.isdecimal() or int(key) >= len(data):
            raise UsageError(f"--set {override}: a list of {len(data)} has no place {key!r}")
        items = list(data)
        index = int(key)
        items[index] = _with(items[index], rest, value, section=None, override=override) if rest else value
        return items
    if not isinstance(data, dict):
        raise UsageError(f"--set {override}: there is nothing below a value", got=repr(data))
    if not rest:
        return {**data, key: value}
    field = field_of(section, key) if section else None
    # A key missing in the file has its default, and an override changes only one value in it.
    below = data[key] if key in data else default_of(field) if field else {}
    inner = section_of(field.annotation) if field else None
    return {**data, key: _with({} if below is None else below, rest, value, section=inner, override=override)}
