"""Metrics of a run: `metrics.jsonl` with one JSON object per line, and TensorBoard event files in the same folder."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from attnlab import files
from attnlab.errors import RunError

WriteMetrics = Callable[[int, str, dict[str, float]], None]
"""(step, split, values).  The splits are 'train', 'valid' and 'speed'; only 'speed' differs between two equal runs."""


@contextmanager
def metrics_writer(workdir: Path, step: int, writes: bool = True):
    """Yield a `WriteMetrics` function for the steps after `step`.

    Records of later steps, which an interrupted run has left, are deleted first: the run writes them again.

    writes: whether to write at all; True for one process of a run and False for the others.

    Raises RunError with the path if the file cannot be written.
    """
    if not writes:
        yield lambda step, split, values: None
        return
    path = Path(workdir) / 'metrics.jsonl'
    with _raise_run_error(path):
        _delete_later_records(path, step)
        file = path.open('a', encoding='utf-8')

    @cache
    def open_tensorboard():
        from tensorboardX import SummaryWriter  # the import takes a second, so it waits for the first record

        # The queue is unlimited: if the thread of the writer has failed, as on a full disk, a limited queue fills up
        # and `add_scalar` blocks.
        return SummaryWriter(str(workdir), purge_step=step + 1, max_queue=0)

    def write(step: int, split: str, values: dict[str, float]) -> None:
        record = {'step': step, 'split': split} | {name: float(value) for name, value in values.items()}
        with _raise_run_error(path):
            file.write(json.dumps(record, allow_nan=False) + '\n')
            file.flush()
            tensorboard = open_tensorboard()
        for name, value in values.items():
            tensorboard.add_scalar(f'{split}/{name}', np.float64(value), step)

    try:
        yield write
    finally:
        with _raise_run_error(path), file:
            if open_tensorboard.cache_info().currsize:
                open_tensorboard().close()


@contextmanager
def _raise_run_error(path: Path):
    """Context manager that turns an OSError into a RunError with the path."""
    try:
        yield
    except OSError as error:
        raise RunError(f'{path} cannot be written: {error.strerror or error}') from error


def _delete_later_records(path: Path, step: int) -> None:
    """Delete the records after a step from a metrics file; if this fails half-way the file is unchanged."""
    try:
        remaining = [line for line in read_metrics_lines(path) if json.loads(line)['step'] <= step]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RunError(f'{path} has a line that is not a record of a step: delete that line to continue') from None
    text = ''.join(line + '\n' for line in remaining)
    if path.exists() and path.read_text(encoding='utf-8') != text:
        files.write_file(path, text)


def read_metrics_lines(path: Path) -> list[str]:
    """Return the complete lines of a metrics file; an empty list if there is no file.

    A last line without a line end, which a killed process leaves, is left out.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding='utf-8').split('\n')
    return lines


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """Return the records of a run's metrics.jsonl, in order; see `files.read_records`."""
    return files.read_records(Path(workdir) / 'metrics.jsonl')
