"""What the processes of a sweep see of its points by their numbers."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from attnlab import configs
from attnlab.sweeps import outcome
from attnlab.sweeps.outcome import Outcome
from attnlab.sweeps.points import Plan
from attnlab.train import checkpoint


class Board(NamedTuple):
    """A sweep and its directory.  known: outcomes that were read, which do not change."""

    folder: Path
    plan: Plan
    known: dict[int, Outcome]

    @property
    def numbers(self) -> range:
        """Of all points."""
        return range(self.plan.search['trials'] if self.plan.search else len(self.plan.points))


def ended(board: Board, number: int) -> Outcome | None:
    """How a point ended; None for one that did not yet."""
    if number not in board.known:
        name = name_of(board, number)
        if name is None or (found := outcome.outcome(board.folder, name)) is None:
            return None
        board.known[number] = found
    return board.known[number]


def name_of(board: Board, number: int) -> str | None:
    """The name of a point; None for one of a search that nobody has begun."""
    if not board.plan.search:
        return board.plan.points[number].name
    found = begun(board, number)
    return found['name'] if found else None


def begun(board: Board, number: int) -> dict[str, Any] | None:
    """Number, name and overrides of a point of a search; None for one that nobody has begun."""
    found = list((board.folder / 'points').glob(f'{number:04d},*/point.json'))
    return outcome.load_point(found[0]) if found else None


def same(board: Board, number: int, config: Any) -> int | None:
    """The number of another point of a search that is done and has trained this very config; None if there is none."""
    text = lambda tree: json.dumps(tree, sort_keys=True)  # as values 1 == 1.0 == True
    wanted = text(configs.tree(config))
    for path in sorted((board.folder / 'points').glob('*/run/config.json')):
        other = int(path.parts[-3].partition(',')[0])
        if other != number and text(outcome.load(path)) == wanted:
            if (end := ended(board, other)) and end.status == 'done':
                return other
    return None


def reached(board: Board, number: int) -> int:
    """The newest step of a point's checkpoints; 0 if there is none."""
    name = name_of(board, number)
    return max(checkpoint.steps(outcome.run_folder(board.folder, name)), default=0) if name else 0


def forget_failed(board: Board, numbers: Iterable[int]) -> None:
    """Those of the points that failed wait again."""
    for number in numbers:
        found = ended(board, number)
        if found and found.status == 'failed':
            name = name_of(board, number) or ''
            del board.known[number]
            # A search that failed itself has drawn nothing, and draws anew.
            drawn = not board.plan.search or (begun(board, number) or {}).get('overrides')
            outcome.forget(board.folder, name, point=not drawn)
