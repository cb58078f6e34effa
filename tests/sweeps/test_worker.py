"""A worker, with a stand-in for training: outcomes of points, signals, kills, searches and pruning."""

import math
import os
import signal

import pytest

from attnlab.errors import Diverged, RunError, Stopped, UserError
from attnlab.sweeps import points, progress, storage, sweep_directory, sweep_files, worker
from attnlab.train import loop
from attnlab.train.signals import catch_stop_signals
from tests.sweeps.experiments import SEARCHED
from tests.sweeps.trainer import EVALUATIONS, Trainer, raise_error

SOMETIMES = """
import os
def search_sometimes(trial):
    if os.environ.get('BROKEN'):
        raise ValueError('broken')
    return {'optimizer.learning_rate': trial.suggest_float('rate', 1e-4, 1, log=True)}
"""


@pytest.fixture
def trainer(monkeypatch):
    trainer = Trainer()
    monkeypatch.setattr(worker.run, 'train_run', trainer)
    monkeypatch.setattr(worker.gc, 'collect', lambda: 0)  # would take half of the time of these tests
    return trainer


@pytest.fixture
def sweep(experiment, tmp_path):
    """Return a function that creates a sweep and returns a function that runs it in this process and gives its rows."""
    config = experiment(SEARCHED + SOMETIMES)

    def create(name, folder='sweep', **search):
        plan = points.make_sweep_plan(config, [], [name], search)
        spec = sweep_directory.ensure_sweep_directory(tmp_path / folder, plan)

        def run():
            url = f'sqlite:///{tmp_path}/{folder}/sweep.db'
            worker.run_points(progress.SweepProgress(tmp_path / folder, plan), spec['id'], url)
            return sweep_files.read_sweep(tmp_path / folder).rows

        return run

    return create


def signal_in_last_step(number):
    """Return a function that sends a signal as if during the last step: the training loop handles and ignores it."""

    def action():
        with catch_stop_signals():
            os.kill(os.getpid(), number)

    return action


def send_signal(number):
    """Return a function that sends a signal to this process."""
    return lambda: os.kill(os.getpid(), number)


def learning_rates(rows):
    return [row.overrides['optimizer.learning_rate'] for row in rows]


def test_the_other_points_run_when_points_raise(trainer, sweep):
    trainer.on_start = {0: raise_error(RunError('step 3: the loss is nan')), 2: raise_error(MemoryError('too\n large'))}
    rows = sweep('seeds')()
    assert [row.status for row in rows] == ['failed', 'done', 'failed', 'done']
    assert [row.reason for row in rows] == ['step 3: the loss is nan', None, 'MemoryError: too large', None]
    assert [seed for seed, _ in trainer.runs] == [0, 1, 2, 3]


@pytest.mark.quick_cases(2)
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
def test_a_failure_is_recorded_in_one_line(trainer, sweep, capsys, error, reason):
    trainer.on_start = {0: raise_error(error)}
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
def test_a_signal_releases_the_point(trainer, sweep, number):
    trainer.on_start = {1: send_signal(number)}
    work = sweep('seeds')
    with pytest.raises(Stopped) as caught:
        work()
    assert caught.value.code == 128 + number
    rows = work()
    assert [row.status for row in rows] == ['done'] * 4
    assert [seed for seed, _ in trainer.runs] == [0, 1, 2, 3, 1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize('name', ['seeds', 'rate'])
def test_a_signal_in_the_last_step_of_a_point_stops_the_sweep(trainer, sweep, tmp_path, name, number):
    trainer.on_start = {1: signal_in_last_step(number)}
    work = sweep(name, **({'trials': 4} if name == 'rate' else {}))
    with pytest.raises(Stopped) as caught:
        work()
    assert caught.value.code == 128 + number
    assert str(caught.value) == f'{number.name}: stopped; run the same command again to continue'
    assert [row.status for row in sweep_files.read_sweep(tmp_path / 'sweep').rows if row.status != 'waiting'] == [
        'done'
    ] * 2
    assert [row.status for row in work()] == ['done'] * 4 and len(trainer.runs) == 4


def test_a_signal_stops_the_sweep_although_the_point_fails_after_it(trainer, sweep):
    send = signal_in_last_step(signal.SIGINT)
    trainer.on_start = {0: lambda: (send(), raise_error(RunError('no'))())}
    with pytest.raises(Stopped):
        sweep('seeds')()
    assert len(trainer.runs) == 1


def test_a_signal_in_the_last_step_of_a_single_point_raises(trainer, sweep, tmp_path):
    sweep('seeds')
    folder = tmp_path / 'sweep'
    sweep_progress = progress.SweepProgress(
        folder, points.make_sweep_plan(sweep_files.read_spec(folder)['config'], [], ['seeds'], {})
    )
    trainer.on_start = {0: signal_in_last_step(signal.SIGTERM)}
    with pytest.raises(Stopped):
        worker.run_point(sweep_progress, 2)
    assert [row.status for row in sweep_files.read_sweep(folder).rows] == ['waiting', 'waiting', 'done', 'waiting']


def test_an_ignored_signal_stays_ignored(trainer, sweep):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trainer.on_start = {1: send_signal(signal.SIGINT)}
        assert [row.status for row in sweep('seeds')()] == ['done'] * 4
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_a_signal_during_the_last_checkpoint_stops_the_sweep(trainable, tmp_path, monkeypatch):
    config = trainable(SEARCHED)
    plan = points.make_sweep_plan(
        config, [('train.duration', '3 steps'), ('train.eval_every', '3 steps')], ['seeds'], {}
    )
    spec, save = sweep_directory.ensure_sweep_directory(tmp_path / 'sweep', plan), loop.checkpoint.save_checkpoint

    def save_and_signal(manager, saved):
        os.kill(os.getpid(), signal.SIGTERM)
        save(manager, saved)

    monkeypatch.setattr(loop.checkpoint, 'save_checkpoint', save_and_signal)
    with pytest.raises(Stopped):
        worker.run_points(
            progress.SweepProgress(tmp_path / 'sweep', plan), spec['id'], f'sqlite:///{tmp_path}/sweep/sweep.db'
        )
    rows = sweep_files.read_sweep(tmp_path / 'sweep').rows
    assert [row.status for row in rows] == ['done', 'waiting', 'waiting', 'waiting'], rows[0].reason


def test_a_stopped_run_releases_the_point(trainer, sweep):
    trainer.on_start = {0: raise_error(Stopped(signal.SIGTERM, 7))}
    work = sweep('seeds')
    with pytest.raises(Stopped):
        work()
    assert [row.status for row in work()] == ['done'] * 4 and len(trainer.runs) == 5


def test_a_point_that_kills_its_workers_fails(trainer, sweep, monkeypatch):
    """After `MAX_KILLS` kills with no step saved in between."""
    work = sweep('seeds')
    deaths = 0

    def die_at_point_1(run_claimed):
        def run(progress, store, claim, signals):
            nonlocal deaths
            if claim.point == 1 and claim.kills < storage.MAX_KILLS:
                deaths += 1
                raise SystemExit  # releases the lock and leaves the trial running
            run_claimed(progress, store, claim, signals)

        return run

    monkeypatch.setattr(worker, '_run_claimed', die_at_point_1(worker._run_claimed))
    for _ in range(storage.MAX_KILLS):
        with pytest.raises(SystemExit):
            work()
    rows = work()
    assert deaths == 4 and [row.status for row in rows] == ['done', 'failed', 'done', 'done']
    assert rows[1].reason == 'its worker was killed 4 times with no step saved in between'
    assert 1 not in [seed for seed, _ in trainer.runs]


def test_failed_points_run_again_after_a_reset(trainer, sweep, tmp_path):
    trainer.on_start = {0: raise_error(RunError('no'))}
    work = sweep('seeds')
    assert work()[0].status == 'failed' and work()[0].status == 'failed' and len(trainer.runs) == 4
    folder = tmp_path / 'sweep'
    sweep_progress = progress.SweepProgress(
        folder, points.make_sweep_plan(sweep_files.read_spec(folder)['config'], [], ['seeds'], {})
    )
    sweep_progress.reset_failed(sweep_progress.point_numbers)
    assert [row.status for row in work()] == ['done'] * 4 and len(trainer.runs) == 5


@pytest.mark.slow
@pytest.mark.parametrize('sampler', ['random', 'tpe', 'cmaes'])
def test_a_search_runs_its_points(trainer, sweep, sampler):
    rows = sweep('two', trials=12, sampler=sampler)()
    assert [row.number for row in rows] == list(range(12)) and all(row.status == 'done' for row in rows)
    assert rows[3].name.startswith('0003,learning_rate=') and rows[3].run.parent.name == rows[3].name
    assert len(set(learning_rates(rows))) == 12
    assert [rate for _, rate in trainer.runs] == learning_rates(rows)


@pytest.mark.slow
def test_a_sampler_learns_from_the_outcomes(trainer, sweep):
    """The first ten draws of TPE are random."""
    distances = [abs(math.log10(rate) + 2) for rate in learning_rates(sweep('rate', trials=24, sampler='tpe')())]
    assert sum(distances[-8:]) / 8 < 0.5 * sum(distances[:10]) / 10


@pytest.mark.slow
def test_draws_do_not_depend_on_failures_and_stops(trainer, sweep):
    first = learning_rates(sweep('rate', 'one', trials=5, sampler='random')())
    trainer.on_start = {6: raise_error(RunError('no')), 8: raise_error(Stopped(signal.SIGTERM, 1))}
    work = sweep('rate', 'two', trials=5, sampler='random')
    with pytest.raises(Stopped):
        work()
    assert learning_rates(work()) == first
    assert trainer.runs[8] in trainer.runs[9:]


@pytest.mark.slow
@pytest.mark.parametrize(('pruner', 'max_share'), [('median', 0.7), ('asha', 0.6), ('hyperband', 0.8)])
def test_pruning_keeps_the_best_point_and_saves_steps(trainer, sweep, pruner, max_share):
    rows = sweep('rate', trials=20, sampler='random', pruner=pruner)()
    best = min(rows, key=lambda row: abs(math.log10(learning_rates([row])[0]) + 2))
    done = [row for row in rows if row.status == 'done']
    assert max(done, key=lambda row: row.value) is best and trainer.steps < max_share * 20 * EVALUATIONS
    pruned = [row for row in rows if row.status == 'pruned']
    assert pruned and all(row.value is not None and row.step < EVALUATIONS for row in pruned)


def test_a_search_without_a_valid_config_fails_its_points(trainer, sweep):
    rows = sweep('bad', trials=2)()
    assert [row.status for row in rows] == ['failed'] * 2 and not trainer.runs
    assert rows[0].reason.startswith('there is no config.optimizer.rate; did you mean')


def test_a_failed_search_draws_again_after_a_reset(trainer, sweep, tmp_path, monkeypatch):
    work = sweep('sometimes', trials=3, sampler='random')
    monkeypatch.setenv('BROKEN', '1')
    assert [row.reason for row in work()] == ['ValueError: broken'] * 3
    monkeypatch.delenv('BROKEN')
    config, search = sweep_files.read_spec(tmp_path / 'sweep')['config'], dict(trials=3, sampler='random')
    sweep_progress = progress.SweepProgress(
        tmp_path / 'sweep', points.make_sweep_plan(config, [], ['sometimes'], search)
    )
    sweep_progress.reset_failed(sweep_progress.point_numbers)
    rows = work()
    assert [row.status for row in rows] == ['done'] * 3 and len(set(learning_rates(rows))) == 3
    assert [rate for _, rate in trainer.runs] == learning_rates(rows)


def test_evaluations_reported_before_a_stop_are_reported_once(trainer, sweep):
    work = sweep('rate', trials=1, sampler='random', pruner='median')
    train, calls = worker.run.train_run, []

    def stop_at_third_evaluation(config, workdir, watch):
        def watch_and_stop(step, scores):
            calls.append(step)
            watch(step, scores)
            if len(calls) == 3:
                raise Stopped(signal.SIGTERM, step)

        return train(config, workdir, watch=watch_and_stop)

    worker.run.train_run = stop_at_third_evaluation
    with pytest.raises(Stopped):
        work()
    [row] = work()
    assert row.status == 'done' and calls == [1, 2, 3, *range(1, EVALUATIONS)]
