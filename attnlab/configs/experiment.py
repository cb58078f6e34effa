"""Experiment files: Python files with a function `get_config(arg='')` that returns a config.

A config is an `ml_collections.ConfigDict` with the fields of the dataclass of its task (`attnlab.configs.tasks`), or an
instance of that dataclass.  Fields that it leaves out have their defaults.
"""

import inspect
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import RequiredValueError

from attnlab.configs import fields, serialization
from attnlab.configs.overrides import apply_override
from attnlab.configs.run import RunConfig
from attnlab.configs.tasks import config_class
from attnlab.errors import UserError

_ROOT = Path(__file__).resolve().parents[2]  # of the repository, which has the folder `experiments`


def load_experiment(spec: str, overrides: Sequence[tuple[str, Any]] = ()) -> ConfigDict:
    """Load an experiment file and return its locked config, with overrides applied.

    spec: `path.py` or `path.py:arg`.  The path is looked up in the current folder, then in the repository, then in the
      repository's folder `experiments`.
    overrides: (dotted key, value).  A value is text as on the command line, or of the field's type; an int is accepted
      for a float, a list for a tuple.  References between fields are resolved after the overrides, so derived values
      follow them.

    Raises UserError for any error in the file, the argument, a key or a value.
    """
    config = _call_get_config(spec)
    cls = config_class(config.get('task'))
    keys = [key for key, _ in overrides]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f'--config.{key} is set {keys.count(key)} times; expected once')
    fields.fill_defaults(cls, config)
    # Names first, because the name of a section decides which other fields it has.
    for key, value in sorted(overrides, key=lambda item: not item[0].endswith('.name')):
        apply_override(cls, config, key, value)
        if key.endswith('.name'):
            fields.fill_defaults(cls, config)
    try:
        config = config.copy_and_resolve_references()
    except RequiredValueError:
        empty = next(_keys_without_value(config))
        raise UserError(f'{spec}: a value is required: --config.{empty}=...') from None
    except Exception as error:  # a derived value is the user's expression, which may raise any exception
        raise UserError(f'{spec}: a derived value cannot be computed: {serialization.format_error(error)}') from error
    serialization.config_to_json(config)  # raises UserError for a value that cannot be saved
    return config.lock()


def experiment_functions(spec: str, prefix: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of an experiment file whose names have a prefix, by the name without the prefix."""
    names = _run_file(_split_spec(spec)[0])
    return {
        name.removeprefix(prefix): value for name, value in names.items() if name.startswith(prefix) and callable(value)
    }


def _keys_without_value(config: ConfigDict, prefix: str = '') -> Iterator[str]:
    """Yield the dotted keys of required placeholders without a value."""
    for name in config:
        try:
            value = config[name]
        except RequiredValueError:
            yield prefix + name
        else:
            if isinstance(value, ConfigDict):
                yield from _keys_without_value(value, f'{prefix}{name}.')


def _call_get_config(spec: str) -> ConfigDict:
    path, argument = _split_spec(spec)
    get_config = _run_file(path).get('get_config')
    if not callable(get_config):
        raise UserError(f"{path} has no get_config(arg='')")
    try:
        inspect.signature(get_config).bind(*argument)
    except TypeError as error:
        raise UserError(
            f'{path}: get_config does not take the argument {argument[0]!r}'
            if argument
            else f'{path}: get_config must be callable without an argument: {error}'
        ) from None
    try:
        config = get_config(*argument)
    except UserError as error:
        raise UserError(f'{spec}: {error}') from error
    except (Exception, SystemExit) as error:  # get_config may raise any exception for an argument
        raise UserError(
            f'{spec}: get_config fails{_line_in(path, error)}: {serialization.format_error(error)}'
        ) from error
    if isinstance(config, RunConfig):
        return fields.config_dict(config)
    if type(config) is not ConfigDict:  # a FrozenConfigDict could not be overridden
        kind = type(config).__name__
        raise UserError(f'{path}: get_config returns {kind}, expected a config dataclass or ConfigDict')
    return config


def _split_spec(spec: str) -> tuple[Path, tuple[str, ...]]:
    """Return the file and the argument as a tuple, () for none."""
    head, colon, argument = spec.partition('.py:')
    name = head + '.py' if colon else spec
    if not name.endswith('.py'):
        raise UserError(f'expected an experiment file as path.py[:arg], got {spec!r}{_file_suggestion(name)}')
    for folder in (Path(), _ROOT, _ROOT / 'experiments'):
        if (path := folder / name).is_file():
            return path, (argument,) if colon else ()
    raise UserError(f'there is no experiment file {name}{_file_suggestion(name)}')


def _file_suggestion(name: str) -> str:
    """Return '; did you mean ...?' with the most similar experiment file, or '' if none is similar."""
    folders = {Path(): Path('experiments'), _ROOT: _ROOT / 'experiments'}
    files = {str(path.relative_to(base)) for base, folder in folders.items() for path in folder.rglob('*.py')}

    def likeness(file: str) -> float:
        return max(fields.similarity(name, file), fields.similarity(Path(name).stem, Path(file).stem))

    best = max(sorted(files), key=likeness, default='')
    return f'; did you mean {best}?' if likeness(best) >= fields.MIN_SIMILARITY else ''


def _run_file(path: Path) -> dict[str, Any]:
    """Run an experiment file and return its global names.

    Its folder is appended to sys.path, so modules beside it can be imported, unless other modules have their names.
    """
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    try:
        return runpy.run_path(str(path))
    except SyntaxError as error:
        raise UserError(
            f'{error.filename or path}, line {error.lineno or 1}: {serialization.format_error(error)}'
        ) from error
    except (Exception, SystemExit) as error:  # the user's code may raise any exception
        raise UserError(f'{path} fails{_line_in(path, error)}: {serialization.format_error(error)}') from error


def _line_in(path: Path, error: BaseException) -> str:
    """Return ' at line N' for the last line of a file in the traceback of an error, or ''."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f' at line {lines[-1]}' if lines else ''
