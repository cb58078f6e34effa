"""Time and peak memory of `attnlab.dot_product_attention` and of the attention of JAX, Flax and PyTorch.

Prints Markdown tables, and writes all numbers and two figures to `bench/attention/`.
"""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import jax
import numpy as np

from attnlab.bench import attention_figures as figures
from attnlab.bench import memory
from attnlab.bench.attention_functions import (
    AttentionProblem,
    estimate_peak_bytes,
    peer_names,
    prepare_function,
    supported_implementations,
)
from attnlab.bench.timing import describe_hardware, time_interleaved
from attnlab.errors import RunError, UserError

OUTPUT_FOLDER = Path('bench/attention')
SHAPES = (
    (32, 64, 8, 32), (8, 256, 8, 64), (4, 1024, 8, 64), (1, 4096, 8, 64), (1, 8192, 8, 64), (1, 16384, 4, 64),
)  # fmt: skip
"""B, T, N, H of the timed calls."""

LENGTHS = (1024, 2048, 4096, 8192, 16384)
"""T of the memory measurements, at B = 1, N = 4, H = 64."""

PACKAGES = ('jax', 'flax', 'torch')
SEED = 0

ROUNDS, SECONDS = 50, 10.0
"""Most rounds of a row, and seconds after which no further round begins; three rounds always run."""

TOLERANCE = 1e-5
"""Largest difference between two arrays, relative to the largest number in them."""

MEMORY_FRACTION = 0.9
"""Part of the free memory that a call may need."""


class SpeedRow(NamedTuple):
    """Times of one problem.

    times: implementation -> seconds, one entry for each round.  missing: implementation -> reason why it was not run.
    chosen: the implementation that attnlab takes for `implementation=None`.
    """

    problem: AttentionProblem
    times: dict[str, list[float]]
    missing: dict[str, str]
    chosen: str


class MemoryRow(NamedTuple):
    """Peak memory of one problem.

    growth: implementation -> bytes.  missing: implementation -> reason why it was not run.
    """

    problem: AttentionProblem
    growth: dict[str, int]
    missing: dict[str, str]


def main() -> None:
    """Measure all problems, which takes a quarter of an hour on two cores.

    Raises UserError unless JAX runs on the CPU, where all implementations can run.
    """
    if jax.default_backend() != 'cpu':
        raise UserError(f'the attention benchmark runs on the CPU, got {jax.default_backend()}; set JAX_PLATFORMS=cpu')
    measure_attention(SHAPES, LENGTHS, OUTPUT_FOLDER)


def measure_attention(shapes: Sequence[tuple[int, int, int, int]], lengths: Sequence[int], folder: Path) -> None:
    """Measure peak memory at the lengths, then times at the shapes; print each row, and write numbers and figures.

    shapes: B, T, N, H.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'cannot make the folder {folder}: {error.strerror}') from None
    machine = f'{describe_hardware(PACKAGES)}, seed {SEED}'
    print(machine)
    if 'PyTorch' not in peer_names():
        print("PyTorch is not measured: it is not installed; pip install 'attnlab[peers]' installs it")
    if memory.can_measure_memory():
        peaks = _measure_memory_rows(lengths)
    else:
        print('peak memory is not measured: only Linux reports it')
        peaks = []
    rows = _measure_speed_rows(shapes)
    _write_results(folder, machine, peaks, rows)
    print(f'\nall numbers and the figures are in {folder}/')


# Measuring


def compare_speed(problem: AttentionProblem, names: Sequence[str]) -> SpeedRow:
    """Time the implementations called `names`; raise RunError unless all that run give the same results."""
    missing = {name: reason for name in names if (reason := reason_not_run(name, problem))}
    functions = {name: prepare_function(name, problem, SEED) for name in names if name not in missing}
    check = lambda results: check_agreement(results, problem)
    times = time_interleaved(functions, ROUNDS, seconds=SECONDS, seed=SEED, check=check)
    return SpeedRow(problem, times, missing, supported_implementations(problem)[0])


def reason_not_run(name: str, problem: AttentionProblem) -> str:
    """Return the reason why an implementation cannot run the problem on this machine, or '' if it can."""
    if name not in (*supported_implementations(problem), *peer_names()):
        return 'does not support this call'
    needed, free = estimate_peak_bytes(name, problem), memory.available_memory()
    if needed <= MEMORY_FRACTION * free:
        return ''
    return f'needs about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free'


def check_agreement(results: dict[str, tuple], problem: AttentionProblem) -> None:
    """Raise RunError unless the arrays of all implementations are equal within `TOLERANCE`.

    results: implementation -> its arrays, as returned by `prepare_function`.
    """
    first, *others = results
    for name in others:
        for first_array, array in zip(results[first], results[name], strict=True):
            difference = np.max(np.abs(np.asarray(first_array) - np.asarray(array)))
            largest = np.max(np.abs(np.asarray(first_array)))
            if not difference <= TOLERANCE * largest:  # written so that NaN also raises
                message = f'{first} and {name} differ by {difference:.1e} in numbers up to {largest:.1e}'
                raise RunError(f'{message}: {problem}')


def _measure_memory_rows(lengths: Sequence[int]) -> list[MemoryRow]:
    problems = [AttentionProblem((1, T, 4, 64), backward=True) for T in lengths]
    names = [*sorted({name for problem in problems for name in supported_implementations(problem)}), *peer_names()]
    names.remove('flax')  # needs as much memory as jax.nn
    print('\nPeak memory of forward and backward in MiB, B = 1, N = 4, H = 64, each call in a process of its own\n')
    print(_line(['T', *names]), _rule(1 + len(names)), sep='\n')
    peaks = []
    for problem in problems:
        peaks.append(row := _measure_memory_row(problem, names))
        cells = [f'{row.growth[name] / 2**20:,.0f}' if name in row.growth else '-' for name in names]
        print(_line([f'{problem.shape[1]:,}', *cells]), flush=True)
    _print_missing(peaks)
    return peaks


def _measure_memory_row(problem: AttentionProblem, names: Sequence[str]) -> MemoryRow:
    growth, missing = {}, {}
    for name in names:
        if reason := reason_not_run(name, problem):
            missing[name] = reason
            continue
        try:
            growth[name] = memory.measure_peak_memory(name, problem)
        except RunError as error:  # the estimate was too low for this machine; the others can still be measured
            missing[name] = str(error)
    return MemoryRow(problem, growth, missing)


def _measure_speed_rows(shapes: Sequence[tuple[int, int, int, int]]) -> list[SpeedRow]:
    problems = [AttentionProblem(shape, *kind) for kind in product((False, True), (False, True)) for shape in shapes]
    names = [*sorted({name for problem in problems for name in supported_implementations(problem)}), *peer_names()]
    print(f'\nMilliseconds in float32, medians of 3 to {ROUNDS} rounds; "both" is forward and backward. Bold is the')
    print('implementation that implementation=None takes, and "times" is the time of the fastest peer divided by its')
    print(f'time. Outputs and gradients are equal within {TOLERANCE:g} of their largest number.\n')
    head = ['B, T, N, H', 'mask', 'pass', *names, 'times']
    print(_line(head), _rule(len(head)), sep='\n')
    rows = []
    for problem in problems:
        rows.append(row := compare_speed(problem, names))
        print(_line(_speed_cells(row, names)), flush=True)
    _print_missing(rows)
    return rows


# Printing and writing


def _speed_cells(row: SpeedRow, names: Sequence[str]) -> list[str]:
    medians = {name: 1e3 * median(times) for name, times in row.times.items()}
    cells = {name: f'{value:.3g}' if value < 100 else f'{value:,.0f}' for name, value in medians.items()}
    cells[row.chosen] = f'**{cells[row.chosen]}**'
    peer_medians = [value for name, value in medians.items() if name in peer_names()]
    problem = row.problem
    return [
        ', '.join(map(str, problem.shape)), 'causal' if problem.causal else 'plain',
        'both' if problem.backward else 'forward', *(cells.get(name, '-') for name in names),
        f'{min(peer_medians) / medians[row.chosen]:.2f}' if peer_medians else '-',
    ]  # fmt: skip


def _line(cells: Sequence[str]) -> str:
    return f'| {cells[0]:>14} | {" | ".join(f"{cell:>9}" for cell in cells[1:])} |'


def _rule(columns: int) -> str:
    return _line(['-' * 13 + ':', *['-' * 8 + ':'] * (columns - 1)])


def _print_missing(rows: Sequence[SpeedRow | MemoryRow]) -> None:
    """Print the reason for each empty cell of a table."""
    for row in rows:
        for name, reason in row.missing.items():
            print(f'\n-: {name} at {row.problem} {reason}', end='')
    print()


def _write_results(folder: Path, machine: str, peaks: list[MemoryRow], rows: list[SpeedRow]) -> None:
    numbers = {
        'machine': machine,
        'memory': [{**peak.problem._asdict(), 'bytes': peak.growth, 'missing': peak.missing} for peak in peaks],
        'speed': [{**row.problem._asdict(), 'seconds': row.times, 'missing': row.missing, 'chosen': row.chosen}
                  for row in rows],
    }  # fmt: skip
    (folder / 'numbers.json').write_text(json.dumps(numbers, indent=1, allow_nan=False) + '\n')
    if peaks:
        figures.save_figure(figures.plot_memory(numbers['memory']), folder / 'memory.png')
    figures.save_figure(figures.plot_speed(numbers['speed']), folder / 'speed.png')
