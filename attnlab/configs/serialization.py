"""The `config.json` of a run, and a config as JSON."""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ml_collections import ConfigDict

from attnlab import files
from attnlab.configs.fields import fill_defaults, rename_former_fields
from attnlab.configs.tasks import config_class
from attnlab.errors import UserError

_SHOWN = 5  # differences and fields named in one error


def config_to_json(config: ConfigDict) -> dict[str, Any]:
    """The config as JSON has it: sections as objects, tuples as arrays (a config holds no lists)."""
    return _encode(config)


def save_config(config: ConfigDict, path: str | os.PathLike) -> None:
    """Writes the config as JSON."""
    files.write_file(path, json.dumps(config_to_json(config), indent=2, allow_nan=False) + '\n')


def load_config(path: str | os.PathLike) -> ConfigDict:
    """The locked config that `save_config` wrote; fields that a later version has added have their defaults.

    Raises `UserError` for any other file.
    """
    try:
        found = json.loads(Path(path).read_bytes(), parse_constant=_refuse_constant)
        if not isinstance(found, dict):
            raise ValueError(f'expected an object, got {type(found).__name__}')
        config = config_from_json(found)
        with config.unlocked():
            cls = config_class(config.get('task'))
            rename_former_fields(cls, config)
            added = fill_defaults(cls, config)
    except OSError as error:
        raise UserError(f'{path}: {error.strerror}') from error
    except UserError as error:
        raise UserError(f'{path}: {error}') from error
    except (ValueError, AttributeError, RecursionError) as error:  # AttributeError: a key such as __class__
        raise UserError(f'{path} is no config: {format_error(error)}') from error
    if added:
        values = dict(_leaves(config))
        shown = ', '.join(f'{key} = {values[key]!r}' for key in added if key in values)
        logging.warning('%s is of an earlier version; fields that it lacks have their defaults: %s', path, shown)
    return config


def config_from_json(found: dict[str, Any]) -> ConfigDict:
    """The locked config that `config_to_json` was made of."""
    return ConfigDict(_decode(found)).lock()


def check_same_config(config: ConfigDict, saved: ConfigDict, what: str = 'the work directory holds a run') -> None:
    """Raises `UserError` naming the first fields in which the given config differs from the saved one."""
    given, stored = ({key: repr(value) for key, value in _leaves(each)} for each in (config, saved))
    keys = [key for key in given | stored if given.get(key) != stored.get(key)]  # by repr: 1 == 1.0 == True
    if not keys:
        return
    shown = ', '.join(
        f'{key} is {given.get(key, "absent")} here and {stored.get(key, "absent")} there' for key in keys[:_SHOWN]
    )
    rest = f', and {len(keys) - _SHOWN} more' if len(keys) > _SHOWN else ''
    raise UserError(f'{what} of another config: {shown}{rest}')


def format_error(error: BaseException) -> str:
    """Type and message of an exception in one line."""
    message = error.msg if isinstance(error, SyntaxError) else ' '.join(str(error).split())
    return f'{type(error).__name__}: {message}'


def _leaves(config: ConfigDict, prefix: str = '') -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every field; an empty section counts as a field."""
    for key, value in config.items():
        if isinstance(value, ConfigDict) and len(value):
            yield from _leaves(value, f'{prefix}{key}.')
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
        case _ if value is None or type(value) in (bool, int, float, str):
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
