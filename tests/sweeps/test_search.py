"""A search counts a config once, even if it is drawn several times, and continues only if it is unchanged."""

import csv
import json

import pytest

from attnlab.errors import RunError, UserError
from attnlab.sweeps import points, progress, results, seeds, sweep_directory, sweep_files, winner, worker
from tests.sweeps import made
from tests.sweeps.trainer import Trainer, raise_error

SPACE = """
def search_space(trial):
    return {{'optimizer.learning_rate': trial.suggest_float('rate', {rate}),
            'model.hidden': 2 ** trial.suggest_int('width', 2, {width}),
            'model.attention': trial.suggest_categorical('score', [{scores}])}}
"""
SAME = {'rate': '1e-4, 1, log=True', 'width': '4', 'scores': "'additive', 'dot'"}
FEW = "def search_space(trial): return {'model.attention': trial.suggest_categorical('score', ['additive', 'dot'])}"


class Saving(Trainer):
    """A stand-in for training that saves the config of a run; the score depends on the attention only."""

    def __call__(self, config, workdir, watch):
        scores = super().__call__(config, workdir, watch)
        worker.configs.save_config(config, workdir / 'config.json')
        return scores | {'best_bleu': 40.0 if config.model.attention == 'dot' else 30.0}


@pytest.fixture
def trainer(monkeypatch):
    trainer = Saving()
    monkeypatch.setattr(worker.run, 'train_run', trainer)
    return trainer


@pytest.fixture
def search(experiment, tmp_path):
    """Return a function that runs the search in a text and returns the sweep, continued if it exists."""

    def run(text, trials=6, folder=tmp_path / 'sweep'):
        plan = points.make_sweep_plan(experiment(text), [], ['space'], {'trials': trials, 'sampler': 'random'})
        spec = sweep_directory.ensure_sweep_directory(folder, plan)
        worker.run_points(progress.SweepProgress(folder, plan), spec['id'], f'sqlite:///{folder}/sweep.db')
        return sweep_files.read_sweep(folder)

    return run


@pytest.mark.slow
def test_a_config_that_is_drawn_twice_is_trained_and_counted_once(search, trainer, tmp_path, capsys):
    sweep = search(FEW)
    drawn = [row.overrides['model.attention'] for row in sweep.rows]
    assert sorted(set(drawn)) == ['additive', 'dot'] and len(trainer.runs) == 2  # if not, draw with another seed
    assert [row.value for row in sweep.rows] == [40.0 if attention == 'dot' else 30.0 for attention in drawn]
    groups = seeds.group_by_seed(sweep)
    assert [(len(group.done), len(group.rows), group.error) for group in groups] == [(1, 1, None)] * 2
    counted = [drawn.index(attention) for attention in drawn]
    notes = ['' if number == first else f'not trained: its config is that of point {first}, counted once'
             for number, first in enumerate(counted)]  # fmt: skip
    with results.write_csv_table(sweep).open(newline='') as file:
        assert [line[-1] for line in csv.reader(file)][1:] == notes
    results.print_sweep(sweep, width=160)
    output = capsys.readouterr().out
    assert 'standard error' not in output and 'best bleu: 40.0000, attention=dot' in output
    page = results.write_sweep_report(tmp_path / 'sweep').read_text()
    assert all(note in output and note in page for note in notes) and 'standard error' not in page
    assert winner.write_best_config(sweep, tmp_path / 'best.py').number == drawn.index('dot')


@pytest.mark.slow
def test_a_failed_config_is_trained_again_if_it_is_drawn_again(search, trainer):
    trainer.on_start = {0: raise_error(RunError('no'))}
    sweep = search(FEW)
    assert len(trainer.runs) == 3 and sweep.rows[0].status == 'failed'
    attention = sweep.rows[0].overrides['model.attention']
    [group] = [group for group in seeds.group_by_seed(sweep) if group.values == {'model.attention': attention}]
    assert [row.status for row in group.rows] == ['done']


def test_two_points_trained_with_the_same_config_are_counted_once(tmp_path):
    """As happens if two workers draw the config before either of them has ended."""
    rate = 'optimizer.learning_rate'
    sweep = sweep_files.read_sweep(made.write_sweep(tmp_path, [
        made.make_point({rate: 0.1, 'seed': 1}, value=2.0, metrics=[]),
        made.make_point({rate: 0.1, 'seed': 1}, 'running'),
        made.make_point({rate: 0.1, 'seed': 2}, value=3.0),
        made.make_point({rate: 0.1, 'seed': 1}, value=2.0, metrics=[]),
        made.make_point({rate: 0.2, 'seed': 1}, 'failed', reason='no'),
        made.make_point({rate: 0.2, 'seed': 1}, value=1.0),
        made.make_point({}, 'failed', reason='no'),
        made.make_point({}, 'failed', reason='no'),
    ]))  # fmt: skip
    assert seeds.find_duplicates(sweep) == {1: 0, 3: 0, 4: 5}
    assert [(group.mean, len(group.done), len(group.rows)) for group in seeds.group_by_seed(sweep)] == [
        (2.5, 2, 2), (1.0, 1, 1), (None, 0, 2),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(('change', 'message'), [
    ({'rate': '1e-3, 1, log=True'}, 'rate is drawn from 0.001 to 1.0 (log) here and from 0.0001 to 1.0 (log) there'),
    ({'rate': '1e-4, 1'}, 'rate is drawn from 0.0001 to 1.0 here and from 0.0001 to 1.0 (log) there'),
    ({'width': '5'}, 'width is drawn from 2 to 5 here and from 2 to 4 there'),
    ({'width': '4, step=2'}, 'width is drawn from 2 to 4 in steps of 2 here and from 2 to 4 there'),
    ({'scores': "'additive', 'dot', 'none'"}, 'score is drawn from one of additive, dot, none here and from one of ad'),
    ({'scores': "'dot', 'additive'"}, 'score is drawn from one of dot, additive here and from one of additive, dot'),
])  # fmt: skip
def test_a_changed_search_space_is_refused_with_the_parameter_name(search, trainer, tmp_path, change, message):
    search(SPACE.format(**SAME), trials=2)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob('sweep/**/*'))
    with pytest.raises(UserError) as caught:
        search(SPACE.format(**SAME | change), trials=2)
    assert str(caught.value).startswith(f'--workdir={tmp_path}/sweep holds another sweep of search_space: {message}')
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob('sweep/**/*')) == before
    assert len(search(SPACE.format(**SAME), trials=2).rows) == 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(('old', 'new', 'message'), [
    ("'rate'", "'r'", 'r is drawn from 0.0001 to 1.0 (log) here and not drawn there'),
    ("trial.suggest_int('width', 2, 4)", '3', 'width is not drawn here and drawn from 2 to 4 there'),
    ('2 **', '3 **', 'point 0 sets model.hidden to'),
    ("'model.hidden'", "'model.embedding'", 'point 0 sets model.embedding to'),
    ('return', 'raise KeyError("a")\n    return', "it fails for the draws of point 0: KeyError: 'a'"),
])  # fmt: skip
def test_a_search_that_makes_other_points_from_the_same_draws_is_refused(search, trainer, old, new, message):
    text = SPACE.format(**SAME)
    search(text, trials=1)
    with pytest.raises(UserError, match='holds another sweep of search_space') as caught:
        search(text.replace(old, new), trials=1)
    assert message in str(caught.value)


def test_points_of_earlier_versions_are_continued(search, trainer, tmp_path):
    search(FEW, trials=1)
    [path] = (tmp_path / 'sweep' / 'points').glob('*/point.json')
    point = json.loads(path.read_text())
    path.write_text(json.dumps({key: point[key] for key in ('number', 'name', 'overrides')}))
    assert [row.status for row in search(FEW, trials=1).rows] == ['done']


def test_choices_that_change_between_points_fail_with_the_parameter_name(search, trainer):
    text = "def search_space(trial): return {'seed': trial.suggest_categorical('kind', [trial.number, 99])}"
    rows = search(text, trials=2).rows
    assert [row.status for row in rows] == ['done', 'failed']
    assert rows[1].reason.startswith('kind, drawn from one of 1, 99: ')


@pytest.mark.parametrize(('old', 'new', 'message'), [
    ("'model.hidden'", "'model.embedding'", '2 points here and 2 there, only here embedding=8,seed=0'),
    ('range(2)', '(1, 0)', 'point 0 is model.hidden=8 seed=1 here and model.hidden=8 seed=0 there'),
    ('(8,)', '(16,)', '2 points here and 2 there, only here hidden=16,seed=0'),
])  # fmt: skip
def test_a_changed_sweep_is_refused_with_the_point_name(experiment, tmp_path, old, new, message):
    text = "def sweep_two(): return grid({'model.hidden': (8,), 'seed': range(2)})"
    sweep_directory.ensure_sweep_directory(
        tmp_path / 'sweep', points.make_sweep_plan(experiment(text), [], ['two'], {})
    )
    plan = points.make_sweep_plan(experiment(text.replace(old, new)), [], ['two'], {})
    with pytest.raises(UserError) as caught:
        sweep_directory.ensure_sweep_directory(tmp_path / 'sweep', plan)
    assert message in str(caught.value)


def test_points_with_equal_names_and_different_fields_are_distinguished():
    one, other = ([{'number': 0, 'name': 'rate=1', 'overrides': {key: 1}}] for key in ('a.rate', 'b.rate'))
    assert sweep_directory._describe_difference(one, other) == 'point 0 is a.rate=1 here and b.rate=1 there'
