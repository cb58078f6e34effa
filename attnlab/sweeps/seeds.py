"""Points that differ in their seed alone are a group, and groups are what is compared: by the mean over their seeds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from attnlab import configs
from attnlab.sweeps.sweep_files import PointRow, SweepResults


class SeedGroup(NamedTuple):
    """values: of the keys that vary, the seed apart.  rows: its points, by number.  done: those of them with a score.

    mean: of their scores; error: its standard error, None of fewer than two.
    """

    values: dict[str, Any]
    rows: tuple[PointRow, ...]
    done: tuple[PointRow, ...]
    mean: float | None
    error: float | None


def varied_values(sweep: SweepResults) -> dict[int, dict[str, Any]]:
    """By the point's number, the values of every key that varies, in the sweep's order.

    What a point does not override is what its run's config says; None as long as there is no run.
    """
    keys = list(dict.fromkeys(key for row in sweep.rows for key in row.overrides))
    found = {row.number: {key: _value(row, key) for key in keys} for row in sweep.rows}
    several = [key for key in keys if len({repr(each[key]) for each in found.values()}) > 1]  # repr: 1 == 1.0 == True
    return {number: {key: each[key] for key in several} for number, each in found.items()}


def _value(row: PointRow, key: str) -> Any:
    if key in row.overrides:
        return row.overrides[key]
    saved = row.run / 'config.json'
    value: Any = configs.load_config(saved) if saved.exists() else ConfigDict()
    for part in key.split('.'):
        value = value.get(part) if isinstance(value, ConfigDict) else None
    return value


def find_duplicates(sweep: SweepResults) -> dict[int, int]:
    """Points with the config and seed of another one, which counts for both -> that one; by number.

    A search may draw a config again.  The one that counts is the first that was trained to its end.
    """
    varied = varied_values(sweep)
    alike: dict[str, list[PointRow]] = {}
    for row in sweep.rows:
        if row.overrides or row.status == 'done':  # not those for which the search failed
            alike.setdefault(repr(varied[row.number]), []).append(row)
    counts = lambda row: (row.status != 'done' or row.value is None, row.reason is not None, row.number)
    first = [(min(rows, key=counts), rows) for rows in alike.values()]
    return {row.number: one.number for one, rows in first for row in rows if row is not one}


def group_by_seed(sweep: SweepResults) -> list[SeedGroup]:
    """The groups of a sweep, by the number of their first point; a config that was drawn again counts once."""
    parted: dict[str, tuple[dict[str, Any], list[PointRow]]] = {}
    varied, again = varied_values(sweep), find_duplicates(sweep)
    for row in sweep.rows:
        if row.number in again:
            continue
        apart = {key: value for key, value in varied[row.number].items() if key != 'seed'}
        parted.setdefault(repr(apart), (apart, []))[1].append(row)
    return [_group(apart, rows) for apart, rows in parted.values()]


def _group(apart: dict[str, Any], rows: list[PointRow]) -> SeedGroup:
    done = tuple(row for row in rows if row.status == 'done' and row.value is not None)
    return SeedGroup(
        apart, tuple(rows), done, *mean_and_standard_error([row.value for row in done if row.value is not None])
    )


def mean_and_standard_error(numbers: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean and its standard error, of the deviation over n - 1; None where there are too few numbers."""
    if not numbers:
        return None, None
    error = float(np.std(numbers, ddof=1)) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
    return float(np.mean(numbers)), error


def best_group_index(sweep: SweepResults, found: Sequence[SeedGroup]) -> int | None:
    """The index of the best group, of equals the first; None as long as no point is done.

    It is sought among the groups of which every point is done, so that what fails with one seed does not win by the
    others; among all, as long as there is no such group.
    """
    sign = -1.0 if sweep.direction == 'max' else 1.0
    some = [index for index, group in enumerate(found) if group.done]
    whole = [index for index in some if len(found[index].done) == len(found[index].rows)]
    return min(whole or some, key=lambda index: sign * (found[index].mean or 0.0), default=None)


def shorten_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under the last part of their keys, where no two have that in common."""
    last = [key.split('.')[-1] for key in values]
    short = {key: name if last.count(name) == 1 else key for key, name in zip(values, last, strict=True)}
    return {short[key]: value for key, value in values.items()}
