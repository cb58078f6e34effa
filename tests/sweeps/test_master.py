"""The process that starts the workers: signals reach each of them, whenever they come."""

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
def started(tmp_path, monkeypatch):
    """Workers that sleep in place of a sweep's; after each start the function of its number is called."""
    program = tmp_path / 'program'
    program.write_text('#!/bin/sh\nexec sleep 60\n')
    program.chmod(0o755)
    workers, then, start = [], {}, subprocess.Popen

    def starts(*args, **more):
        workers.append(start(*args, **more))
        then.get(len(workers) - 1, lambda: None)()
        return workers[-1]

    monkeypatch.setattr(sys, 'executable', str(program))
    monkeypatch.setattr(master.subprocess, 'Popen', starts)
    monkeypatch.setattr(master, '_POLL', 0.02)
    return workers, then


def sends(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize('at', [0, 1])
def test_a_signal_among_the_starts_ends_every_worker(started, tmp_path, at, number):
    workers, then = started
    then[at] = sends(number)
    with pytest.raises(Stopped) as caught:
        master.run_workers([], tmp_path, 2)
    assert caught.value.code == 128 + number
    assert [worker.poll() for worker in workers] == [-signal.SIGTERM] * 2


def test_a_signal_while_a_killed_worker_is_replaced_ends_the_new_one(started, tmp_path):
    workers, then = started
    then[1] = lambda: (workers[0].kill(), workers[0].wait())
    then[2] = sends(signal.SIGTERM)
    with pytest.raises(Stopped):
        master.run_workers([], tmp_path, 2)
    assert [worker.poll() for worker in workers] == [-signal.SIGKILL, -signal.SIGTERM, -signal.SIGTERM]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_page_is_written_is_told_in_one_line(tmp_path, monkeypatch, capsys, number):
    from attnlab.sweeps import results

    folder = made.sweep(tmp_path / 'sweep', [made.point({'seed': 1}, value=1.0, metrics=[])])
    monkeypatch.setattr(master, 'run_workers', lambda *args: 0)
    monkeypatch.setattr(results, 'write_sweep_report', lambda folder: (sends(number)(), time.sleep(5)))
    argv = ['sweep', '--config=experiments/a.py', f'--workdir={folder}', '--sweep=rates']
    before = signal.getsignal(number)
    assert cli.main(argv) == 128 + number
    assert capsys.readouterr().err == f'attnlab: {number.name}: stopped; run the same command again to continue\n'
    assert signal.getsignal(number) == before
