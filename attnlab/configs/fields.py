"""Config dataclasses: each field is declared once, with its type, bounds or allowed values, default and description.

    @dataclass(frozen=True, kw_only=True)
    class Decode(Section):
        beams: int = field(1, 'hypotheses of beam search; 1: greedy', ge=1)

A `Section` checks its values when it is created.  `to_dataclass` turns a whole config (an `ml_collections.ConfigDict`,
or a dict from JSON) into dataclasses, and `fill_defaults` adds the fields that a config does not have.
"""

import dataclasses
import difflib
import functools
import importlib
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from ml_collections import ConfigDict

from attnlab.errors import UserError

MAX_EXACT_INT = 2**53
"""Largest int that is accepted for a float: up to here every int is exactly a float."""

T = TypeVar('T', bound='Section')


REQUIRED = dataclasses.MISSING
"""The default of a field that must be given."""


def field(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: str = '',
    former: str = '',
) -> Any:
    """Declare a field of a `Section`, like `pydantic.Field`.

    doc: the description, one line.
    ge, gt, le, lt: bounds: value >= ge, value > gt, value <= le, value < lt; in a tuple, of each element.
    choices: the table of the allowed values, as 'package.module:TABLE', if it is defined in another module.
      `to_dataclass` imports that module.
    former: the name of the field in an earlier version; `load_config` accepts it in a saved config.
    """
    bounds = {'ge': ge, 'gt': gt, 'le': le, 'lt': lt}
    metadata = {'doc': doc, 'bounds': bounds, 'choices': choices, 'former': former}
    return dataclasses.field(default=default, metadata=metadata)


class Section:
    """Base class of all config dataclasses, which checks the values of a new instance.

    Raises UserError for a value of another type, or outside the bounds or allowed values of its field.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        for config_field in fields_of(type(self)):
            if not dataclasses.is_dataclass(value := getattr(self, config_field.name)):
                object.__setattr__(self, config_field.name, checked_value(config_field, value, '', load_choices=False))
        self.check()

    def check(self) -> None:
        """Raise UserError for values of several fields that are not possible together."""


class Field(NamedTuple):
    """A declared field, with the arguments of `field`.

    kind: a scalar type, `tuple[int, ...]`, a Literal, or the dataclass, or union of dataclasses, of a subsection.
    bounds: by 'ge', 'gt', 'le', 'lt'.
    """

    name: str
    kind: Any
    default: Any
    doc: str
    bounds: Mapping[str, float | None]
    choices: str
    former: str

    @property
    def sections(self) -> tuple[type[Section], ...]:
        """The dataclasses that a subsection may be an instance of; () for a value."""
        kinds = typing.get_args(self.kind) if isinstance(self.kind, types.UnionType) else (self.kind,)
        return tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section))

    @property
    def by_name(self) -> dict[str, type[Section]]:
        """The dataclasses of a subsection, by the value of their field `name`."""
        return {typing.get_args(typing.get_type_hints(cls)['name'])[0]: cls for cls in self.sections}

    @property
    def required(self) -> bool:
        """Whether the field has no default."""
        return self.default is dataclasses.MISSING

    def allowed(self, load_choices: bool = True) -> tuple[Any, ...]:
        """Return the allowed values; () if only type and bounds limit them.

        load_choices: False: do not import the table of `choices`; its values then count as not limited.
        """
        if typing.get_origin(self.kind) is Literal:
            return typing.get_args(self.kind)
        if not self.choices or not load_choices:
            return ()
        module, _, table = self.choices.partition(':')
        return tuple(getattr(importlib.import_module(module), table))


@functools.cache
def fields_of(cls: type[Section]) -> tuple[Field, ...]:
    """Return the declared fields of a dataclass, in order."""
    kinds = typing.get_type_hints(cls)
    return tuple(
        Field(
            declared.name, kinds[declared.name],
            declared.default if declared.default_factory is dataclasses.MISSING else declared.default_factory(),
            declared.metadata.get('doc', ''), declared.metadata.get('bounds', {}),
            declared.metadata.get('choices', ''), declared.metadata.get('former', ''),
        )
        for declared in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def config_dict(section: Section) -> ConfigDict:
    """Return the fields of a dataclass and its subsections as a ConfigDict, which an experiment may change."""
    return ConfigDict(_to_dict(section))


def _to_dict(section: Section) -> dict[str, Any]:
    values = {field.name: getattr(section, field.name) for field in fields_of(type(section))}
    return {name: _to_dict(value) if isinstance(value, Section) else value for name, value in values.items()}


def to_dataclass(cls: type[T], config: Any) -> T:
    """Return a config as an instance of its dataclass; missing fields get their defaults.

    Raises UserError with the dotted key of an unknown field, of a missing field without a default, of a value of
    another type, and of a value that is not allowed.
    """
    known = list(possible_keys(cls))
    for key in present_keys(config):
        if key not in known:
            raise UserError(f'there is no config.{key}{key_suggestion(key, known, former_keys(cls))}')
    return _to_section(cls, config, '')


def fill_defaults(cls: type[Section], config: ConfigDict) -> list[str]:
    """Add the missing fields that have defaults to a config; returns their dotted keys."""
    return list(_fill_defaults(cls, config, ''))


def _fill_defaults(cls: type[Section], config: ConfigDict, prefix: str) -> Iterator[str]:
    for field in fields_of(cls):
        key = prefix + field.name
        if field.name not in config:
            if not field.required:
                config[field.name] = config_dict(field.default) if field.sections else field.default
                yield from present_keys(config[field.name], f'{key}.') if field.sections else [key]
        elif field.sections and isinstance(section := config[field.name], ConfigDict):
            yield from _fill_defaults(section_class(field, section, prefix), section, f'{key}.')


def rename_former_fields(cls: type[Section], config: ConfigDict, prefix: str = '') -> None:
    """Give each field of a saved config that has its former name its present one, unless it has both."""
    for field in fields_of(cls):
        if field.former and field.former in config and field.name not in config:
            config[field.name] = config[field.former]
            del config[field.former]
        if field.sections and isinstance(section := config.get(field.name), ConfigDict):
            rename_former_fields(section_class(field, section, prefix), section, f'{prefix}{field.name}.')


def former_keys(cls: type[Section], prefix: str = '') -> dict[str, str]:
    """Return the present dotted key of each field that was renamed, by its former dotted key."""
    keys = {}
    for field in fields_of(cls):
        if field.former:
            keys[prefix + field.former] = prefix + field.name
        for section in field.sections:
            keys |= former_keys(section, f'{prefix}{field.name}.')
    return keys


def possible_keys(cls: type[Section], prefix: str = '') -> Iterator[str]:
    """Yield the dotted key of each field and section that a config may have, for all dataclasses of each subsection."""
    keys: dict[str, None] = {}
    for field in fields_of(cls):
        keys[prefix + field.name] = None
        for section in field.sections:
            keys |= dict.fromkeys(possible_keys(section, f'{prefix}{field.name}.'))
    yield from keys


def present_keys(config: Any, prefix: str = '') -> Iterator[str]:
    """Yield the dotted key of each section and field of a config, which may be any mapping."""
    # A reference of a ConfigDict to another field may have no value yet.
    options = {'preserve_field_references': True} if isinstance(config, ConfigDict) else {}
    for name, value in config.items(**options):
        yield prefix + name
        if isinstance(value, Mapping | ConfigDict):
            yield from present_keys(value, f'{prefix}{name}.')


def _to_section(cls: type[T], config: Any, prefix: str) -> T:
    values = {}
    for field in fields_of(cls):
        key = prefix + field.name
        if field.name not in config:
            if field.required:
                raise UserError(f'config has no {key}; expected {_describe_expected(field)}')
            values[field.name] = field.default
        elif field.sections:
            value = config[field.name]
            if not isinstance(value, Mapping | ConfigDict):
                raise UserError(f'config.{key} is {value!r}; expected a section')
            values[field.name] = _to_section(section_class(field, value, prefix), value, f'{key}.')
        else:
            values[field.name] = checked_value(field, config[field.name], prefix)
    try:
        return cls(**values)
    except UserError as error:
        raise UserError(f'{prefix}{error}') from None


def section_class(field: Field, config: Any, prefix: str) -> type[Section]:
    """Return the dataclass of a subsection: the only one, or the one with the `name` of the config.

    Raises UserError if the config has no name, or an unknown one.  prefix: of the dotted key, for the error.
    """
    if len(field.sections) == 1:
        return field.sections[0]
    by_name = field.by_name
    name = config.get('name')
    if name is None:
        raise UserError(f'config has no {prefix}{field.name}.name; expected {join_names(by_name)}')
    if not isinstance(name, str) or name not in by_name:
        raise UserError(f'{prefix}{field.name}.name is {name!r}; expected {join_names(by_name)}')
    return by_name[name]


def checked_value(field: Field, value: Any, prefix: str, load_choices: bool = True) -> Any:
    """Return a value of a field's type; an int is accepted for a float, a list for a tuple.

    Raises UserError for a value of another type, or one that is not allowed.  prefix: of the dotted key, for the error.
    load_choices: whether to import the table of `choices` and check against it.
    """
    key = f'{prefix}{field.name}'
    if isinstance(value, list) and typing.get_origin(field.kind) is tuple:
        value = tuple(value)
    if not _has_type(value, field.kind):
        shown = 'a section' if isinstance(value, ConfigDict) else repr(value)
        raise UserError(f'{key} is {shown}; expected {_describe_expected(field)}')
    if (allowed := field.allowed(load_choices)) and value not in allowed:
        raise UserError(f'{key} is {value!r}; expected {join_names(allowed)}')
    for element in value if isinstance(value, tuple) else [value]:
        if not _within(element, field.bounds):
            raise UserError(f'{key} is {value!r}; expected {describe_bounds(field)}')
    if isinstance(value, tuple) and typing.get_args(field.kind)[0] is float:
        return tuple(float(element) for element in value)
    return float(value) if field.kind is float else value  # type: ignore[arg-type]


def _has_type(value: Any, kind: Any) -> bool:
    match typing.get_origin(kind):
        case typing.Literal:
            return type(value) is type(typing.get_args(kind)[0])
        case origin if origin is tuple:
            inner = typing.get_args(kind)
            count = len(value) if isinstance(value, tuple) and inner[-1] is Ellipsis else len(inner)
            return type(value) is tuple and len(value) == count and all(_has_type(item, inner[0]) for item in value)
    if kind is float and type(value) is int:
        return abs(value) <= MAX_EXACT_INT
    return type(value) is kind and (kind is not float or math.isfinite(value))  # not isinstance, as a bool is an int


def _within(value: Any, bounds: Mapping[str, float | None]) -> bool:
    tests = {'ge': lambda b: value >= b, 'gt': lambda b: value > b, 'le': lambda b: value <= b,
             'lt': lambda b: value < b}  # fmt: skip
    return all(tests[name](bound) for name, bound in bounds.items() if bound is not None)


def describe_bounds(field: Field) -> str:
    """Return the bounds of a field in words; '' if it has none."""
    ge, gt, le, lt = (field.bounds.get(name) for name in ('ge', 'gt', 'le', 'lt'))
    numbers = 'numbers ' if typing.get_origin(field.kind) is tuple else ''
    if ge is gt is le is lt is None:
        return ''
    if le is None and lt is None:
        return numbers + (f'{ge} or more' if ge is not None else f'more than {gt}')
    if ge is not None and le is not None:
        return numbers + f'{ge} to {le}'
    lower = '' if ge is None and gt is None else f'{ge} <= ' if ge is not None else f'{gt} < '
    upper = '' if le is None and lt is None else f' <= {le}' if le is not None else f' < {lt}'
    return f'{lower}{field.name}{upper}'


def _describe_expected(field: Field) -> str:
    """Return the values of a field in words."""
    if field.sections:
        names = ', '.join(inner.name for inner in fields_of(field.sections[0]))
        return f'a section with the fields {names}' if len(field.sections) == 1 else 'a section with a name'
    if allowed := field.allowed(load_choices=False):
        return join_names(allowed)
    if typing.get_origin(field.kind) is tuple:
        inner = typing.get_args(field.kind)
        return f'a tuple of {"" if inner[-1] is Ellipsis else f"{len(inner)} "}{inner[0].__name__}'
    return {bool: 'true or false', int: 'an int', float: 'a finite float', str: 'a str'}[field.kind]


def join_names(names: Iterable[Any]) -> str:
    """Return names as text: 'a', 'b' or 'c'."""
    *front, last = map(repr, names)
    return f'{", ".join(front)} or {last}' if front else last


def key_suggestion(key: str, names: Sequence[str], former: Mapping[str, str]) -> str:
    """Return the end of an error about an unknown key, with a suggestion.

    It suggests the present key of a former one; else the most similar of the dotted names; else, if none is similar,
    all names in the section of the key.  former: present dotted key by former dotted key.
    """
    if key in former:
        return f'; did you mean config.{former[key]}?'
    last = key.split('.')[-1]

    def likeness(name: str) -> float:  # high for a misspelt path, and for a right name in a wrong section
        return similarity(key, name) + similarity(last, name.split('.')[-1])

    best = max(names, key=likeness, default='')
    if likeness(best) >= 2 * MIN_SIMILARITY:
        return f'; did you mean config.{best}?'
    section = key.rpartition('.')[0]
    alternatives = section and {name for name in names if name.rpartition('.')[0] == section}
    alternatives = alternatives or {name.split('.')[0] for name in names}
    return f'; expected one of {", ".join(sorted(alternatives))}' if alternatives else ''


MIN_SIMILARITY = 0.6
"""Similarity from which one name is suggested for another."""


def similarity(a: str, b: str) -> float:
    """Return the similarity of two texts, from 0 to 1."""
    return difflib.SequenceMatcher(None, a, b).ratio()
