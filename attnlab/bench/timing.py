"""Times that may be compared: taken in turns on one machine, with the machine named."""

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
    """Seconds of each function, one entry a round; compare the medians.

    settle: a training step runs behind others of its own, and finds memory and threads as they left them; threads of
    another library may go on waiting for work at full speed for a while.  For so many seconds a function is called in
    its turn, none of the calls timed, before the one that is.

    A round calls every function once, each round starting with another one, so that a slow spell of the machine and
    what the one before left in the caches strike all alike.  With a `seed` the order is drawn anew each round: a
    function that frees much memory slows down the one after it, which then is not always the same.  An untimed call of
    each comes first: it compiles and warms up, and `check` gets what they return, to raise if they do not agree.
    After three rounds, none is begun once `seconds` have passed.
    A function returns when its work is done: block on a device's result inside it.
    """
    warm = {name: function() for name, function in functions.items()}
    if check:
        check(warm)
    del warm  # memory that is held would be one more difference between the calls
    times: dict[str, list[float]] = {name: [] for name in functions}
    names, draw, begin = list(functions), random.Random(seed), time.perf_counter()
    for turn in range(rounds):
        if turn >= 3 and time.perf_counter() - begin >= seconds:
            break
        first = turn % len(names)
        order = names[first:] + names[:first] if seed is None else draw.sample(names, len(names))
        for name in order:
            start = time.perf_counter()
            while time.perf_counter() - start < settle:
                functions[name]()
            start = time.perf_counter()
            functions[name]()
            times[name].append(time.perf_counter() - start)
    return times


def describe_hardware(packages: Sequence[str] = ()) -> str:
    """One line: the processor, the cores this process may use, Python, and the versions of installed `packages`."""
    usable = getattr(os, 'sched_getaffinity', None)  # Linux: what a container allows, not what the machine has
    cores = len(usable(0)) if usable else os.cpu_count() or 1
    found = {'Python': platform.python_version(), **{name: _version(name) for name in packages}}
    return ', '.join([_processor(Path('/proc/cpuinfo')), f'{cores} core{"s" * (cores > 1)}',
                      *(f'{name} {number}' for name, number in found.items() if number)])


def _processor(table: Path) -> str:
    lines = table.read_text('utf-8', 'replace').splitlines() if table.exists() else []
    models = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    return models[0] if models else platform.processor() or platform.machine()  # Arm's table names no model


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
