"""Creating the directory of a sweep, and checking that an existing directory belongs to the same sweep."""

import json
import uuid
from pathlib import Path
from typing import Any

from attnlab import configs, files
from attnlab.errors import UserError
from attnlab.sweeps import points, sweep_files
from attnlab.sweeps.points import SweepPlan

_MAX_NAMES = 3
"""Most point names in an error message."""


def ensure_sweep_directory(folder: Path, plan: SweepPlan) -> dict[str, Any]:
    """Write sweep.json if there is none, else check that it describes the same sweep; return its content.

    If several processes call this at once, exactly one of them writes the file.

    Raises UserError if the directory holds a run or another sweep.
    """
    files.check_folder(folder, 'workdir')
    if (folder / 'config.json').exists() and not (folder / 'sweep.json').exists():
        raise UserError(f'--workdir={folder} holds a run; expected a new directory, or that of a sweep')
    new_spec = {'id': uuid.uuid4().hex, **_plan_to_json(plan)}
    if sweep_files.create_json(folder / 'sweep.json', new_spec):
        return new_spec
    saved_spec = sweep_files.read_spec(folder) or {}
    _check_same_spec(folder, plan, new_spec, saved_spec)
    return saved_spec


def check_same_sweep(folder: Path, plan: SweepPlan) -> None:
    """Raise UserError if the directory holds another sweep."""
    if saved_spec := sweep_files.read_spec(folder):
        _check_same_spec(folder, plan, _plan_to_json(plan), saved_spec)


def _plan_to_json(plan: SweepPlan) -> dict[str, Any]:
    spec = plan._asdict() | {'base': configs.config_to_json(plan.base)}
    spec['points'] = [point._asdict() for point in plan.points]
    return json.loads(json.dumps(spec))  # tuples become lists, as in a spec that was read from a file


def _check_same_spec(folder: Path, plan: SweepPlan, new_spec: dict[str, Any], saved_spec: dict[str, Any]) -> None:
    prefix = f'--workdir={folder} holds another sweep'
    if missing := [key for key in new_spec if key not in saved_spec]:
        raise UserError(f'{folder / "sweep.json"} is damaged: it has no {", ".join(missing)}')
    for key in ('config', 'sweep', 'overrides', 'search'):
        new_value, saved_value = new_spec[key], saved_spec[key]
        if new_value != saved_value:
            raise UserError(f'{prefix}: {key} is {_format(new_value)} here and {_format(saved_value)} there')
    new_base, saved_base = (configs.config_from_json(spec['base']) for spec in (new_spec, saved_spec))
    configs.check_same_config(new_base, saved_base, f'--workdir={folder} holds a sweep')
    # Texts are compared, because as values 1 == 1.0 == True.
    if json.dumps(new_spec['points']) != json.dumps(saved_spec['points']):
        raise UserError(f'{prefix}: {_describe_difference(new_spec["points"], saved_spec["points"])}')
    if plan.search:
        _check_same_search(folder, plan, prefix)


def _check_same_search(folder: Path, plan: SweepPlan, prefix: str) -> None:
    from attnlab.sweeps import search_space

    search = configs.experiment_functions(plan.config, 'search_')[plan.sweep[0]]

    def to_typed(overrides: points.Overrides) -> points.Overrides:
        return points.typed_overrides(points.point_config(plan.config, plan.overrides, overrides), overrides)

    try:
        search_space.check_search_space(folder, search, to_typed)
    except UserError as error:
        raise UserError(f'{prefix} of search_{plan.sweep[0]}: {error}') from error


def _describe_difference(here: list[dict[str, Any]], there: list[dict[str, Any]]) -> str:
    """Describe how two lists of points differ: the names that only one of them has, else the first unequal point."""
    names_here, names_there = ([point['name'] for point in spec_points] for spec_points in (here, there))
    only_here = [name for name in names_here if name not in names_there][:_MAX_NAMES]
    only_there = [name for name in names_there if name not in names_here][:_MAX_NAMES]
    if only_here or only_there:
        parts = [f'{len(here)} points here and {len(there)} there']
        parts += [f'only here {" ".join(only_here)}'] if only_here else []
        parts += [f'only there {" ".join(only_there)}'] if only_there else []
        return ', '.join(parts)
    pairs = zip(here, there, strict=True)
    # Points are compared as texts, because as values 1 == 1.0 == True.
    number = next(i for i, pair in enumerate(pairs) if json.dumps(pair[0]) != json.dumps(pair[1]))
    point_here, point_there = here[number], there[number]
    return f'point {number} is {_format(point_here["overrides"])} here and {_format(point_there["overrides"])} there'


def _format(value: Any) -> str:
    """Format a value of sweep.json for an error message."""
    match value:
        case []:
            return 'none'
        case dict():
            return ' '.join(f'{key}={inner}' for key, inner in value.items())
        case list():
            return ','.join('='.join(inner) if isinstance(inner, list) else inner for inner in value)
    return 'none' if value is None else str(value)
