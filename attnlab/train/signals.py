"""A wish to stop, noticed between two steps."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

StopCheck = Callable[[int], int | None]
"""Asked once a step, with its number: the signal that wants the run to stop behind it, or None."""

_REPORTS: list[Callable[[int], None]] = []


@contextmanager
def report_signals(report: Callable[[int], None]) -> Iterator[None]:
    """Calls `report` with the number of each signal that `catch_stop_signals` receives, also one that stops no run any more."""
    _REPORTS.append(report)
    try:
        yield
    finally:
        _REPORTS.remove(report)


@contextmanager
def catch_stop_signals() -> Iterator[StopCheck]:
    """What tells which of SIGTERM and SIGINT has come, None until then; a second one acts as it always does.

    One that the process was started to ignore, as by nohup or behind an &, stays ignored.  Outside of the main thread,
    where Python hands out no signals, it is always None.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: None
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: object) -> None:
        came.append(number)
        for report in _REPORTS:
            report(number)
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda step: came[0] if came else None
    finally:
        restore()


@contextmanager
def catch_shared_stop_signals() -> Iterator[StopCheck]:
    """As `catch_stop_signals` for the processes of one run: a signal to any of them is SIGTERM in all, behind the same step.

    It needs the preemption service of `jax.distributed`, which has taken SIGTERM for itself.
    """
    from jax.experimental.multihost_utils import reached_preemption_sync_point

    before = signal.signal(signal.SIGINT, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    try:
        yield lambda step: signal.SIGTERM if reached_preemption_sync_point(step) else None
    finally:
        signal.signal(signal.SIGINT, before)
