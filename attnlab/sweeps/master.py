"""The process that starts the workers of a sweep on this machine, replaces killed workers, and forwards signals."""

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
"""The sweep fails once this many workers were killed while no point ended."""

_POLL_SECONDS = 0.2


def run_workers(argv: Sequence[str], folder: Path, count: int) -> int:
    """Run `attnlab ARGV` as workers 0 to count - 1 until all have ended; log each point that ends.

    A killed worker is started again.  Returns the exit code of the first worker that ended with an error, else 0.

    Raises RunError after `MAX_WORKER_DEATHS`, and Stopped after a signal, once all workers have ended.
    """

    def start_worker(number: int) -> subprocess.Popen:
        return subprocess.Popen(
            environment.attnlab_command(*argv, f'--worker={number}'),
            env=environment.child_environment(),
            # Ctrl-C in a terminal then reaches only this process, which forwards it once to each worker.
            start_new_session=True,
        )

    logged_names, deaths, signal_count = ended_point_names(folder), 0, 0
    with handle_stop_signals() as signals, _killed_at_exit() as workers:
        workers += [start_worker(number) for number in range(count)]
        while True:
            deaths = 0 if log_ended_points(folder, logged_names) else deaths
            signal_count = _forward_signals(workers, signals, signal_count)
            codes = [worker.poll() for worker in workers]
            if None not in codes and (signal_count or not any(codes)):
                signals.check()
                return 0
            for number, code in enumerate(codes):
                if code and code > 0 and not signal_count:
                    _terminate_workers(workers)
                    return code
                if code and code < 0 and not signal_count:
                    deaths += 1
                    name = signal.Signals(-code).name
                    if deaths == MAX_WORKER_DEATHS:
                        _terminate_workers(workers)
                        raise RunError(f'{deaths} workers were killed and no point ended, the last one by {name}')
                    logging.warning('worker %d was killed by %s; starting another in its place', number, name)
                    workers[number] = start_worker(number)
            time.sleep(_POLL_SECONDS)


def _forward_signals(workers: Sequence[subprocess.Popen], signals: StopSignals, previous_count: int) -> int:
    """Send SIGTERM to the workers if signals came since `previous_count`; return the number of signals so far.

    The signal handler cannot do this: it would miss a worker that is just being started.  The workers get SIGTERM also
    for a SIGINT, because during a worker's imports SIGINT would print the traceback of a KeyboardInterrupt.
    """
    count = signals.count  # read once: a signal that comes during the loop is forwarded by the next call
    if count > previous_count:
        for worker in workers:
            worker.terminate()  # has no effect on a worker that has ended
    return count


def _terminate_workers(workers: Sequence[subprocess.Popen]) -> None:
    """Send SIGTERM to the workers, which save their points, and wait until they have ended."""
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.wait()


@contextmanager
def _killed_at_exit() -> Iterator[list[subprocess.Popen]]:
    """Yield an empty list of processes; kill those in the list that still run at the end."""
    workers: list[subprocess.Popen] = []
    try:
        yield workers
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()


# Log lines


def ended_point_names(folder: Path) -> set[str]:
    """Return the names of the points that have ended."""
    return {path.parent.name for path in (folder / 'points').glob('*/outcome.json')}


def log_ended_points(folder: Path, logged_names: set[str]) -> int:
    """Log each ended point that is not in `logged_names`, and add it there; return the number of new points."""
    new_names = ended_point_names(folder) - logged_names
    for name in sorted(new_names):
        outcome = sweep_files.read_outcome(folder, name)
        if outcome is None:  # deleted meanwhile, because the point will run again
            continue
        logged_names.add(name)
        logging.info('%s, %.0f s: %s', name, outcome.seconds, outcome)
    return len(new_names)
