"""What a worker makes of points, with a training of no time in place of the loop."""

import math
import os
import signal

import pytest

from attnlab.errors import Diverged, RunError, Stopped, UserError
from attnlab.sweeps import points, progress, storage, sweep_directory, sweep_files, worker
from attnlab.train import loop
from attnlab.train.signals import catch_stop_signals
from tests.sweeps.experiments import SEARCHED
from tests.sweeps.trainer import EVALUATIONS, Trainer, fails

SOMETIMES = '''
import os
def search_sometimes(trial):
    if os.environ.get('BROKEN'):
        raise ValueError('broken')
    return {'optimizer.learning_rate': trial.suggest_float('rate', 1e-4, 1, log=True)}
'''
@pytest.fixture
def trainer(monkeypatch):
    made = Trainer()
    monkeypatch.setattr(worker.run, 'train', made)
    monkeypatch.setattr(worker.gc, 'collect', lambda: 0)  # half of the time here
    return made


@pytest.fixture
def sweep(experiment, tmp_path):
    """Begins a sweep of a name, and returns what runs it in this process."""
    config = experiment(SEARCHED + SOMETIMES)

    def begun(name, folder='sweep', **search):
        plan = points.make_sweep_plan(config, [], [name], search)
        spec = sweep_directory.ensure_sweep_directory(tmp_path / folder, plan)

        def run():
            url = f'sqlite:///{tmp_path}/{folder}/sweep.db'
            worker.run_points(progress.SweepProgress(tmp_path / folder, plan), spec['id'], url)
            return sweep_files.read_sweep(tmp_path / folder).rows

        return run

    return begun


def in_the_last_step(number):
    """A signal that the training loop receives when nothing is left to stop."""

    def act():
        with catch_stop_signals():
            os.kill(os.getpid(), number)

    return act


def sends(number):
    return lambda: os.kill(os.getpid(), number)


def rates(rows):
    return [row.overrides['optimizer.learning_rate'] for row in rows]


def test_whatever_a_point_raises_the_others_run(trainer, sweep):
    trainer.otherwise = {0: fails(RunError('step 3: the loss is nan')), 2: fails(MemoryError('too\n large'))}
    rows = sweep('seeds')()
    assert [row.status for row in rows] == ['failed', 'done', 'failed', 'done']
    assert [row.reason for row in rows] == ['step 3: the loss is nan', None, 'MemoryError: too large', None]
    assert [seed for seed, _ in trainer.ran] == [0, 1, 2, 3]


@pytest.mark.parametrize(('error', 'reason'), [
    (Diverged(3, 'loss', math.nan, 'try a lower rate'), 'step 3: the loss is nan; try a lower rate'),
    (UserError('train.mesh is data=9;\nexpected fewer'), 'train.mesh is data=9; expected fewer'),
    (MemoryError(), 'MemoryError: '),
    (RuntimeError('RESOURCE_EXHAUSTED: Out of memory\n' + 'more\n' * 1000), 'RuntimeError: RESOURCE_EXHAUSTED: Out'),
    (RecursionError('deep'), 'RecursionError: deep'),
    (SystemExit(3), 'SystemExit: 3'),
    (ExceptionGroup('several', [ValueError('a\x1b[31m')]), 'ExceptionGroup: several (1 sub-exception)'),
    (ValueError('\x1b[31mred'), 'ValueError: \\x1b[31mred'),
])  # fmt: skip
def test_a_point_that_fails_is_recorded_in_one_line_and_the_others_run(trainer, sweep, capsys, error, reason):
    trainer.otherwise = {0: fails(error)}
    rows = sweep('seeds')()
    assert [row.status for row in rows] == ['failed', 'done', 'done', 'done']
    assert (
        rows[0].reason.startswith(reason)
        and rows[0].reason.isprintable()
        and len(rows[0].reason) <= worker.MAX_REASON_LENGTH
    )
    assert rows[0].diverged_at == (3 if isinstance(error, Diverged) else None)
    log = capsys.readouterr().err
    assert 'Traceback' in log and type(error).__name__ in log


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_gives_the_point_back(trainer, sweep, number):
    trainer.otherwise = {1: sends(number)}
    work = sweep('seeds')
    with pytest.raises(Stopped) as caught:
        work()
    assert caught.value.code == 128 + number
    rows = work()
    assert [row.status for row in rows] == ['done'] * 4
    assert [seed for seed, _ in trainer.ran] == [0, 1, 2, 3, 1]


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize('name', ['seeds', 'rate'])
def test_a_signal_in_a_points_last_step_stops_the_sweep(trainer, sweep, tmp_path, name, number):
    trainer.otherwise = {1: in_the_last_step(number)}
    work = sweep(name, **({'trials': 4} if name == 'rate' else {}))
    with pytest.raises(Stopped) as caught:
        work()
    assert caught.value.code == 128 + number
    assert str(caught.value) == f'{number.name}: stopped; run the same command again to continue'
    assert [row.status for row in sweep_files.read_sweep(tmp_path / 'sweep').rows if row.status != 'waiting'] == [
        'done'
    ] * 2
    assert [row.status for row in work()] == ['done'] * 4 and len(trainer.ran) == 4


def test_a_signal_is_kept_where_the_point_fails_behind_it(trainer, sweep):
    signals = in_the_last_step(signal.SIGINT)
    trainer.otherwise = {0: lambda: (signals(), fails(RunError('no'))())}
    with pytest.raises(Stopped):
        sweep('seeds')()
    assert len(trainer.ran) == 1


def test_a_signal_in_the_last_step_of_a_single_point_is_told(trainer, sweep, tmp_path):
    sweep('seeds')
    folder = tmp_path / 'sweep'
    seen = progress.SweepProgress(
        folder, points.make_sweep_plan(sweep_files.read_spec(folder)['config'], [], ['seeds'], {})
    )
    trainer.otherwise = {0: in_the_last_step(signal.SIGTERM)}
    with pytest.raises(Stopped):
        worker.run_point(seen, 2)
    assert [row.status for row in sweep_files.read_sweep(folder).rows] == ['waiting', 'waiting', 'done', 'waiting']


def test_a_signal_that_is_ignored_stays_so(trainer, sweep):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trainer.otherwise = {1: sends(signal.SIGINT)}
        assert [row.status for row in sweep('seeds')()] == ['done'] * 4
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_a_signal_in_the_last_step_of_a_training_stops_the_sweep(trainable, tmp_path, monkeypatch):
    config = trainable(SEARCHED)
    plan = points.make_sweep_plan(
        config, [('train.duration', '3 steps'), ('train.eval_every', '3 steps')], ['seeds'], {}
    )
    spec, save = sweep_directory.ensure_sweep_directory(tmp_path / 'sweep', plan), loop.checkpoint.save

    def asked(manager, saved):
        os.kill(os.getpid(), signal.SIGTERM)
        save(manager, saved)

    monkeypatch.setattr(loop.checkpoint, 'save', asked)
    with pytest.raises(Stopped):
        worker.run_points(progress.SweepProgress(tmp_path / 'sweep', plan), spec['id'], f'sqlite:///{tmp_path}/sweep/sweep.db')
    rows = sweep_files.read_sweep(tmp_path / 'sweep').rows
    assert [row.status for row in rows] == ['done', 'waiting', 'waiting', 'waiting'], rows[0].reason


def test_a_run_that_stops_gives_the_point_back(trainer, sweep):
    trainer.otherwise = {0: fails(Stopped(signal.SIGTERM, 7))}
    work = sweep('seeds')
    with pytest.raises(Stopped):
        work()
    assert [row.status for row in work()] == ['done'] * 4 and len(trainer.ran) == 5


def test_a_point_that_kills_its_workers_fails(trainer, sweep, monkeypatch):
    """Three times more than once, with no step saved in between."""
    work = sweep('seeds')
    died = 0

    def dies(claimed):
        nonlocal died

        def run(board, store, claim, signals):
            nonlocal died
            if claim.point == 1 and claim.kills < storage.MAX_KILLS:
                died += 1
                raise SystemExit  # the lock goes, and the trial is left as it is
            claimed(board, store, claim, signals)

        return run

    monkeypatch.setattr(worker, '_claimed', dies(worker._claimed))
    for _ in range(storage.MAX_KILLS):
        with pytest.raises(SystemExit):
            work()
    rows = work()
    assert died == 4 and [row.status for row in rows] == ['done', 'failed', 'done', 'done']
    assert rows[1].reason == 'its worker was killed 4 times with no step saved in between'
    assert 1 not in [seed for seed, _ in trainer.ran]


def test_failed_points_run_again_when_they_are_forgotten(trainer, sweep, tmp_path):
    trainer.otherwise = {0: fails(RunError('no'))}
    work = sweep('seeds')
    assert work()[0].status == 'failed' and work()[0].status == 'failed' and len(trainer.ran) == 4
    folder = tmp_path / 'sweep'
    seen = progress.SweepProgress(
        folder, points.make_sweep_plan(sweep_files.read_spec(folder)['config'], [], ['seeds'], {})
    )
    seen.forget_failed(seen.numbers)
    assert [row.status for row in work()] == ['done'] * 4 and len(trainer.ran) == 5


@pytest.mark.parametrize('sampler', ['random', 'tpe', 'cmaes'])
def test_a_search(trainer, sweep, sampler):
    rows = sweep('two', trials=12, sampler=sampler)()
    assert [row.number for row in rows] == list(range(12)) and all(row.status == 'done' for row in rows)
    assert rows[3].name.startswith('0003,learning_rate=') and rows[3].run.parent.name == rows[3].name
    assert len(set(rates(rows))) == 12
    assert [rate for _, rate in trainer.ran] == rates(rows)


def test_a_sampler_learns_from_the_outcomes(trainer, sweep):
    """Its first ten draws are random."""
    miss = [abs(math.log10(rate) + 2) for rate in rates(sweep('rate', trials=24, sampler='tpe')())]
    assert sum(miss[-8:]) / 8 < 0.5 * sum(miss[:10]) / 10


def test_a_search_draws_the_same_whoever_runs_what(trainer, sweep):
    first = rates(sweep('rate', 'one', trials=5, sampler='random')())
    trainer.otherwise = {6: fails(RunError('no')), 8: fails(Stopped(signal.SIGTERM, 1))}
    work = sweep('rate', 'two', trials=5, sampler='random')
    with pytest.raises(Stopped):
        work()
    assert rates(work()) == first
    assert trainer.ran[8] in trainer.ran[9:]


@pytest.mark.parametrize(('pruner', 'most'), [('median', 0.7), ('asha', 0.6), ('hyperband', 0.8)])
def test_pruning_keeps_the_winner_and_saves_steps(trainer, sweep, pruner, most):
    rows = sweep('rate', trials=20, sampler='random', pruner=pruner)()
    winner = min(rows, key=lambda row: abs(math.log10(rates([row])[0]) + 2))
    done = [row for row in rows if row.status == 'done']
    assert max(done, key=lambda row: row.value) is winner and trainer.steps < most * 20 * EVALUATIONS
    pruned = [row for row in rows if row.status == 'pruned']
    assert pruned and all(row.value is not None and row.step < EVALUATIONS for row in pruned)


def test_a_search_that_makes_no_config_fails_its_points(trainer, sweep):
    rows = sweep('bad', trials=2)()
    assert [row.status for row in rows] == ['failed'] * 2 and not trainer.ran
    assert rows[0].reason.startswith('there is no config.optimizer.rate; did you mean')


def test_a_search_that_failed_draws_anew_when_it_is_forgotten(trainer, sweep, tmp_path, monkeypatch):
    work = sweep('sometimes', trials=3, sampler='random')
    monkeypatch.setenv('BROKEN', '1')
    assert [row.reason for row in work()] == ['ValueError: broken'] * 3
    monkeypatch.delenv('BROKEN')
    config, search = sweep_files.read_spec(tmp_path / 'sweep')['config'], dict(trials=3, sampler='random')
    seen = progress.SweepProgress(tmp_path / 'sweep', points.make_sweep_plan(config, [], ['sometimes'], search))
    seen.forget_failed(seen.numbers)
    rows = work()
    assert [row.status for row in rows] == ['done'] * 3 and len(set(rates(rows))) == 3
    assert [rate for _, rate in trainer.ran] == rates(rows)


def test_evaluations_told_before_a_kill_are_told_once(trainer, sweep):
    work = sweep('rate', trials=1, sampler='random', pruner='median')
    train, calls = worker.run.train, []

    def stops(config, workdir, watch):
        def watched(step, scores):
            calls.append(step)
            watch(step, scores)
            if len(calls) == 3:
                raise Stopped(signal.SIGTERM, step)

        return train(config, workdir, watch=watched)

    worker.run.train = stops
    with pytest.raises(Stopped):
        work()
    [row] = work()
    assert row.status == 'done' and calls == [1, 2, 3, *range(1, EVALUATIONS)]
