"""What is known of a sweep's points, in files that any machine can read.

DIR/sweep.json                   what the sweep is; written once, by whoever comes first
DIR/points/NAME/point.json       number and overrides; of a search, whose points are not known before
DIR/points/NAME/running.json     who runs it, or ran it last; written anew as long as that goes on
DIR/points/NAME/outcome.json     how it ended
DIR/points/NAME/log.txt          the traceback of what failed
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
"""Seconds between two signs of life of who runs a point."""

GRACE_SECONDS = 60.0
"""Seconds without one after which it counts as dead."""


@dataclass(frozen=True)
class Outcome:
    """How a point ended.

    metric, direction: of `Task.best`; None where it failed before its task was built.
    value: the best of the run's evaluations, and step: that of it; None where there was none.
    seconds: that this point was trained, over all its starts.
    reason: in one line, of what failed, or was not trained as another point has its config; None otherwise.
    diverged_at: the step at which the loss was no longer finite, for a point that failed by that; None otherwise, and
      in the outcomes of earlier versions.
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
    """A point as it stands: what it is, and what came of it; `value` to `diverged_at` as in `Outcome`.

    overrides: dotted key -> bool, int, float, str, None or a tuple of these, in the order of the sweep.
    run: its work directory, which need not exist yet.
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
    """A sweep's directory, read.

    config: the experiment file and its argument, as on the command line.
    sweep: the names of its sweeps or of its search.
    overrides: (dotted key, text) of the command line, which hold for every point.
    metric, direction: of the points' outcomes; None as long as there is none.
    rows: by number; of a search, those that were begun.
    """

    folder: Path
    config: str
    sweep: tuple[str, ...]
    overrides: tuple[tuple[str, str], ...]
    metric: str | None
    direction: Direction | None
    rows: tuple[PointRow, ...]


def read_sweep(folder: str | os.PathLike) -> SweepResults:
    """The sweep in a directory; raises UserError where there is none, and where its points measure different things."""
    folder = Path(folder)
    spec = read_spec(folder)
    if spec is None:
        raise UserError(f'{folder} holds no sweep (it has no sweep.json)')
    points = spec['points']
    if spec.get('search'):
        points = [known for path in (folder / 'points').glob('*/point.json') if (known := read_point(path))]
    points = sorted(points, key=lambda point: point['number'])
    ended = {point['name']: read_outcome(folder, point['name']) for point in points}
    ends = [end for end in ended.values() if end]
    measured: set[tuple[str, Direction | None]] = {(end.metric, end.direction) for end in ends if end.metric}
    if len(measured) > 1:
        several = ' and '.join(sorted(f'{metric} ({direction})' for metric, direction in measured))
        raise UserError(f'{folder}: the points of the sweep measure different things: {several}')
    metric, direction = next(iter(measured), (None, None))
    return SweepResults(
        folder=folder,
        config=spec['config'],
        sweep=tuple(spec['sweep']),
        overrides=tuple((key, text) for key, text in spec['overrides']),
        metric=metric,
        direction=direction,
        rows=tuple(_row(folder, point, ended[point['name']]) for point in points),
    )


def _row(folder: Path, point: dict[str, Any], end: Outcome | None) -> PointRow:
    values = {key: _tupled(value) for key, value in point['overrides'].items()}
    known = point['number'], point['name'], values, run_folder(folder, point['name'])
    if end is None:
        running = _alive(point_folder(folder, point['name']) / 'running.json')
        return PointRow(*known, 'running' if running else 'waiting')
    return PointRow(*known, end.status, end.value, end.step, end.seconds, end.reason, end.diverged_at)


def point_folder(folder: Path, name: str) -> Path:
    """Where all about a point lies."""
    return folder / 'points' / name


def run_folder(folder: Path, name: str) -> Path:
    """The work directory of a point's training."""
    return point_folder(folder, name) / 'run'


def read_spec(folder: Path) -> dict[str, Any] | None:
    """What sweep.json says; None where there is none."""
    return read_json(Path(folder) / 'sweep.json', 'config', 'sweep', 'overrides', 'points')


def read_outcome(folder: Path, name: str) -> Outcome | None:
    """How a point ended, None for one that did not yet."""
    required = [field.name for field in fields(Outcome) if field.default is MISSING]
    found = read_json(point_folder(folder, name) / 'outcome.json', *required)
    known = [field.name for field in fields(Outcome)]
    return Outcome(**{name: value for name, value in found.items() if name in known}) if found else None


def write_outcome(folder: Path, name: str, end: Outcome) -> None:
    """Writes it whole or not at all."""
    write_json(point_folder(folder, name) / 'outcome.json', asdict(end))


def delete_outcome(folder: Path, name: str, point: bool = False) -> None:
    """Takes away how a point ended, and, of a search, also what it was."""
    for file in ('outcome.json', *(['point.json'] if point else [])):
        (point_folder(folder, name) / file).unlink(missing_ok=True)


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Writes JSON that a reader sees whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_file(path, _json(tree))


def create_json(path: Path, tree: Mapping[str, Any]) -> bool:
    """Writes JSON where there is no such file yet, and says whether that was so: of several, one does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = files.temporary_path(path)
    try:
        part.write_text(_json(tree), encoding='utf-8')
        os.link(part, path)  # unlike a rename, refused where the name is taken
    except FileExistsError:
        return False
    finally:
        part.unlink(missing_ok=True)
    return True


def _json(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False) + '\n'


def read_json(path: Path, *keys: str) -> dict[str, Any] | None:
    """The JSON object in a file, None where there is none; UserError for anything else, and for one without a key."""
    try:
        found = json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f'{path} cannot be read: {error}') from error
    if not isinstance(found, dict):
        raise UserError(f'{path} holds a {type(found).__name__}; expected an object with {", ".join(keys)}')
    if missing := [key for key in keys if key not in found]:
        raise UserError(f'{path} is damaged: it has no {", ".join(missing)}')
    return found


def read_point(path: Path) -> dict[str, Any] | None:
    """Number, name and overrides of a point of a search, from its point.json."""
    return read_json(path, 'number', 'name', 'overrides')


def write_running(folder: Path, name: str, running: bool, started: float, seconds: float) -> None:
    """Says that this process runs a point, or has ended to; seconds: that the point was trained so far."""
    who = {'running': running, 'host': socket.gethostname(), 'pid': os.getpid()}
    write_json(point_folder(folder, name) / 'running.json', who | {'started': started, 'seconds': seconds})


def read_training_seconds(folder: Path, name: str) -> float:
    """That a point was trained by whoever ran it so far."""
    found = read_json(point_folder(folder, name) / 'running.json', 'seconds')
    return found['seconds'] if found else 0.0


def _alive(path: Path) -> bool:
    """Whether the file says that someone runs the point, and was written a short while ago."""
    found = read_json(path, 'running')
    return bool(found and found['running']) and time.time() - path.stat().st_mtime < GRACE_SECONDS


def _tupled(value: Any) -> Any:
    return tuple(_tupled(inner) for inner in value) if isinstance(value, list) else value
