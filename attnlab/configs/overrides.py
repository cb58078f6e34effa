"""Overrides of config fields, from `--config.key=value` on the command line or from the points of a sweep."""

import math
import re
import typing
from collections.abc import Callable
from typing import Any, Literal

from ml_collections import ConfigDict

from attnlab.configs.fields import (
    Field,
    Section,
    checked_value,
    fields_of,
    former_keys,
    join_names,
    key_suggestion,
    present_keys,
    section_class,
)
from attnlab.errors import UserError


def apply_override(cls: type[Section], config: ConfigDict, key: str, value: Any) -> None:
    """Set one field of a config.

    cls: the dataclass of the config.  config: has all fields of the dataclass.  key: dotted.
    value: text as on the command line, or a value of the field's type.

    Raises UserError for an unknown key, for a section, and for a value of another type or outside the bounds.
    """
    section: Any = config
    section_cls = cls
    parent: Field | None = None  # the field that holds the section
    *path, name = key.split('.')

    def find_field(name: str) -> Field:
        for field in fields_of(section_cls):
            if field.name == name:
                return field
        if parent and (others := _names_with_field(parent, name)):
            own = next(other for other, other_cls in parent.by_name.items() if other_cls is section_cls)
            path = key.removesuffix(f'.{name}')
            raise UserError(f'config.{key} is a field of {path}.name {join_names(others)}; {path}.name is {own!r}')
        raise UserError(f'there is no config.{key}{key_suggestion(key, list(present_keys(config)), former_keys(cls))}')

    for depth, part in enumerate(path):
        field = find_field(part)
        prefix = '.'.join([*path[:depth], ''])
        if not field.sections:
            kind = type(section[part]).__name__
            raise UserError(f'config.{prefix}{part} is a {kind}, not a section: there is no config.{key}')
        section, parent = section[part], field
        section_cls = section_class(field, section, prefix)
    field = find_field(name)
    if field.sections:
        fields = ', '.join(f'config.{key}.{inner}' for inner in section[name])
        raise UserError(f'config.{key} is a section, set one of its fields: {fields}')
    if isinstance(value, str):
        value = _parse(key, value, field.kind)
    if name == 'name' and parent and len(parent.sections) > 1:
        field = field._replace(kind=Literal[tuple(parent.by_name)])
    value = checked_value(field, value, key.removesuffix(name), load_choices=False)
    with section.ignore_type():  # a float may replace an int of the experiment file
        section[name] = value


def _names_with_field(parent: Field, name: str) -> list[str]:
    """Return the section names of which a field is, if the section may be one of several dataclasses."""
    if len(parent.sections) < 2:
        return []
    return [section_name for section_name, cls in parent.by_name.items() if name in {f.name for f in fields_of(cls)}]


def _parse(key: str, text: str, kind: Any) -> Any:
    """Parse text to a value of a field's type."""
    if typing.get_origin(kind) is tuple:
        return _parse_tuple(key, text, typing.get_args(kind))
    if kind not in _SCALARS:  # str, or a Literal of str or int
        values = typing.get_args(kind)
        return text if not values or isinstance(values[0], str) else _parse(key, text, type(values[0]))
    expected, convert = _SCALARS[kind]
    try:
        return convert(text)
    except ValueError:
        raise UserError(f'config.{key} expects {expected}, got {text!r}') from None


def _parse_tuple(key: str, text: str, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """Parse a tuple, written as `16,16`, `(16, 16)`, `16,` or `()`."""
    inner = text.strip()
    inner = inner[1:-1].strip() if inner.startswith('(') and inner.endswith(')') else inner
    parts = [part.strip() for part in inner.removesuffix(',').split(',')] if inner else []
    if kinds[-1] is not Ellipsis and len(parts) != len(kinds):
        raise UserError(f'config.{key} expects {len(kinds)} elements, got {text!r}')
    return tuple(_parse(key, _strip_quotes(part) if kinds[0] is str else part, kinds[0]) for part in parts)


def _strip_quotes(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in '\'"' else text


def _bool(text: str) -> bool:
    if text not in ('true', 'false'):
        raise ValueError(text)
    return text == 'true'


def _int(text: str) -> int:
    if not re.fullmatch(r'[+-]?[0-9]+(_[0-9]+)*', text):
        raise ValueError(text)
    return int(text)


def _float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


_SCALARS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    bool: ('true or false', _bool),
    int: ('an int', _int),
    float: ('a finite float', _float),
}
