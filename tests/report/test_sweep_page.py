"""Pictures and page of a sweep, from plain data."""

import math

import numpy as np
import pytest

from attnlab.report import sweep_figures as figures
from attnlab.report import sweep_page
from attnlab.report.values import describe_values
from attnlab.tasks import heatmap
from tests.report.pages import outline, pictures

KEYS = {'optimizer.learning_rate': 'learning_rate', 'model.order': 'order'}
RATES = (1e-4, 1e-3, 1e-2)


def group(values, mean=None, error=None, number=0, failed=False):
    label = describe_values({KEYS.get(key, key): value for key, value in values.items()})
    return {'label': label, 'values': values, 'mean': mean, 'error': error, 'numbers': [number], 'failed': failed,
            'done': int(mean is not None), 'of': 1}  # fmt: skip


def swept(means, orders=('pre', 'post'), errors=0.1):
    """Groups of every rate and order, rates slowest; None: failed."""
    pairs = [dict(zip(KEYS, (rate, order), strict=True)) for rate in RATES for order in orders]
    return [group(pair, mean, None if mean is None else errors, number, mean is None)
            for number, (pair, mean) in enumerate(zip(pairs, means, strict=True))]  # fmt: skip


def lines(axes):
    """Label -> points, of what has a label."""
    return {line.get_label(): np.stack(line.get_data(), 1).tolist() for line in axes.get_lines()
            if not line.get_label().startswith('_')}  # fmt: skip


def ticks(axes):
    return [label.get_text() for label in axes.get_xticklabels()]


# Pictures


def test_curves_hold_the_records_of_every_point():
    groups = [group({'a': 1}, 2.0, number=3), group({'a': 2}, 1.0, number=4) | {'numbers': [4, 5]}]
    records = {3: [{'step': 1, 'split': 'train', 'loss': 4.0}, {'step': 2, 'split': 'valid', 'loss': 9.0, 'bleu': 7.0}],
               4: [{'step': 1, 'split': 'train', 'loss': 5.0}, {'step': 3, 'split': 'train', 'loss': 2.0}]}  # fmt: skip
    loss, bleu = figures.plot_sweep_curves(groups, records, 'bleu', 1).axes
    assert lines(loss) == {'a=1': [[1, 4]], 'a=2': [[1, 5], [3, 2]]}
    assert lines(bleu) == {'a=1': [[2, 7]]}
    assert [text.get_text() for text in bleu.get_legend().get_texts()] == ['a=1', 'a=2']


def test_of_many_curves_the_best_stands_out_and_what_diverges_is_off_the_picture():
    count = 60
    groups = [group({'a': at}, float(at), number=at) for at in range(count)]
    records = {at: [{'step': 1, 'split': 'train', 'loss': 4.0}, {'step': 2, 'split': 'train', 'loss': 1 + at / count}]
               for at in range(count)}  # fmt: skip
    records[59][1]['loss'] = 1e6
    loss, _ = figures.plot_sweep_curves(groups, records, 'loss', 7).axes
    strong = [line for line in loss.get_lines() if line.get_label() == 'best']
    assert [line.get_ydata().tolist() for line in strong] == [[4.0, 1 + 7 / count]]
    assert strong[0].get_zorder() > max(line.get_zorder() for line in loss.get_lines() if line not in strong)
    low, high = loss.get_ylim()
    assert low < 1 and 4 < high < 5


def test_the_metric_stands_against_each_key_with_its_error():
    groups = swept([3.0, 3.5, 2.0, 2.5, 2.2, None])
    rate, order = figures.plot_metric_by_field(groups, KEYS, 'loss', 'min', 2).axes
    assert rate.get_xscale() == 'log' and order.get_xscale() == 'linear'
    found = lines(rate)
    assert found.pop('failed or outlier') == [[1e-2, 0.97]]
    assert found == {'pre': [[1e-4, 3], [1e-3, 2], [1e-2, 2.2]], 'post': [[1e-4, 3.5], [1e-3, 2.5]]}
    assert [text.get_text() for text in rate.get_legend().get_texts()] == ['pre', 'post', 'failed or outlier']
    assert rate.get_legend().get_title().get_text() == 'order'
    (bar, *_), _ = (bars.get_segments() for bars in rate.collections)
    np.testing.assert_allclose(bar, [[1e-4, 2.9], [1e-4, 3.1]])
    assert ticks(order) == ['pre', 'post']
    heights = {label: [y for _, y in points] for label, points in lines(order).items()}
    assert heights == {'0.0001': [3, 3.5], '0.001': [2, 2.5], '0.01': [2.2], 'failed or outlier': [0.97]}
    assert all(line.get_linestyle() == 'None' for line in order.get_lines())  # categories are not joined
    circled = [line for axes in (rate, order) for line in axes.get_lines() if line.get_markersize() == 9]
    assert [line.get_ydata()[0] for line in circled] == [2, 2]
    assert circled[0].get_xdata()[0] == 1e-3


@pytest.mark.parametrize('direction', ['min', 'max'])
def test_error_bars_are_drawn_to_their_ends(direction):
    groups = swept([3.0, 3.5, 2.0, 2.5, 2.2, 2.4], errors=0.4)
    picture = figures.plot_metric_by_field(groups, KEYS, 'loss', direction, 2)
    lines = [{'label': 'a', 'rates': RATES, 'losses': [1.0, 2.0, 3.0], 'errors': [1.5] * 3, 'capped': [False] * 3,
              'sensitivity': None}]  # fmt: skip
    for axes, ends in ((picture.axes[0], (1.6, 3.9)), (picture.axes[1], (1.6, 3.9)),
                       (figures.plot_sensitivity(lines).axes[0], (-0.5, 4.5))):  # fmt: skip
        low, high = axes.get_ylim()
        assert low < ends[0] and ends[1] < high


def test_any_value_is_named_and_drawn_as_it_is():
    order = {'model.order': 'order'}
    labels = ['_a', '$a$', '$a', '_child', '\\$', r'$\bad$']
    groups = [group({'optimizer.learning_rate': rate, 'model.order': label}, 1.0 + at, 0.1, at)
              for at, label in enumerate(labels) for rate in RATES]  # fmt: skip
    picture = figures.plot_metric_by_field(groups, KEYS, 'a_$b$', 'min', None)
    heatmap.render_png(picture)  # mathematics that does not parse would raise
    rate, category = picture.axes
    assert [text.get_text() for text in rate.get_legend().get_texts()] == labels
    assert ticks(category) == labels
    found = figures.plot_parallel_coordinates(groups, KEYS | order, '$m$', 'min', None)
    heatmap.render_png(found)
    assert {*labels, '$m$'} <= {text.get_text() for text in found.axes[0].texts}
    records = {at: [{'step': 1, 'split': 'train', 'loss': 4.0}] for at in range(len(groups))}
    few = [{**groups[3 * at], 'label': label} for at, label in enumerate(labels)]
    (loss, score) = figures.plot_sweep_curves(few, {each['numbers'][0]: records[0] for each in few}, 'bleu', None).axes
    assert [text.get_text() for text in score.get_legend().get_texts()] == labels


def test_one_seed_has_no_error():
    axes = figures.plot_metric_by_field(swept([3.0] * 6, errors=None), KEYS, 'loss', 'min', None).axes
    assert not axes[0].collections


def test_among_many_groups_the_best_at_each_value_is_strong():
    orders = 'abcdefg'
    groups = swept([*range(1, 8), *range(11, 18), *range(21, 28)], orders)
    for direction, best in (('min', [1, 11, 21]), ('max', [7, 17, 27])):
        rate, _ = figures.plot_metric_by_field(groups, KEYS, 'loss', direction, 0).axes
        assert lines(rate) == {'best at each value': [[rate, value] for rate, value in zip(RATES, best, strict=True)]}


@pytest.mark.parametrize(('direction', 'means', 'shown', 'edge'), [
    ('min', [2.0, 2.1, 2.2, 2.3, 2.4, 70.0], (2.0, 2.4), 0.97),
    ('max', [90.0, 91.0, 92.0, 93.0, 94.0, 1.0], (90.0, 94.0), 0.03),
])  # fmt: skip
def test_what_is_far_worse_than_the_others_does_not_press_them_flat(direction, means, shown, edge):
    rate, _ = figures.plot_metric_by_field(swept(means, errors=0.01), KEYS, 'loss', direction, 0).axes
    low, high = rate.get_ylim()
    spread = shown[1] - shown[0]
    assert shown[0] - 0.2 * spread < low < shown[0] and shown[1] < high < shown[1] + 0.2 * spread
    assert lines(rate)['failed or outlier'] == [[1e-2, edge]]


def test_what_is_far_worse_ends_at_the_end_of_the_parallel_axis():
    (axes,) = figures.plot_parallel_coordinates(swept([2.0, 2.1, 2.2, 2.3, 2.4, 70.0]), KEYS, 'loss', 'min', 0).axes
    ends = [line.get_ydata()[2] for line in axes.get_lines() if len(line.get_ydata()) == 3]
    np.testing.assert_allclose(sorted(ends), [0, 0.25, 0.5, 0.75, 1, 1], atol=1e-12)


def test_what_is_far_better_than_the_others_is_shown():
    rate, _ = figures.plot_metric_by_field(swept([2.0, 2.1, 2.2, 2.3, 2.4, 0.1]), KEYS, 'loss', 'min', 5).axes
    assert rate.get_ylim()[0] < 0.1
    assert 'failed or outlier' not in lines(rate)


def test_parallel_coordinates_go_through_every_value():
    groups = swept([3.0, 2.5, 2.0, 1.0, 1.5, None])
    groups.append(group(dict(zip(KEYS, (1.0, 'other'), strict=True))))  # waiting
    (axes,) = figures.plot_parallel_coordinates(groups, KEYS, 'loss', 'min', 3).axes
    drawn = [line.get_ydata().tolist() for line in axes.get_lines() if len(line.get_ydata()) == 3]
    heights = [[0, 0, 1], [0, 1, 0.75], [0.5, 0, 0.5], [0.5, 1, 0], [1, 0, 0.25]]
    np.testing.assert_allclose(drawn, heights, atol=1e-12)
    np.testing.assert_allclose(lines(axes)['best'], [[0, 0.5], [1, 1], [2, 0]], atol=1e-12)
    assert lines(axes)['failed'] == [[0, 1], [1, 1]]
    texts = [text.get_text() for text in axes.texts]
    assert {'learning_rate', 'order', 'loss', '0.0001', '0.01', 'pre', 'post'} <= set(texts)
    assert 'other' not in texts


def test_what_failed_before_its_values_were_known_is_on_no_axis():
    groups = [*swept([3.0, 2.5, 2.0, 1.0, 1.5, 1.2]), group(dict.fromkeys(KEYS), failed=True)]
    rate, order = figures.plot_metric_by_field(groups, KEYS, 'loss', 'min', 3).axes
    assert rate.get_xscale() == 'log' and ticks(order) == ['pre', 'post']
    (axes,) = figures.plot_parallel_coordinates(groups, KEYS, 'loss', 'min', 3).axes
    assert 'failed' not in lines(axes)


@pytest.mark.parametrize('direction', ['min', 'max'])
def test_the_better_a_line_the_darker(direction):
    groups = swept([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (axes,) = figures.plot_parallel_coordinates(groups, KEYS, 'loss', direction, None).axes
    darkness = {round(line.get_ydata()[2], 3): -sum(line.get_color()[:3])
                for line in axes.get_lines() if len(line.get_ydata()) == 3}  # fmt: skip
    ordered = [darkness[height] for height in sorted(darkness, reverse=direction == 'min')]
    assert ordered == sorted(ordered) and len(set(ordered)) == 6


def test_a_sensitivity_stands_beside_its_line():
    given = [
        {'label': 'order=pre', 'rates': [1e-3, 1e-2], 'losses': [2.0, 1.5], 'errors': [0.25, 0.0],
         'capped': [False, False], 'sensitivity': 0.25},
        {'label': 'order=post', 'rates': [1e-3, 1e-2], 'losses': [2.0, 4.0], 'errors': [None, None],
         'capped': [False, True], 'sensitivity': None},
    ]  # fmt: skip
    (axes,) = figures.plot_sensitivity(given).axes
    assert axes.get_xscale() == 'log'
    assert ticks(axes) == ['0.001', '0.01']
    found = lines(axes)
    assert found['order=pre: 0.250'] == [[1e-3, 2], [1e-2, 1.5]]
    assert found['order=post: not known yet'] == [[1e-3, 2], [1e-2, 4]]
    hollow = [line.get_xydata().tolist() for line in axes.get_lines() if line.get_markerfacecolor() == 'white']
    assert [[1e-2, 4]] in hollow
    (bars,) = axes.collections
    np.testing.assert_allclose(bars.get_segments()[0], [[1e-3, 1.75], [1e-3, 2.25]])
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ['order=pre: 0.250', 'order=post: not known yet', 'no better than untrained']


@pytest.mark.parametrize('count', [1, 2, 60])
def test_pictures_of_any_number_of_points_are_drawn(count):
    """Warnings of matplotlib, such as of a layout that does not fit, are errors here."""
    random = np.random.default_rng(0)
    keys = {'model.long_key_of_a_config': 'long_key_of_a_config', 'b': 'b', 'c': 'c', 'd': 'd'}
    groups = [group({'model.long_key_of_a_config': float(10 ** random.uniform(-5, -1)), 'b': f'{"$a/b_c" * (at % 3)} x',
                     'c': (at % 2, 1), 'd': at % 5}, float(at), 0.1, at) for at in range(count)]  # fmt: skip
    records = {at: [{'step': step, 'split': split, 'loss': math.exp(-step)} for step in range(9)
                    for split in ('train', 'valid')] for at in range(count)}  # fmt: skip
    for figure in (figures.plot_sweep_curves(groups, records, 'loss', 0), figures.plot_metric_by_field(groups, keys, 'loss', 'min', 0),
                   figures.plot_parallel_coordinates(groups, keys, 'loss', 'min', 0)):  # fmt: skip
        assert len(heatmap.render_png(figure)) < 200_000


# The page


def found(**changes):
    groups = [
        group({'model.order': '<b>'}, 1.5, 0.25) | {'numbers': [0, 1], 'done': 2, 'of': 2},
        group({'model.order': 'post'}, failed=True) | {'numbers': [2, 3], 'done': 0, 'of': 2},
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


def test_a_page_tells_of_best_seeds_points_and_failures(tmp_path):
    path = sweep_page.write_sweep_page(tmp_path / 'report.html', 'my sweep', found())
    markup = path.read_text('utf-8')
    texts = outline(markup).texts
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
    assert len(pictures(markup)) == 2  # against the one key, and the curves


def test_the_best_comes_first_in_its_direction(tmp_path):
    groups = [group({'model.order': name}, mean, 0.1) | {'of': 2} for name, mean in zip('abc', (2, 1, 3), strict=True)]
    for direction, order in (('min', ['b', 'a', 'c']), ('max', ['c', 'a', 'b'])):
        more = found(groups=groups, direction=direction)
        texts = outline(sweep_page.write_sweep_page(tmp_path / 'a.html', 'a', more).read_text('utf-8')).texts
        at = texts.index('Seeds')
        assert texts[at + 5 : at + 17 : 4] == order


def test_a_sweep_that_nothing_has_come_of_has_a_page(tmp_path):
    points = [point | {'status': 'waiting', 'value': None} for point in found()['points']]
    groups = [each | {'mean': None, 'done': 0, 'failed': False} for each in found()['groups']]
    more = found(points=points, groups=groups, metric=None, direction=None, best=None, winner=None, records={})
    markup = sweep_page.write_sweep_page(tmp_path / 'a.html', 'a', more).read_text('utf-8')
    texts = outline(markup).texts
    assert '4 waiting.' in texts and 'best score' in texts
    assert not {'Best', 'Failed', 'Metric by field', 'Training'} & set(texts)
    assert not pictures(markup)


def test_sensitivity_and_parallel_coordinates_where_there_are_any(tmp_path):
    line = {'label': '', 'rates': [0.1, 0.2], 'losses': [1.0, 2.0], 'errors': [None, None], 'capped': [False, False],
            'sensitivity': 0.5}  # fmt: skip
    groups = swept([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    points = [{**point, 'values': point['values'] | each['values']}
              for point, each in zip(found()['points'], groups, strict=False)]  # fmt: skip
    more = found(sensitivity=[line], keys=KEYS, groups=groups, points=points)
    markup = sweep_page.write_sweep_page(tmp_path / 'a.html', 'a', more).read_text('utf-8')
    assert {'Sensitivity to the learning rate', 'Parallel coordinates'} <= set(outline(markup).texts)
    assert len(pictures(markup)) == 4


@pytest.mark.parametrize(('seconds', 'text'), [
    (0, '0 s'), (59.4, '59 s'), (59.6, '60 s'), (60, '1:00'), (185, '3:05'), (3599.7, '1:00:00'), (7207, '2:00:07'),
])  # fmt: skip
def test_durations(seconds, text):
    assert sweep_page.format_duration(seconds) == text


@pytest.mark.parametrize(('value', 'text'), [
    (None, '–'), (0.0, '0.0000'), (1.75808, '1.7581'), (-0.5, '-0.5000'), (97.2, '97.2000'), (1234.56, '1235'),
    (1e-5, '1e-05'), (5e7, '5e+07'),
])  # fmt: skip
def test_numbers(value, text):
    assert sweep_page.format_number(value) == text
