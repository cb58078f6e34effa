"""The command `attnlab sweep` in processes: directories, failures, stops, kills, and two commands started at once."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from attnlab import cli
from attnlab.sweeps import sweep_files
from attnlab.train import metrics
from tests.sweeps.experiments import TRAINED
from tests.sweeps.processes import read_run_records, start_sweep, wait_for_exit, wait_until

LONG = ('--config.train.duration=2000 steps', '--config.train.eval_every=2000 steps')


@pytest.fixture
def config(trainable):
    return trainable(TRAINED)


def rows_by_name(folder):
    return {row.name: row for row in sweep_files.read_sweep(folder).rows}


@pytest.mark.slow
def test_other_points_finish_when_one_fails(config, tmp_path):
    folder = tmp_path / 'sweep'
    code, text = wait_for_exit(start_sweep(config, folder, '--sweep=three', '--workers=2'))
    assert code == 1, text
    results = sweep_files.read_sweep(folder)
    assert [row.status for row in results.rows] == ['done', 'failed', 'done']
    assert [row.name for row in results.rows] == [f'learning_rate={rate}' for rate in ('0.01', '1e+38', '0.02')]
    assert (results.metric, results.direction) == ('loss', 'min')
    failed = results.rows[1]
    assert failed.reason.startswith('step ') and 'the loss is' in failed.reason and failed.value is None
    assert 'Traceback' in (folder / 'points' / failed.name / 'log.txt').read_text()
    for row in (results.rows[0], results.rows[2]):
        valid = [record for record in metrics.read_metrics(row.run) if record['split'] == 'valid']
        assert row.value == min(record['loss'] for record in valid) and row.seconds > 0
        assert {'step': row.step, 'loss': row.value}.items() <= valid[row.step // 10 - 1].items()
        assert (
            json.loads((row.run / 'config.json').read_text())['optimizer']['learning_rate']
            == (row.overrides['optimizer.learning_rate'])
        )
    before = {row.name: (row.run / 'metrics.jsonl').stat().st_mtime_ns for row in results.rows}
    code, text = wait_for_exit(start_sweep(config, folder, '--sweep=three', '--retry'))
    after_retry = rows_by_name(folder)
    assert code == 1 and after_retry[failed.name].status == 'failed', text
    changed = [
        name for name, row in after_retry.items() if (row.run / 'metrics.jsonl').stat().st_mtime_ns != before[name]
    ]
    assert changed == [failed.name]


@pytest.mark.slow
def test_a_stopped_sweep_saves_and_resumes(config, tmp_path):
    folder = tmp_path / 'sweep'
    process = start_sweep(config, folder, '--sweep=seeds', '--config.train.save_every=1000 steps', *LONG)
    run = folder / 'points' / 'seed=0' / 'run' / 'metrics.jsonl'
    wait_until(lambda: run.exists() and '"step": 3,' in run.read_text())
    assert [row.status for row in sweep_files.read_sweep(folder).rows] == ['running', 'waiting']
    process.send_signal(signal.SIGTERM)
    code, text = wait_for_exit(process)
    assert code == 143, text
    assert [row.status for row in sweep_files.read_sweep(folder).rows] == ['waiting', 'waiting']
    steps = [int(path.name) for path in (run.parent / 'checkpoints').iterdir()]
    assert len(steps) == 1 and 3 <= steps[0] < 1000
    process = start_sweep(config, folder, '--sweep=seeds', '--config.train.save_every=1000 steps', *LONG)
    log = folder / 'points' / 'seed=0' / 'log.txt'
    wait_until(lambda: f'continues from step {steps[0]}' in log.read_text())
    process.send_signal(signal.SIGINT)
    assert wait_for_exit(process)[0] == 130


@pytest.mark.slow
def test_a_sweep_resumes_after_its_worker_and_master_are_killed(config, tmp_path):
    """One kill of each; test_kill.py kills at random moments, ten times."""
    folder = tmp_path / 'sweep'
    process = start_sweep(config, folder, '--sweep=seeds', '--workers=2')
    running = folder / 'points' / 'seed=0' / 'running.json'
    run = running.parent / 'run' / 'metrics.jsonl'
    wait_until(lambda: run.exists() and '"step": 4,' in run.read_text())
    os.kill(json.loads(running.read_text())['pid'], signal.SIGKILL)
    time.sleep(1)
    process.kill()  # the workers detect this and save
    process.communicate()
    code, text = wait_for_exit(start_sweep(config, folder, '--sweep=seeds'))
    assert code == 0, text
    assert [row.status for row in sweep_files.read_sweep(folder).rows] == ['done', 'done']
    for records in read_run_records(folder).values():
        assert [record['step'] for record in records if record['split'] == 'train'] == list(range(1, 21))


@pytest.mark.slow
def test_two_commands_started_at_once_share_a_sweep_or_one_is_refused(config, tmp_path):
    same, other = tmp_path / 'same', tmp_path / 'other'
    twice = [start_sweep(config, same, '--sweep=seeds') for _ in range(2)]
    different = [start_sweep(config, other, f'--sweep={name}') for name in ('seeds', 'more')]
    ends = [wait_for_exit(process) for process in twice]
    assert [code for code, _ in ends] == [0, 0], ends
    logs = [(same / 'points' / f'seed={seed}' / 'log.txt').read_text() for seed in range(2)]
    assert not any('continues' in log or 'Traceback' in log for log in logs)
    ends = [wait_for_exit(process) for process in different]
    assert sorted(code for code, _ in ends) == [0, 2], ends
    refused = next(text for code, text in ends if code == 2)
    assert 'holds another sweep: sweep is ' in refused and len(refused.splitlines()) == 1
    seeds = 2 if ends[0][0] == 0 else 3
    assert sorted(path.name for path in (other / 'points').iterdir()) == [f'seed={seed}' for seed in range(seeds)]


def test_another_sweep_in_the_same_directory_is_refused(config, tmp_path, capsys):
    folder = tmp_path / 'sweep'
    assert wait_for_exit(start_sweep(config, folder, '--sweep=seeds', '--index=1'))[0] == 0
    assert not (folder / 'sweep.db').exists() and sweep_files.read_sweep(folder).rows[1].status == 'done'
    before = sorted(folder.rglob('*'))

    def refused(workdir, *flags):
        assert cli.main(['sweep', f'--config={config}', f'--workdir={workdir}', *flags, '--index=0']) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1 and sorted(folder.rglob('*')) == before
        return error

    assert 'holds another sweep: sweep is more here and seeds there' in refused(folder, '--sweep=more')
    line = 'holds another sweep: overrides is model.heads=1 here and none there'
    assert line in refused(folder, '--sweep=seeds', '--config.model.heads=1')
    run = folder / 'points' / 'seed=1' / 'run'
    assert f'--workdir={run} holds a run' in refused(run, '--sweep=seeds')
    text = Path(config).read_text()
    Path(config).write_text(text.replace("'model.heads': '2'", "'model.heads': '1'"))
    assert 'holds a sweep of another config: model.heads is 1 here and 2 there' in refused(folder, '--sweep=seeds')
    Path(config).write_text(text.replace('range(2)', 'range(3)'))
    line = 'holds another sweep: 3 points here and 2 there, only here seed=2'
    assert line in refused(folder, '--sweep=seeds')


@pytest.mark.slow  # test_storage.py tests claims on both databases quickly
def test_two_commands_share_a_sweep_through_a_database(config, database, tmp_path):
    """On SQLite and on PostgreSQL; the workers belong to two commands."""
    folder = tmp_path / 'sweep'
    both = [start_sweep(config, folder, '--sweep=seeds', f'--storage={database}') for _ in range(2)]
    ends = [wait_for_exit(process) for process in both]
    assert [code for code, _ in ends] == [0, 0], ends
    assert [row.status for row in sweep_files.read_sweep(folder).rows] == ['done'] * 2
    assert not (folder / 'sweep.db').exists()
