"""A sweep's points, named and checked before the first of them runs."""

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
"""So many characters of a name at most; a file system takes 255, of which some are added."""


class Point(NamedTuple):
    """number: from 0, in the order of the sweep.  name: of its folder.  overrides: of the config's types."""

    number: int
    name: str
    overrides: Overrides


class SweepPlan(NamedTuple):
    """What a sweep is; the same wherever it is made from the same command.

    config, overrides: as on the command line.  sweep: the names after --sweep.
    search: {trials, sampler, pruner} of a search, whose points are not known before; None otherwise.
    metric, direction: of the task.  base: the config without the sweep's overrides.
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
    """What the command line asks for.  search: what it says of one, empty where it says nothing.

    Raises UserError for whatever is wrong with the experiment, the sweep or any of its points; nothing is written.
    """
    base = configs.load_experiment(config, overrides)
    found = find_search(config, names)
    metric, direction = tasks.create_task(base).best
    if found is None:
        if search:
            raise UserError(f'--{next(iter(search))} is of a search; {", ".join(names)} is none')
        points, asked = _points(config, overrides, names), None
    else:
        run.check_config(base)
        points, asked = [], {'trials': 20, 'sampler': 'tpe', 'pruner': 'none'} | search
    return SweepPlan(config, list(overrides), list(names), asked, metric, direction, base, points)


def find_search(config: str, names: Sequence[str]) -> Callable[[Any], Overrides] | None:
    """The experiment's search of a name; None where the names are of sweeps; UserError where they are of neither."""
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
        raise UserError(f'--sweep={",".join(names)}: a search stands alone')
    return searches[names[0]]


def point_config(config: str, overrides: Sequence[tuple[str, str]], point: Mapping[str, Any]) -> ConfigDict:
    """The locked config of a point; UserError for a key that the command line sets as well."""
    for key, text in overrides:
        if key in point:
            raise UserError(f'config.{key} is varied by the sweep, and --config.{key}={text} sets it')
    return configs.load_experiment(config, [*overrides, *point.items()])


def typed_overrides(config: ConfigDict, point: Mapping[str, Any]) -> Overrides:
    """The overrides with the values that the config has by them."""
    return {key: config[key] for key in point}


def point_name(overrides: Mapping[str, Any], number: int | None = None) -> str:
    """A folder's name, as in learning_rate=0.001,seed=0: the last parts of the keys, or all where those are alike.

    What a file system may not take is written as %XX; what is too long is cut and ends in a hash.
    number: for searches, whose points may be alike; it comes first, and numbers behind it are shortened.
    """
    last = [key.rpartition('.')[2] for key in overrides]
    keys = last if len(set(last)) == len(last) else list(overrides)
    parts = [f'{key}={_shown(value, number)}' for key, value in zip(keys, overrides.values(), strict=True)]
    head = '' if number is None else f'{number:04d},'
    name = head + _escaped(','.join(parts) or 'base')
    if len(name) <= MAX_NAME_LENGTH:
        return name
    digest = hashlib.sha256(json.dumps(overrides, sort_keys=True).encode()).hexdigest()[:12]
    return f'{name[: MAX_NAME_LENGTH - 13]}-{digest}'


def _shown(value: Any, number: int | None) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float() if number is not None:
            return f'{value:.4g}'
        case tuple():
            return 'x'.join(_shown(inner, number) for inner in value)
    return str(value)


def _escaped(text: str) -> str:
    """All but letters, digits and =,.+-_ as %XX."""
    return re.sub(r'[^A-Za-z0-9=,.+_-]', lambda found: ''.join(f'%{byte:02x}' for byte in found[0].encode()), text)


def _points(config: str, overrides: Sequence[tuple[str, str]], names: Sequence[str]) -> list[Point]:
    points: list[Point] = []
    seen: dict[str, int] = {}
    for number, given in enumerate(_given(config, names)):
        told = describe_values(given) or 'nothing'
        try:
            locked = point_config(config, overrides, given)
            run.check_config(locked)
        except UserError as error:
            raise UserError(f'point {number} of the sweep ({told}): {error}') from error
        values = typed_overrides(locked, given)
        # By all of the config: what a point does not set has the value of the file, which another may set as well.
        same = json.dumps(configs.config_to_json(locked))
        if same in seen:
            raise UserError(f'points {seen[same]} and {number} of the sweep are the same: {told}')
        seen[same] = number
        points.append(Point(number, point_name(values), values))
    if not points:
        raise UserError(f'--sweep={",".join(names)} has no points')
    return _unlike(points)


def _unlike(points: list[Point]) -> list[Point]:
    """Names that differ, whatever the case of their letters: those that do not end in the number."""
    folded = [point.name.lower() for point in points]
    return [point._replace(name=f'{point.name}-{point.number}') if folded.count(name) > 1 else point
            for point, name in zip(points, folded, strict=True)]  # fmt: skip


def _given(config: str, names: Sequence[str]) -> list[Overrides]:
    found = configs.experiment_functions(config, 'sweep_')
    every = list(itertools.islice(product(*(_points_of(config, name, found[name]) for name in names)), MAX_POINTS + 1))
    if len(every) > MAX_POINTS:
        raise UserError(f'--sweep={",".join(names)} has more than {MAX_POINTS} points')
    return every


def _points_of(config: str, name: str, sweep: Callable[[], Iterable[Overrides]]) -> list[Overrides]:
    """The points of a sweep_NAME as it gives them, of one without an end the first; UserError where it gives none."""
    try:
        found = sweep()
        if found is None:
            raise UserError(f'sweep_{name}() returns None; expected dicts dotted key -> value')
        each = list(itertools.islice(found, MAX_POINTS + 1))
    except UserError as error:
        raise UserError(f'{config}: {error}') from error
    except (Exception, SystemExit) as error:  # whatever the experiment's author raises
        text = ' '.join(f'{type(error).__name__}: {error}'.split())
        raise UserError(f'{config}: --sweep={name} fails: {text}') from error
    for point in each:
        if not isinstance(point, dict) or not all(isinstance(key, str) for key in point):
            raise UserError(f'{config}: a point of a sweep is a dict dotted key -> value, got {point!r}')
    return each
