"""SIGTERM and SIGINT in the processes of a sweep."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from attnlab.errors import Stopped
from attnlab.train.signals import report_signals


class StopSignals:
    """The first signal that came, None until then, and the count of all that came.

    raises: whether a signal raises Stopped where it arrives; otherwise it is kept until the next `check`.
    """

    def __init__(self, raises: bool) -> None:
        self.came: int | None = None
        self.count = 0
        self.raises = raises

    def keep(self, number: int) -> None:
        self.came = self.came or number
        self.count += 1

    def check(self) -> None:
        """Raises Stopped if a signal came."""
        if self.came is not None:
            raise Stopped(self.came)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Signals raise here."""
        self.raises = True
        try:
            self.check()
            yield
        finally:
            self.raises = False

    def _handle(self, number: int, frame: object) -> None:
        self.keep(number)
        if self.raises:
            self.check()


@contextmanager
def handle_stop_signals(raises: bool = False) -> Iterator[StopSignals]:
    """Takes both signals over, except one that the process was started to ignore.

    Signals that the training loop takes for itself are kept too: it forgets one that comes after its last step began.
    """
    signals = StopSignals(raises)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, signals._handle)
    try:
        with report_signals(signals.keep):
            yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
