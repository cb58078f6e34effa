"""The file that --best writes."""

import pytest

from attnlab import configs
from attnlab.errors import UserError
from attnlab.sweeps import sweep_files, winner
from tests.sweeps import made
from tests.sweeps.made import make_point

RATE = 'optimizer.learning_rate'


def write(folder, points, path, **options):
    """Write the best config of a sweep with these points to `path`; return the best point."""
    sweep = sweep_files.read_sweep(made.write_sweep(folder / 'sweep', points, **options))
    return winner.write_best_config(sweep, path)


def test_the_written_file_loads_as_the_config_of_the_best_point(tmp_path):
    points = [make_point({RATE: rate, 'data.note': note}, value=value, step=7, metrics=[])
              for rate, note, value in ((1e-05, 'x', 2.0), (3e-4, 'y', 1.0), (0.1, 'z', 3.0))]  # fmt: skip
    row = write(tmp_path, points, tmp_path / 'best.py')
    assert row.number == 1
    config = configs.load_experiment(str(tmp_path / 'best.py'))
    configs.check_same_config(config, configs.load_config(row.run / 'config.json'))
    assert (config.optimizer.learning_rate, config.data.note) == (3e-4, 'y')
    assert config.is_locked
    configs.load_experiment(str(tmp_path / 'best.py'), [(RATE, '1')])  # fields accept texts of their types


@pytest.mark.parametrize('overrides', [
    {'data.note': 'quotes \' " \'\'\' """ and \\ and \n and ü'},
    {'data.shape': [1]}, {'data.shape': []}, {'data.words': ['a"b', "c'd"]},
    {'model.tied': False}, {'seed': 2**31}, {'model.inner.rate': 1.0}, {'model.inner.rate': 5e-324},
])  # fmt: skip
def test_every_kind_of_value_is_restored(tmp_path, overrides):
    row = write(tmp_path, [make_point(overrides, value=1.0, metrics=[])], tmp_path / 'best.py')
    configs.check_same_config(
        configs.load_experiment(str(tmp_path / 'best.py')), configs.load_config(row.run / 'config.json')
    )


def test_the_written_file_has_this_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    points = [make_point({RATE: rate, 'seed': seed}, value=value + seed, step=40, metrics=[])
              for rate, value in ((0.1, 2.0), (0.2, 1.0)) for seed in (0, 1, 2)]  # fmt: skip
    write(tmp_path, [*points, make_point({RATE: 0.3, 'seed': 0}, 'failed')], 'best.py',
          overrides=[['train.duration', '40 steps']], names=['rates', 'seeds'])  # fmt: skip
    assert (
        (tmp_path / 'best.py').read_text()
        == '''\
"""Best config of --sweep=rates,seeds of experiments/a.py: loss 2.0000 ± 0.5774 (standard error of 3 seeds).

attnlab train --config=best.py --workdir=runs/best

Point 3 of 7, of which 6 are done. Changes to that file: train.duration=40 steps, optimizer.learning_rate=0.2, seed=0.
This is the first seed of its group; its own best loss is 1, at step 40.
"""

from ml_collections import ConfigDict


def get_config(arg: str = '') -> ConfigDict:
    """Return the config; `arg` must be empty."""
    if arg:
        raise ValueError(f"the argument is {arg!r}; expected ''")
    config = ConfigDict()
    config['task'] = 'tests.sweeps.made:Task'
    config['seed'] = 0
    config['data'] = {
        'note': 'a "b" c',
        'shape': (2, 3),
        'words': ('x',),
    }
    config['model'] = {
        'layers': 2,
        'order': 'pre',
        'tied': True,
        'inner': {
            'rate': 0.1,
        },
    }
    config['optimizer'] = {
        'learning_rate': 0.2,
        'warmup': '100 steps',
    }
    return config
'''
    )
    with pytest.raises(UserError, match="the argument is 'x'; expected ''"):
        configs.load_experiment('best.py:x')


def test_the_first_seed_is_written_not_the_best_seed(tmp_path):
    points = [
        make_point({RATE: 0.1, 'seed': seed}, value=value, metrics=[]) for seed, value in enumerate((2.0, 1.0, 3.0))
    ]
    assert write(tmp_path, points, tmp_path / 'best.py').number == 0
    assert configs.load_experiment(str(tmp_path / 'best.py')).seed == 0


def test_an_unusable_file_or_unfinished_sweep_is_refused(tmp_path):
    done, waiting = [make_point({}, value=1.0, metrics=[])], [make_point({}, 'waiting')]
    (tmp_path / 'mine.py').write_text('mine')
    for i, (points, name, message) in enumerate((
        (done, 'best.txt', r'--best expects the name of an experiment file, FILE.py, got .*best.txt'),
        (done, 'mine.py', 'mine.py exists already'),
        (done, 'no/best.py', 'there is no folder'),
        (waiting, 'best.py', 'no point is done yet'),
    )):  # fmt: skip
        with pytest.raises(UserError, match=message):
            write(tmp_path / f'{i}', points, tmp_path / name)
    assert (tmp_path / 'mine.py').read_text() == 'mine'
    assert {path.name for path in tmp_path.iterdir()} == {'mine.py', '0', '1', '2', '3'}


def test_quotes_in_an_experiment_argument_are_escaped(tmp_path):
    write(tmp_path, [make_point({'seed': 3}, value=1.0, metrics=[])], tmp_path / 'best.py', config='e.py:a"""b\\')
    assert "e.py:a'''b\\\\" in (tmp_path / 'best.py').read_text()
    configs.load_experiment(str(tmp_path / 'best.py'))
