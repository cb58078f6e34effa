"""Experiment files: Python files with `get_config(arg='')` that returns a config, and overrides of its fields.

A config is an `ml_collections.ConfigDict` with the fields of the dataclass of its task (`attnlab.configs.tasks`), or an
instance of that dataclass. Fields that it leaves out have their defaults.
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

_ROOT = Path(__file__).resolve().parents[2]  # where `experiments/` stands in a checkout


def load_experiment(spec: str, overrides: Sequence[tuple[str, Any]] = ()) -> ConfigDict:
    """The locked config of the experiment `path.py` or `path.py:arg`, with overrides (dotted key, value) applied.

    A value is a text as on the command line, or of the field's type; an int serves for a float, a list for a tuple.
    The path is looked up in the current folder, then in the repository, then in its `experiments/`.
    References between fields are resolved after the overrides, so derived values follow them.
    Raises `UserError` for whatever is wrong in the file, the argument, a key or a value.
    """
    config = _call(spec)
    cls = config_class(config.get('task'))
    for key in (keys := [key for key, _ in overrides]):
        if keys.count(key) > 1:
            raise UserError(f'--config.{key} is set {keys.count(key)} times; expected once')
    fields.fill_defaults(cls, config)
    # First names: the name of a section decides which other fields it has.
    for key, value in sorted(overrides, key=lambda each: not each[0].endswith('.name')):
        apply_override(cls, config, key, value)
        if key.endswith('.name'):
            fields.fill_defaults(cls, config)
    try:
        config = config.copy_and_resolve_references()
    except RequiredValueError:
        empty = next(_empty(config))
        raise UserError(f'{spec}: a value is required: --config.{empty}=...') from None
    except Exception as error:  # a derived value is an expression of the file's author and may raise anything
        raise UserError(f'{spec}: a derived value fails: {serialization.format_error(error)}') from error
    serialization.config_to_json(config)
    return config.lock()


def experiment_functions(spec: str, prefix: str) -> dict[str, Callable[..., Any]]:
    """The functions of an experiment's file whose names begin so, by what follows."""
    found = ((name, each) for name, each in _names(_split(spec)[0]).items() if callable(each))
    return {name.removeprefix(prefix): each for name, each in found if name.startswith(prefix)}


def _empty(config: ConfigDict, above: str = '') -> Iterator[str]:
    """Dotted keys of required placeholders without a value."""
    for name in config:
        try:
            value = config[name]
        except RequiredValueError:
            yield above + name
        else:
            if isinstance(value, ConfigDict):
                yield from _empty(value, f'{above}{name}.')


def _call(spec: str) -> ConfigDict:
    path, argument = _split(spec)
    get_config = _get_config(path)
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
    except (Exception, SystemExit) as error:  # whatever the experiment's author raises for an argument
        raise UserError(
            f'{spec}: get_config fails{_line_in(path, error)}: {serialization.format_error(error)}'
        ) from error
    if isinstance(config, RunConfig):
        return fields.config_dict(config)
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
    likeness = lambda file: max(fields.similarity(name, file), fields.similarity(Path(name).stem, Path(file).stem))
    best = max(sorted(files), key=likeness, default='')
    return f'; did you mean {best}?' if likeness(best) >= fields.MIN_SIMILARITY else ''


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
        raise UserError(
            f'{error.filename or path}, line {error.lineno or 1}: {serialization.format_error(error)}'
        ) from error
    except (Exception, SystemExit) as error:  # an experiment is code, and code may raise anything
        raise UserError(f'{path} fails{_line_in(path, error)}: {serialization.format_error(error)}') from error


def _line_in(path: Path, error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f' at line {lines[-1]}' if lines else ''
