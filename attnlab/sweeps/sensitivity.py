"""How much the final loss depends on the learning rate.

Wortsman et al. 2023, "Small-scale proxies for large-scale Transformer training instabilities", section 2.2: the mean,
over the learning rates of a range, of min(loss, loss at initialisation) less the least loss of the range.  Here the
range is the rates that were swept, the loss that of the last evaluation, and the loss at initialisation the training
loss of step 1.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from attnlab.report.values import describe_values
from attnlab.sweeps.seeds import SeedGroup, mean_and_standard_error, shorten_keys
from attnlab.sweeps.sweep_files import PointRow

LEARNING_RATE_KEY = 'optimizer.learning_rate'

MetricRecords = Mapping[int, Sequence[Mapping[str, Any]]]
"""The lines of metrics.jsonl, by the number of the point."""


def sensitivity_lines(groups: Sequence[SeedGroup], records: MetricRecords) -> list[dict[str, Any]]:
    """A line a variant (what else varies), as `attnlab.report.sweep_figures.plot_sensitivity` takes it.

    Empty where the learning rate does not vary, or where a variant has but one, as in most searches.  A rate of which
    no point has come to an end is left out, as is a variant with none; as long as one is out, there is no sensitivity.
    """
    groups = [
        group for group in groups if group.values.get(LEARNING_RATE_KEY) is not None
    ]  # a search that failed drew none
    variants: dict[str, list[SeedGroup]] = {}
    for group in groups:
        rest = shorten_keys({key: value for key, value in group.values.items() if key != LEARNING_RATE_KEY})
        variants.setdefault(describe_values(rest), []).append(group)
    if min(map(len, variants.values()), default=0) < 2:
        return []
    return [line for label, each in variants.items() if (line := _line(label, each, records))['rates']]


def _line(label: str, groups: Sequence[SeedGroup], records: MetricRecords) -> dict[str, Any]:
    groups = sorted(groups, key=lambda group: group.values[LEARNING_RATE_KEY])
    starts = [start for group in groups for row in group.rows if (start := _start(records[row.number])) is not None]
    start = float(np.mean(starts)) if starts else None
    found = [(group.values[LEARNING_RATE_KEY], *_losses(group.rows, records, start)) for group in groups]
    known = [(rate, *mean_and_standard_error(losses), capped) for rate, losses, capped, _ in found if losses]
    rates, means, errors, capped = zip(*known, strict=True) if known else ((), (), (), ())
    whole = all(complete for *_, complete in found)
    return {
        'label': label, 'rates': list(rates), 'losses': list(means), 'errors': list(errors), 'capped': list(capped),
        'sensitivity': float(np.mean(means) - np.min(means)) if whole else None,
    }  # fmt: skip


def _losses(rows: Iterable[PointRow], records: MetricRecords, start: float | None) -> tuple[list[float], bool, bool]:
    """The final losses of a group that are known, whether one of them is the start's, and whether all are known."""
    losses, capped, complete = [], False, True
    for row in rows:
        loss = _final(row, records[row.number])
        # A run that diverged counts as no better than at initialisation.
        if start is not None and (row.diverged_at is not None or (loss is not None and loss > start)):
            loss, capped = start, True
        if loss is None:
            complete = False
        else:
            losses.append(loss)
    return losses, capped, complete


def _start(records: Iterable[Mapping[str, Any]]) -> float | None:
    """The loss of the first step, which is computed before anything is learned."""
    return next((each['loss'] for each in records if each['split'] == 'train' and each['step'] == 1), None)


def _final(row: PointRow, records: Iterable[Mapping[str, Any]]) -> float | None:
    """The loss of the last evaluation of a run that came to its end."""
    losses = [each['loss'] for each in records if each['split'] == 'valid' and 'loss' in each]
    return losses[-1] if losses and row.status == 'done' else None
