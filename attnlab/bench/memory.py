"""Peak memory of one call, measured in a process of its own.

The compiler's count of temporary memory does not include the copies that its matrix products make.  So the measure is
the peak of the resident memory of the process, minus its resident memory before the call.
"""

import ctypes
import re
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from attnlab.bench import attention_functions
from attnlab.errors import RunError

PROCESS_STATUS = Path('/proc/self/status')
CLEAR_REFS = Path('/proc/self/clear_refs')
MEMORY_INFO = Path('/proc/meminfo')


def can_measure_memory() -> bool:
    """Return whether this system reports peak memory; only Linux does."""
    return CLEAR_REFS.exists()


def available_memory() -> float:
    """Return the bytes that are free for a new process; infinity if the system does not report them."""
    return _read_bytes(MEMORY_INFO, 'MemAvailable') if MEMORY_INFO.exists() else float('inf')


def measure_peak_memory(name: str, problem: attention_functions.AttentionProblem) -> int:
    """Return the growth of a new process during the first call of a function, in bytes, results included.

    name: as in `attention_functions.prepare_function`.

    Raises RunError if the system ends the process, for example because memory runs out.
    """
    # Spawned, not forked: a fork would start with the memory and the peak of its parent.
    with ProcessPoolExecutor(1, mp_context=get_context('spawn')) as pool:
        try:
            return pool.submit(memory_growth, name, problem).result()
        except BrokenProcessPool:
            raise RunError('was ended by the system') from None


def memory_growth(name: str, problem: attention_functions.AttentionProblem) -> int:
    """Return the same as `measure_peak_memory`, measured in this process."""
    B, _, N, H = problem.shape
    # The first call loads libraries and starts threads.
    attention_functions.prepare_function(name, problem._replace(shape=(B, 64, N, H)))()
    call = attention_functions.prepare_function(name, problem)
    # Memory that is free but still held by the process would hide a part of the growth.
    if trim := getattr(ctypes.CDLL(None), 'malloc_trim', None):
        trim(0)
    CLEAR_REFS.write_text('5')  # resets the peak, which compilation has raised
    before = _read_bytes(PROCESS_STATUS, 'VmRSS')
    call()
    return _read_bytes(PROCESS_STATUS, 'VmHWM') - before


def _read_bytes(file: Path, name: str) -> int:
    """Return the number in a line such as `VmRSS:  1024 kB`, in bytes."""
    match = re.search(rf'^{name}:\s+(\d+) kB', file.read_text(), re.MULTILINE)
    if not match:
        raise RunError(f'{file} has no line {name}')
    return 1024 * int(match[1])
