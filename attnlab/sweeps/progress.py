"""The state of every point of a sweep, addressed by point number, as read from the sweep's directory."""

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
    """A sweep and its directory.

    known_outcomes: outcomes that were already read, by point number. An outcome does not change once it is written.
    """

    folder: Path
    plan: SweepPlan
    known_outcomes: dict[int, Outcome] = field(default_factory=dict)

    @property
    def point_numbers(self) -> range:
        """The numbers of all points."""
        return range(self.plan.search['trials'] if self.plan.search else len(self.plan.points))

    def find_outcome(self, number: int) -> Outcome | None:
        """Return the outcome of a point, or None if the point has not ended."""
        if number not in self.known_outcomes:
            name = self.find_name(number)
            if name is None or (outcome := sweep_files.read_outcome(self.folder, name)) is None:
                return None
            self.known_outcomes[number] = outcome
        return self.known_outcomes[number]

    def find_name(self, number: int) -> str | None:
        """Return the name of a point, or None for a point of a search that has not been drawn."""
        if not self.plan.search:
            return self.plan.points[number].name
        point = self.read_drawn_point(number)
        return point['name'] if point else None

    def read_drawn_point(self, number: int) -> dict[str, Any] | None:
        """Return number, name and overrides of a point of a search, or None if it has not been drawn."""
        paths = list((self.folder / 'points').glob(f'{number:04d},*/point.json'))
        return sweep_files.read_point(paths[0]) if paths else None

    def find_same_config(self, number: int, config: ConfigDict) -> tuple[int, Outcome] | None:
        """Return number and outcome of another point of a search that is done and was trained with this config."""
        config_text = _canonical_json(configs.config_to_json(config))
        for path in sorted((self.folder / 'points').glob('*/run/config.json')):
            other = int(path.parts[-3].partition(',')[0])
            if other != number and _canonical_json(sweep_files.read_json(path)) == config_text:
                if (outcome := self.find_outcome(other)) and outcome.status == 'done':
                    return other, outcome
        return None

    def newest_step(self, number: int) -> int:
        """Return the newest step of a point's checkpoints, or 0 if it has none."""
        name = self.find_name(number)
        return max(checkpoint.list_steps(sweep_files.run_folder(self.folder, name)), default=0) if name else 0

    def reset_failed(self, numbers: Iterable[int]) -> None:
        """Delete the outcomes of the failed points among `numbers`, so that these points run again."""
        for number in numbers:
            outcome = self.find_outcome(number)
            if outcome and outcome.status == 'failed':
                name = self.find_name(number) or ''
                del self.known_outcomes[number]
                # If the search function itself failed, the point has no overrides and is drawn again.
                is_drawn = not self.plan.search or (self.read_drawn_point(number) or {}).get('overrides')
                sweep_files.delete_outcome(self.folder, name, point=not is_drawn)


def _canonical_json(tree: Any) -> str:
    """Return a text that is equal for equal configs; as values 1 == 1.0 == True."""
    return json.dumps(tree, sort_keys=True)
