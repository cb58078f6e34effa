"""Workers as jobs: what submitit's local executor runs, and what is handed to a SLURM that is not there."""

import os
import re
import signal
import stat

import pytest

from attnlab import cli
from attnlab.sweeps import launcher, sweep_files
from tests.sweeps.experiments import TRAINED
from tests.sweeps.processes import said, sweep

SBATCH = """#!/bin/sh
cp "$1" "$SUBMITTED"/script.$(ls "$SUBMITTED" | wc -l)
echo "Submitted batch job $(ls "$SUBMITTED" | wc -l)"
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A folder in which a script lies for each job that was submitted."""
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
def test_jobs_on_this_machine(trainable, tmp_path):
    folder = tmp_path / 'sweep'
    process = sweep(trainable(TRAINED), folder, '--sweep=more', '--workers=2', '--launcher=local',
                    '--launcher_options=timeout_min=5')  # fmt: skip
    code, text = said(process)
    assert code == 0, text
    assert [row.status for row in sweep_files.read_sweep(folder).rows] == ['done'] * 3
    assert re.search(r'jobs \d+ \d+; their logs are in ', text)


def test_the_batch_script(slurm, tmp_path):
    options = 'partition=gpu,timeout_min=90,gpus_per_node=1,cpus_per_task=8,slurm_qos=low,constraint=a100'
    made = launcher.create_executor(tmp_path / 'jobs', 'slurm', launcher.parse_launcher_options(options))
    job = made.submit(launcher.WorkerJob(['sweep', '--workdir=a b', '--sweep=x', '--workers=1']))
    [script] = slurm.iterdir()
    lines = script.read_text().splitlines()
    assert lines[0] == '#!/bin/bash' and job.job_id == '1'
    asked = dict(line.removeprefix('#SBATCH --').partition('=')[::2] for line in lines if line.startswith('#SBATCH'))
    expected = {
        'job-name': 'attnlab', 'partition': 'gpu', 'time': '90', 'gpus-per-node': '1', 'cpus-per-task': '8',
        'qos': 'low', 'constraint': 'a100', 'nodes': '1', 'signal': 'USR2@90',
        'open-mode': 'append',
    }  # fmt: skip
    assert expected.items() <= asked.items()
    assert str(tmp_path / 'jobs') in asked['output'] and 'error' not in asked
    [run] = [line for line in lines if line.startswith('srun')]
    assert '-m submitit.core._submit' in run and str(tmp_path / 'jobs') in run


def test_a_job_goes_on_in_the_next_one():
    job = launcher.WorkerJob(['sweep', '--sweep=x'])
    again = job.checkpoint()
    assert again.function is job and again.args == () and job.argv == ['sweep', '--sweep=x']


def test_a_jobs_command_line(monkeypatch, experiment, tmp_path):
    """That of the user, with one worker and no launcher."""
    submitted = []
    monkeypatch.setattr(launcher, 'run_jobs', lambda *args: submitted.append(args))
    monkeypatch.setattr(launcher, 'create_executor', lambda *args: None)
    argv = ['sweep', f'--config={experiment(TRAINED)}', f'--workdir={tmp_path}/new', '--sweep=more', '--workers', '3',
            '--launcher', 'slurm', f'--storage=sqlite:///{tmp_path}/x.db', '--launcher_options=partition=a',
            '--config.model.hidden=16']  # fmt: skip
    before = dict(os.environ)
    assert cli.main(argv) == 1  # no point has come to its end
    [(given, folder, count, name, options)] = submitted
    kept = {f'--config={experiment(TRAINED)}', f'--workdir={tmp_path}/new', '--sweep=more',
            f'--storage=sqlite:///{tmp_path}/x.db', '--config.model.hidden=16'}  # fmt: skip
    assert given[0] == 'sweep' and set(given[1:]) == kept | {'--workers=1'} and len(given) == 7
    assert (str(folder), count, name, options) == (f'{tmp_path}/new', 3, 'slurm', {'partition': 'a'})
    assert dict(os.environ) == before


def test_a_signal_to_the_waiting_command_says_that_jobs_go_on(monkeypatch, experiment, tmp_path, capsys, caplog):
    class Job:
        job_id = '7'

        def done(self):
            os.kill(os.getpid(), signal.SIGINT)

    class Executor:
        submit = staticmethod(lambda job: Job())

    monkeypatch.setattr(launcher, 'create_executor', lambda *args: Executor)
    argv = ['sweep', f'--config={experiment(TRAINED)}', f'--workdir={tmp_path}/new', '--sweep=more', '--launcher=local']
    assert cli.main(argv) == 130
    assert 'jobs that were submitted go on' in caplog.text
    assert capsys.readouterr().err == 'attnlab: SIGINT: stopped; run the same command again to continue\n'


@pytest.mark.parametrize(('options', 'line'), [
    ('timeout_mins=5', "--launcher=slurm: "),
    ('nodes=two', "--launcher=slurm: "),
])  # fmt: skip
def test_options_that_are_none(slurm, experiment, tmp_path, capsys, options, line):
    code = cli.main(['sweep', f'--config={experiment(TRAINED)}', f'--workdir={tmp_path}/new', '--sweep=more',
                     '--launcher=slurm', '--storage=sqlite://', f'--launcher_options={options}'])  # fmt: skip
    said = capsys.readouterr().err
    assert code == 2 and line in said and said.count('\n') == 1 and not (tmp_path / 'new').exists(), said


def test_no_slurm(experiment, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('PATH', '/nowhere')
    code = cli.main(['sweep', f'--config={experiment(TRAINED)}', f'--workdir={tmp_path}/new', '--sweep=more',
                     '--launcher=slurm', '--storage=sqlite://'])  # fmt: skip
    said = capsys.readouterr().err
    assert code == 2 and 'Could not detect "srun"' in said and not (tmp_path / 'new').exists()
