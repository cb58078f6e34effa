"""Prefetched batches: in order, each made once, errors raised when their batch is due."""

import threading
import time
from contextlib import closing

import pytest

from attnlab.train.prefetch import PREFETCH_DEPTH, prefetch_batches


@pytest.mark.parametrize(('start', 'stop'), [(0, 9), (5, 6), (3, 3), (0, 1)])
def test_batches_come_in_order_and_are_made_once(start, stop):
    made = []
    assert (
        list(prefetch_batches(lambda step: made.append(step) or step, start, stop)) == list(range(start, stop)) == made
    )


def test_prefetch_depth_and_end_of_the_thread():
    made, lock = [], threading.Lock()

    def batch(step):
        with lock:
            made.append(step)
        return step

    with closing(prefetch_batches(batch, 0, 100)) as batches:
        for step in range(5):
            assert next(batches) == step
        deadline = time.monotonic() + 5
        while len(made) < 5 + PREFETCH_DEPTH - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 5 + PREFETCH_DEPTH - 1 <= len(made) <= 5 + PREFETCH_DEPTH
    assert len(made) <= 5 + PREFETCH_DEPTH and 'batches' not in {
        each.name.split('_')[0] for each in threading.enumerate()
    }


def test_error_is_raised_when_its_batch_is_due():
    def batch(step):
        if step == 2:
            raise ValueError('no third one')
        return step

    batches = prefetch_batches(batch, 0, 9)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match='no third one'):
        next(batches)
