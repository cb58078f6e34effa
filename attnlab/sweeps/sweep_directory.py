"""A sweep's directory, begun once or found to be this sweep's."""

import json
import uuid
from pathlib import Path
from typing import Any

from attnlab import configs, files
from attnlab.errors import UserError
from attnlab.sweeps import points, sweep_files
from attnlab.sweeps.points import SweepPlan

_SHOWN = 3


def ensure_sweep_directory(folder: Path, plan: SweepPlan) -> dict[str, Any]:
    """What sweep.json says, written if there is none; of several that begin at once, one writes it.

    Raises UserError where the directory holds something else.
    """
    files.check_folder(folder, 'workdir')
    if (folder / 'config.json').exists() and not (folder / 'sweep.json').exists():
        raise UserError(f'--workdir={folder} holds a run; expected a new directory, or that of a sweep')
    spec = {'id': uuid.uuid4().hex, **_spec(plan)}
    if sweep_files.create_json(folder / 'sweep.json', spec):
        return spec
    found = sweep_files.read_spec(folder) or {}
    _check_same(folder, plan, spec, found)
    return found


def check_same_sweep(folder: Path, plan: SweepPlan) -> None:
    """Raises UserError where the directory holds another sweep."""
    if found := sweep_files.read_spec(folder):
        _check_same(folder, plan, _spec(plan), found)


def _spec(plan: SweepPlan) -> dict[str, Any]:
    spec = plan._asdict() | {'base': configs.config_to_json(plan.base)}
    spec['points'] = [point._asdict() for point in plan.points]
    return json.loads(json.dumps(spec))  # as it will be read: tuples as arrays


def _check_same(folder: Path, plan: SweepPlan, spec: dict[str, Any], found: dict[str, Any]) -> None:
    holds = f'--workdir={folder} holds another sweep'
    if missing := [key for key in spec if key not in found]:
        raise UserError(f'{folder / "sweep.json"} is damaged: it has no {", ".join(missing)}')
    for key in ('config', 'sweep', 'overrides', 'search'):
        if spec[key] != found[key]:
            raise UserError(f'{holds}: {key} is {_told(spec[key])} here and {_told(found[key])} there')
    base, there = (configs.config_from_json(each['base']) for each in (spec, found))
    configs.check_same_config(base, there, f'--workdir={folder} holds a sweep')
    if json.dumps(spec['points']) != json.dumps(found['points']):  # by text: 1 == 1.0 == True
        raise UserError(f'{holds}: {_differing(spec["points"], found["points"])}')
    if plan.search:
        from attnlab.sweeps import search_space

        search = configs.experiment_functions(plan.config, 'search_')[plan.sweep[0]]
        typed = lambda point: points.typed_overrides(points.point_config(plan.config, plan.overrides, point), point)
        try:
            search_space.check_search_space(folder, search, typed)
        except UserError as error:
            raise UserError(f'{holds} of search_{plan.sweep[0]}: {error}') from error


def _differing(here: list[dict[str, Any]], there: list[dict[str, Any]]) -> str:
    """How the points of two sweeps differ: those of one alone, or the first that is another."""
    names = [[point['name'] for point in each] for each in (here, there)]
    only = [[name for name in one if name not in other][:_SHOWN] for one, other in (names, names[::-1])]
    if any(only):
        shown = [f'only {where} {" ".join(some)}' for where, some in zip(('here', 'there'), only, strict=True) if some]
        return ', '.join([f'{len(here)} points here and {len(there)} there', *shown])
    at = next(at for at, (one, other) in enumerate(zip(here, there, strict=True)) if one != other)
    one, other = (_told(each[at]['overrides']) for each in (here, there))
    return f'point {at} is {one} here and {other} there'


def _told(value: Any) -> str:
    match value:
        case []:
            return 'none'
        case dict():
            return ' '.join(f'{key}={each}' for key, each in value.items())
        case list():
            return ','.join('='.join(each) if isinstance(each, list) else each for each in value)
    return 'none' if value is None else str(value)
