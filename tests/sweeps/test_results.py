"""Results of a sweep, from directories with given outcomes: statuses, groups, the best group, tables, page."""

import csv
import re

import pytest

from attnlab.errors import UserError
from attnlab.sweeps import results, seeds, sweep_files
from tests.sweeps import made
from tests.sweeps.made import DIVERGED, make_point, train_records, valid_record

RATE, ORDER = 'optimizer.learning_rate', 'model.order'


def make_sweep(folder, *points, **options):
    return sweep_files.read_sweep(made.write_sweep(folder, points, **options))


def every_status_sweep(folder, **options):
    return make_sweep(
        folder,
        make_point({RATE: 0.001, ORDER: 'a/b c'}, value=2.5, step=30, seconds=61.4, metrics=train_records(4.0)),
        make_point({RATE: 1e-05, ORDER: 'pre'}, 'failed', reason=DIVERGED, metrics=train_records(4.0)),
        make_point({RATE: 0.003, ORDER: 'pre'}, 'pruned', value=1.0, step=10, metrics=train_records(4.0)),
        make_point({RATE: 0.003, ORDER: 'post'}, 'running', metrics=train_records(4.0)),
        make_point({RATE: 0.001, ORDER: 'post'}, 'waiting'),
        **options,
    )


def sweep_of_seeds(folder, scores, **options):
    """Return a sweep with a point for each score, in groups 'a', 'b', ... of three seeds; None is a failed point."""
    points = [
        make_point({ORDER: 'abcdef'[i // 3], 'seed': i % 3}, 'failed' if score is None else 'done', value=score)
        for i, score in enumerate(scores)
    ]
    return make_sweep(folder, *points, **options)


def best_point(sweep):
    groups = seeds.group_by_seed(sweep)
    best = seeds.best_group_index(sweep, groups)
    return None if best is None else groups[best].rows[0].number


def test_the_csv_table_has_one_line_for_each_point(tmp_path):
    path = results.write_csv_table(every_status_sweep(tmp_path))
    assert path == tmp_path / 'table.csv'
    with path.open(newline='') as file:
        lines = list(csv.reader(file))
    assert lines == [
        ['number', 'status', RATE, ORDER, 'best_loss', 'best_step', 'seconds', 'reason'],
        ['0', 'done', '0.001', 'a/b c', '2.5', '30', '61.4', ''],
        ['1', 'failed', '1e-05', 'pre', '', '', '10.0', DIVERGED],
        ['2', 'pruned', '0.003', 'pre', '1.0', '10', '10.0', ''],
        ['3', 'running', '0.003', 'post', '', '', '', ''],
        ['4', 'waiting', '0.001', 'post', '', '', '', ''],
    ]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()].count('table.csv') == 1
    assert not list(tmp_path.glob('*.partial'))


def test_printing_shows_every_point_its_reason_and_the_best(tmp_path, capsys):
    results.print_sweep(every_status_sweep(tmp_path), width=160)
    lines = [re.sub(r' +', ' ', line).strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == 'point status learning_rate order best loss step time reason'
    assert lines[1] == '0 done 0.001 a/b c 2.5000 30 1:01'
    assert lines[2].startswith('1 failed 1e-5 pre – 10 s step 7: the loss is nan;')
    assert '2 pruned 0.003 pre 1.0000 10 10 s' in lines
    assert '3 running 0.003 post –' in lines
    assert '4 waiting 0.001 post –' in lines
    assert lines[-1] == 'best loss: 2.5000, learning_rate=0.001, order=a/b c'
    assert not any('standard error' in line for line in lines)


def test_seeds_are_one_row_with_mean_standard_error_and_count(tmp_path, capsys):
    results.print_sweep(
        sweep_of_seeds(tmp_path, [1.0, 2.0, 6.0, 2.0, 2.5, 3.0], metric='bleu', direction='max'), width=160
    )
    lines = [re.sub(r' +', ' ', line).strip() for line in capsys.readouterr().out.splitlines()]
    # 1, 2, 6: mean 3, deviation sqrt((4 + 1 + 9) / 2) = sqrt(7), divided by sqrt(3): 1.5275.
    assert 'a 3.0000 1.5275 3 of 3' in lines
    assert 'b 2.5000 0.2887 3 of 3' in lines
    assert lines[-1] == 'best bleu: 3.0000 ± 1.5275 (standard error of 3 seeds), order=a'


def test_user_text_is_not_read_as_markup(tmp_path, capsys):
    sweep = make_sweep(
        tmp_path, make_point({ORDER: '[bold]x'}, 'failed', reason='[red]no'), make_point({ORDER: '[/]'}, value=1.0)
    )
    results.print_sweep(sweep, width=120)
    output = capsys.readouterr().out
    assert '[bold]x' in output and '[red]no' in output and '[/]' in output


NAMES = ['_a', '$a$', '$x', 'two\nlines', '\x1b[31mred', '[bold]', ':smile:', '<b>', '&amp;', '\\', '猫', 'x' * 500]


def test_names_of_any_characters_are_printed_or_escaped(tmp_path, capsys):
    """The terminal and the page escape line breaks and control characters; the CSV table has them unchanged."""
    sweep = make_sweep(tmp_path, *(make_point({ORDER: name, 'seed': seed}, value=1.0 + i + seed, metrics=[])
                             for i, name in enumerate(NAMES) for seed in (0, 1)))  # fmt: skip
    results.print_sweep(sweep, width=100)
    output = capsys.readouterr().out
    escaped = [name.replace('\n', '\\n').replace('\x1b', '\\x1b') for name in NAMES]
    assert '\x1b' not in output and '…' not in output and output.count('x') >= 1000
    assert all(re.search(rf'(?m)(^|\s){re.escape(name)}(\s|$)', output) for name in escaped[:-1])
    assert re.search(r'best loss: .*, order=_a\n', output)
    with results.write_csv_table(sweep).open(newline='') as file:
        assert [line[2] for line in csv.reader(file)][1::2] == NAMES
    _, rows = results.page.points_table(results.comparison_data(sweep))
    assert [row[2] for row in rows][1::2] == escaped


def test_output_without_a_terminal_is_not_cut_off(tmp_path, capsys):
    long_keys = [f'model.a_key_with_a_long_name_{i}' for i in range(5)]
    points = [make_point(dict.fromkeys(long_keys, value), value=1.0) for value in (0, 1)]
    results.print_sweep(make_sweep(tmp_path, *points))
    output = capsys.readouterr().out
    assert '…' not in output
    assert len([line for line in output.splitlines() if line.strip()]) == 4


@pytest.mark.parametrize(('scores', 'direction', 'winner'), [
    ([1.0, 1.2, 1.1, 0.9, 1.9, 1.9], 'min', 0),  # the lowest score is in the other group
    ([1.0, 1.2, 1.1, 0.9, 1.9, 1.9], 'max', 3),
    ([2.0, 1.0, 3.0, 3.0, 2.0, 1.0], 'min', 0),  # of equal groups the first
    ([2.0, 1.0, 3.0, 3.0, 2.0, 1.0], 'max', 0),
    ([0.1, 0.1, None, 1.0, 1.0, 1.0], 'min', 3),  # a group with a failed seed does not win with its other seeds
    ([None, 2.0, 2.0, 1.0, None, 1.0], 'min', 3),  # unless every group has a failed seed
    ([None] * 6, 'min', None),
])  # fmt: skip
def test_the_best_group_has_the_best_mean(tmp_path, scores, direction, winner):
    assert best_point(sweep_of_seeds(tmp_path, scores, direction=direction)) == winner


def test_pruned_points_and_points_without_score_are_not_the_best(tmp_path):
    sweep = make_sweep(
        tmp_path,
        make_point({RATE: 0.1}, 'pruned', value=0.1, step=3), make_point({RATE: 0.2}, value=None),
        make_point({RATE: 0.3}, value=1.0), make_point({RATE: 0.4}, 'running'),
    )  # fmt: skip
    assert best_point(sweep) == 2


def test_a_sweep_that_has_not_started_has_a_table_and_no_best(tmp_path, capsys):
    sweep = make_sweep(tmp_path, make_point({RATE: 0.1}, 'waiting'), make_point({RATE: 0.2}, 'waiting'))
    assert best_point(sweep) is None
    results.print_sweep(sweep)
    assert 'best score' in capsys.readouterr().out
    assert results.write_csv_table(sweep).read_text().splitlines()[1:] == ['0,waiting,0.1,,,,', '1,waiting,0.2,,,,']


def test_only_varying_keys_are_shown_and_types_count_as_different(tmp_path):
    sweep = make_sweep(
        tmp_path, make_point({ORDER: 'pre', 'a': 1, 'b': True}), make_point({ORDER: 'pre', 'a': 1.0, 'b': True})
    )
    assert [list(values) for values in seeds.varied_values(sweep).values()] == [['a'], ['a']]


def test_values_that_a_point_does_not_override_are_read_from_its_config(tmp_path):
    """As in chained sweeps; two points whose values are equal are in one group."""
    sweep = make_sweep(
        tmp_path,
        make_point({'model.layers': 4, 'seed': 1}, value=2.0, metrics=[]),
        make_point({ORDER: 'post'}, value=1.0, metrics=[]),
        make_point({'model.layers': 4}, value=4.0, metrics=[]),
        make_point({'model.layers': 8}, 'waiting'),
    )
    assert list(seeds.varied_values(sweep).values()) == [
        {'model.layers': 4, 'seed': 1, ORDER: 'pre'}, {'model.layers': 2, 'seed': 0, ORDER: 'post'},
        {'model.layers': 4, 'seed': 0, ORDER: 'pre'}, {'model.layers': 8, 'seed': None, ORDER: None},
    ]  # fmt: skip
    assert results.write_csv_table(sweep).read_text().splitlines()[4] == '3,waiting,8,,,,,,'
    groups = seeds.group_by_seed(sweep)
    assert [[row.number for row in group.rows] for group in groups] == [[0, 2], [1], [3]]
    assert [group.mean for group in groups] == [3.0, 1.0, None]


def test_keys_are_shortened_to_their_last_part_if_it_is_unique():
    assert seeds.shorten_keys({'a.b.c': 1, 'a.d': 2}) == {'c': 1, 'd': 2}
    assert seeds.shorten_keys({'a.c': 1, 'b.c': 2, 'b.d': 3}) == {'a.c': 1, 'b.c': 2, 'd': 3}


def test_csv_values_have_the_form_that_the_command_line_accepts(tmp_path):
    sweep = make_sweep(
        tmp_path, make_point({'a': [16, 8], 'b': True, 'c': 0.1 + 0.2}), make_point({'a': [1], 'b': False, 'c': 1.0})
    )
    lines = results.write_csv_table(sweep).read_text().splitlines()
    assert lines[1].startswith('0,done,"16,8",true,0.30000000000000004,')
    assert lines[2].startswith('1,done,1,false,1.0,')


def test_a_directory_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(UserError, match='holds no sweep'):
        results.write_sweep_report(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_page_shows_the_current_state_of_the_directory(tmp_path):
    every_status_sweep(tmp_path / 'my sweep', overrides=[['train.duration', '30 steps']], names=['rates', 'orders'])
    path = results.write_sweep_report(tmp_path / 'my sweep')
    assert path == tmp_path / 'my sweep' / 'report.html'
    markup = path.read_text('utf-8')
    for text in ('<h1>my sweep</h1>', 'experiments/a.py · rates, orders · train.duration=30 steps',
                 '1 done, 1 running, 1 waiting, 1 failed, 1 pruned.', 'a/b c', DIVERGED):  # fmt: skip
        assert text in markup, text
    assert (path.parent / 'table.csv').exists()


def test_a_sweep_of_rates_without_any_loss_has_a_page(tmp_path):
    failed = [make_point({RATE: rate}, 'failed', reason='no such file') for rate in (0.1, 0.2)]
    make_sweep(
        tmp_path, *failed, make_point({}, 'failed', reason='ZeroDivisionError'), make_point({RATE: 0.3}, 'waiting')
    )
    assert results.write_sweep_report(tmp_path).exists()


def test_the_page_data_has_the_numbers_of_the_runs(tmp_path):
    records = [*train_records(4.0, 3.0), valid_record(2, loss=2.5)]
    sweep = make_sweep(tmp_path, make_point({RATE: 0.1}, value=2.5, step=2, metrics=records), make_point({RATE: 0.2}))
    data = results.page_data(sweep)
    assert data['records'] == {0: records, 1: []}
    assert data['keys'] == {RATE: 'learning_rate'}
    assert data['winner']['number'] == 0
    assert data['winner']['config']['optimizer'] == {'learning_rate': 0.1, 'warmup': '100 steps'}
    assert [group['values'] for group in data['groups']] == [{RATE: 0.1}, {RATE: 0.2}]
