"""Profiler traces of some steps of a run, for the viewers of `jax.profiler`."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from attnlab.tasks.task import Batch
from attnlab.train.step import StepMetrics, TrainState

CompiledStep = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
"""A compiled training step."""


@contextmanager
def trace_steps(update: CompiledStep, folder: Path, start: int, steps: tuple[int, int]) -> Iterator[CompiledStep]:
    """Yield a step with the same results as `update` that writes a trace of some steps into a folder.

    start: number of steps that the run has already done.
    steps: first and last step of the trace.  The traced step waits for the device before the first and after the last.
    """
    first, last = steps
    steps_done, is_tracing = start, False
    if start >= first:
        logging.warning('--profile=%d..%d: the run continues from step %d; nothing is traced', first, last, start)

    def traced_update(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        nonlocal steps_done, is_tracing
        steps_done += 1
        if steps_done == first:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(folder))
            is_tracing = True
        with jax.profiler.StepTraceAnnotation('train', step_num=steps_done):
            result = update(state, batch)
        if steps_done == last and is_tracing:
            jax.block_until_ready(result)
            stop_trace()
        return result

    def stop_trace() -> None:
        nonlocal is_tracing
        is_tracing = False
        jax.profiler.stop_trace()
        trace = max(folder.rglob('*.trace.json.gz'), default=folder)
        viewers = 'https://ui.perfetto.dev, or the folder with TensorBoard and its profile plugin (pip install xprof)'
        message = 'steps %d to %d are traced in %s: open %s at %s'
        logging.info(message, first, steps_done, folder, trace, viewers)

    try:
        yield traced_update
    finally:
        if is_tracing:
            stop_trace()
