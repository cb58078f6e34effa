"""The plan of a sweep: its points, named and checked before the first one runs."""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from attnlab import configs, tasks
from attnlab.errors import UserError
from attnlab.flags import nearest
from attnlab.report.values import describe_values
from attnlab.sweeps import MAX_POINTS, Overrides, product
from attnlab.sweeps.sweep_files import Direction
from attnlab.train import run

MAX_NAME_LENGTH = 120
"""Most characters of a point's name; file systems allow 255, and a suffix may be added."""


class Point(NamedTuple):
    """One point of a sweep.

    number: from 0, in the order of the sweep.  name: name of the point's folder.
    overrides: dotted key -> value, with the types of the config's fields.
    """

    number: int
    name: str
    overrides: Overrides


class SweepPlan(NamedTuple):
    """The definition of a sweep; the same command always gives the same plan.

    config, overrides: as on the command line.  sweep: the names after --sweep.
    search: {trials, sampler, pruner} of a search, whose points are drawn later; None for a sweep.
    metric, direction: `Task.best` of the task.  base: the config without the sweep's overrides.
    """

    config: str
    overrides: list[tuple[str, str]]
    sweep: list[str]
    search: dict[str, Any] | None
    metric: str
    direction: Direction
    base: ConfigDict
    points: list[Point]


def make_sweep_plan(
    config: str, overrides: Sequence[tuple[str, str]], names: Sequence[str], search: dict[str, Any]
) -> SweepPlan:
    """Return the plan of the sweeps or the search called `names`; nothing is written.

    search: options of a search that are set on the command line.

    Raises UserError if the experiment, the sweep or one of its points is invalid.
    """
    base = configs.load_experiment(config, overrides)
    search_function = find_search(config, names)
    metric, direction = tasks.create_task(base).best
    if search_function is None:
        if search:
            raise UserError(f'--{next(iter(search))} applies to a search only; {", ".join(names)} is not a search')
        points, options = _make_points(config, overrides, names), None
    else:
        run.check_config(base)
        points, options = [], {'trials': 20, 'sampler': 'tpe', 'pruner': 'none'} | search
    return SweepPlan(config, list(overrides), list(names), options, metric, direction, base, points)


def find_search(config: str, names: Sequence[str]) -> Callable[[Any], Overrides] | None:
    """Return the experiment's function `search_NAME`, or None if all names are sweeps.

    Raises UserError if a name is neither a sweep nor a search, or if a search is combined with another name.
    """
    sweeps, searches = (configs.experiment_functions(config, prefix) for prefix in ('sweep_', 'search_'))
    for name in names:
        if name not in sweeps and name not in searches:
            known = [*sweeps, *searches]
            hint = nearest(name, known) if known else '; it has neither sweep_NAME() nor search_NAME(trial)'
            raise UserError(f'{config} has no sweep {name!r}{hint}')
        if name in sweeps and name in searches:
            raise UserError(f'{config} has both sweep_{name} and search_{name}')
    if all(name in sweeps for name in names):
        return None
    if len(names) > 1:
        raise UserError(f'--sweep={",".join(names)}: a search cannot be combined with other names')
    return searches[names[0]]


def point_config(config: str, overrides: Sequence[tuple[str, str]], point: Mapping[str, Any]) -> ConfigDict:
    """Return the locked config of a point; raise UserError for a key that the command line sets as well.

    point: overrides of the point.
    """
    for key, text in overrides:
        if key in point:
            raise UserError(f'config.{key} is varied by the sweep, and --config.{key}={text} sets it')
    return configs.load_experiment(config, [*overrides, *point.items()])


def typed_overrides(config: ConfigDict, overrides: Mapping[str, Any]) -> Overrides:
    """Return the overrides with the values in `config`, which have the types of their fields."""
    return {key: config[key] for key in overrides}


def point_name(overrides: Mapping[str, Any], number: int | None = None) -> str:
    """Return the folder name of a point, as in learning_rate=0.001,seed=0.

    The name has the last part of each key, or the whole keys if two last parts are equal.  Characters that a file
    system may not allow are written as %XX.  A name that is too long is cut and ends in a hash.

    number: number of a point of a search.  It comes first, because such points may have equal overrides; floats are
    then shortened.
    """
    last_parts = [key.rpartition('.')[2] for key in overrides]
    keys = last_parts if len(set(last_parts)) == len(last_parts) else list(overrides)
    pairs = [f'{key}={_format_value(value, number)}' for key, value in zip(keys, overrides.values(), strict=True)]
    prefix = '' if number is None else f'{number:04d},'
    name = prefix + _percent_encode(','.join(pairs) or 'base')
    if len(name) <= MAX_NAME_LENGTH:
        return name
    digest = hashlib.sha256(json.dumps(overrides, sort_keys=True).encode()).hexdigest()[:12]
    return f'{name[: MAX_NAME_LENGTH - 13]}-{digest}'


def _format_value(value: Any, number: int | None) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float() if number is not None:
            return f'{value:.4g}'
        case tuple():
            return 'x'.join(_format_value(inner, number) for inner in value)
    return str(value)


def _percent_encode(text: str) -> str:
    """Write all characters except ASCII letters, digits and =,.+_- as %XX."""
    return re.sub(r'[^A-Za-z0-9=,.+_-]', lambda match: ''.join(f'%{byte:02x}' for byte in match[0].encode()), text)


def _make_points(config: str, overrides: Sequence[tuple[str, str]], names: Sequence[str]) -> list[Point]:
    """Return the checked points of the product of several sweeps."""
    points: list[Point] = []
    number_of_config: dict[str, int] = {}
    for number, untyped in enumerate(_untyped_points(config, names)):
        description = describe_values(untyped) or 'nothing'
        try:
            locked = point_config(config, overrides, untyped)
            run.check_config(locked)
        except UserError as error:
            raise UserError(f'point {number} of the sweep ({description}): {error}') from error
        typed = typed_overrides(locked, untyped)
        # Whole configs are compared: another point may set a field to the value that this point has by default.
        config_text = json.dumps(configs.config_to_json(locked))
        if config_text in number_of_config:
            first = number_of_config[config_text]
            raise UserError(f'points {first} and {number} of the sweep are the same: {description}')
        number_of_config[config_text] = number
        points.append(Point(number, point_name(typed), typed))
    if not points:
        raise UserError(f'--sweep={",".join(names)} has no points')
    return _with_unique_names(points)


def _with_unique_names(points: list[Point]) -> list[Point]:
    """Append the number to names that differ only in upper and lower case, which some file systems treat as equal."""
    lowered = [point.name.lower() for point in points]
    return [point._replace(name=f'{point.name}-{point.number}') if lowered.count(name) > 1 else point
            for point, name in zip(points, lowered, strict=True)]  # fmt: skip


def _untyped_points(config: str, names: Sequence[str]) -> list[Overrides]:
    """Return the points of the product of several sweeps, with values as the experiment file gives them."""
    functions = configs.experiment_functions(config, 'sweep_')
    sweeps = (_call_sweep(config, name, functions[name]) for name in names)
    points = list(itertools.islice(product(*sweeps), MAX_POINTS + 1))
    if len(points) > MAX_POINTS:
        raise UserError(f'--sweep={",".join(names)} has more than {MAX_POINTS} points')
    return points


def _call_sweep(config: str, name: str, sweep: Callable[[], Iterable[Overrides]]) -> list[Overrides]:
    """Return the points of a function `sweep_NAME`, at most MAX_POINTS + 1, because it may not end.

    Raises UserError if the function fails or does not give dicts.
    """
    try:
        iterable = sweep()
        if iterable is None:
            raise UserError(f'sweep_{name}() returns None; expected dicts dotted key -> value')
        points = list(itertools.islice(iterable, MAX_POINTS + 1))
    except UserError as error:
        raise UserError(f'{config}: {error}') from error
    except (Exception, SystemExit) as error:  # the user's sweep function may raise anything
        text = ' '.join(f'{type(error).__name__}: {error}'.split())
        raise UserError(f'{config}: --sweep={name} fails: {text}') from error
    for point in points:
        if not isinstance(point, dict) or not all(isinstance(key, str) for key in point):
            raise UserError(f'{config}: a point of a sweep is a dict dotted key -> value, got {point!r}')
    return points
