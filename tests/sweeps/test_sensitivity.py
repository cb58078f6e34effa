"""The sensitivity to the learning rate, against numbers computed by hand."""

import numpy as np
import pytest

from attnlab.sweeps import seeds, sensitivity, sweep_files
from attnlab.train import metrics
from tests.sweeps import made
from tests.sweeps.made import DIVERGED, make_point, train_records, valid_record

RATE, ORDER = sensitivity.LEARNING_RATE_KEY, 'model.order'


def lines_of(folder, *points):
    sweep = sweep_files.read_sweep(made.write_sweep(folder, points))
    return sensitivity.sensitivity_lines(
        seeds.group_by_seed(sweep), {row.number: metrics.read_metrics(row.run) for row in sweep.rows}
    )


def finished(rate, final, start=4.0, best=0.5, **overrides):
    """Return a point whose best evaluation is not the last one; the last one counts."""
    records = [*train_records(start, 3.0), valid_record(5, loss=best), valid_record(9, loss=final)]
    return make_point({RATE: rate, **overrides}, value=best, metrics=records)


def test_sensitivity_is_the_mean_distance_from_the_best_rate(tmp_path):
    lines = lines_of(tmp_path, finished(0.1, 2.0), finished(0.001, 1.5), finished(0.01, 1.0))
    assert lines == [{
        'label': '', 'rates': [0.001, 0.01, 0.1], 'losses': [1.5, 1.0, 2.0], 'errors': [None] * 3,
        'capped': [False] * 3, 'sensitivity': pytest.approx((0.5 + 0.0 + 1.0) / 3),
    }]  # fmt: skip


def test_losses_are_capped_at_the_loss_of_initialisation(tmp_path):
    diverged = make_point(
        {RATE: 1.0}, 'failed', reason=DIVERGED, diverged_at=1
    )  # in the first step, so the run has no record
    (line,) = lines_of(tmp_path, finished(0.01, 1.0), finished(0.1, 70.0), diverged)
    assert line['losses'] == [1.0, 4.0, 4.0]
    assert line['capped'] == [False, True, True]
    assert line['sensitivity'] == pytest.approx((0.0 + 3.0 + 3.0) / 3)


def test_each_variant_has_a_line_with_the_mean_over_seeds(tmp_path):
    numbers = {('pre', 0.1): (1.0, 2.0, 3.0), ('pre', 0.2): (1.5, 1.5, 1.5),
               ('post', 0.1): (3.0, 3.5, 3.1), ('post', 0.2): (3.0, 90.0, 3.5)}  # fmt: skip
    points = [finished(rate, loss, seed=seed, **{ORDER: order})
              for (order, rate), losses in numbers.items() for seed, loss in enumerate(losses)]  # fmt: skip
    pre, post = lines_of(tmp_path, *points)
    assert (pre['label'], post['label']) == ('order=pre', 'order=post')
    assert pre['losses'] == [2.0, 1.5]
    assert pre['errors'] == pytest.approx([np.sqrt(1 / 3), 0.0])
    assert post['losses'] == pytest.approx([3.2, 3.5])  # 90 counts as 4
    assert post['capped'] == [False, True]
    assert (pre['sensitivity'], post['sensitivity']) == pytest.approx((0.25, 0.15))


@pytest.mark.parametrize('other', [
    make_point({RATE: 0.2}, 'waiting'),
    make_point({RATE: 0.2}, 'running', metrics=[*train_records(4.0), valid_record(5, loss=3.0)]),
    make_point({RATE: 0.2}, 'pruned', value=3.0, step=5, metrics=[*train_records(4.0), valid_record(5, loss=3.0)]),
    make_point({RATE: 0.2}, 'failed', reason='no space left on the device', metrics=train_records(4.0)),
    # A run of an earlier version diverged: its outcome has no diverged_at.
    make_point({RATE: 0.2}, 'failed', reason=DIVERGED, metrics=train_records(4.0)),
])  # fmt: skip
def test_sensitivity_is_none_while_a_rate_has_no_loss(tmp_path, other):
    (line,) = lines_of(tmp_path, finished(0.1, 1.0), other, finished(0.3, 2.0))
    assert line['rates'] == [0.1, 0.3]
    assert line['sensitivity'] is None


def test_sensitivity_is_none_if_a_run_diverged_and_the_initial_loss_is_missing(tmp_path):
    late = make_point(
        {RATE: 0.1}, value=1.0, metrics=[{'step': 50, 'split': 'train', 'loss': 2.0}, valid_record(50, loss=1.0)]
    )
    (line,) = lines_of(tmp_path, late, make_point({RATE: 0.2}, 'failed', reason=DIVERGED, diverged_at=7))
    assert line['sensitivity'] is None


def test_there_are_no_lines_if_no_variant_has_several_rates(tmp_path):
    assert lines_of(tmp_path / 'a', finished(0.1, 1.0, **{ORDER: 'pre'}), finished(0.1, 1.0, **{ORDER: 'post'})) == []
    assert lines_of(tmp_path / 'b', finished(0.1, 1.0, **{ORDER: 'pre'}), finished(0.2, 1.0, **{ORDER: 'post'})) == []


def test_variants_without_a_loss_and_failed_searches_are_left_out(tmp_path):
    waiting = [make_point({RATE: rate, ORDER: 'post'}, 'waiting') for rate in (0.1, 0.2)]
    failed = make_point({}, 'failed', reason='ZeroDivisionError: division by zero')
    (line,) = lines_of(
        tmp_path / 'a', finished(0.1, 1.0, **{ORDER: 'pre'}), finished(0.2, 2.0, **{ORDER: 'pre'}), *waiting, failed
    )
    assert line['label'] == 'order=pre' and line['rates'] == [0.1, 0.2]
    assert lines_of(tmp_path / 'b', *waiting) == []
