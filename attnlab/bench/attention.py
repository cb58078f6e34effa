"""`attnlab.dot_product_attention` beside the functions that one would call instead: time and peak memory.

Prints Markdown tables, and leaves all times and two pictures in `bench/attention/`.
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
LENGTHS = (1024, 2048, 4096, 8192, 16384)  # of the table of memory, at B = 1, N = 4, H = 64
PACKAGES = ('jax', 'flax', 'torch')
SEED, ROUNDS, SECONDS = 0, 50, 10.0  # at most so many rounds and, after three, so many seconds a row
TOLERANCE = 1e-5  # of the largest number in an array
MEMORY_FRACTION = 0.9  # of the memory that is free may be taken


class SpeedRow(NamedTuple):
    """times: name -> seconds, one entry a round.  missing: name -> why it was not run.  chosen: what None takes."""

    problem: AttentionProblem
    times: dict[str, list[float]]
    missing: dict[str, str]
    chosen: str


class MemoryRow(NamedTuple):
    """growth: name -> bytes."""

    problem: AttentionProblem
    growth: dict[str, int]
    missing: dict[str, str]


def main() -> None:
    """Measures everything, a quarter of an hour on two cores; on the CPU, where all sides run."""
    if jax.default_backend() != 'cpu':
        raise UserError(f'attention is measured on a CPU, got {jax.default_backend()}; set JAX_PLATFORMS=cpu')
    measure_attention(SHAPES, LENGTHS, OUTPUT_FOLDER)


def measure_attention(shapes: Sequence[tuple[int, int, int, int]], lengths: Sequence[int], folder: Path) -> None:
    """Peak memory at the lengths, then times at the shapes, each printed as it is known; pictures of both."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'cannot make the folder {folder}: {error.strerror}') from None
    machine = f'{describe_hardware(PACKAGES)}, seed {SEED}'
    print(machine)
    if 'PyTorch' not in peer_names():
        print("PyTorch is left out: it is not installed; pip install 'attnlab[peers]' installs it")
    if memory.can_measure_memory():
        peaks = _peaks(lengths)
    else:
        print('peak memory is left out: only Linux tells it')
        peaks = []
    rows = _rows(shapes)
    _write(folder, machine, peaks, rows)
    print(f'\nall times and the pictures are in {folder}/')


# Measuring


def compare_speed(problem: AttentionProblem, names: Sequence[str]) -> SpeedRow:
    """The sides of those names; raises RunError unless all that run agree."""
    missing = {name: reason for name in names if (reason := reason_not_run(name, problem))}
    functions = {name: prepare_function(name, problem, SEED) for name in names if name not in missing}
    check = lambda results: check_agreement(results, problem)
    times = time_interleaved(functions, ROUNDS, seconds=SECONDS, seed=SEED, check=check)
    return SpeedRow(problem, times, missing, supported_implementations(problem)[0])


def reason_not_run(name: str, problem: AttentionProblem) -> str:
    """Why the side cannot run the problem here, '' if it can."""
    if name not in (*supported_implementations(problem), *peer_names()):
        return 'does not serve it'
    needed, free = estimate_peak_bytes(name, problem), memory.available_memory()
    return (
        f'needs about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free' if needed > MEMORY_FRACTION * free else ''
    )


def check_agreement(results: dict[str, tuple], problem: AttentionProblem) -> None:
    """Raises RunError unless every array of every side is that of the first, within the tolerance."""
    first, *others = results
    for name in others:
        for ours, theirs in zip(results[first], results[name], strict=True):
            ours, theirs = np.asarray(ours), np.asarray(theirs)
            apart, largest = np.max(np.abs(ours - theirs)), np.max(np.abs(ours))
            if not apart <= TOLERANCE * largest:  # NaN is apart
                raise RunError(f'{first} and {name} are {apart:.1e} apart of at most {largest:.1e}: {problem}')


def _peaks(lengths: Sequence[int]) -> list[MemoryRow]:
    problems = [AttentionProblem((1, T, 4, 64), backward=True) for T in lengths]
    names = [*sorted({name for problem in problems for name in supported_implementations(problem)}), *peer_names()]
    names.remove('flax')  # takes what jax.nn takes
    print('\nPeak memory of forward and backward in MiB, B = 1, N = 4, H = 64, each call in a process of its own\n')
    print(_line(['T', *names]), _rule(1 + len(names)), sep='\n')
    peaks = []
    for problem in problems:
        peaks.append(found := _peak(problem, names))
        cells = [f'{found.growth[name] / 2**20:,.0f}' if name in found.growth else '-' for name in names]
        print(_line([f'{problem.shape[1]:,}', *cells]), flush=True)
    _explain(peaks)
    return peaks


def _peak(problem: AttentionProblem, names: Sequence[str]) -> MemoryRow:
    growth, missing = {}, {}
    for name in names:
        if reason := reason_not_run(name, problem):
            missing[name] = reason
            continue
        try:
            growth[name] = memory.measure_peak_memory(name, problem)
        except RunError as error:  # the estimate was too low for this machine; the rest can still be measured
            missing[name] = str(error)
    return MemoryRow(problem, growth, missing)


def _rows(shapes: Sequence[tuple[int, int, int, int]]) -> list[SpeedRow]:
    problems = [AttentionProblem(shape, *kind) for kind in product((False, True), (False, True)) for shape in shapes]
    names = [*sorted({name for problem in problems for name in supported_implementations(problem)}), *peer_names()]
    print(f'\nMilliseconds in float32, medians of 3 to {ROUNDS} rounds; bold is what implementation=None takes, and')
    print('"times" how often it is done in the time of the fastest peer. Outputs and gradients agree to')
    print(f'{TOLERANCE:g} of their largest number; "both" is forward and backward.\n')
    head = ['B, T, N, H', 'mask', 'pass', *names, 'times']
    print(_line(head), _rule(len(head)), sep='\n')
    rows = []
    for problem in problems:
        rows.append(row := compare_speed(problem, names))
        print(_line(_cells(row, names)), flush=True)
    _explain(rows)
    return rows


# Printing and writing


def _cells(row: SpeedRow, names: Sequence[str]) -> list[str]:
    medians = {name: 1e3 * median(times) for name, times in row.times.items()}
    shown = {name: f'{value:.3g}' if value < 100 else f'{value:,.0f}' for name, value in medians.items()}
    shown[row.chosen] = f'**{shown[row.chosen]}**'
    others = [value for name, value in medians.items() if name in peer_names()]
    problem = row.problem
    return [
        ', '.join(map(str, problem.shape)), 'causal' if problem.causal else 'plain',
        'both' if problem.backward else 'forward', *(shown.get(name, '-') for name in names),
        f'{min(others) / medians[row.chosen]:.2f}' if others else '-',
    ]  # fmt: skip


def _line(cells: Sequence[str]) -> str:
    return f'| {cells[0]:>14} | {" | ".join(f"{cell:>9}" for cell in cells[1:])} |'


def _rule(columns: int) -> str:
    return _line(['-' * 13 + ':', *['-' * 8 + ':'] * (columns - 1)])


def _explain(found: Sequence[SpeedRow | MemoryRow]) -> None:
    """A line for each place that was left empty."""
    for each in found:
        for name, reason in each.missing.items():
            print(f'\n-: {name} at {each.problem} {reason}', end='')
    print()


def _write(folder: Path, machine: str, peaks: list[MemoryRow], rows: list[SpeedRow]) -> None:
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
