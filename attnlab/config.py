"""Experiment files and their configs: loading, typed overrides, and the `config.json` of a run.

An experiment is a Python file with `get_config(arg='')` that returns an `ml_collections.ConfigDict`.
Its fields are bool, int, float, str, tuples of these, sections, or `config_dict.placeholder(type)` for a
field that is None unless it is set.  The type that the file gives a field is the type that an override must have.
"""

import difflib
import inspect
import json
import math
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import RequiredValueError

from attnlab import files
from attnlab.errors import UserError

_ROOT = Path(__file__).resolve().parents[1]  # where `experiments/` stands in a checkout
_SHOWN = 5  # differences and fields named in one error
_ALIKE = 0.6  # similarity of two names, from 0 to 1, from which one is offered for the other


def load(spec: str, overrides: Sequence[tuple[str, Any]] = ()) -> ConfigDict:
    """The locked config of the experiment `path.py` or `path.py:arg`, with overrides (dotted key, value) applied.

    A value is a text as on the command line, or of the field's type; an int serves for a float, a list for a tuple.
    The path is looked up in the current folder, then in the repository, then in its `experiments/`.
    References between fields are resolved after the overrides, so derived values follow them.
    Raises `UserError` for whatever is wrong in the file, the argument, a key or a value.
    """
    config = _call(spec)
    for key in (keys := [key for key, _ in overrides]):
        if keys.count(key) > 1:
            raise UserError(f'--config.{key} is set {keys.count(key)} times; once is expected')
    for key, value in overrides:
        _override(config, key, value)
    try:
        config = config.copy_and_resolve_references()
    except RequiredValueError:
        empty = [key for key, value in _leaves(config, references=True) if _is_empty(value)]
        raise UserError(f'{spec}: a value is required: --config.{empty[0]}=...') from None
    except Exception as error:  # a derived value is an expression of the file's author and may raise anything
        raise UserError(f'{spec}: a derived value fails: {_brief(error)}') from error
    _encode(config)
    return config.lock()


def functions(spec: str, prefix: str) -> dict[str, Callable[..., Any]]:
    """The functions of an experiment's file whose names begin so, by what follows."""
    found = ((name, each) for name, each in _names(_split(spec)[0]).items() if callable(each))
    return {name.removeprefix(prefix): each for name, each in found if name.startswith(prefix)}


def tree(config: ConfigDict) -> dict[str, Any]:
    """The config as JSON has it: sections as objects, tuples as arrays (a config holds no lists)."""
    return _encode(config)


def check_common(config: Any) -> None:
    """Raises `UserError` for values of fields that every task reads."""
    check_seed(config.seed)
    smoothing = config.train.label_smoothing
    if not 0.0 <= smoothing < 1.0:
        raise UserError(f'train.label_smoothing is {smoothing}; expected 0 <= smoothing < 1')


def check_seed(seed: int) -> None:
    """Raises `UserError` for a seed that is none: a key of JAX takes 32 bits."""
    if not 0 <= seed < 2**32:
        raise UserError(f'seed is {seed}; expected 0 to {2**32 - 1}')


def save(config: ConfigDict, path: str | os.PathLike) -> None:
    """Writes the config as JSON."""
    files.write(path, json.dumps(tree(config), indent=2, allow_nan=False) + '\n')


def read(path: str | os.PathLike) -> ConfigDict:
    """The locked config that `save` wrote, equal to the one saved.  Raises `UserError` for any other file."""
    try:
        found = json.loads(Path(path).read_bytes(), parse_constant=_refuse_constant)
        if not isinstance(found, dict):
            raise ValueError(f'expected an object, got {type(found).__name__}')
        return from_tree(found)
    except OSError as error:
        raise UserError(f'{path}: {error.strerror}') from error
    except (ValueError, AttributeError, RecursionError) as error:  # AttributeError: a key such as __class__
        raise UserError(f'{path} is no config: {_brief(error)}') from error


def from_tree(found: dict[str, Any]) -> ConfigDict:
    """The locked config that `tree` was made of."""
    return ConfigDict(_decode(found)).lock()


def check_same(config: ConfigDict, saved: ConfigDict, what: str = 'the work directory holds a run') -> None:
    """Raises `UserError` naming the first fields in which the given config differs from the saved one."""
    given, stored = ({key: repr(value) for key, value in _leaves(each)} for each in (config, saved))
    keys = [key for key in given | stored if given.get(key) != stored.get(key)]  # by repr: 1 == 1.0 == True
    if not keys:
        return
    shown = ', '.join(f'{key} is {given.get(key, "absent")} here and {stored.get(key, "absent")} there'
                      for key in keys[:_SHOWN])
    rest = f', and {len(keys) - _SHOWN} more' if len(keys) > _SHOWN else ''
    raise UserError(f'{what} of another config: {shown}{rest}')


# The experiment file


def _call(spec: str) -> ConfigDict:
    path, argument = _split(spec)
    get_config = _get_config(path)
    try:
        inspect.signature(get_config).bind(*argument)
    except TypeError as error:
        raise UserError(f'{path}: get_config does not take the argument {argument[0]!r}' if argument
                        else f'{path}: get_config must be callable without an argument: {error}') from None
    try:
        config = get_config(*argument)
    except UserError as error:
        raise UserError(f'{spec}: {error}') from error
    except (Exception, SystemExit) as error:  # whatever the experiment's author raises for an argument
        raise UserError(f'{spec}: get_config fails{_line_in(path, error)}: {_brief(error)}') from error
    if type(config) is not ConfigDict:  # a frozen one could not be overridden
        raise UserError(f'{path}: get_config returns {type(config).__name__}, expected an ml_collections.ConfigDict')
    return config


def _split(spec: str) -> tuple[Path, tuple[str, ...]]:
    """The file and its argument, () where none is given."""
    head, colon, argument = spec.partition('.py:')
    name = head + '.py' if colon else spec
    if not name.endswith('.py'):
        raise UserError(f'expected an experiment file as path.py[:arg], got {spec!r}{_nearest_file(name)}')
    for folder in (Path(), _ROOT, _ROOT / 'experiments'):
        if (path := folder / name).is_file():
            return path, (argument,) if colon else ()
    raise UserError(f'there is no experiment file {name}{_nearest_file(name)}')


def _nearest_file(name: str) -> str:
    folders = {Path(): Path('experiments'), _ROOT: _ROOT / 'experiments'}
    files = {str(path.relative_to(base)) for base, folder in folders.items() for path in folder.rglob('*.py')}
    likeness = lambda file: max(_ratio(name, file), _ratio(Path(name).stem, Path(file).stem))
    best = max(sorted(files), key=likeness, default='')
    return f'; did you mean {best}?' if likeness(best) >= _ALIKE else ''


def _get_config(path: Path) -> Callable[..., Any]:
    if not callable(get_config := _names(path).get('get_config')):
        raise UserError(f"{path} has no get_config(arg='')")
    return get_config


def _names(path: Path) -> dict[str, Any]:
    """What the file defines; from here on modules of its folder can be imported, where nothing else has their name."""
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    try:
        return runpy.run_path(str(path))
    except SyntaxError as error:
        raise UserError(f'{error.filename or path}, line {error.lineno or 1}: {_brief(error)}') from error
    except (Exception, SystemExit) as error:  # an experiment is code, and code may raise anything
        raise UserError(f'{path} fails{_line_in(path, error)}: {_brief(error)}') from error


def _line_in(path: Path, error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f' at line {lines[-1]}' if lines else ''


def _brief(error: BaseException) -> str:
    message = error.msg if isinstance(error, SyntaxError) else ' '.join(str(error).split())
    return f'{type(error).__name__}: {message}'


# Overrides


def _override(config: ConfigDict, key: str, value: Any) -> None:
    *path, name = key.split('.')
    section = config
    for depth, part in enumerate(path):
        section = section[part] if part in section else _unknown(config, key)
        if not isinstance(section, ConfigDict):
            leaf = '.'.join(path[: depth + 1])
            raise UserError(f'config.{leaf} is a {type(section).__name__}, not a section: there is no config.{key}')
    if name not in section:
        _unknown(config, key)
    field = dict(section.items(preserve_field_references=True))[name]
    if isinstance(field, ConfigDict):
        fields = ', '.join(f'config.{key}.{inner}' for inner in field)
        raise UserError(f'config.{key} is a section, set one of its fields: {fields or "it has none"}')
    if isinstance(field, FieldReference):
        empty = _is_empty(field)
        default = None if empty else field.get()
        nothing = empty and (value is None or value == 'None')
        section[name] = None if nothing else _typed(key, value, field.get_type(), default)
    else:
        section[name] = _typed(key, value, type(field), field)


def _is_empty(field: Any) -> bool:
    if not isinstance(field, FieldReference):
        return False
    try:
        return field.get() is None
    except RequiredValueError:
        return True


def _unknown(config: ConfigDict, key: str) -> NoReturn:
    names = [name for name, _ in _leaves(config, references=True)]
    raise UserError(f'there is no config.{key}{nearest_key(key, names)}')


def nearest_key(key: str, names: Sequence[str]) -> str:
    """The end of an error about an unknown key: the most similar of the dotted names or, where none is similar, all
    names in the key's section."""
    last = key.split('.')[-1]

    def likeness(name: str) -> float:  # a misspelt path, or a right name in a wrong section
        return _ratio(key, name) + _ratio(last, name.split('.')[-1])

    best = max(names, key=likeness, default='')
    if likeness(best) >= 2 * _ALIKE:
        return f'; did you mean config.{best}?'
    above = key.rpartition('.')[0]
    beside = above and {name for name in names if name.rpartition('.')[0] == above}
    beside = beside or {name.split('.')[0] for name in names}
    return f'; expected one of {", ".join(sorted(beside))}' if beside else ''


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _typed(key: str, value: Any, kind: type, default: Any) -> Any:
    """A text, or a value, as one of the field's type; the default tells a tuple's element types."""
    if isinstance(value, str) or kind is type(None) or kind is not tuple and kind not in _SCALARS:
        return _parse(key, str(value), kind, default)
    if kind is tuple:
        if not isinstance(value, tuple | list):
            raise UserError(f'config.{key} expects a tuple, got {value!r}')
        kinds = _kinds(key, len(value), default, value)
        return tuple(_typed(key, each, inner, None) for each, inner in zip(value, kinds, strict=True))
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or kind is float and not math.isfinite(value):  # exactly: a bool is an int
        raise UserError(f'config.{key} expects {_SCALARS[kind][0]}, got {value!r}')
    return value


def _parse(key: str, text: str, kind: type, default: Any) -> Any:
    if kind is tuple:
        return _parse_tuple(key, text, default)
    if kind is type(None):
        raise UserError(f'config.{key} is None without a type and cannot be set; its file should use placeholder(type)')
    if kind not in _SCALARS:
        raise UserError(f'config.{key} is a {kind.__name__} and cannot be set on the command line')
    name, convert = _SCALARS[kind]
    try:
        return convert(text)
    except ValueError:
        raise UserError(f'config.{key} expects {name}, got {text!r}') from None


def _parse_bool(text: str) -> bool:
    if text not in ('true', 'false'):
        raise ValueError(text)
    return text == 'true'


def _parse_int(text: str) -> int:
    if not re.fullmatch(r'[+-]?[0-9]+(_[0-9]+)*', text):
        raise ValueError(text)
    return int(text)


def _parse_float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


_SCALARS: dict[type, tuple[str, Callable[[str], Any]]] = {
    bool: ('true or false', _parse_bool),
    int: ('an int', _parse_int),
    float: ('a finite float', _parse_float),
    str: ('a str', str),
}


def _parse_tuple(key: str, text: str, default: tuple | None) -> tuple:
    """`16,16`, `(16, 16)`, `16,` or `()`: any length where the elements have one type, else the same length."""
    inner = text.strip()
    inner = inner[1:-1].strip() if inner.startswith('(') and inner.endswith(')') else inner
    parts = [part.strip() for part in inner.removesuffix(',').split(',')] if inner else []
    kinds = _kinds(key, len(parts), default, text)
    return tuple(_parse(key, _unquote(part) if kind is str else part, kind, None)
                 for part, kind in zip(parts, kinds, strict=True))


def _kinds(key: str, count: int, default: tuple | None, given: Any) -> list[type]:
    """The types of so many elements of a tuple."""
    if not count:
        return []
    if not default:
        raise UserError(f'config.{key} is empty in its file, so the type of its elements is unknown; set it there')
    kinds = [type(element) for element in default]
    if set(kinds) <= {int, float}:
        kinds = [float if float in kinds else int] * len(kinds)
    if len(set(kinds)) == 1:
        kinds = kinds[:1] * count
    if any(kind not in _SCALARS for kind in kinds):
        raise UserError(f'config.{key} is a nested tuple and cannot be set on the command line')
    if count != len(kinds):
        raise UserError(f'config.{key} expects {len(kinds)} elements like {default!r}, got {given!r}')
    return kinds


def _unquote(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in '\'"' else text


# JSON


def _leaves(config: ConfigDict, references: bool = False, prefix: str = '') -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every field; an empty section counts as a field."""
    for key, value in config.items(preserve_field_references=references):
        if isinstance(value, ConfigDict) and len(value):
            yield from _leaves(value, references, f'{prefix}{key}.')
        else:
            yield f'{prefix}{key}', value


def _encode(value: Any, key: str = 'config') -> Any:
    match value:
        case ConfigDict():
            return {name: _encode(inner, f'{key}.{name}') for name, inner in value.items()}
        case tuple() if type(value) is tuple and not any(isinstance(inner, Mapping) for inner in value):
            return [_encode(inner, f'{key}[{i}]') for i, inner in enumerate(value)]
        case float() if type(value) is float and not math.isfinite(value):
            raise UserError(f'{key} is {value}, expected a finite float')
        case _ if value is None or type(value) in _SCALARS:
            return value
        case list():
            raise UserError(f'{key} is a list, expected a tuple')
        case _:
            kinds = 'bool, int, float, str, None, tuple or section'
            raise UserError(f'{key} is a {type(value).__name__}, expected {kinds}')


def _decode(value: Any) -> Any:
    match value:
        case dict():
            return {key: _decode(inner) for key, inner in value.items()}
        case list():
            return tuple(_decode(inner) for inner in value)
        case _:
            return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is not JSON')
