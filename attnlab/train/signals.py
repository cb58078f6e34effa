"""Handling of SIGTERM and SIGINT, which are acted on between two steps."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

StopCheck = Callable[[int], int | None]
"""Called after each step with the number of the step; returns the signal that should stop the run there, or None."""

_REPORTS: list[Callable[[int], None]] = []


@contextmanager
def report_signals(report: Callable[[int], None]) -> Iterator[None]:
    """Call `report` with the number of each signal that `catch_stop_signals` receives.

    A signal is also reported if it comes too late to stop a run.
    """
    _REPORTS.append(report)
    try:
        yield
    finally:
        _REPORTS.remove(report)


@contextmanager
def catch_stop_signals() -> Iterator[StopCheck]:
    """Catch the first SIGTERM or SIGINT; yield a function that returns its number, or None before it comes.

    A second signal has its usual effect.  A signal that is ignored when this is called (after nohup, or in a background
    job of a shell) stays ignored.  In a thread other than the main one, where Python does not deliver signals, the
    function always returns None.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: None
        return
    previous_handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    previous_handlers = {
        number: handler for number, handler in previous_handlers.items() if handler is not signal.SIG_IGN
    }

    def restore() -> None:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)

    def handle_signal(number: int, frame: object) -> None:
        received.append(number)
        for report in _REPORTS:
            report(number)
        restore()

    for number in previous_handlers:
        signal.signal(number, handle_signal)
    try:
        yield lambda step: received[0] if received else None
    finally:
        restore()


@contextmanager
def catch_shared_stop_signals() -> Iterator[StopCheck]:
    """Do as `catch_stop_signals` for a run of several processes.

    A signal to any process stops all of them after the same step, as SIGTERM.  This needs the preemption service of
    `jax.distributed`, which has its own handler for SIGTERM.
    """
    from jax.experimental.multihost_utils import reached_preemption_sync_point

    previous_handler = signal.signal(signal.SIGINT, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    try:
        yield lambda step: signal.SIGTERM if reached_preemption_sync_point(step) else None
    finally:
        signal.signal(signal.SIGINT, previous_handler)
