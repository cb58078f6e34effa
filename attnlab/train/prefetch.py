"""Batches made while the step before them is computed."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PREFETCH_DEPTH = 2
"""So many batches are made before they are asked for."""


def prefetch_batches(batch: Callable[[int], Any], start: int, stop: int) -> Generator[Any, None, None]:
    """batch(start), .., batch(stop - 1), each made in a thread of its own; what one raises comes when it is its turn.

    Close it when fewer are taken: the thread ends with the batch that it is making.
    """
    with ThreadPoolExecutor(1, 'batches') as maker:
        waiting = deque(maker.submit(batch, step) for step in range(start, min(start + PREFETCH_DEPTH, stop)))
        try:
            for step in range(start, stop):
                found = waiting.popleft().result()
                if step + PREFETCH_DEPTH < stop:
                    waiting.append(maker.submit(batch, step + PREFETCH_DEPTH))
                yield found
        finally:
            for each in waiting:
                each.cancel()
