"""Prefetched batches: in order, each prepared once, errors raised when their batch is due."""

import threading
import time
from contextlib import closing

import pytest

from attnlab.train.prefetch import PREFETCH_DEPTH, prefetch_batches


@pytest.mark.parametrize(('start', 'stop'), [(0, 9), (5, 6), (3, 3), (0, 1)])
def test_batches_come_in_order_and_are_made_once(start, stop):
    steps = []
    batches = prefetch_batches(lambda step: steps.append(step) or step, start, stop)
    assert list(batches) == list(range(start, stop)) == steps


def test_prefetch_depth_and_end_of_the_thread():
    steps, lock = [], threading.Lock()

    def batch(step):
        with lock:
            steps.append(step)
        return step

    with closing(prefetch_batches(batch, 0, 100)) as batches:
        for step in range(5):
            assert next(batches) == step
        deadline = time.monotonic() + 5
        while len(steps) < 5 + PREFETCH_DEPTH - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 5 + PREFETCH_DEPTH - 1 <= len(steps) <= 5 + PREFETCH_DEPTH
    thread_names = {thread.name.split('_')[0] for thread in threading.enumerate()}
    assert len(steps) <= 5 + PREFETCH_DEPTH and 'batches' not in thread_names


def test_error_is_raised_when_its_batch_is_due():
    def batch(step):
        if step == 2:
            raise ValueError('no third one')
        return step

    batches = prefetch_batches(batch, 0, 9)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match='no third one'):
        next(batches)
