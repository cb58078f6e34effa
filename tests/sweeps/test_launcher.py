"""Workers as jobs: run by submitit's local executor, and submitted to a stand-in for SLURM."""

import os
import re
import signal
import stat

import pytest

from attnlab import cli
from attnlab.sweeps import launcher, sweep_files
from tests.sweeps.experiments import TRAINED
from tests.sweeps.processes import start_sweep, wait_for_exit

SBATCH = """#!/bin/sh
cp "$1" "$SUBMITTED"/script.$(ls "$SUBMITTED" | wc -l)
echo "Submitted batch job $(ls "$SUBMITTED" | wc -l)"
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Folder that gets a batch script for each submitted job; stand-ins for the SLURM commands are on the PATH."""
    programs, submitted = tmp_path / 'bin', tmp_path / 'submitted'
    for folder in (programs, submitted):
        folder.mkdir()
    for name in ('sbatch', 'srun', 'sacct', 'scontrol'):
        path = programs / name
        path.write_text(SBATCH if name == 'sbatch' else '#!/bin/sh\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv('PATH', f'{programs}{os.pathsep}{os.environ["PATH"]}')
    monkeypatch.setenv('SUBMITTED', str(submitted))
    return submitted


@pytest.mark.slow
def test_local_jobs_finish_a_sweep(trainable, tmp_path):
    folder = tmp_path / 'sweep'
    process = start_sweep(trainable(TRAINED), folder, '--sweep=more', '--workers=2', '--launcher=local',
                    '--launcher_options=timeout_min=5')  # fmt: skip
    code, text = wait_for_exit(process)
    assert code == 0, text
    assert [row.status for row in sweep_files.read_sweep(folder).rows] == ['done'] * 3
    assert re.search(r'jobs \d+ \d+; their logs are in ', text)


def test_launcher_options_are_in_the_batch_script(slurm, tmp_path):
    options = 'partition=gpu,timeout_min=90,gpus_per_node=1,cpus_per_task=8,slurm_qos=low,constraint=a100'
    executor = launcher.create_executor(tmp_path / 'jobs', 'slurm', launcher.parse_launcher_options(options))
    job = executor.submit(launcher.WorkerJob(['sweep', '--workdir=a b', '--sweep=x', '--workers=1']))
    [script] = slurm.iterdir()
    lines = script.read_text().splitlines()
    assert lines[0] == '#!/bin/bash' and job.job_id == '1'
    directives = dict(
        line.removeprefix('#SBATCH --').partition('=')[::2] for line in lines if line.startswith('#SBATCH')
    )
    expected = {
        'job-name': 'attnlab', 'partition': 'gpu', 'time': '90', 'gpus-per-node': '1', 'cpus-per-task': '8',
        'qos': 'low', 'constraint': 'a100', 'nodes': '1', 'signal': 'USR2@90',
        'open-mode': 'append',
    }  # fmt: skip
    assert expected.items() <= directives.items()
    assert str(tmp_path / 'jobs') in directives['output'] and 'error' not in directives
    [run] = [line for line in lines if line.startswith('srun')]
    assert '-m submitit.core._submit' in run and str(tmp_path / 'jobs') in run


def test_a_job_is_continued_by_the_same_command():
    job = launcher.WorkerJob(['sweep', '--sweep=x'])
    submission = job.checkpoint()
    assert submission.function is job and submission.args == () and job.argv == ['sweep', '--sweep=x']


def test_a_job_runs_the_command_with_one_worker_and_no_launcher(monkeypatch, experiment, tmp_path):
    submitted = []
    monkeypatch.setattr(launcher, 'run_jobs', lambda *args: submitted.append(args))
    monkeypatch.setattr(launcher, 'create_executor', lambda *args: None)
    argv = ['sweep', f'--config={experiment(TRAINED)}', f'--workdir={tmp_path}/new', '--sweep=more', '--workers', '3',
            '--launcher', 'slurm', f'--storage=sqlite:///{tmp_path}/x.db', '--launcher_options=partition=a',
            '--config.model.hidden=16']  # fmt: skip
    before = dict(os.environ)
    assert cli.main(argv) == 1  # no point has ended
    [(job_argv, folder, count, name, options)] = submitted
    expected = {f'--config={experiment(TRAINED)}', f'--workdir={tmp_path}/new', '--sweep=more',
            f'--storage=sqlite:///{tmp_path}/x.db', '--config.model.hidden=16'}  # fmt: skip
    assert job_argv[0] == 'sweep' and set(job_argv[1:]) == expected | {'--workers=1'} and len(job_argv) == 7
    assert (str(folder), count, name, options) == (f'{tmp_path}/new', 3, 'slurm', {'partition': 'a'})
    assert dict(os.environ) == before


def test_a_signal_stops_the_command_but_not_the_jobs(monkeypatch, experiment, tmp_path, capsys, caplog):
    class Job:
        job_id = '7'

        def done(self):
            os.kill(os.getpid(), signal.SIGINT)

    class Executor:
        submit = staticmethod(lambda job: Job())

    monkeypatch.setattr(launcher, 'create_executor', lambda *args: Executor)
    argv = ['sweep', f'--config={experiment(TRAINED)}', f'--workdir={tmp_path}/new', '--sweep=more', '--launcher=local']
    assert cli.main(argv) == 130
    assert 'the submitted jobs continue' in caplog.text
    assert capsys.readouterr().err == 'attnlab: SIGINT: stopped; run the same command again to continue\n'


@pytest.mark.parametrize(('options', 'line'), [
    ('timeout_mins=5', "--launcher=slurm: "),
    ('nodes=two', "--launcher=slurm: "),
])  # fmt: skip
def test_invalid_launcher_options_are_refused(slurm, experiment, tmp_path, capsys, options, line):
    code = cli.main(['sweep', f'--config={experiment(TRAINED)}', f'--workdir={tmp_path}/new', '--sweep=more',
                     '--launcher=slurm', '--storage=sqlite://', f'--launcher_options={options}'])  # fmt: skip
    error = capsys.readouterr().err
    assert code == 2 and line in error and error.count('\n') == 1 and not (tmp_path / 'new').exists(), error


def test_a_missing_slurm_is_one_line(experiment, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('PATH', '/nowhere')
    code = cli.main(['sweep', f'--config={experiment(TRAINED)}', f'--workdir={tmp_path}/new', '--sweep=more',
                     '--launcher=slurm', '--storage=sqlite://'])  # fmt: skip
    error = capsys.readouterr().err
    assert code == 2 and 'Could not detect "srun"' in error and not (tmp_path / 'new').exists()
