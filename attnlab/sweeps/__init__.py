"""The points of a sweep: what an experiment's `sweep_NAME` gives, any iterable of dicts dotted key -> value."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attnlab.errors import UserError

Overrides = dict[str, Any]
"""Dotted key of a config -> value, or its text as on the command line."""

MAX_POINTS = 10_000
"""Points that a sweep or a search may have: all have a trial in the database before the first of them runs."""


def grid(values: Mapping[str, Iterable[Any]]) -> Iterator[Overrides]:
    """Every combination; the last key varies fastest."""
    for chosen in itertools.product(*map(tuple, values.values())):
        yield dict(zip(values, chosen, strict=True))


def zipped(values: Mapping[str, Sequence[Any]]) -> Iterator[Overrides]:
    """The first value of each key, then the second of each, and so on; ValueError where they are not as many."""
    counts = {key: len(each) for key, each in values.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f'zipped expects as many values of each key, got {counts}')
    for chosen in zip(*values.values(), strict=True):
        yield dict(zip(values, chosen, strict=True))


def chained(*sweeps: Iterable[Overrides]) -> Iterator[Overrides]:
    """The points of the first, then those of the second, and so on."""
    return itertools.chain(*sweeps)


def product(*sweeps: Iterable[Overrides]) -> Iterator[Overrides]:
    """Every combination of a point of each; the last varies fastest.  UserError for a key that two of them set."""
    for chosen in itertools.product(*map(list, sweeps)):
        point: Overrides = {}
        for overrides in chosen:
            for key, value in overrides.items():
                if key in point:
                    raise UserError(f'config.{key} is set by two sweeps of a product: to {point[key]!r} and {value!r}')
                point[key] = value
        yield point
