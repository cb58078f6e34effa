"""Where the time of a run goes."""

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class Clock:
    """Time since the last reading: steps, waiting for data, and pauses (saving, evaluation) that count as neither.

    flops: floating-point operations of a step by the shape of its batch, NaN where they are not known.
    peak: those a second of all devices, None where it is not known.
    """

    flops: Callable[[Any], float] = lambda shape: math.nan
    peak: float | None = None
    start: float = field(default_factory=lambda: time.perf_counter())
    spent: dict[str, float] = field(default_factory=lambda: {'wait': 0.0, 'save': 0.0, 'evaluate': 0.0})
    steps: int = 0
    weight: float = 0.0
    shapes: Counter[Any] = field(default_factory=Counter)

    def count(self, weight: float, shape: Any = None) -> None:
        """One more step, over `weight` things (tokens, examples), with a batch of that shape."""
        self.steps, self.weight = self.steps + 1, self.weight + weight
        self.shapes[shape] += 1

    @contextmanager
    def spend(self, on: Literal['wait', 'save', 'evaluate']):
        """Books the time inside the `with`."""
        start = time.perf_counter()
        yield
        self.spent[on] += time.perf_counter() - start

    def rates(self) -> dict[str, float]:
        """What was done a second, and where the time went; starts a new interval.

        Rates and `data_share`, the part spent waiting for data, are of the time that is neither saving nor evaluation;
        `save_share` and `evaluate_share` are the parts that these have of the whole interval.  Where operations are not
        known there is no `flops_per_second`; `utilisation` is its part of the peak, and absent without one.
        """
        whole = max(time.perf_counter() - self.start, 1e-9)
        seconds = max(whole - self.spent['save'] - self.spent['evaluate'], 1e-9)
        rates = {
            'steps_per_second': self.steps / seconds,
            'weight_per_second': self.weight / seconds,
            'data_share': self.spent['wait'] / seconds,
            'save_share': self.spent['save'] / whole,
            'evaluate_share': self.spent['evaluate'] / whole,
        }
        # To count takes its time, the first time; it is in no interval.
        flops = sum(count * self.flops(shape) for shape, count in self.shapes.items())
        if not math.isnan(flops):
            rates['flops_per_second'] = flops / seconds
            if self.peak is not None:
                rates['utilisation'] = rates['flops_per_second'] / self.peak
        self.__init__(self.flops, self.peak)
        return rates
