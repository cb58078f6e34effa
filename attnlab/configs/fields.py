"""Declare the fields of a config once: name, type, allowed values, default, description.

    @dataclass(frozen=True, kw_only=True)
    class Decode(Section):
        beams: int = field(1, 'hypotheses kept by beam search; 1: greedy', least=1)

A `Section` checks its values when it is made. `to_dataclass` reads a whole config (an `ml_collections.ConfigDict`, or a dict
from JSON) into dataclasses, and `fill_defaults` gives a config the fields that it lacks.
"""

import dataclasses
import difflib
import functools
import importlib
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from ml_collections import ConfigDict

from attnlab.errors import UserError

MAX_EXACT_INT = 2**53
"""An int serves for a float up to here: every smaller one is a float exactly."""

T = TypeVar('T', bound='Section')


REQUIRED = dataclasses.MISSING
"""The default of a field that has none."""


def field(
    default: Any,
    doc: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: str = '',
    former: str = '',
) -> Any:
    """A field of a `Section`.

    doc: one line.  least, above, most, below: bounds, `least <= value`, `above < value`, and so on; of each element
      where the field is a tuple.
    choices: for allowed values that a table elsewhere lists: 'package.module:TABLE'. `to_dataclass` imports it.
    former: the name that the field had in an earlier version; saved configs with that name can be loaded.
    """
    bounds = {'least': least, 'above': above, 'most': most, 'below': below}
    return dataclasses.field(default=default, metadata={'doc': doc, 'bounds': bounds, 'choices': choices, 'former': former})


class Section:
    """Base of all config dataclasses: checks the values of a new instance.

    Raises UserError for a value of another type, or outside the field's bounds or choices.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        for each in fields_of(type(self)):
            if not dataclasses.is_dataclass(value := getattr(self, each.name)):
                object.__setattr__(self, each.name, checked_value(each, value, '', load_choices=False))
        self.check()

    def check(self) -> None:
        """Raise UserError where values of several fields do not fit together."""


class Field(NamedTuple):
    """A declared field. kind: a scalar type, `tuple[int, ...]`, a Literal, or the dataclasses of a subsection."""

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
        """The dataclasses of a subsection by the values of its field `name`."""
        return {typing.get_args(typing.get_type_hints(one)['name'])[0]: one for one in self.sections}

    @property
    def required(self) -> bool:
        """Whether the field has no default."""
        return self.default is dataclasses.MISSING

    def allowed(self, load_choices: bool = True) -> tuple[Any, ...]:
        """The allowed values; () where the type and the bounds are all there is, or the table is not to be loaded."""
        if typing.get_origin(self.kind) is Literal:
            return typing.get_args(self.kind)
        if not self.choices or not load_choices:
            return ()
        module, _, table = self.choices.partition(':')
        return tuple(getattr(importlib.import_module(module), table))


@functools.cache
def fields_of(cls: type[Section]) -> tuple[Field, ...]:
    """The declared fields of a dataclass, in order."""
    kinds = typing.get_type_hints(cls)
    return tuple(
        Field(
            each.name, kinds[each.name],
            each.default if each.default_factory is dataclasses.MISSING else each.default_factory(),
            each.metadata.get('doc', ''), each.metadata.get('bounds', {}), each.metadata.get('choices', ''),
            each.metadata.get('former', ''),
        )
        for each in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def config_dict(section: Section) -> ConfigDict:
    """The fields of a dataclass and its subsections as a ConfigDict, for an experiment to change and to return."""
    return ConfigDict(_plain(section))


def _plain(section: Section) -> dict[str, Any]:
    values = {each.name: getattr(section, each.name) for each in fields_of(type(section))}
    return {name: _plain(value) if isinstance(value, Section) else value for name, value in values.items()}


def to_dataclass(cls: type[T], config: Any) -> T:
    """A config as an instance of its dataclass; missing fields take their defaults.

    Raises UserError naming the dotted key for an unknown field, a missing one without a default, a value of another
    type, and a value that is not allowed.
    """
    known = list(possible_keys(cls))
    for key in present_keys(config):
        if key not in known:
            raise UserError(f'there is no config.{key}{key_suggestion(key, known, former_keys(cls))}')
    return _section(cls, config, '')


def rename_former_fields(cls: type[Section], config: ConfigDict, above: str = '') -> None:
    """Give the fields of a saved config that have the name of an earlier version their present name."""
    for each in fields_of(cls):
        if each.former and each.former in config and each.name not in config:
            config[each.name] = config[each.former]
            del config[each.former]
        if each.sections and isinstance(section := config.get(each.name), ConfigDict):
            rename_former_fields(section_class(each, section, above), section, f'{above}{each.name}.')


def former_keys(cls: type[Section], above: str = '') -> dict[str, str]:
    """Present dotted key by the dotted key of an earlier version, of all fields that were renamed."""
    keys = {}
    for each in fields_of(cls):
        if each.former:
            keys[above + each.former] = above + each.name
        for section in each.sections:
            keys |= former_keys(section, f'{above}{each.name}.')
    return keys


def fill_defaults(cls: type[Section], config: ConfigDict) -> list[str]:
    """Add the fields that a config lacks and that have defaults; returns their dotted keys."""
    return list(_completed(cls, config, ''))


def _completed(cls: type[Section], config: ConfigDict, above: str) -> Iterator[str]:
    for each in fields_of(cls):
        if each.name not in config:
            if not each.required:
                config[each.name] = config_dict(each.default) if each.sections else each.default
                inner = (
                    present_keys(config[each.name], f'{above}{each.name}.') if each.sections else [above + each.name]
                )
                yield from inner
        elif each.sections and isinstance(section := config[each.name], ConfigDict):
            yield from _completed(section_class(each, section, above), section, f'{above}{each.name}.')


def possible_keys(cls: type[Section], above: str = '') -> Iterator[str]:
    """Dotted keys of all fields that a config may have, of every dataclass that a subsection may be."""
    found: dict[str, None] = {}
    for each in fields_of(cls):
        found[above + each.name] = None
        for section in each.sections:
            found |= dict.fromkeys(possible_keys(section, f'{above}{each.name}.'))
    yield from found


def present_keys(config: Any, above: str = '') -> Iterator[str]:
    """Dotted keys of the sections and fields of a config, given as a mapping."""
    references = {'preserve_field_references': True} if isinstance(config, ConfigDict) else {}  # may have no value yet
    for name, value in config.items(**references):
        yield above + name
        if isinstance(value, Mapping | ConfigDict):
            yield from present_keys(value, f'{above}{name}.')


def _section(cls: type[T], config: Any, above: str) -> T:
    values = {}
    for each in fields_of(cls):
        key = above + each.name
        if each.name not in config:
            if each.required:
                raise UserError(f'config has no {key}; expected {_expected(each)}')
            values[each.name] = each.default
        elif each.sections:
            value = config[each.name]
            if not isinstance(value, Mapping | ConfigDict):
                raise UserError(f'config.{key} is {value!r}; expected a section')
            values[each.name] = _section(section_class(each, value, above), value, f'{key}.')
        else:
            values[each.name] = checked_value(each, config[each.name], above)
    try:
        return cls(**values)
    except UserError as error:
        raise UserError(f'{above}{error}') from None


def section_class(each: Field, config: Any, above: str) -> type[Section]:
    """The dataclass of a subsection: the only one, or the one whose `name` the config has; UserError for none."""
    if len(each.sections) == 1:
        return each.sections[0]
    by_name = each.by_name
    name = config.get('name')
    if name is None:
        raise UserError(f'config has no {above}{each.name}.name; expected {join_names(by_name)}')
    if not isinstance(name, str) or name not in by_name:
        raise UserError(f'{above}{each.name}.name is {name!r}; expected {join_names(by_name)}')
    return by_name[name]


def checked_value(each: Field, value: Any, above: str, load_choices: bool = True) -> Any:
    """The value, an int as a float and a list as a tuple where the field is one; UserError for a wrong one."""
    where = f'{above}{each.name}'
    if isinstance(value, list) and typing.get_origin(each.kind) is tuple:
        value = tuple(value)
    if not _fits(value, each.kind):
        shown = 'a section' if isinstance(value, ConfigDict) else repr(value)
        raise UserError(f'{where} is {shown}; expected {_expected(each)}')
    if (allowed := each.allowed(load_choices)) and value not in allowed:
        raise UserError(f'{where} is {value!r}; expected {join_names(allowed)}')
    for one in value if isinstance(value, tuple) else [value]:
        if not _within(one, each.bounds):
            raise UserError(f'{where} is {value!r}; expected {describe_bounds(each)}')
    if isinstance(value, tuple) and typing.get_args(each.kind)[0] is float:
        return tuple(float(one) for one in value)
    return float(value) if each.kind is float else value  # type: ignore[arg-type]


def _fits(value: Any, kind: Any) -> bool:
    match typing.get_origin(kind):
        case typing.Literal:
            return type(value) is type(typing.get_args(kind)[0])
        case builtin if builtin is tuple:
            inner = typing.get_args(kind)
            count = len(value) if isinstance(value, tuple) and inner[-1] is Ellipsis else len(inner)
            return type(value) is tuple and len(value) == count and all(_fits(one, inner[0]) for one in value)
    if kind is float and type(value) is int:
        return abs(value) <= MAX_EXACT_INT
    return type(value) is kind and (kind is not float or math.isfinite(value))  # exactly: a bool is an int


def _within(value: Any, bounds: Mapping[str, float | None]) -> bool:
    tests = {'least': lambda b: value >= b, 'above': lambda b: value > b, 'most': lambda b: value <= b,
             'below': lambda b: value < b}  # fmt: skip
    return all(tests[name](bound) for name, bound in bounds.items() if bound is not None)


def describe_bounds(each: Field) -> str:
    """The allowed range in words; '' without bounds."""
    least, above, most, below = (each.bounds.get(name) for name in ('least', 'above', 'most', 'below'))
    what = 'numbers ' if typing.get_origin(each.kind) is tuple else ''
    if least is above is most is below is None:
        return ''
    if most is None and below is None:
        return what + (f'{least} or more' if least is not None else f'more than {above}')
    if least is not None and most is not None:
        return what + f'{least} to {most}'
    low = '' if least is None and above is None else f'{least} <= ' if least is not None else f'{above} < '
    high = '' if most is None and below is None else f' <= {most}' if most is not None else f' < {below}'
    return f'{low}{each.name}{high}'


def _expected(each: Field) -> str:
    """The values of a field, in words."""
    if each.sections:
        fields = ', '.join(one.name for one in fields_of(each.sections[0]))
        return f'a section with the fields {fields}' if len(each.sections) == 1 else 'a section with a name'
    if allowed := each.allowed(load_choices=False):
        return join_names(allowed)
    if typing.get_origin(each.kind) is tuple:
        inner = typing.get_args(each.kind)
        return f'a tuple of {"" if inner[-1] is Ellipsis else f"{len(inner)} "}{inner[0].__name__}'
    return {bool: 'true or false', int: 'an int', float: 'a finite float', str: 'a str'}[each.kind]


def join_names(names: Any) -> str:
    """Names as text: 'a', 'b' or 'c'."""
    *front, last = map(repr, names)
    return f'{", ".join(front)} or {last}' if front else last


def key_suggestion(key: str, names: Sequence[str], former: Mapping[str, str]) -> str:
    """End of an error about an unknown key, which suggests other keys.

    It suggests the present key of a former one, or else the most similar of the dotted names, or else all names in the
    key's section.  former: present dotted key by former one.
    """
    if key in former:
        return f'; did you mean config.{former[key]}?'
    last = key.split('.')[-1]

    def likeness(name: str) -> float:  # a misspelt path, or a right name in a wrong section
        return similarity(key, name) + similarity(last, name.split('.')[-1])

    best = max(names, key=likeness, default='')
    if likeness(best) >= 2 * MIN_SIMILARITY:
        return f'; did you mean config.{best}?'
    above = key.rpartition('.')[0]
    beside = above and {name for name in names if name.rpartition('.')[0] == above}
    beside = beside or {name.split('.')[0] for name in names}
    return f'; expected one of {", ".join(sorted(beside))}' if beside else ''


MIN_SIMILARITY = 0.6
"""Similarity of two names from which one is offered for the other."""


def similarity(a: str, b: str) -> float:
    """Of two texts, from 0 to 1."""
    return difflib.SequenceMatcher(None, a, b).ratio()
