"""Where the time of a run goes."""

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Clock:
    """Time since the last reading: steps, waiting for data, and pauses (evaluation, saving) that count as neither."""

    start: float = field(default_factory=time.perf_counter)
    spent: dict[str, float] = field(default_factory=lambda: {'wait': 0.0, 'pause': 0.0})
    steps: int = 0
    weight: float = 0.0

    def count(self, weight: float) -> None:
        """One more step, over `weight` things (tokens, examples)."""
        self.steps, self.weight = self.steps + 1, self.weight + weight

    @contextmanager
    def spend(self, on: Literal['wait', 'pause']):
        """Books the time inside the `with`."""
        start = time.perf_counter()
        yield
        self.spent[on] += time.perf_counter() - start

    def rates(self) -> dict[str, float]:
        """Steps and things a second, and the share of the time spent waiting for data; starts a new interval."""
        seconds = max(time.perf_counter() - self.start - self.spent['pause'], 1e-9)
        rates = {
            'steps_per_second': self.steps / seconds,
            'weight_per_second': self.weight / seconds,
            'data_share': self.spent['wait'] / seconds,
        }
        self.__init__()
        return rates
