"""Groups of points that differ only in their seed; groups are compared by the mean of their scores."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from attnlab import configs
from attnlab.sweeps.sweep_files import PointRow, SweepResults


class SeedGroup(NamedTuple):
    """Points that differ only in their seed.

    values: dotted key -> value of every key that varies in the sweep, except the seed.
    rows: the points, by number.  done: the points that are done and have a score.
    mean: mean of their scores, None if `done` is empty.  error: standard error of the mean, None for fewer than two.
    """

    values: dict[str, Any]
    rows: tuple[PointRow, ...]
    done: tuple[PointRow, ...]
    mean: float | None
    error: float | None


def varied_values(sweep: SweepResults) -> dict[int, dict[str, Any]]:
    """Return the values of every key that varies, in the sweep's order, by point number.

    The value of a key that a point does not override is read from its run's config; it is None if there is no run.
    """
    keys = list(dict.fromkeys(key for row in sweep.rows for key in row.overrides))
    values = {row.number: {key: _value_of(row, key) for key in keys} for row in sweep.rows}

    def varies(key: str) -> bool:
        return len({repr(point_values[key]) for point_values in values.values()}) > 1  # repr: 1 == 1.0 == True

    varying = [key for key in keys if varies(key)]
    return {number: {key: point_values[key] for key in varying} for number, point_values in values.items()}


def _value_of(row: PointRow, key: str) -> Any:
    if key in row.overrides:
        return row.overrides[key]
    path = row.run / 'config.json'
    value: Any = configs.load_config(path) if path.exists() else ConfigDict()
    for part in key.split('.'):
        value = value.get(part) if isinstance(value, ConfigDict) else None
    return value


def find_duplicates(sweep: SweepResults) -> dict[int, int]:
    """Return number -> number of the point that is counted instead, for points with the config and seed of another.

    A search may draw a config again.  The first point that was trained to its end is the one that is counted.
    """
    varied = varied_values(sweep)
    same_config: dict[str, list[PointRow]] = {}
    for row in sweep.rows:
        if row.overrides or row.status == 'done':  # a point without overrides is one for which the search failed
            same_config.setdefault(repr(varied[row.number]), []).append(row)
    duplicates = {}
    for rows in same_config.values():
        counted = min(rows, key=_counting_order)
        duplicates |= {row.number: counted.number for row in rows if row is not counted}
    return duplicates


def _counting_order(row: PointRow) -> tuple[bool, bool, int]:
    """Sort key: points that are done first, among these the trained ones (without a reason) first, then by number."""
    return row.status != 'done' or row.value is None, row.reason is not None, row.number


def group_by_seed(sweep: SweepResults) -> list[SeedGroup]:
    """Return the groups of a sweep, ordered by the number of their first point, without duplicate points."""
    rows_by_group: dict[str, tuple[dict[str, Any], list[PointRow]]] = {}
    varied, duplicates = varied_values(sweep), find_duplicates(sweep)
    for row in sweep.rows:
        if row.number in duplicates:
            continue
        values = {key: value for key, value in varied[row.number].items() if key != 'seed'}
        rows_by_group.setdefault(repr(values), (values, []))[1].append(row)
    return [_make_group(values, rows) for values, rows in rows_by_group.values()]


def _make_group(values: dict[str, Any], rows: list[PointRow]) -> SeedGroup:
    done = tuple(row for row in rows if row.status == 'done' and row.value is not None)
    scores = [row.value for row in done if row.value is not None]
    return SeedGroup(values, tuple(rows), done, *mean_and_standard_error(scores))


def mean_and_standard_error(numbers: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and its standard error, from the deviation over n - 1; None if there are too few numbers."""
    if not numbers:
        return None, None
    error = float(np.std(numbers, ddof=1)) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
    return float(np.mean(numbers)), error


def best_group_index(sweep: SweepResults, groups: Sequence[SeedGroup]) -> int | None:
    """Return the index of the group with the best mean, of equal groups the first; None if no point is done.

    Only groups whose points are all done are compared, if there is one: a group must not win because its bad seeds
    failed.
    """
    sign = -1.0 if sweep.direction == 'max' else 1.0
    scored = [index for index, group in enumerate(groups) if group.done]
    complete = [index for index in scored if len(groups[index].done) == len(groups[index].rows)]
    return min(complete or scored, key=lambda index: sign * (groups[index].mean or 0.0), default=None)


def shorten_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values under the last part of their keys; a key whose last part is not unique stays whole."""
    last_parts = [key.split('.')[-1] for key in values]
    return {
        last if last_parts.count(last) == 1 else key: value
        for (key, value), last in zip(values.items(), last_parts, strict=True)
    }
