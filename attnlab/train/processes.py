"""Coordination of the processes of one run, on one machine or on several, each with its own devices."""

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
"""Seconds without a heartbeat after which a process counts as lost, which ends the run."""


def join_processes(count: int | None, number: int | None, coordinator: str | None) -> None:
    """Connect this process to the other processes of its run; call before any device is used.

    count: number of processes.
    number: index of this process.
    coordinator: HOST:PORT on which process 0 listens.

    All three are None if SLURM, Open MPI or a cloud's TPU environment provides them.

    Raises UserError if the other processes cannot be reached, and if the environment does not provide the values.
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
        reason = str(error).splitlines()[0]
        if coordinator is None:
            problem = 'found no settings of SLURM, Open MPI or a cloud TPU'
        else:
            problem = f'the coordinator is {coordinator}'
        raise UserError(f'the processes of the run cannot connect: {problem} ({reason})') from error
    sys.excepthook = _exit_on_unexpected_error
    environment.is_distributed = True


def _exit_on_unexpected_error(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """Print an unexpected error and end this process at once, so that the other processes notice.

    The cause of a device error may be that another process was lost.  The error does not name that process; the
    coordinator does, if it gets the time.  On a CPU the transport may also abort this process first; then the launcher
    names the lost process.
    """
    if issubclass(kind, jax.errors.JaxRuntimeError):
        lines = str(error).splitlines() or [kind.__name__]
        message = f'another process was lost, or a device failed: {lines[0]}'
        environment.print_error(prefix_process_number(message))
        time.sleep(2 * HEARTBEAT_SECONDS)  # the coordinator ends this process within that time if a process was lost
    else:
        sys.__excepthook__(kind, error, trace)  # type: ignore[arg-type]
    exit_process(1)


def exit_process(code: int) -> NoReturn:
    """End this process at once: a normal exit would wait for the other processes, which may wait for this one."""
    if is_first_process():  # the coordinator: give the others time to print their own errors
        time.sleep(1.0)
    environment.exit_now(code)


def prefix_process_number(line: str) -> str:
    """Return the line with the number of this process before it, if there are several processes."""
    return f'process {jax.process_index()}: {line}' if is_multi_process() else line


def is_multi_process() -> bool:
    """Return whether this run has other processes."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first_process() -> bool:
    """Return whether this is process 0, the one that writes the files of the run."""
    return not is_multi_process() or jax.process_index() == 0


def broadcast_scores(scores: dict[str, float]) -> dict[str, float]:
    """Return the scores of the first process in every process.

    Without this, scores that differ in the last bit could make processes disagree on the best step.
    """
    if not is_multi_process():
        return scores
    from jax.experimental import multihost_utils

    bits = np.array(list(scores.values()), np.float64).view(np.uint32)
    values = np.asarray(multihost_utils.broadcast_one_to_all(bits)).view(np.float64)
    return dict(zip(scores, values.tolist(), strict=True))


def run_in_all(function: Callable[[], T]) -> T:
    """Call a function in every process, wait for all of them, and return its result in this process.

    If it raises in some processes, all processes raise: the first one that failed raises its exception, the others a
    UserError or RunError without a message, so that the error is printed once.
    """
    result, exception = None, None
    try:
        result = function()
    except Exception as error:
        exception = error
    if is_multi_process():
        from jax.experimental import multihost_utils

        code = 0 if exception is None else 2 if isinstance(exception, UserError) else 1
        codes = multihost_utils.process_allgather(np.array(code))
        failed = np.flatnonzero(codes)
        if failed.size and failed[0] != jax.process_index():
            raise UserError('') if codes[failed[0]] == 2 else RunError('')
    if exception is not None:
        raise exception
    return result  # type: ignore[return-value]


def run_in_first(function: Callable[[], None]) -> None:
    """Call a function in the first process, and wait for it in all; errors as in `run_in_all`."""
    run_in_all(function if is_first_process() else lambda: None)


def barrier(name: str) -> None:
    """Wait until all processes have called this function."""
    if is_multi_process():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
