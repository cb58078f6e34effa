"""Comparable times: functions timed in turns on one machine, and a description of the machine."""

from __future__ import annotations

import math
import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def time_interleaved(
    functions: Mapping[str, Callable[[], Any]], rounds: int, *, seconds: float = math.inf, seed: int | None = None,
    check: Callable[[dict[str, Any]], None] | None = None, settle: float = 0.0,
) -> dict[str, list[float]]:  # fmt: skip
    """Time functions in turns; return the seconds of each function, one entry for each round.  Compare the medians.

    A function returns when its work is done: it must block until a device's result is ready.

    Each function is first called once without timing, which compiles it and warms caches.  Then every round calls every
    function once, and each round starts with another function, so that slow phases of the machine and the caches that a
    function leaves behind affect all functions alike.

    rounds: most rounds.  seconds: after this time and at least three rounds, no further round begins.
    seed: if set, the order is drawn anew in each round.  This helps if a function frees much memory, which slows down
      the function after it.
    check: called with the results of the untimed calls; raises if they do not agree.
    settle: before each timed call, the function is called without timing for this many seconds.  A training step
      normally follows other steps of its own, with memory and threads as they left them; threads of another library may
      wait for work at full speed for a while.
    """
    results = {name: function() for name, function in functions.items()}
    if check:
        check(results)
    del results  # their memory would affect the timed calls
    times: dict[str, list[float]] = {name: [] for name in functions}
    names, generator, begin = list(functions), random.Random(seed), time.perf_counter()
    for round_number in range(rounds):
        if round_number >= 3 and time.perf_counter() - begin >= seconds:
            break
        first = round_number % len(names)
        order = names[first:] + names[:first] if seed is None else generator.sample(names, len(names))
        for name in order:
            start = time.perf_counter()
            while time.perf_counter() - start < settle:
                functions[name]()
            start = time.perf_counter()
            functions[name]()
            times[name].append(time.perf_counter() - start)
    return times


def describe_hardware(packages: Sequence[str] = ()) -> str:
    """Return one line: processor, cores that this process may use, versions of Python and of installed `packages`."""
    get_cores = getattr(os, 'sched_getaffinity', None)  # on Linux: the cores that a container may use
    cores = len(get_cores(0)) if get_cores else os.cpu_count() or 1
    versions = {'Python': platform.python_version(), **{name: _installed_version(name) for name in packages}}
    parts = [_processor_name(Path('/proc/cpuinfo')), f'{cores} core{"s" * (cores > 1)}']
    return ', '.join(parts + [f'{name} {number}' for name, number in versions.items() if number])


def _processor_name(cpuinfo: Path) -> str:
    lines = cpuinfo.read_text('utf-8', 'replace').splitlines() if cpuinfo.exists() else []
    models = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    return models[0] if models else platform.processor() or platform.machine()  # on Arm, cpuinfo has no model name


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
