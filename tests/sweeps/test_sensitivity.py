"""The learning-rate sensitivity, against numbers made by hand."""

import numpy as np
import pytest

from attnlab.sweeps import seeds, sensitivity, sweep_files
from attnlab.train import metrics
from tests.sweeps import made
from tests.sweeps.made import DIVERGED, make_point, train_records, valid_record

RATE, ORDER = sensitivity.LEARNING_RATE_KEY, 'model.order'


def lines(folder, *points):
    sweep = sweep_files.read_sweep(made.write_sweep(folder, points))
    return sensitivity.sensitivity_lines(
        seeds.group_by_seed(sweep), {row.number: metrics.read_metrics(row.run) for row in sweep.rows}
    )


def run(rate, final, start=4.0, before=0.5, **more):
    """Its best evaluation is not the last one, which is what counts."""
    records = [*train_records(start, 3.0), valid_record(5, loss=before), valid_record(9, loss=final)]
    return make_point({RATE: rate, **more}, value=before, metrics=records)


def test_sensitivity_is_the_mean_distance_from_the_best_rate(tmp_path):
    found = lines(tmp_path, run(0.1, 2.0), run(0.001, 1.5), run(0.01, 1.0))
    assert found == [{
        'label': '', 'rates': [0.001, 0.01, 0.1], 'losses': [1.5, 1.0, 2.0], 'errors': [None] * 3,
        'capped': [False] * 3, 'sensitivity': pytest.approx((0.5 + 0.0 + 1.0) / 3),
    }]  # fmt: skip


def test_losses_are_capped_at_the_loss_of_initialisation(tmp_path):
    diverged = make_point({RATE: 1.0}, 'failed', reason=DIVERGED, diverged_at=1)  # in the first step: it has no record
    (found,) = lines(tmp_path, run(0.01, 1.0), run(0.1, 70.0), diverged)
    assert found['losses'] == [1.0, 4.0, 4.0]
    assert found['capped'] == [False, True, True]
    assert found['sensitivity'] == pytest.approx((0.0 + 3.0 + 3.0) / 3)


def test_each_variant_has_a_line_with_the_mean_over_seeds(tmp_path):
    numbers = {('pre', 0.1): (1.0, 2.0, 3.0), ('pre', 0.2): (1.5, 1.5, 1.5),
               ('post', 0.1): (3.0, 3.5, 3.1), ('post', 0.2): (3.0, 90.0, 3.5)}  # fmt: skip
    points = [run(rate, loss, seed=seed, **{ORDER: order})
              for (order, rate), losses in numbers.items() for seed, loss in enumerate(losses)]  # fmt: skip
    pre, post = lines(tmp_path, *points)
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
    make_point({RATE: 0.2}, 'failed', reason=DIVERGED, metrics=train_records(4.0)),  # of an earlier version: its kind is not known
])  # fmt: skip
def test_sensitivity_is_none_while_a_rate_has_no_loss(tmp_path, other):
    (found,) = lines(tmp_path, run(0.1, 1.0), other, run(0.3, 2.0))
    assert found['rates'] == [0.1, 0.3]
    assert found['sensitivity'] is None


def test_sensitivity_is_none_if_a_run_diverged_and_the_initial_loss_is_missing(tmp_path):
    late = make_point({RATE: 0.1}, value=1.0, metrics=[{'step': 50, 'split': 'train', 'loss': 2.0}, valid_record(50, loss=1.0)])
    (found,) = lines(tmp_path, late, make_point({RATE: 0.2}, 'failed', reason=DIVERGED, diverged_at=7))
    assert found['sensitivity'] is None


def test_there_are_no_lines_if_no_variant_has_several_rates(tmp_path):
    assert lines(tmp_path / 'a', run(0.1, 1.0, **{ORDER: 'pre'}), run(0.1, 1.0, **{ORDER: 'post'})) == []
    assert lines(tmp_path / 'b', run(0.1, 1.0, **{ORDER: 'pre'}), run(0.2, 1.0, **{ORDER: 'post'})) == []


def test_variants_without_a_loss_and_failed_searches_are_left_out(tmp_path):
    waiting = [make_point({RATE: rate, ORDER: 'post'}, 'waiting') for rate in (0.1, 0.2)]
    failed = make_point({}, 'failed', reason='ZeroDivisionError: division by zero')
    (found,) = lines(tmp_path / 'a', run(0.1, 1.0, **{ORDER: 'pre'}), run(0.2, 2.0, **{ORDER: 'pre'}), *waiting, failed)
    assert found['label'] == 'order=pre' and found['rates'] == [0.1, 0.2]
    assert lines(tmp_path / 'b', *waiting) == []
