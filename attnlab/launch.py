"""Start several processes of one run on this machine and watch them: if one fails, all are ended."""

import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence

from attnlab import environment

GRACE_SECONDS = 10.0
"""Time in seconds that the other processes have to end by themselves after one has failed."""

MAX_PROCESSES = 64
"""Largest number of processes on one machine; each needs its own core or GPU to be useful."""

_POLL_SECONDS = 0.1


def launch_processes(argv: Sequence[str], count: int) -> int:
    """Run `attnlab ARGV` as processes 0 to count - 1 of one run, and return the exit code.

    The exit code is 0 if all processes succeed, otherwise that of the first one that failed, or 1 if that was killed.
    SIGTERM and SIGINT are forwarded to all of them.
    """
    address = f'127.0.0.1:{find_free_port()}'
    command = environment.attnlab_command(*argv, f'--coordinator={address}')
    child_environment = environment.child_environment()
    processes = [subprocess.Popen([*command, f'--process={number}'], env=child_environment) for number in range(count)]

    def forward(signal_number: int, frame: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal_number)

    previous_handlers = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _wait_for_processes(processes)
    finally:
        for process in processes:
            process.kill()
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _wait_for_processes(processes: list[subprocess.Popen]) -> int:
    # Numbers of the processes in the order in which they end: the failure of one makes the others fail after it.
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def wait(number: int) -> None:
        processes[number].wait()
        ended.put(number)

    for number in range(len(processes)):
        threading.Thread(target=wait, args=(number,), daemon=True).start()
    for _ in processes:
        number = ended.get()
        if processes[number].returncode:
            return _handle_failure(processes, number)
    return 0


def _handle_failure(processes: list[subprocess.Popen], failed: int) -> int:
    """Wait for the other processes, kill those that do not end, print which one failed, and return the exit code.

    failed: number of the process that failed first.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.kill()
    code = processes[failed].returncode
    if code in (2, 128 + signal.SIGINT, 128 + signal.SIGTERM):  # that process has printed the reason itself
        return code
    reason = f'was killed by {signal.Signals(-code).name}' if code < 0 else f'ended with exit code {code}'
    others = f'; {len(running)} that waited for it were stopped' if running else ''
    line = (
        f'process {failed} of {len(processes)} {reason}{others}; '
        'run the same command again to continue from the last checkpoint'
    )
    environment.print_error(line)
    return 1


def find_free_port() -> int:
    """Return a TCP port of this machine that is not in use."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]
