"""Figures and page of a sweep, from plain data."""

import math

import numpy as np
import pytest

from attnlab.report import sweep_figures as figures
from attnlab.report import sweep_page
from attnlab.report.values import describe_values
from attnlab.tasks import heatmap
from tests.report.pages import decode_pictures, parse_page

KEYS = {'optimizer.learning_rate': 'learning_rate', 'model.order': 'order'}
RATES = (1e-4, 1e-3, 1e-2)


def make_group(values, mean=None, error=None, number=0, failed=False):
    """Return a group with one point."""
    label = describe_values({KEYS.get(key, key): value for key, value in values.items()})
    return {'label': label, 'values': values, 'mean': mean, 'error': error, 'numbers': [number], 'failed': failed,
            'done': int(mean is not None), 'of': 1}  # fmt: skip


def make_groups(means, orders=('pre', 'post'), errors=0.1):
    """Return a group for every rate and order, the rate varying slowest; a mean of None is a group that failed."""
    pairs = [dict(zip(KEYS, (rate, order), strict=True)) for rate in RATES for order in orders]
    return [make_group(pair, mean, None if mean is None else errors, number, mean is None)
            for number, (pair, mean) in enumerate(zip(pairs, means, strict=True))]  # fmt: skip


def labelled_lines(axes):
    """Return label -> points of the lines that have a label."""
    return {line.get_label(): np.stack(line.get_data(), 1).tolist() for line in axes.get_lines()
            if not line.get_label().startswith('_')}  # fmt: skip


def tick_labels(axes):
    return [label.get_text() for label in axes.get_xticklabels()]


# Figures


def test_curves_have_the_records_of_every_point():
    groups = [make_group({'a': 1}, 2.0, number=3), make_group({'a': 2}, 1.0, number=4) | {'numbers': [4, 5]}]
    records = {3: [{'step': 1, 'split': 'train', 'loss': 4.0}, {'step': 2, 'split': 'valid', 'loss': 9.0, 'bleu': 7.0}],
               4: [{'step': 1, 'split': 'train', 'loss': 5.0}, {'step': 3, 'split': 'train', 'loss': 2.0}]}  # fmt: skip
    loss, bleu = figures.plot_sweep_curves(groups, records, 'bleu', 1).axes
    assert labelled_lines(loss) == {'a=1': [[1, 4]], 'a=2': [[1, 5], [3, 2]]}
    assert labelled_lines(bleu) == {'a=1': [[2, 7]]}
    assert [text.get_text() for text in bleu.get_legend().get_texts()] == ['a=1', 'a=2']


def test_best_of_many_curves_is_strong_and_diverged_losses_are_cut_off():
    count = 60
    groups = [make_group({'a': number}, float(number), number=number) for number in range(count)]
    records = {
        number: [
            {'step': 1, 'split': 'train', 'loss': 4.0}, {'step': 2, 'split': 'train', 'loss': 1 + number / count}
        ]
        for number in range(count)
    }  # fmt: skip
    records[59][1]['loss'] = 1e6
    loss, _ = figures.plot_sweep_curves(groups, records, 'loss', 7).axes
    strong = [line for line in loss.get_lines() if line.get_label() == 'best']
    assert [line.get_ydata().tolist() for line in strong] == [[4.0, 1 + 7 / count]]
    assert strong[0].get_zorder() > max(line.get_zorder() for line in loss.get_lines() if line not in strong)
    low, high = loss.get_ylim()
    assert low < 1 and 4 < high < 5


def test_metric_by_field_has_lines_errors_crosses_and_the_best_group():
    groups = make_groups([3.0, 3.5, 2.0, 2.5, 2.2, None])
    rate, order = figures.plot_metric_by_field(groups, KEYS, 'loss', 'min', 2).axes
    assert rate.get_xscale() == 'log' and order.get_xscale() == 'linear'
    rate_lines = labelled_lines(rate)
    assert rate_lines.pop('failed or outlier') == [[1e-2, 0.97]]
    assert rate_lines == {'pre': [[1e-4, 3], [1e-3, 2], [1e-2, 2.2]], 'post': [[1e-4, 3.5], [1e-3, 2.5]]}
    assert [text.get_text() for text in rate.get_legend().get_texts()] == ['pre', 'post', 'failed or outlier']
    assert rate.get_legend().get_title().get_text() == 'order'
    (bar, *_), _ = (bars.get_segments() for bars in rate.collections)
    np.testing.assert_allclose(bar, [[1e-4, 2.9], [1e-4, 3.1]])
    assert tick_labels(order) == ['pre', 'post']
    heights = {label: [y for _, y in points] for label, points in labelled_lines(order).items()}
    assert heights == {'0.0001': [3, 3.5], '0.001': [2, 2.5], '0.01': [2.2], 'failed or outlier': [0.97]}
    assert all(line.get_linestyle() == 'None' for line in order.get_lines())  # categories are not joined by lines
    circled = [line for axes in (rate, order) for line in axes.get_lines() if line.get_markersize() == 9]
    assert [line.get_ydata()[0] for line in circled] == [2, 2]
    assert circled[0].get_xdata()[0] == 1e-3


@pytest.mark.parametrize('direction', ['min', 'max'])
def test_error_bars_are_inside_the_axes(direction):
    groups = make_groups([3.0, 3.5, 2.0, 2.5, 2.2, 2.4], errors=0.4)
    picture = figures.plot_metric_by_field(groups, KEYS, 'loss', direction, 2)
    lines = [{'label': 'a', 'rates': RATES, 'losses': [1.0, 2.0, 3.0], 'errors': [1.5] * 3, 'capped': [False] * 3,
              'sensitivity': None}]  # fmt: skip
    for axes, ends in ((picture.axes[0], (1.6, 3.9)), (picture.axes[1], (1.6, 3.9)),
                       (figures.plot_sensitivity(lines).axes[0], (-0.5, 4.5))):  # fmt: skip
        low, high = axes.get_ylim()
        assert low < ends[0] and ends[1] < high


def test_values_are_drawn_unchanged():
    order = {'model.order': 'order'}
    labels = ['_a', '$a$', '$a', '_child', '\\$', r'$\bad$']
    groups = [make_group({'optimizer.learning_rate': rate, 'model.order': label}, 1.0 + number, 0.1, number)
              for number, label in enumerate(labels) for rate in RATES]  # fmt: skip
    picture = figures.plot_metric_by_field(groups, KEYS, 'a_$b$', 'min', None)
    heatmap.render_png(picture)  # mathematics that does not parse would raise
    rate, category = picture.axes
    assert [text.get_text() for text in rate.get_legend().get_texts()] == labels
    assert tick_labels(category) == labels
    figure = figures.plot_parallel_coordinates(groups, KEYS | order, '$m$', 'min', None)
    heatmap.render_png(figure)
    assert {*labels, '$m$'} <= {text.get_text() for text in figure.axes[0].texts}
    few = [{**groups[3 * number], 'label': label} for number, label in enumerate(labels)]
    records = {group['numbers'][0]: [{'step': 1, 'split': 'train', 'loss': 4.0}] for group in few}
    _, score = figures.plot_sweep_curves(few, records, 'bleu', None).axes
    assert [text.get_text() for text in score.get_legend().get_texts()] == labels


def test_one_seed_has_no_error_bar():
    axes = figures.plot_metric_by_field(make_groups([3.0] * 6, errors=None), KEYS, 'loss', 'min', None).axes
    assert not axes[0].collections


def test_best_at_each_value_is_drawn_among_many_groups():
    orders = 'abcdefg'
    groups = make_groups([*range(1, 8), *range(11, 18), *range(21, 28)], orders)
    for direction, best in (('min', [1, 11, 21]), ('max', [7, 17, 27])):
        rate, _ = figures.plot_metric_by_field(groups, KEYS, 'loss', direction, 0).axes
        points = [[rate_value, mean] for rate_value, mean in zip(RATES, best, strict=True)]
        assert labelled_lines(rate) == {'best at each value': points}


@pytest.mark.parametrize(('direction', 'means', 'shown', 'edge'), [
    ('min', [2.0, 2.1, 2.2, 2.3, 2.4, 70.0], (2.0, 2.4), 0.97),
    ('max', [90.0, 91.0, 92.0, 93.0, 94.0, 1.0], (90.0, 94.0), 0.03),
])  # fmt: skip
def test_outliers_do_not_extend_the_axis(direction, means, shown, edge):
    rate, _ = figures.plot_metric_by_field(make_groups(means, errors=0.01), KEYS, 'loss', direction, 0).axes
    low, high = rate.get_ylim()
    spread = shown[1] - shown[0]
    assert shown[0] - 0.2 * spread < low < shown[0] and shown[1] < high < shown[1] + 0.2 * spread
    assert labelled_lines(rate)['failed or outlier'] == [[1e-2, edge]]


def test_outliers_end_at_the_end_of_the_parallel_axis():
    groups = make_groups([2.0, 2.1, 2.2, 2.3, 2.4, 70.0])
    (axes,) = figures.plot_parallel_coordinates(groups, KEYS, 'loss', 'min', 0).axes
    ends = [line.get_ydata()[2] for line in axes.get_lines() if len(line.get_ydata()) == 3]
    np.testing.assert_allclose(sorted(ends), [0, 0.25, 0.5, 0.75, 1, 1], atol=1e-12)


def test_group_far_better_than_the_others_is_no_outlier():
    rate, _ = figures.plot_metric_by_field(make_groups([2.0, 2.1, 2.2, 2.3, 2.4, 0.1]), KEYS, 'loss', 'min', 5).axes
    assert rate.get_ylim()[0] < 0.1
    assert 'failed or outlier' not in labelled_lines(rate)


def test_parallel_coordinates_pass_through_every_value():
    groups = make_groups([3.0, 2.5, 2.0, 1.0, 1.5, None])
    groups.append(make_group(dict(zip(KEYS, (1.0, 'other'), strict=True))))  # waiting
    (axes,) = figures.plot_parallel_coordinates(groups, KEYS, 'loss', 'min', 3).axes
    drawn = [line.get_ydata().tolist() for line in axes.get_lines() if len(line.get_ydata()) == 3]
    heights = [[0, 0, 1], [0, 1, 0.75], [0.5, 0, 0.5], [0.5, 1, 0], [1, 0, 0.25]]
    np.testing.assert_allclose(drawn, heights, atol=1e-12)
    np.testing.assert_allclose(labelled_lines(axes)['best'], [[0, 0.5], [1, 1], [2, 0]], atol=1e-12)
    assert labelled_lines(axes)['failed'] == [[0, 1], [1, 1]]
    texts = [text.get_text() for text in axes.texts]
    assert {'learning_rate', 'order', 'loss', '0.0001', '0.01', 'pre', 'post'} <= set(texts)
    assert 'other' not in texts


def test_group_that_failed_without_values_is_not_drawn():
    groups = [*make_groups([3.0, 2.5, 2.0, 1.0, 1.5, 1.2]), make_group(dict.fromkeys(KEYS), failed=True)]
    rate, order = figures.plot_metric_by_field(groups, KEYS, 'loss', 'min', 3).axes
    assert rate.get_xscale() == 'log' and tick_labels(order) == ['pre', 'post']
    (axes,) = figures.plot_parallel_coordinates(groups, KEYS, 'loss', 'min', 3).axes
    assert 'failed' not in labelled_lines(axes)


@pytest.mark.parametrize('direction', ['min', 'max'])
def test_better_groups_have_darker_lines(direction):
    groups = make_groups([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (axes,) = figures.plot_parallel_coordinates(groups, KEYS, 'loss', direction, None).axes
    darkness = {round(line.get_ydata()[2], 3): -sum(line.get_color()[:3])
                for line in axes.get_lines() if len(line.get_ydata()) == 3}  # fmt: skip
    ordered = [darkness[height] for height in sorted(darkness, reverse=direction == 'min')]
    assert ordered == sorted(ordered) and len(set(ordered)) == 6


def test_legend_gives_the_sensitivity_of_each_line():
    variants = [
        {'label': 'order=pre', 'rates': [1e-3, 1e-2], 'losses': [2.0, 1.5], 'errors': [0.25, 0.0],
         'capped': [False, False], 'sensitivity': 0.25},
        {'label': 'order=post', 'rates': [1e-3, 1e-2], 'losses': [2.0, 4.0], 'errors': [None, None],
         'capped': [False, True], 'sensitivity': None},
    ]  # fmt: skip
    (axes,) = figures.plot_sensitivity(variants).axes
    assert axes.get_xscale() == 'log'
    assert tick_labels(axes) == ['0.001', '0.01']
    drawn = labelled_lines(axes)
    assert drawn['order=pre: 0.250'] == [[1e-3, 2], [1e-2, 1.5]]
    assert drawn['order=post: not known yet'] == [[1e-3, 2], [1e-2, 4]]
    hollow = [line.get_xydata().tolist() for line in axes.get_lines() if line.get_markerfacecolor() == 'white']
    assert [[1e-2, 4]] in hollow
    (bars,) = axes.collections
    np.testing.assert_allclose(bars.get_segments()[0], [[1e-3, 1.75], [1e-3, 2.25]])
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ['order=pre: 0.250', 'order=post: not known yet', 'no better than untrained']


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('count', [1, 2, 60])
def test_figures_of_any_number_of_points_are_drawn(count):
    """Also without a warning of matplotlib, such as for a layout that does not fit: tests turn warnings into errors."""
    random = np.random.default_rng(0)
    keys = {'model.long_key_of_a_config': 'long_key_of_a_config', 'b': 'b', 'c': 'c', 'd': 'd'}
    groups = [
        make_group(
            {
                'model.long_key_of_a_config': float(10 ** random.uniform(-5, -1)), 'b': f'{"$a/b_c" * (number % 3)} x',
                'c': (number % 2, 1), 'd': number % 5,
            },
            float(number), 0.1, number,
        )
        for number in range(count)
    ]  # fmt: skip
    records = {
        number: [
            {'step': step, 'split': split, 'loss': math.exp(-step)} for step in range(9) for split in ('train', 'valid')
        ]
        for number in range(count)
    }
    for figure in (
        figures.plot_sweep_curves(groups, records, 'loss', 0),
        figures.plot_metric_by_field(groups, keys, 'loss', 'min', 0),
        figures.plot_parallel_coordinates(groups, keys, 'loss', 'min', 0),
    ):
        assert len(heatmap.render_png(figure)) < 200_000


# The page


def make_sweep(**changes):
    """Return the data of a sweep of four points, two of them done, with some entries changed."""
    groups = [
        make_group({'model.order': '<b>'}, 1.5, 0.25) | {'numbers': [0, 1], 'done': 2, 'of': 2},
        make_group({'model.order': 'post'}, failed=True) | {'numbers': [2, 3], 'done': 0, 'of': 2},
    ]
    point = {'value': 1.25, 'step': 3000, 'seconds': 75.0, 'reason': None}
    records = [{'step': 1, 'split': 'train', 'loss': 4.0}, {'step': 3000, 'split': 'valid', 'loss': 1.25}]
    points = [
        point | {'number': 0, 'status': 'done', 'values': {'model.order': '<b>', 'seed': 0}},
        point | {'number': 1, 'status': 'done', 'values': {'model.order': '<b>', 'seed': 1}, 'value': 1.75},
        point | {'number': 2, 'status': 'failed', 'values': {'model.order': 'post', 'seed': 0}, 'value': None,
                 'step': None, 'seconds': 5.0, 'reason': 'the <disk> is full'},
        point | {'number': 3, 'status': 'waiting', 'values': {'model.order': 'post', 'seed': 1}, 'value': None,
                 'step': None, 'seconds': None},
    ]  # fmt: skip
    return {'summary': 'a.py · rates', 'metric': 'loss', 'direction': 'min', 'keys': {'model.order': 'order'},
            'points': points, 'groups': groups, 'best': 0, 'winner': {'number': 0, 'config': {'a': {'b': 0.5}}},
            'sensitivity': [], 'records': {0: records}} | changes  # fmt: skip


def test_page_has_best_seeds_points_and_failures(tmp_path):
    path = sweep_page.write_sweep_page(tmp_path / 'report.html', 'my sweep', make_sweep())
    markup = path.read_text('utf-8')
    texts = parse_page(markup).texts
    assert texts[:2] == ['my sweep', 'my sweep']
    for text in ('a.py · rates', '2 done, 1 waiting, 1 failed.', '1.5000', 'best loss, 2 seeds', '2 of 4', '2:35',
                 'order=<b>: loss 1.5000 ± 0.2500 (standard error of 2 seeds).', 'a.b = 0.5',
                 'The config is that of point 0, the first of its seeds.', '2: the <disk> is full'):  # fmt: skip
        assert text in texts, text
    at = texts.index('Seeds')
    assert texts[at + 1 : at + 5] == ['order', 'mean loss', 'standard error', 'seeds']
    assert texts[at + 5 : at + 9] == ['<b>', '1.5000', '0.2500', '2 of 2']
    assert texts[at + 9 : at + 13] == ['post', '–', '–', '0 of 2']
    at = texts.index('Points')
    assert texts[at + 1 : at + 8] == ['point', 'status', 'order', 'seed', 'best loss', 'step', 'time']
    assert texts[at + 8 : at + 15] == ['0', '✓ done', '<b>', '0', '1.2500', '3,000', '1:15']
    assert texts[at + 22 : at + 27] == ['2', '✗ failed', 'post', '0', '–']
    assert len(decode_pictures(markup)) == 2  # metric by field, and the curves


def test_seeds_table_is_sorted_best_first(tmp_path):
    means = {'a': 2, 'b': 1, 'c': 3}
    groups = [make_group({'model.order': name}, mean, 0.1) | {'of': 2} for name, mean in means.items()]
    for direction, order in (('min', ['b', 'a', 'c']), ('max', ['c', 'a', 'b'])):
        more = make_sweep(groups=groups, direction=direction)
        texts = parse_page(sweep_page.write_sweep_page(tmp_path / 'a.html', 'a', more).read_text('utf-8')).texts
        at = texts.index('Seeds')
        assert texts[at + 5 : at + 17 : 4] == order


def test_sweep_without_results_has_a_page(tmp_path):
    points = [point | {'status': 'waiting', 'value': None} for point in make_sweep()['points']]
    groups = [group | {'mean': None, 'done': 0, 'failed': False} for group in make_sweep()['groups']]
    more = make_sweep(points=points, groups=groups, metric=None, direction=None, best=None, winner=None, records={})
    markup = sweep_page.write_sweep_page(tmp_path / 'a.html', 'a', more).read_text('utf-8')
    texts = parse_page(markup).texts
    assert '4 waiting.' in texts and 'best score' in texts
    assert not {'Best', 'Failed', 'Metric by field', 'Training'} & set(texts)
    assert not decode_pictures(markup)


def test_page_has_sensitivity_and_parallel_coordinates(tmp_path):
    line = {'label': '', 'rates': [0.1, 0.2], 'losses': [1.0, 2.0], 'errors': [None, None], 'capped': [False, False],
            'sensitivity': 0.5}  # fmt: skip
    groups = make_groups([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    points = [{**point, 'values': point['values'] | group['values']}
              for point, group in zip(make_sweep()['points'], groups, strict=False)]  # fmt: skip
    more = make_sweep(sensitivity=[line], keys=KEYS, groups=groups, points=points)
    markup = sweep_page.write_sweep_page(tmp_path / 'a.html', 'a', more).read_text('utf-8')
    assert {'Sensitivity to the learning rate', 'Parallel coordinates'} <= set(parse_page(markup).texts)
    assert len(decode_pictures(markup)) == 4


@pytest.mark.parametrize(('seconds', 'text'), [
    (0, '0 s'), (59.4, '59 s'), (59.6, '60 s'), (60, '1:00'), (185, '3:05'), (3599.7, '1:00:00'), (7207, '2:00:07'),
])  # fmt: skip
def test_durations_are_formatted(seconds, text):
    assert sweep_page.format_duration(seconds) == text


@pytest.mark.parametrize(('value', 'text'), [
    (None, '–'), (0.0, '0.0000'), (1.75808, '1.7581'), (-0.5, '-0.5000'), (97.2, '97.2000'), (1234.56, '1235'),
    (1e-5, '1e-05'), (5e7, '5e+07'),
])  # fmt: skip
def test_numbers_are_formatted(value, text):
    assert sweep_page.format_number(value) == text
