"""Numbers of a run: one JSON object a line in `metrics.jsonl`, and TensorBoard event files beside it."""

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
"""(step, split, values).  Splits: train, valid, and speed, which alone differs between two runs of one config."""


@contextmanager
def metrics_writer(workdir: Path, step: int, writes: bool = True):
    """A `WriteMetrics` that continues behind `step`: what an interrupted run wrote after it is written again, so it goes.

    writes: False for all processes of a run but one.

    Raises RunError, naming the file, where it cannot be written.
    """
    if not writes:
        yield lambda step, split, values: None
        return
    path = Path(workdir) / 'metrics.jsonl'
    with _writing(path):
        _cut(path, step)
        file = path.open('a', encoding='utf-8')

    @cache
    def board():
        from tensorboardX import SummaryWriter  # takes a second: not before the first step

        # Once its thread has failed, for a full disk, a queue with an end would be full and waited for.
        return SummaryWriter(str(workdir), purge_step=step + 1, max_queue=0)

    def write(step: int, split: str, values: dict[str, float]) -> None:
        record = {'step': step, 'split': split} | {name: float(value) for name, value in values.items()}
        with _writing(path):
            file.write(json.dumps(record, allow_nan=False) + '\n')
            file.flush()
            shown = board()
        for name, value in values.items():
            shown.add_scalar(f'{split}/{name}', np.float64(value), step)

    try:
        yield write
    finally:
        with _writing(path), file:
            if board.cache_info().currsize:
                board().close()


@contextmanager
def _writing(path: Path):
    try:
        yield
    except OSError as error:
        raise RunError(f'{path} cannot be written: {error.strerror or error}') from error


def _cut(path: Path, step: int) -> None:
    """Ends a metrics file behind a step; a kill or a full disk in the midst of it leaves it as it was."""
    try:
        kept = [line for line in read_metrics_lines(path) if json.loads(line)['step'] <= step]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RunError(f'{path} has a line that is not a record of a step: delete that line to go on') from None
    text = ''.join(line + '\n' for line in kept)
    if path.exists() and path.read_text(encoding='utf-8') != text:
        files.write_file(path, text)


def read_metrics_lines(path: Path) -> list[str]:
    """The whole lines of a metrics file; none if there is no file.  A line cut off by a kill does not count."""
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding='utf-8').split('\n')
    return lines


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """Records of a run, in order; as `files.read_records`."""
    return files.read_records(Path(workdir) / 'metrics.jsonl')
