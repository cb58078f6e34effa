"""Peak memory of one call, measured in a process of its own.

The compiler's own account of a program's temporaries leaves out what its matrix products copy, so what counts is what
the operating system sees: how far the resident memory of the process rises above where it stood before the call.
"""

import ctypes
import re
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from attnlab.bench import attention_functions as sides
from attnlab.errors import RunError

STATUS, CLEAR, MACHINE = (Path(f'/proc/{name}') for name in ('self/status', 'self/clear_refs', 'meminfo'))


def can_measure_memory() -> bool:
    """Whether this system tells: Linux does."""
    return CLEAR.exists()


def available_memory() -> float:
    """Bytes that a new process may take; infinity where the system does not tell."""
    return _read(MACHINE, 'MemAvailable') if MACHINE.exists() else float('inf')


def measure_peak_memory(name: str, problem: sides.AttentionProblem) -> int:
    """Bytes by which a fresh process grows at most during the first call of a side of the bench, results included.

    Raises RunError where the system ends the process, as it does where memory runs out.
    """
    # Started anew, not forked: a fork begins with the parent's memory, and its peak with the parent's peak.
    with ProcessPoolExecutor(1, mp_context=get_context('spawn')) as pool:
        try:
            return pool.submit(memory_growth, name, problem).result()
        except BrokenProcessPool:
            raise RunError('was ended by the system') from None


def memory_growth(name: str, problem: sides.AttentionProblem) -> int:
    """`measure_peak_memory`, in this process."""
    B, _, N, H = problem.shape
    sides.prepare_function(
        name, problem._replace(shape=(B, 64, N, H))
    )()  # libraries load and threads start at a first call
    call = sides.prepare_function(name, problem)
    if trim := getattr(ctypes.CDLL(None), 'malloc_trim', None):  # what is free but still held would hide some growth
        trim(0)
    CLEAR.write_text('5')  # the peak so far is forgotten, that of compiling included
    before = _read(STATUS, 'VmRSS')
    call()
    return _read(STATUS, 'VmHWM') - before


def _read(file: Path, name: str) -> int:
    """The bytes that a line such as `VmRSS:  1024 kB` tells."""
    found = re.search(rf'^{name}:\s+(\d+) kB', file.read_text(), re.MULTILINE)
    if not found:
        raise RunError(f'{file} tells no {name}')
    return 1024 * int(found[1])
