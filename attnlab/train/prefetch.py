"""Preparation of batches in a background thread while the device computes."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PREFETCH_DEPTH = 2
"""Number of batches that are prepared ahead of the one in use."""


def prefetch_batches(make_batch: Callable[[int], Any], start: int, stop: int) -> Generator[Any, None, None]:
    """Yield make_batch(start), .., make_batch(stop - 1), each prepared in a background thread.

    An exception of `make_batch` is raised when its batch is due.  Close the generator if fewer batches are taken: the
    thread ends after the batch that it is preparing.
    """
    with ThreadPoolExecutor(1, 'batches') as executor:
        futures = deque(executor.submit(make_batch, step) for step in range(start, min(start + PREFETCH_DEPTH, stop)))
        try:
            for step in range(start, stop):
                batch = futures.popleft().result()
                if step + PREFETCH_DEPTH < stop:
                    futures.append(executor.submit(make_batch, step + PREFETCH_DEPTH))
                yield batch
        finally:
            for future in futures:
                future.cancel()
