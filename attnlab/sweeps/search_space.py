"""The parameters that a search draws: recorded with each point, and compared when the search continues."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.trial import FixedTrial, Trial

from attnlab.errors import UserError
from attnlab.sweeps import Overrides, sweep_files


def record_draws(trial: Trial) -> dict[str, Any]:
    """Return the values that a trial drew and their distributions as JSON, for `check_search_space`."""
    draws = {
        name: {'value': trial.params[name], 'from': _distribution_to_json(distribution)}
        for name, distribution in trial.distributions.items()
    }
    return {'trial': trial.number, 'draws': draws}


def check_search_space(
    folder: Path, search: Callable[[Any], Overrides], to_typed: Callable[[Overrides], Overrides]
) -> None:
    """Raise UserError if the search would not make the same points from the same draws; name the first parameter.

    The search is called once for each point, with the values that it drew for this point.  Points of earlier versions
    have no record of their draws and are not compared.

    to_typed: converts the overrides of a point to the types of their config fields.
    """
    for point in _points_with_draws(folder):
        trial = _ReplayedTrial(point)
        try:
            overrides = search(trial)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # the user's search function may raise anything
            message = f'it fails for the draws of point {point["number"]}'
            raise UserError(f'{message}: {type(error).__name__}: {error}') from error
        for name in point['draws'].keys() - trial.params.keys():
            raise UserError(f'{name} is not drawn here and drawn from {_describe(point["draws"][name]["from"])} there')
        new_overrides = json.loads(json.dumps(to_typed(overrides)))  # tuples become lists, as in the saved overrides
        saved_overrides = point['overrides']
        for key in new_overrides | saved_overrides:
            here, there = (json.dumps(values.get(key, 'unset')) for values in (new_overrides, saved_overrides))
            if here != there:
                message = f'point {point["number"]} sets {key}'
                raise UserError(f'{message} to {here} here and {there} there, with the same draws')


def _points_with_draws(folder: Path) -> Iterator[dict[str, Any]]:
    """Return the points whose draws are recorded, by number, except those for which the search failed."""
    points = [sweep_files.read_point(path) or {} for path in sorted((folder / 'points').glob('*/point.json'))]
    return (point for point in points if point.get('draws') and point['overrides'])


class _ReplayedTrial(FixedTrial):
    """A trial that returns the recorded draws of a point, and raises UserError for a draw that is not recorded."""

    def __init__(self, point: dict[str, Any]) -> None:
        draws = point['draws']
        super().__init__({name: draw['value'] for name, draw in draws.items()}, number=point['trial'])
        self._draws = draws

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        here = _distribution_to_json(distribution)
        if name not in self._draws:
            raise UserError(f'{name} is drawn from {_describe(here)} here and not drawn there')
        there = self._draws[name]['from']
        if json.dumps(there) != json.dumps(here):  # texts are compared, because as values 1 == 1.0 == True
            raise UserError(f'{name} is drawn from {_describe(here)} here and from {_describe(there)} there')
        return super()._suggest(name, distribution)


def describe_distribution(distribution: BaseDistribution) -> str:
    """Describe a distribution, as in `0.001 to 0.1 (log)`, `1 to 9 in steps of 2`, `one of a, b`."""
    return _describe(_distribution_to_json(distribution))


def _distribution_to_json(distribution: BaseDistribution) -> dict[str, Any]:
    return json.loads(distribution_to_json(distribution))


def _describe(distribution: dict[str, Any]) -> str:
    """Describe a distribution in Optuna's JSON form."""
    attributes = distribution['attributes']
    if 'choices' in attributes:
        return f'one of {", ".join(map(str, attributes["choices"]))}'
    steps = f' in steps of {attributes["step"]}' if attributes.get('step') not in (None, 1) else ''
    return f'{attributes["low"]} to {attributes["high"]}{steps}{" (log)" if attributes.get("log") else ""}'
