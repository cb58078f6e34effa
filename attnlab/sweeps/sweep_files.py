"""The files in which the state of a sweep is stored, readable from any machine.

DIR/sweep.json                   the plan of the sweep; written once, by the process that starts first
DIR/points/NAME/point.json       number and overrides of a point of a search; other points are in sweep.json
DIR/points/NAME/running.json     the process that runs the point, or ran it last; rewritten while the point runs
DIR/points/NAME/outcome.json     how the point ended
DIR/points/NAME/log.txt          the output of the run, with the traceback of a failure
DIR/points/NAME/run              the work directory that `train` writes
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from attnlab import files
from attnlab.errors import UserError

PointStatus = Literal['waiting', 'running', 'done', 'failed', 'pruned']
Direction = Literal['max', 'min']

HEARTBEAT_SECONDS = 5.0
"""Seconds between two heartbeats of a process that runs a point."""

GRACE_SECONDS = 60.0
"""Seconds without a heartbeat after which a process counts as dead."""


@dataclass(frozen=True)
class Outcome:
    """How a point ended.

    metric, direction: `Task.best`; None if the point failed before its task was built.
    value, step: the best evaluation of the run and its step; None if there was no evaluation.
    seconds: training time of the point, over all its starts.
    reason: one line: why the point failed, or which point has the same config and was trained instead; None otherwise.
    diverged_at: the step at which the loss was no longer finite, if the point failed for that; None otherwise, and in
      the outcomes of earlier versions.
    """

    status: Literal['done', 'failed', 'pruned']
    metric: str | None
    direction: Direction | None
    value: float | None
    step: int | None
    seconds: float
    reason: str | None = None
    diverged_at: int | None = None

    def __str__(self) -> str:
        score = '' if self.value is None else f', best {self.metric} {self.value:.6g} at step {self.step}'
        return f'{self.status}{score}{f": {self.reason}" if self.reason else ""}'


@dataclass(frozen=True)
class PointRow:
    """A point and its current state; `value` to `diverged_at` as in `Outcome`.

    overrides: dotted key -> bool, int, float, str, None or a tuple of these, in the order of the sweep.
    run: work directory of the point, which need not exist yet.
    """

    number: int
    name: str
    overrides: dict[str, Any]
    run: Path
    status: PointStatus
    value: float | None = None
    step: int | None = None
    seconds: float | None = None
    reason: str | None = None
    diverged_at: int | None = None


@dataclass(frozen=True)
class SweepResults:
    """The content of a sweep's directory.

    config: the experiment file and its argument, as on the command line.
    sweep: the names of the sweeps, or the name of the search.
    overrides: (dotted key, text) pairs of the command line, which apply to every point.
    metric, direction: those of the points' outcomes; None while there is no outcome.
    rows: the points by number; of a search, the points drawn so far.
    """

    folder: Path
    config: str
    sweep: tuple[str, ...]
    overrides: tuple[tuple[str, str], ...]
    metric: str | None
    direction: Direction | None
    rows: tuple[PointRow, ...]


def read_sweep(folder: str | os.PathLike) -> SweepResults:
    """Read the sweep in a directory.

    Raises UserError if the directory holds no sweep, a file is damaged, or the points have different metrics.
    """
    folder = Path(folder)
    spec = read_spec(folder)
    if spec is None:
        raise UserError(f'{folder} holds no sweep (it has no sweep.json)')
    points = spec['points']
    if spec.get('search'):
        points = [point for path in (folder / 'points').glob('*/point.json') if (point := read_point(path))]
    points = sorted(points, key=lambda point: point['number'])
    outcomes = {point['name']: read_outcome(folder, point['name']) for point in points}
    metrics: set[tuple[str, Direction | None]] = {
        (outcome.metric, outcome.direction) for outcome in outcomes.values() if outcome and outcome.metric
    }
    if len(metrics) > 1:
        names = ' and '.join(sorted(f'{metric} ({direction})' for metric, direction in metrics))
        raise UserError(f'{folder}: the points of the sweep have different metrics: {names}')
    metric, direction = next(iter(metrics), (None, None))
    return SweepResults(
        folder=folder,
        config=spec['config'],
        sweep=tuple(spec['sweep']),
        overrides=tuple((key, text) for key, text in spec['overrides']),
        metric=metric,
        direction=direction,
        rows=tuple(_point_row(folder, point, outcomes[point['name']]) for point in points),
    )


def _point_row(folder: Path, point: dict[str, Any], outcome: Outcome | None) -> PointRow:
    overrides = {key: _lists_to_tuples(value) for key, value in point['overrides'].items()}
    identity = point['number'], point['name'], overrides, run_folder(folder, point['name'])
    if outcome is None:
        running = _is_running(point_folder(folder, point['name']) / 'running.json')
        return PointRow(*identity, 'running' if running else 'waiting')
    return PointRow(
        *identity, outcome.status, outcome.value, outcome.step, outcome.seconds, outcome.reason, outcome.diverged_at
    )


def point_folder(folder: Path, name: str) -> Path:
    """Return the folder with all files of a point."""
    return folder / 'points' / name


def run_folder(folder: Path, name: str) -> Path:
    """Return the work directory of a point's training."""
    return point_folder(folder, name) / 'run'


def read_spec(folder: Path) -> dict[str, Any] | None:
    """Return the content of sweep.json, or None if the file does not exist."""
    return read_json(Path(folder) / 'sweep.json', 'config', 'sweep', 'overrides', 'points')


def read_outcome(folder: Path, name: str) -> Outcome | None:
    """Return the outcome of a point, or None if the point has not ended."""
    required = [field.name for field in fields(Outcome) if field.default is MISSING]
    tree = read_json(point_folder(folder, name) / 'outcome.json', *required)
    known = [field.name for field in fields(Outcome)]
    return Outcome(**{key: value for key, value in tree.items() if key in known}) if tree else None


def write_outcome(folder: Path, name: str, outcome: Outcome) -> None:
    """Write the outcome of a point atomically."""
    write_json(point_folder(folder, name) / 'outcome.json', asdict(outcome))


def delete_outcome(folder: Path, name: str, point: bool = False) -> None:
    """Delete the outcome of a point; if `point`, also the point.json of a point of a search."""
    for file in ('outcome.json', *(['point.json'] if point else [])):
        (point_folder(folder, name) / file).unlink(missing_ok=True)


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Write a JSON file atomically: a reader gets the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_file(path, _to_json(tree))


def create_json(path: Path, tree: Mapping[str, Any]) -> bool:
    """Write a JSON file if it does not exist; return whether this call wrote it.

    Of several processes that call this at once, exactly one writes the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = files.temporary_path(path)
    try:
        part.write_text(_to_json(tree), encoding='utf-8')
        os.link(part, path)  # unlike a rename, this fails if the file exists
    except FileExistsError:
        return False
    finally:
        part.unlink(missing_ok=True)
    return True


def _to_json(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False) + '\n'


def read_json(path: Path, *keys: str) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file does not exist.

    Raises UserError if the file cannot be read, holds no JSON object, or the object lacks one of `keys`.
    """
    try:
        tree = json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f'{path} cannot be read: {error}') from error
    if not isinstance(tree, dict):
        raise UserError(f'{path} holds a {type(tree).__name__}; expected an object with {", ".join(keys)}')
    if missing := [key for key in keys if key not in tree]:
        raise UserError(f'{path} is damaged: it has no {", ".join(missing)}')
    return tree


def read_point(path: Path) -> dict[str, Any] | None:
    """Return number, name and overrides of a point of a search from its point.json, or None if there is no file."""
    return read_json(path, 'number', 'name', 'overrides')


def write_running(folder: Path, name: str, running: bool, started: float, seconds: float) -> None:
    """Record that this process runs a point, or no longer runs it.

    started: time of the start, in seconds since the epoch.  seconds: training time of the point so far.
    """
    process = {'running': running, 'host': socket.gethostname(), 'pid': os.getpid()}
    write_json(point_folder(folder, name) / 'running.json', process | {'started': started, 'seconds': seconds})


def read_training_seconds(folder: Path, name: str) -> float:
    """Return the training time of a point in all earlier starts, in seconds."""
    tree = read_json(point_folder(folder, name) / 'running.json', 'seconds')
    return tree['seconds'] if tree else 0.0


def _is_running(path: Path) -> bool:
    """Return whether a running.json records a running point and is at most `GRACE_SECONDS` old."""
    tree = read_json(path, 'running')
    return bool(tree and tree['running']) and time.time() - path.stat().st_mtime < GRACE_SECONDS


def _lists_to_tuples(value: Any) -> Any:
    return tuple(_lists_to_tuples(inner) for inner in value) if isinstance(value, list) else value
