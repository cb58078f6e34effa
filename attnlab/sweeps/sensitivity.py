"""Sensitivity of the final loss to the learning rate.

Definition by Wortsman et al. 2023, "Small-scale proxies for large-scale Transformer training instabilities",
section 2.2: the mean, over the learning rates of a range, of min(loss, loss at initialisation) minus the lowest loss of
the range.  Here the range is the learning rates of the sweep, the loss is that of the last evaluation, and the loss at
initialisation is the training loss of step 1.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from attnlab.report.values import describe_values
from attnlab.sweeps.seeds import SeedGroup, mean_and_standard_error, shorten_keys
from attnlab.sweeps.sweep_files import PointRow

LEARNING_RATE_KEY = 'optimizer.learning_rate'

MetricRecords = Mapping[int, Sequence[Mapping[str, Any]]]
"""Point number -> records of its metrics.jsonl."""


def sensitivity_lines(groups: Sequence[SeedGroup], records: MetricRecords) -> list[dict[str, Any]]:
    """Return a line for each variant, in the form of `attnlab.report.sweep_figures.plot_sensitivity`.

    A variant is a combination of the values that vary besides the learning rate.  The list is empty if the learning
    rate does not vary, or if a variant has only one, as in most searches.  A rate without a finished point is left out,
    and so is a variant without any rate; the sensitivity of a variant is None while one of its rates lacks a loss.
    """
    # A point for which the search failed has no learning rate.
    groups = [group for group in groups if group.values.get(LEARNING_RATE_KEY) is not None]
    variants: dict[str, list[SeedGroup]] = {}
    for group in groups:
        other_values = shorten_keys({key: value for key, value in group.values.items() if key != LEARNING_RATE_KEY})
        variants.setdefault(describe_values(other_values), []).append(group)
    if min(map(len, variants.values()), default=0) < 2:
        return []
    lines = [_variant_line(label, variant_groups, records) for label, variant_groups in variants.items()]
    return [line for line in lines if line['rates']]


def _variant_line(label: str, groups: Sequence[SeedGroup], records: MetricRecords) -> dict[str, Any]:
    groups = sorted(groups, key=lambda group: group.values[LEARNING_RATE_KEY])
    rows = [row for group in groups for row in group.rows]
    initial_losses = [loss for row in rows if (loss := _initial_loss(records[row.number])) is not None]
    initial_loss = float(np.mean(initial_losses)) if initial_losses else None
    rates, means, errors, capped, is_complete = [], [], [], [], True
    for group in groups:
        losses, has_capped, has_all = _final_losses(group.rows, records, initial_loss)
        is_complete &= has_all
        if losses:
            mean, error = mean_and_standard_error(losses)
            rates.append(group.values[LEARNING_RATE_KEY])
            means.append(mean)
            errors.append(error)
            capped.append(has_capped)
    return {
        'label': label, 'rates': rates, 'losses': means, 'errors': errors, 'capped': capped,
        'sensitivity': float(np.mean(means) - np.min(means)) if is_complete else None,
    }  # fmt: skip


def _final_losses(
    rows: Iterable[PointRow], records: MetricRecords, initial_loss: float | None
) -> tuple[list[float], bool, bool]:
    """Return the known final losses, capped at `initial_loss`; whether one was capped; and whether all are known."""
    losses, has_capped, has_all = [], False, True
    for row in rows:
        loss = _final_loss(row, records[row.number])
        # A diverged run counts as no better than at initialisation.
        if initial_loss is not None and (row.diverged_at is not None or (loss is not None and loss > initial_loss)):
            loss, has_capped = initial_loss, True
        if loss is None:
            has_all = False
        else:
            losses.append(loss)
    return losses, has_capped, has_all


def _initial_loss(records: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the training loss of step 1, which is computed before the first update."""
    return next((record['loss'] for record in records if record['split'] == 'train' and record['step'] == 1), None)


def _final_loss(row: PointRow, records: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the loss of the last evaluation, or None if the run is not done."""
    losses = [record['loss'] for record in records if record['split'] == 'valid' and 'loss' in record]
    return losses[-1] if losses and row.status == 'done' else None
