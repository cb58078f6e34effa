"""What a search draws its points from: kept with each point, compared when the search goes on."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.trial import FixedTrial, Trial

from attnlab.errors import UserError
from attnlab.sweeps import Overrides, sweep_files


def record_draws(trial: Trial) -> dict[str, Any]:
    """The draws of a trial as JSON: for `check_search_space`."""
    draws = {name: {'value': trial.params[name], 'from': _json(each)} for name, each in trial.distributions.items()}
    return {'trial': trial.number, 'draws': draws}


def check_search_space(
    folder: Path, search: Callable[[Any], Overrides], typed: Callable[[Overrides], Overrides]
) -> None:
    """Raises UserError naming the first parameter that the search now draws from other values than its points' draws.

    The search is called once more for each point, with what it drew for it.  Points of earlier versions have no record
    of their draws and are not compared.
    typed: gives the values that a point's config has.
    """
    for point in _recorded(folder):
        trial = _Recorded(point)
        try:
            overrides = search(trial)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # whatever the experiment's author raises
            failed = f'it fails for the draws of point {point["number"]}'
            raise UserError(f'{failed}: {type(error).__name__}: {error}') from error
        for name in point['draws'].keys() - trial.params.keys():
            raise UserError(f'{name} is not drawn here and drawn from {_told(point["draws"][name]["from"])} there')
        here = json.loads(json.dumps(typed(overrides)))  # tuples as arrays
        for key in here | point['overrides']:
            values = [json.dumps(each.get(key, 'unset')) for each in (here, point['overrides'])]
            if values[0] != values[1]:
                sets = f'point {point["number"]} sets {key}'
                raise UserError(f'{sets} to {values[0]} here and {values[1]} there, with the same draws')


def _recorded(folder: Path) -> Iterator[dict[str, Any]]:
    """Points whose draws are recorded, by number; not those for which the search failed."""
    found = [sweep_files.read_point(path) or {} for path in sorted((folder / 'points').glob('*/point.json'))]
    return (point for point in found if point.get('draws') and point['overrides'])


class _Recorded(FixedTrial):
    """A trial that draws what a point drew, and raises UserError for a draw that the point did not make."""

    def __init__(self, point: dict[str, Any]) -> None:
        draws = point['draws']
        super().__init__({name: draw['value'] for name, draw in draws.items()}, number=point['trial'])
        self._draws = draws

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        here = _json(distribution)
        if name not in self._draws:
            raise UserError(f'{name} is drawn from {_told(here)} here and not drawn there')
        if json.dumps(there := self._draws[name]['from']) != json.dumps(here):  # by text: 1 == 1.0 == True
            raise UserError(f'{name} is drawn from {_told(here)} here and from {_told(there)} there')
        return super()._suggest(name, distribution)


def describe_distribution(distribution: BaseDistribution) -> str:
    """`0.001 to 0.1 (log)`, `1 to 9 in steps of 2`, `one of a, b`."""
    return _told(_json(distribution))


def _json(distribution: BaseDistribution) -> dict[str, Any]:
    return json.loads(distribution_to_json(distribution))


def _told(kept: dict[str, Any]) -> str:
    has = kept['attributes']
    if 'choices' in has:
        return f'one of {", ".join(map(str, has["choices"]))}'
    steps = f' in steps of {has["step"]}' if has.get('step') not in (None, 1) else ''
    return f'{has["low"]} to {has["high"]}{steps}{" (log)" if has.get("log") else ""}'
