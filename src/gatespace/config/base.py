"""Base of all configuration sections: frozen, no unknown keys, a docstring under each field."""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator
from pydantic.fields import FieldInfo


class Fault(ValueError):
    """An invalid setting, found by a check across several; `field` is the one to report."""

    def __init__(self, field: str, what: str, *, instead: str = "") -> None:
        super().__init__(what)
        self.field = field
        self.what = what
        self.instead = instead


class Section(BaseModel):
    """A group of settings. `load_config` raises errors of `gatespace.errors`, the constructor pydantic's."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_by_name=True,
        validate_by_alias=True,
        validate_default=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _headings_without_content(cls, data: object) -> object:
        """Treat an empty section (null in YAML, e.g. with all its lines commented out) as absent."""
        if not isinstance(data, Mapping):
            return data
        empty = {key for key, value in data.items() if value is None and cls._is_always_there(key)}
        return {key: value for key, value in data.items() if key not in empty}

    @classmethod
    def _is_always_there(cls, key: object) -> bool:
        field = field_of(cls, key)
        return field is not None and section_of(field.annotation) is not None and not is_optional(field.annotation)


# ---------------------------------------------------------------------------------------------------- value types

# Strict, because `steps: true` is a mistake, not a number, and `seed: 1.0` likely is one too.
Switch = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
Name = Annotated[str, Strict(), Field(min_length=1)]
Count = Annotated[int, Strict(), Field(ge=1)]
CountOrZero = Annotated[int, Strict(), Field(ge=0)]
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
Share = Annotated[float, Strict(), AllowInfNan(False), Field(ge=0, le=1)]
SPLITS = ("train", "val", "test")
Split = Literal["train", "val", "test"]


def _place(value: object) -> object:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("must be a path")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # ~name of a user without a home
        raise ValueError(f"must be a path: {error}") from error


Place = Annotated[Path, BeforeValidator(_place)]

# ---------------------------------------------------------------------------------------------------- field inspection


def key_of(name: str, field: FieldInfo) -> str:
    """The field's key in a file."""
    return field.validation_alias if isinstance(field.validation_alias, str) else name


def fields_of(cls: type[Section]) -> dict[str, FieldInfo]:
    """Key in a file → field."""
    return {key_of(name, field): field for name, field in cls.model_fields.items()}


def field_of(cls: type[Section], key: object) -> FieldInfo | None:
    """The field with this key in a file, or this name in Python."""
    if not isinstance(key, str):
        return None
    return fields_of(cls).get(key) or cls.model_fields.get(key)


def section_of(annotation: Any) -> type[Section] | None:
    """The section in ``Section`` or ``Section | None``."""
    for part in alternatives(annotation):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def is_optional(annotation: Any) -> bool:
    """Whether None is allowed."""
    return type(None) in alternatives(annotation)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, else the annotation itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def default_of(field: FieldInfo) -> Any:
    """The default as written in a file, or None if there is none.

    For a section, only the values set explicitly: some of its own defaults depend on other settings.
    """
    if field.is_required():
        return None
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Section):
        return value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return value
