"""Throughput of a training run, and the shares of time spent on data, checkpoints and evaluation."""

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class Clock:
    """Steps and time since the last call of `read_rates`.

    flops: returns the floating-point operations of a step, given the shape of its batch; NaN if they are not known.
    peak: peak floating-point operations per second of all devices together; None if it is not known.
    start: time at the start of the interval, in seconds of `time.perf_counter`.
    seconds: seconds spent waiting for data, saving checkpoints and evaluating.
    steps, weight: steps taken, and the sum of their weights.
    shapes: number of steps for each batch shape.
    """

    flops: Callable[[Any], float] = lambda shape: math.nan
    peak: float | None = None
    start: float = field(default_factory=lambda: time.perf_counter())
    seconds: dict[str, float] = field(default_factory=lambda: {'wait': 0.0, 'save': 0.0, 'evaluate': 0.0})
    steps: int = 0
    weight: float = 0.0
    shapes: Counter[Any] = field(default_factory=Counter)

    def count_step(self, weight: float, shape: Any = None) -> None:
        """Count one step.  weight: its number of tokens or examples.  shape: shape of its batch."""
        self.steps, self.weight = self.steps + 1, self.weight + weight
        self.shapes[shape] += 1

    @contextmanager
    def measure(self, activity: Literal['wait', 'save', 'evaluate']):
        """Add the time of the `with` block to an activity."""
        start = time.perf_counter()
        yield
        self.seconds[activity] += time.perf_counter() - start

    def read_rates(self) -> dict[str, float]:
        """Return the rates and time shares of the interval, and start a new interval.

        Rates and `data_share`, the share of time spent waiting for data, refer to the time without saving and
        evaluation.  `save_share` and `evaluate_share` refer to the whole interval.  `flops_per_second` is missing if
        the operations of a step are not known; `utilisation`, its ratio to the peak, also if the peak is not known.
        """
        total_seconds = max(time.perf_counter() - self.start, 1e-9)
        train_seconds = max(total_seconds - self.seconds['save'] - self.seconds['evaluate'], 1e-9)
        rates = {
            'steps_per_second': self.steps / train_seconds,
            'weight_per_second': self.weight / train_seconds,
            'data_share': self.seconds['wait'] / train_seconds,
            'save_share': self.seconds['save'] / total_seconds,
            'evaluate_share': self.seconds['evaluate'] / total_seconds,
        }
        # The first call of `flops` for a shape is slow; here its time belongs to no interval.
        flops = sum(count * self.flops(shape) for shape, count in self.shapes.items())
        if not math.isnan(flops):
            rates['flops_per_second'] = flops / train_seconds
            if self.peak is not None:
                rates['utilisation'] = rates['flops_per_second'] / self.peak
        self.__init__(self.flops, self.peak)
        return rates
