"""The processes of one run, on one machine or on many, each with devices of its own."""

import logging
import sys
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

import jax
import numpy as np

from attnlab import environment
from attnlab.errors import RunError, UserError

T = TypeVar('T')

HEARTBEAT_SECONDS = 10
"""Seconds without a sign of life after which a process is given up, and with it the run."""


def join_processes(count: int | None, number: int | None, coordinator: str | None) -> None:
    """Makes this process one of several; before any device is used.

    count, number, coordinator: how many they are, which this is, HOST:PORT where number 0 listens.  All None: what
    SLURM, Open MPI or a cloud's TPUs say of themselves.

    Raises UserError where the others cannot be reached, and where the environment says nothing.
    """
    if number is not None:
        logging.warning('process %d of %d waits for the others at %s', number, count, coordinator)
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            number,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=3 * HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        where = 'neither SLURM nor Open MPI nor a cloud says where they are' if coordinator is None else coordinator
        reason = str(error).splitlines()[0]
        raise UserError(f'the processes of the run do not come together: {where} ({reason})') from error
    sys.excepthook = _told
    environment.is_distributed = True


def _told(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """End this process at once on an unexpected error, so that the others notice.

    A device that fails may have lost another process, without a name; the coordinator has time to print the name. On a
    CPU the transport may also abort this process first; then the launcher is what names the process that was lost.
    """
    if issubclass(kind, jax.errors.JaxRuntimeError):
        lines = str(error).splitlines() or [kind.__name__]
        environment.print_error(prefix_process_number(f'another one was lost, or a device failed: {lines[0]}'))
        time.sleep(2 * HEARTBEAT_SECONDS)  # it ends this process before, if it has something to say
    else:
        sys.__excepthook__(kind, error, trace)  # type: ignore[arg-type]
    exit_process(1)


def exit_process(code: int) -> NoReturn:
    """End the process at once: at a usual end it would wait for the others, and they perhaps for it."""
    if is_first_process():  # the coordinator: the others first print their own errors
        time.sleep(1.0)
    environment.exit_now(code)


def prefix_process_number(line: str) -> str:
    """The line with the number of this process in front, if there are several."""
    return f'process {jax.process_index()}: {line}' if is_multi_process() else line


def is_multi_process() -> bool:
    """Whether there are others beside this one."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first_process() -> bool:
    """Whether this is the process that writes what all have in common."""
    return not is_multi_process() or jax.process_index() == 0


def broadcast_scores(scores: dict[str, float]) -> dict[str, float]:
    """The numbers that the first process has, in every one: a last bit that differs may decide what is the best."""
    if not is_multi_process():
        return scores
    from jax.experimental import multihost_utils

    bits = np.array(list(scores.values()), np.float64).view(np.uint32)
    agreed = np.asarray(multihost_utils.broadcast_one_to_all(bits)).view(np.float64)
    return dict(zip(scores, agreed.tolist(), strict=True))


def run_in_all(do: Callable[[], T]) -> T:
    """Does something in every process and goes on once all have; where some fail, the first of them says why, and the
    others leave without a word."""
    made, failed = None, None
    try:
        made = do()
    except Exception as error:
        failed = error
    if is_multi_process():
        from jax.experimental import multihost_utils

        code = 0 if failed is None else 2 if isinstance(failed, UserError) else 1
        codes = multihost_utils.process_allgather(np.array(code))
        wrong = np.flatnonzero(codes)
        if wrong.size and wrong[0] != jax.process_index():
            raise UserError('') if codes[wrong[0]] == 2 else RunError('')
    if failed is not None:
        raise failed
    return made  # type: ignore[return-value]


def run_in_first(do: Callable[[], None]) -> None:
    """Lets the first process do something before any goes on; as in `run_in_all`."""
    run_in_all(do if is_first_process() else lambda: None)


def barrier(what: str) -> None:
    """Waits until all processes have come here."""
    if is_multi_process():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)
