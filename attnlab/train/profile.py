"""A trace of some steps of a run, for `jax.profiler`'s viewers."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from attnlab.tasks.task import Batch
from attnlab.train.step import StepMetrics, TrainState

CompiledStep = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
"""A compiled step."""


@contextmanager
def trace_steps(update: CompiledStep, folder: Path, start: int, steps: tuple[int, int]) -> Iterator[CompiledStep]:
    """The update of a run that has done `start` steps, with the steps from `steps[0]` to `steps[1]` traced into a
    folder.  It waits for the device before and after them, and computes the same."""
    first, last = steps
    done, running = start, False
    if start >= first:
        logging.warning('--profile=%d..%d: the run goes on from step %d; nothing is traced', first, last, start)

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        nonlocal done, running
        done += 1
        if done == first:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(folder))
            running = True
        with jax.profiler.StepTraceAnnotation('train', step_num=done):
            made = update(state, batch)
        if done == last and running:
            jax.block_until_ready(made)
            stop()
        return made

    def stop() -> None:
        nonlocal running
        running = False
        jax.profiler.stop_trace()
        files = max(folder.rglob('*.trace.json.gz'), default=folder)
        logging.info('steps %d to %d are traced in %s: open %s at https://ui.perfetto.dev, or the folder with '
                     'TensorBoard and its profile plugin (pip install xprof)', first, done, folder, files)  # fmt: skip

    try:
        yield run
    finally:
        if running:
            stop()
