"""Numbers of a run: one JSON object a line in `metrics.jsonl`, and TensorBoard event files beside it."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np

Write = Callable[[int, str, dict[str, float]], None]
"""(step, split, values).  Splits: train, valid, and speed, which alone differs between two runs of one config."""


@contextmanager
def writer(workdir: Path, step: int, writes: bool = True):
    """A `Write` that continues behind `step`: what an interrupted run wrote after it is written again, so it goes.

    writes: False for all processes of a run but one.
    """
    if not writes:
        yield lambda step, split, values: None
        return
    from tensorboardX import SummaryWriter

    path = Path(workdir) / 'metrics.jsonl'
    kept = [line for line in read_lines(path) if json.loads(line)['step'] <= step]
    path.write_text(''.join(line + '\n' for line in kept), encoding='utf-8')
    with path.open('a', encoding='utf-8') as file, SummaryWriter(str(workdir), purge_step=step + 1) as board:

        def write(step: int, split: str, values: dict[str, float]) -> None:
            record = {'step': step, 'split': split} | {name: float(value) for name, value in values.items()}
            file.write(json.dumps(record, allow_nan=False) + '\n')
            file.flush()
            for name, value in values.items():
                board.add_scalar(f'{split}/{name}', np.float64(value), step)

        yield write


def read_lines(path: Path) -> list[str]:
    """The whole lines of a metrics file; none if there is no file.  A line cut off by a kill does not count."""
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding='utf-8').split('\n')
    return lines


def read(workdir: Path) -> list[dict]:
    """The records of a run, in order."""
    return [json.loads(line) for line in read_lines(Path(workdir) / 'metrics.jsonl')]
