"""What the processes of a sweep see of its points by their numbers."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from attnlab import configs
from attnlab.sweeps import sweep_files
from attnlab.sweeps.points import SweepPlan
from attnlab.sweeps.sweep_files import Outcome
from attnlab.train import checkpoint


@dataclass(frozen=True)
class SweepProgress:
    """A sweep and its directory.  known: outcomes that were read, which do not change."""

    folder: Path
    plan: SweepPlan
    known: dict[int, Outcome] = field(default_factory=dict)

    @property
    def numbers(self) -> range:
        """Of all points."""
        return range(self.plan.search['trials'] if self.plan.search else len(self.plan.points))

    def ended(self, number: int) -> Outcome | None:
        """How a point ended; None for one that did not yet."""
        if number not in self.known:
            name = self.name_of(number)
            if name is None or (found := sweep_files.read_outcome(self.folder, name)) is None:
                return None
            self.known[number] = found
        return self.known[number]

    def name_of(self, number: int) -> str | None:
        """The name of a point; None for one of a search that nobody has begun."""
        if not self.plan.search:
            return self.plan.points[number].name
        found = self.begun(number)
        return found['name'] if found else None

    def begun(self, number: int) -> dict[str, Any] | None:
        """Number, name and overrides of a point of a search; None for one that nobody has begun."""
        found = list((self.folder / 'points').glob(f'{number:04d},*/point.json'))
        return sweep_files.read_point(found[0]) if found else None

    def same(self, number: int, config: ConfigDict) -> tuple[int, Outcome] | None:
        """Another point of a search that is done and has trained this very config, and its outcome."""
        text = lambda tree: json.dumps(tree, sort_keys=True)  # as values 1 == 1.0 == True
        wanted = text(configs.config_to_json(config))
        for path in sorted((self.folder / 'points').glob('*/run/config.json')):
            other = int(path.parts[-3].partition(',')[0])
            if other != number and text(sweep_files.read_json(path)) == wanted:
                if (end := self.ended(other)) and end.status == 'done':
                    return other, end
        return None

    def reached(self, number: int) -> int:
        """The newest step of a point's checkpoints; 0 if there is none."""
        name = self.name_of(number)
        return max(checkpoint.list_steps(sweep_files.run_folder(self.folder, name)), default=0) if name else 0

    def forget_failed(self, numbers: Iterable[int]) -> None:
        """Those of the points that failed wait again."""
        for number in numbers:
            found = self.ended(number)
            if found and found.status == 'failed':
                name = self.name_of(number) or ''
                del self.known[number]
                # A search that failed itself has drawn nothing, and draws anew.
                drawn = not self.plan.search or (self.begun(number) or {}).get('overrides')
                sweep_files.delete_outcome(self.folder, name, point=not drawn)
