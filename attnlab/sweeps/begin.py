"""A sweep's directory, begun once or found to be this sweep's."""

import json
import uuid
from pathlib import Path
from typing import Any

from attnlab import config as configs
from attnlab import files
from attnlab.errors import UserError
from attnlab.sweeps import outcome
from attnlab.sweeps.points import Plan

_SHOWN = 3


def begin(folder: Path, plan: Plan) -> dict[str, Any]:
    """What sweep.json says, written if there is none; of several that begin at once, one writes it.

    Raises UserError where the directory holds something else.
    """
    files.check_folder(folder, 'workdir')
    if (folder / 'config.json').exists() and not (folder / 'sweep.json').exists():
        raise UserError(f'--workdir={folder} holds a run; expected a new directory, or that of a sweep')
    spec = {'id': uuid.uuid4().hex, **_spec(plan)}
    if outcome.create(folder / 'sweep.json', spec):
        return spec
    found = outcome.read_spec(folder) or {}
    _check_same(folder, spec, found)
    return found


def check(folder: Path, plan: Plan) -> None:
    """Raises UserError where the directory holds another sweep."""
    if found := outcome.read_spec(folder):
        _check_same(folder, _spec(plan), found)


def _spec(plan: Plan) -> dict[str, Any]:
    spec = plan._asdict() | {'base': configs.tree(plan.base)}
    spec['points'] = [point._asdict() for point in plan.points]
    return json.loads(json.dumps(spec))  # as it will be read: tuples as arrays


def _check_same(folder: Path, spec: dict[str, Any], found: dict[str, Any]) -> None:
    holds = f'--workdir={folder} holds another sweep'
    for key in ('config', 'sweep', 'overrides', 'search'):
        if spec[key] != found[key]:
            raise UserError(f'{holds}: {key} is {_told(spec[key])} here and {_told(found[key])} there')
    base, there = (configs.from_tree(each['base']) for each in (spec, found))
    configs.check_same(base, there, f'--workdir={folder} holds a sweep')
    if spec['points'] != found['points']:
        ours, theirs = ([point['name'] for point in each['points']] for each in (spec, found))
        only = [[name for name in one if name not in other][:_SHOWN] for one, other in ((ours, theirs), (theirs, ours))]
        raise UserError(f'{holds}: {len(ours)} points here and {len(theirs)} there'
                        f'{_listed(", only here", only[0])}{_listed(", only there", only[1])}')  # fmt: skip


def _told(value: Any) -> str:
    match value:
        case []:
            return 'none'
        case dict():
            return ' '.join(f'{key}={each}' for key, each in value.items())
        case list():
            return ','.join('='.join(each) if isinstance(each, list) else each for each in value)
    return 'none' if value is None else str(value)


def _listed(what: str, names: list[str]) -> str:
    return f'{what} {" ".join(names)}' if names else ''
