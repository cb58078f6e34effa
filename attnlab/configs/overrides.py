"""Overrides of a config's fields, as `--config.key=value` on the command line or as the points of a sweep."""

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
    """Set a field of a config that has all fields of its dataclass.

    value: a text as on the command line, or a value of the field's type.

    Raises UserError for a key that is no field, and for a value of another type or out of bounds.
    """
    section, root = config, cls
    within: Field | None = None  # the field that holds the section
    *path, name = key.split('.')
    for depth, part in enumerate(path):
        field = _field(cls, part, key, config, within, root)
        above = '.'.join([*path[:depth], ''])
        if not field.sections:
            kind = type(section[part]).__name__
            raise UserError(f'config.{above}{part} is a {kind}, not a section: there is no config.{key}')
        section, within = section[part], field
        cls = section_class(field, section, above)
    field = _field(cls, name, key, config, within, root)
    if field.sections:
        fields = ', '.join(f'config.{key}.{inner}' for inner in section[name])
        raise UserError(f'config.{key} is a section, set one of its fields: {fields}')
    if isinstance(value, str):
        value = _parsed(key, value, field.kind)
    if name == 'name' and within and len(within.sections) > 1:
        field = field._replace(kind=Literal[tuple(within.by_name)])
    value = checked_value(field, value, key.removesuffix(name), load_choices=False)
    with section.ignore_type():  # a float may stand where the file has an int
        section[name] = value


def _field(
    cls: type[Section], name: str, key: str, config: ConfigDict, within: Field | None, root: type[Section]
) -> Field:
    """The field of that name, a part of a dotted key."""
    for field in fields_of(cls):
        if field.name == name:
            return field
    by_name = within.by_name if within and len(within.sections) > 1 else {}
    others = [other for other, one in by_name.items() if name in {field.name for field in fields_of(one)}]
    if others:
        own = next(other for other, one in by_name.items() if one is cls)
        path = key.removesuffix(f'.{name}')
        raise UserError(f'config.{key} is a field of {path}.name {join_names(others)}; {path}.name is {own!r}')
    raise UserError(f'there is no config.{key}{key_suggestion(key, list(present_keys(config)), former_keys(root))}')


def _parsed(key: str, text: str, kind: Any) -> Any:
    """A text as a value of a field's type."""
    if typing.get_origin(kind) is tuple:
        return _parsed_tuple(key, text, typing.get_args(kind))
    if kind not in _SCALARS:  # str, or a Literal of strings or of numbers
        values = typing.get_args(kind)
        return text if not values or isinstance(values[0], str) else _parsed(key, text, type(values[0]))
    name, convert = _SCALARS[kind]
    try:
        return convert(text)
    except ValueError:
        raise UserError(f'config.{key} expects {name}, got {text!r}') from None


def _parsed_tuple(key: str, text: str, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """`16,16`, `(16, 16)`, `16,` or `()`."""
    inner = text.strip()
    inner = inner[1:-1].strip() if inner.startswith('(') and inner.endswith(')') else inner
    parts = [part.strip() for part in inner.removesuffix(',').split(',')] if inner else []
    if kinds[-1] is not Ellipsis and len(parts) != len(kinds):
        raise UserError(f'config.{key} expects {len(kinds)} elements, got {text!r}')
    return tuple(_parsed(key, _unquoted(part) if kinds[0] is str else part, kinds[0]) for part in parts)


def _unquoted(text: str) -> str:
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
