"""The processes of a sweep on this machine: started, kept going, told to stop."""

import logging
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attnlab import environment
from attnlab.errors import RunError
from attnlab.sweeps import sweep_files
from attnlab.sweeps.signals import StopSignals, handle_stop_signals

MAX_WORKER_DEATHS = 10
"""So many workers killed, and no point ended in between: that is no accident."""

_POLL = 0.2


def run_workers(argv: Sequence[str], folder: Path, count: int) -> int:
    """Runs `attnlab ARGV` as workers 0 to count - 1 until they have ended, and tells of each point that ends.

    A worker that is killed is started again.  Returns the exit code of the first worker that could not work, else 0.
    Raises Stopped once all workers have ended after a signal.
    """
    start = lambda number: subprocess.Popen(
        environment.attnlab_command(*argv, f'--worker={number}'),
        env=environment.child_environment(),
        start_new_session=True,  # a terminal's Ctrl-C comes to them once, from here
    )
    told, deaths, came = ended_point_names(folder), 0, 0
    with handle_stop_signals() as signals, _ended_at_last() as workers:
        workers += [start(number) for number in range(count)]
        while True:
            deaths = 0 if log_ended_points(folder, told) else deaths
            came = _forwarded(workers, signals, came)
            codes = [worker.poll() for worker in workers]
            if None not in codes and (came or not any(codes)):
                signals.check()
                return 0
            for number, code in enumerate(codes):
                if code and code > 0 and not came:
                    return _all_ended(workers, code)
                if code and code < 0 and not came:
                    deaths += 1
                    if deaths == MAX_WORKER_DEATHS:
                        _all_ended(workers, 1)
                        raise RunError(f'{deaths} workers were killed with no point ended, the last by {_name(code)}')
                    logging.warning('worker %d was killed by %s; another takes its place', number, _name(code))
                    workers[number] = start(number)
            time.sleep(_POLL)


def _forwarded(workers: Sequence[subprocess.Popen], signals: StopSignals, before: int) -> int:
    """Sends SIGTERM to the workers if signals came since the last call; returns how many have come.

    It is sent from here and not by the signal's handler, which does not know a worker that is being started.  SIGTERM
    also ends a worker silently whose imports are not done, where SIGINT would be a KeyboardInterrupt and a traceback.
    """
    if (now := signals.count) > before:
        for worker in workers:
            worker.terminate()  # does nothing to one that has ended
    return now


def _name(code: int) -> str:
    return signal.Signals(-code).name


def _all_ended(workers: Sequence[subprocess.Popen], code: int) -> int:
    for worker in workers:
        worker.terminate()  # where it runs a point it saves
    for worker in workers:
        worker.wait()
    return code


@contextmanager
def _ended_at_last() -> Iterator[list[subprocess.Popen]]:
    """A list of processes; those that still run at the end are killed."""
    workers: list[subprocess.Popen] = []
    try:
        yield workers
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()


# What is told meanwhile


def ended_point_names(folder: Path) -> set[str]:
    """The names of the points that have ended by now."""
    return {path.parent.name for path in (folder / 'points').glob('*/outcome.json')}


def log_ended_points(folder: Path, told: set[str]) -> int:
    """A log line for each point that has ended since; how many these are."""
    new = ended_point_names(folder) - told
    for name in sorted(new):
        end = sweep_files.read_outcome(folder, name)
        if end is None:  # it is to be run again
            continue
        told.add(name)
        logging.info('%s, %.0f s: %s', name, end.seconds, end)
    return len(new)
