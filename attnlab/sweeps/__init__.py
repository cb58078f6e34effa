"""Functions from which an experiment's `sweep_NAME` builds its points.

A sweep is any iterable of dicts. Each dict is one point: it maps dotted config keys to values.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attnlab.errors import UserError

Overrides = dict[str, Any]
"""Dotted config key -> value, or the text of a value as on the command line."""

MAX_POINTS = 10_000
"""Most points of a sweep or a search: every point gets a trial in the database before the first one runs."""


def grid(values: Mapping[str, Iterable[Any]]) -> Iterator[Overrides]:
    """Yield a point for every combination of the values; the last key varies fastest."""
    for combination in itertools.product(*map(tuple, values.values())):
        yield dict(zip(values, combination, strict=True))


def zipped(values: Mapping[str, Sequence[Any]]) -> Iterator[Overrides]:
    """Yield a point with the first value of every key, then one with the second values, and so on.

    Raises ValueError if the keys have different numbers of values.
    """
    counts = {key: len(key_values) for key, key_values in values.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f'zipped expects the same number of values for every key, got {counts}')
    for combination in zip(*values.values(), strict=True):
        yield dict(zip(values, combination, strict=True))


def chained(*sweeps: Iterable[Overrides]) -> Iterator[Overrides]:
    """Return the points of the first sweep, then those of the second, and so on."""
    return itertools.chain(*sweeps)


def product(*sweeps: Iterable[Overrides]) -> Iterator[Overrides]:
    """Yield every combination of one point from each sweep; the last sweep varies fastest.

    Raises UserError if two sweeps set the same key.
    """
    for combination in itertools.product(*map(list, sweeps)):
        point: Overrides = {}
        for overrides in combination:
            for key, value in overrides.items():
                if key in point:
                    raise UserError(f'config.{key} is set by two sweeps of a product: to {point[key]!r} and {value!r}')
                point[key] = value
        yield point
