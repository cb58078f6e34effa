"""A wish to stop, noticed between two steps."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def wishes() -> Iterator[Callable[[], int | None]]:
    """What tells which of SIGTERM and SIGINT has come, None until then; a second one acts as it always does.

    One that the process was started to ignore, as by nohup or behind an &, stays ignored.  Outside of the main thread,
    where Python hands out no signals, it is always None.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: object) -> None:
        came.append(number)
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: came[0] if came else None
    finally:
        restore()
