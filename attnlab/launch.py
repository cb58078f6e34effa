"""Several processes of one command on this machine, watched: where one fails, all end and it is named."""

import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence

from attnlab import environment

GRACE_SECONDS = 10.0
"""Seconds that the others have to end by themselves once one has failed."""

MAX_PROCESSES = 64
"""Processes of one machine: each needs a core or a GPU of its own to be of use."""

_POLL = 0.1


def launch_processes(argv: Sequence[str], count: int) -> int:
    """Runs `attnlab ARGV` as processes 0 to count - 1 of one run and returns its exit code.

    That is 0 where all succeed, else the code of the first one that failed, 1 for one that was killed.  SIGTERM goes on
    to all of them, SIGINT comes to them from the terminal.
    """
    address = f'127.0.0.1:{find_free_port()}'
    command = environment.attnlab_command(*argv, f'--coordinator={address}')
    start = lambda number: subprocess.Popen([*command, f'--process={number}'], env=environment.child_environment())
    processes = [start(number) for number in range(count)]

    def forward(number: int, frame: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _watch(processes)
    finally:
        for process in processes:
            process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(processes: list[subprocess.Popen]) -> int:
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # in the order in which they end: the others end of the first

    def wait(number: int) -> None:
        processes[number].wait()
        ended.put(number)

    for number in range(len(processes)):
        threading.Thread(target=wait, args=(number,), daemon=True).start()
    for _ in processes:
        if processes[number := ended.get()].returncode:
            return _ended(processes, number)
    return 0


def _ended(processes: list[subprocess.Popen], first: int) -> int:
    """Waits for the others to end, ends those that do not, and tells of the first one; the exit code of all."""
    limit = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < limit:
        time.sleep(_POLL)
    left = [process for process in processes if process.poll() is None]
    for process in left:
        process.kill()
    code = processes[first].returncode
    if code in (2, 128 + signal.SIGINT, 128 + signal.SIGTERM):  # its own line says why
        return code
    how = f'was killed by {signal.Signals(-code).name}' if code < 0 else f'ended with exit code {code}'
    others = f'; {len(left)} that waited for it were stopped' if left else ''
    line = f'process {first} of {len(processes)} {how}{others}; the same command goes on from the last checkpoint'
    environment.print_error(line)
    return 1


def find_free_port() -> int:
    """A port of this machine that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]
