"""Handling of SIGTERM and SIGINT in the processes of a sweep."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from attnlab.errors import Stopped
from attnlab.train.signals import report_signals


class StopSignals:
    """The stop signals that this process has received.

    received: number of the first signal, None before it.  count: number of signals.
    raises: whether a signal raises Stopped as soon as it arrives; otherwise the next `check` raises.
    """

    def __init__(self, raises: bool) -> None:
        self.received: int | None = None
        self.count = 0
        self.raises = raises

    def record(self, number: int) -> None:
        """Record a signal without raising."""
        self.received = self.received or number
        self.count += 1

    def check(self) -> None:
        """Raise Stopped if a signal was received."""
        if self.received is not None:
            raise Stopped(self.received)

    @contextmanager
    def raise_immediately(self) -> Iterator[None]:
        """Raise Stopped inside this context as soon as a signal arrives, or at its start if one was received before."""
        self.raises = True
        try:
            self.check()
            yield
        finally:
            self.raises = False

    def _handle(self, number: int, frame: object) -> None:
        self.record(number)
        if self.raises:
            self.check()


@contextmanager
def handle_stop_signals(raises: bool = False) -> Iterator[StopSignals]:
    """Handle SIGTERM and SIGINT inside this context, except a signal that the process was started to ignore.

    Signals that the training loop handles itself are recorded too: the loop ignores a signal that arrives during its
    last step.
    """
    signals = StopSignals(raises)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    handlers = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in handlers:
        signal.signal(number, signals._handle)
    try:
        with report_signals(signals.record):
            yield signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
