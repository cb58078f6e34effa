"""Configs as JSON, and the file `config.json` of a run."""

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

_MAX_SHOWN = 5  # differences named in one error


def config_to_json(config: ConfigDict) -> dict[str, Any]:
    """Return a config as JSON values: sections as dicts, tuples as lists.

    Raises UserError for a value that JSON cannot hold, and for a list, which would come back as a tuple.
    """
    return _encode(config)


def config_from_json(values: dict[str, Any]) -> ConfigDict:
    """Return the locked config of the result of `config_to_json`."""
    return ConfigDict(_decode(values)).lock()


def save_config(config: ConfigDict, path: str | os.PathLike) -> None:
    """Write a config to a JSON file."""
    files.write_file(path, json.dumps(config_to_json(config), indent=2, allow_nan=False) + '\n')


def load_config(path: str | os.PathLike) -> ConfigDict:
    """Read the locked config that `save_config` wrote, also in an earlier version.

    Fields with a former name get their present one.  Missing fields get their defaults, and a warning names them.
    Raises UserError for a missing file, and for one that is not a config.
    """
    try:
        values = json.loads(Path(path).read_bytes(), parse_constant=_reject_constant)
        if not isinstance(values, dict):
            raise ValueError(f'expected an object, got {type(values).__name__}')
        config = config_from_json(values)
        with config.unlocked():
            cls = config_class(config.get('task'))
            rename_former_fields(cls, config)
            added = fill_defaults(cls, config)
    except OSError as error:
        raise UserError(f'{path}: {error.strerror}') from error
    except UserError as error:
        raise UserError(f'{path}: {error}') from error
    except (ValueError, AttributeError, RecursionError) as error:  # AttributeError: a key such as __class__
        raise UserError(f'{path} is not a config: {format_error(error)}') from error
    if added:
        leaves = dict(_leaves(config))
        shown = ', '.join(f'{key} = {leaves[key]!r}' for key in added if key in leaves)
        logging.warning('%s was saved by an earlier version; missing fields have their defaults: %s', path, shown)
    return config


def check_same_config(config: ConfigDict, saved: ConfigDict, what: str = 'the work directory holds a run') -> None:
    """Raise UserError with the first differences if a config differs from the saved one.

    what: the thing that has the saved config, as the start of the error.
    """
    # Values are compared by repr, as 1 == 1.0 == True.
    current, stored = ({key: repr(value) for key, value in _leaves(c)} for c in (config, saved))
    keys = [key for key in current | stored if current.get(key) != stored.get(key)]
    if not keys:
        return
    shown = ', '.join(
        f'{key} is {current.get(key, "absent")} here and {stored.get(key, "absent")} there' for key in keys[:_MAX_SHOWN]
    )
    rest = f', and {len(keys) - _MAX_SHOWN} more' if len(keys) > _MAX_SHOWN else ''
    raise UserError(f'{what} of another config: {shown}{rest}; expected the same config, or another directory')


def format_error(error: BaseException) -> str:
    """Return type and message of an exception in one line."""
    message = error.msg if isinstance(error, SyntaxError) else ' '.join(str(error).split())
    return f'{type(error).__name__}: {message}'


def _leaves(config: ConfigDict, prefix: str = '') -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each field; an empty section counts as a field."""
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
            expected = 'bool, int, float, str, None, tuple or section'
            raise UserError(f'{key} is a {type(value).__name__}, expected {expected}')


def _decode(value: Any) -> Any:
    match value:
        case dict():
            return {key: _decode(inner) for key, inner in value.items()}
        case list():
            return tuple(_decode(inner) for inner in value)
        case _:
            return value


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is not JSON')
