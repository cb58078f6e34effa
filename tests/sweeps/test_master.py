"""The process that starts the workers: signals reach every worker, whenever they come."""

import os
import signal
import subprocess
import sys
import time

import pytest

from attnlab import cli
from attnlab.errors import Stopped
from attnlab.sweeps import master
from tests.sweeps import made


@pytest.fixture
def sleeping_workers(tmp_path, monkeypatch):
    """Replace workers by processes that sleep.

    Returns the list of started processes, and a dict: number of a start -> function that is called after this start.
    """
    program = tmp_path / 'program'
    program.write_text('#!/bin/sh\nexec sleep 60\n')
    program.chmod(0o755)
    workers, after_start, popen = [], {}, subprocess.Popen

    def start_worker(*args, **options):
        workers.append(popen(*args, **options))
        after_start.get(len(workers) - 1, lambda: None)()
        return workers[-1]

    monkeypatch.setattr(sys, 'executable', str(program))
    monkeypatch.setattr(master.subprocess, 'Popen', start_worker)
    monkeypatch.setattr(master, '_POLL_SECONDS', 0.02)
    return workers, after_start


def send_signal(number):
    """Return a function that sends a signal to this process."""
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize('at', [0, 1])
def test_a_signal_while_workers_are_started_ends_every_worker(sleeping_workers, tmp_path, at, number):
    workers, after_start = sleeping_workers
    after_start[at] = send_signal(number)
    with pytest.raises(Stopped) as caught:
        master.run_workers([], tmp_path, 2)
    assert caught.value.code == 128 + number
    assert [worker.poll() for worker in workers] == [-signal.SIGTERM] * 2


def test_a_signal_while_a_killed_worker_is_replaced_ends_the_new_one(sleeping_workers, tmp_path):
    workers, after_start = sleeping_workers
    after_start[1] = lambda: (workers[0].kill(), workers[0].wait())
    after_start[2] = send_signal(signal.SIGTERM)
    with pytest.raises(Stopped):
        master.run_workers([], tmp_path, 2)
    assert [worker.poll() for worker in workers] == [-signal.SIGKILL, -signal.SIGTERM, -signal.SIGTERM]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_page_is_written_is_reported_in_one_line(tmp_path, monkeypatch, capsys, number):
    from attnlab.sweeps import results

    folder = made.write_sweep(tmp_path / 'sweep', [made.make_point({'seed': 1}, value=1.0, metrics=[])])
    monkeypatch.setattr(master, 'run_workers', lambda *args: 0)
    monkeypatch.setattr(results, 'write_sweep_report', lambda folder: (send_signal(number)(), time.sleep(5)))
    argv = ['sweep', '--config=experiments/a.py', f'--workdir={folder}', '--sweep=rates']
    before = signal.getsignal(number)
    assert cli.main(argv) == 128 + number
    assert capsys.readouterr().err == f'attnlab: {number.name}: stopped; run the same command again to continue\n'
    assert signal.getsignal(number) == before
