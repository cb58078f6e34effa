"""The training loop: takes steps, logs, evaluates, saves and stops, for any task."""

import logging
import math
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jax
import numpy as np
import orbax.checkpoint as ocp

from attnlab.configs.run import RunConfig
from attnlab.errors import Diverged, Stopped
from attnlab.tasks.task import Batch, Params, Task
from attnlab.train import checkpoint, metrics, nans, precision, processes, utilisation
from attnlab.train.clock import Clock
from attnlab.train.prefetch import prefetch_batches
from attnlab.train.profile import trace_steps
from attnlab.train.progress import progress_bar
from attnlab.train.setup import Setup, make_setup
from attnlab.train.signals import StopCheck, catch_shared_stop_signals, catch_stop_signals
from attnlab.train.step import StepMetrics, TrainState

EvaluationCallback = Callable[[int, dict[str, float]], None]
"""(step, scores of an evaluation); it may raise, for example `Pruned`."""


class TrainOptions(TypedDict, total=False):
    """Keyword arguments of a training that are not part of its config.

    debug_nans: keep the state before each step, so that `Diverged` names the first value that was not finite.
    profile: first and last step of a profiler trace, which is written into the subdirectory profile/.
    watch: called after each evaluation except the last one, when its checkpoint save has begun.
    """

    debug_nans: bool
    profile: tuple[int, int] | None
    watch: EvaluationCallback


def run_training_loop(
    config: RunConfig, task: Task, workdir: Path, params: Params | None = None, **options: Unpack[TrainOptions]
) -> dict[str, float]:
    """Train in `workdir`, from its latest checkpoint if it has one; return the last and the best scores.

    params: parameters to start from if there is no checkpoint; the initial parameters of the task if None.

    Raises Diverged if a loss, gradient or score is not finite, and Stopped, after a save, on SIGTERM or SIGINT.
    """
    setup = make_setup(config, task.examples)
    total, layout = setup.durations.total, setup.layout
    with ExitStack() as stack:
        manager = stack.enter_context(checkpoint.checkpoint_manager(workdir))
        state, progress = restore_state(setup, task, manager, params)
        start = int(state.step)
        checkpoint.set_aside_damaged(manager, start)
        is_first_process = processes.is_first_process()
        write_metrics = stack.enter_context(metrics.metrics_writer(workdir, start, is_first_process))
        update_bar = stack.enter_context(progress_bar(total, start, is_first_process))
        batches = stack.enter_context(closing(prefetch_batches(make_batch_loader(setup, task), start, total)))
        stop_signal = stack.enter_context(
            catch_shared_stop_signals() if processes.is_multi_process() else catch_stop_signals()
        )
        state = layout.replicate(state)
        update, advice = setup.compile_step(task.loss, state), lambda step: divergence_advice(manager)
        if options.get('debug_nans'):
            update, advice = nans.remember_states(update, task, setup)
        if (profile := options.get('profile')) is not None and is_first_process:
            update = stack.enter_context(trace_steps(update, workdir / 'profile', start, profile))
        trainer = Trainer(
            setup=setup, task=task, state=state, progress=progress, step=start, manager=manager, batches=batches,
            update=update, stop_signal=stop_signal, write_metrics=write_metrics, update_bar=update_bar, advice=advice,
            watch=options.get('watch'),
        )  # fmt: skip
        return trainer.run()


@dataclass(kw_only=True)
class Trainer:
    """A run from its restored state to its end.

    state: replicated on the devices of the layout.
    step: number of steps done.
    update: the compiled step.
    stop_signal: returns the signal that should stop the run after a step, or None.
    write_metrics, update_bar: report a step to the metrics files and to the progress bar.
    advice: returns what to do about a step that was not finite.
    watch: called after each evaluation except the last.
    scores: those of the latest evaluation.
    pending: step, metrics and batch shape of the latest step, which the device may still be computing.
    """

    setup: Setup
    task: Task
    state: TrainState
    progress: checkpoint.RunProgress
    step: int
    manager: ocp.CheckpointManager
    batches: Iterator[Batch]
    update: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
    stop_signal: StopCheck
    write_metrics: metrics.WriteMetrics
    update_bar: Callable[[int, dict[str, float]], None]
    advice: Callable[[int], str]
    watch: EvaluationCallback | None
    scores: dict[str, float] = field(default_factory=dict)
    pending: tuple[int, StepMetrics, utilisation.BatchShape] | None = None

    def __post_init__(self) -> None:
        layout = self.setup.layout
        flops = utilisation.make_flops_counter(self.task.loss, self.state.params, layout.axis is not None)
        self.clock = Clock(flops, utilisation.peak_flops(layout.device_count, jax.devices()[0].device_kind))

    def run(self) -> dict[str, float]:
        """Take the remaining steps; return the last and the best scores."""
        durations, start = self.setup.durations, self.step
        while self.step < durations.total and not self.out_of_patience:
            self.take_step()
            if self.step == start + 1:  # write its metrics before the program for another batch shape is compiled
                self.log()
            is_evaluation_step = self.step % durations.evaluate == 0 or self.step == durations.total
            # Several processes must all call `stop_signal` in every step.
            if self.stop_signal(self.step) or is_evaluation_step or self.step % durations.save == 0:
                self.log()
                if is_evaluation_step:
                    self.evaluate()
                self.save()
                self.stop_on_signal()
                if is_evaluation_step and self.watch and self.step < durations.total and not self.out_of_patience:
                    self.watch(self.step, self.scores)
        self.log()
        checkpoint.wait_for_save(self.manager)
        name, _ = self.task.best
        if self.out_of_patience:
            logging.info('stopped at step %d: no better %s in %d evaluations', self.step, name, self.progress.waited)
        best = {f'best_{name}': self.progress.best, 'best_step': self.progress.best_step}
        return self.scores | {'step': self.step} | best  # type: ignore[operator]

    def take_step(self) -> None:
        """Start the next step, and log the step before it while the device computes."""
        with self.clock.measure('wait'):
            batch = next(self.batches)
        self.state, step_metrics = self.update(self.state, batch)
        self.step += 1
        self.log()
        self.pending = self.step, step_metrics, utilisation.batch_shape(batch)

    def log(self) -> None:
        """Read, check and report the metrics of the pending step.

        Raises Diverged if its loss or gradient is not finite.
        """
        if self.pending is None:
            return
        (step, step_metrics, batch_shape), self.pending = self.pending, None
        # Reading a value from the device is slow: read these every step, the others only when they are written.
        values = self._read_metrics(step_metrics, {'loss', 'gradient_norm', 'weight', 'loss_scale'})
        # A gradient that is not finite has already spoilt the parameters, unless the loss scale has skipped the step.
        for name in ('loss', 'gradient_norm'):
            if not math.isfinite(values[name]) and values.get('loss_scale', 1.0) <= precision.MIN_SCALE:
                raise Diverged(step, name, values[name], self.advice(step))
        self.clock.count_step(values['weight'], batch_shape)
        log_every = self.setup.durations.log
        if step % log_every == 0 or step == 1:  # the loss of step 1 is that of the initial parameters
            record = self._read_metrics(step_metrics, step_metrics.keys() - {'weight'})
            # In a step that the loss scale has skipped, some values are not finite: leave them out.
            record = {name: x for name, x in record.items() if math.isfinite(x) or 'skipped' not in record}
            self.write_metrics(step, 'train', record)
        if step % log_every == 0:
            self.write_metrics(step, 'speed', self.clock.read_rates())
        name, _ = self.task.best
        # The main score comes first: the bar may have no space for the others.
        scores = {name: self.scores[name], **self.scores} if self.scores else {}
        self.update_bar(step, {'loss': values['loss']} | {f'valid {name}': value for name, value in scores.items()})

    def _read_metrics(self, step_metrics: StepMetrics, names: Set[str]) -> dict[str, float]:
        local = self.setup.layout.to_local({name: x for name, x in step_metrics.items() if name in names})
        return {name: float(x) for name, x in local.items()}

    def evaluate(self) -> None:
        """Evaluate the parameters on the validation split, and record whether they are the best so far.

        Raises Diverged if a score is not finite.
        """
        with self.clock.measure('evaluate'):
            scores = self.setup.layout.evaluate(self.task.validate, self.state.evaluation_params)
            self.scores = processes.broadcast_scores(scores)
        for name, value in self.scores.items():  # a step with finite loss and gradient may still have spoilt them
            if not math.isfinite(value):
                raise Diverged(self.step, f'validation {name}', value, divergence_advice(self.manager))
        self.write_metrics(self.step, 'valid', self.scores)
        name, direction = self.task.best
        score, best = self.scores[name], self.progress.best
        if best is None or (score > best if direction == 'max' else score < best):
            self.progress = checkpoint.RunProgress(score, self.step, 0)
        else:
            self.progress = self.progress._replace(waited=self.progress.waited + 1)

    @property
    def out_of_patience(self) -> bool:
        """Whether the run should end because its last `train.patience` evaluations were no better than the best."""
        return 0 < self.setup.config.train.patience <= self.progress.waited

    def save(self) -> None:
        """Begin to save a checkpoint, which is written while training continues."""
        with self.clock.measure('save'):
            items = checkpoint_items(self.setup.layout.unreplicate(self.state))
            checkpoint.save_checkpoint(self.manager, checkpoint.Checkpoint(self.step, *items, self.progress))

    def stop_on_signal(self) -> None:
        """Raise Stopped if a signal came, after the checkpoint is written; not at the last step."""
        if (signal_number := self.stop_signal(self.step)) and self.step < self.setup.durations.total:
            checkpoint.wait_for_save(self.manager)
            raise Stopped(signal_number, self.step)


def restore_state(
    setup: Setup, task: Task, manager: ocp.CheckpointManager, params: Params | None
) -> tuple[TrainState, checkpoint.RunProgress]:
    """Return the state of the latest checkpoint; without one the initial state, from `params` if given."""
    make_state = partial(setup.initial_state, task.init)  # the same object for both uses: JAX traces it once
    seed = np.uint32(setup.config.seed)
    shapes = setup.layout.stored_shapes(jax.eval_shape(make_state, seed, params))
    saved = checkpoint.restore_latest(manager, *checkpoint_items(shapes))
    if saved is None:
        return setup.layout.initialize(make_state, seed, params), checkpoint.RunProgress()
    logging.info('continues from step %d', saved.step)
    step = setup.layout.initialize(lambda step: step, np.int32(saved.step))
    if shapes.ema_params is None and shapes.loss_scale is None:
        return TrainState(step, saved.params, saved.optimizer), saved.progress
    ema_params = None if shapes.ema_params is None else saved.params
    items = {'params': saved.params, **saved.optimizer}
    state = TrainState(step, items['params'], items['optimizer'], ema_params, items.get('scale'))
    return state, saved.progress


def checkpoint_items(state: TrainState) -> tuple[Params, Any]:
    """Return the two checkpoint items of a state: `params`, those to evaluate, and `optimizer`, everything else.

    `optimizer` is the optimizer's state, or a dict of it and of `params` (without the moving average) and `scale`, as
    far as the state has them.
    """
    others = {} if state.ema_params is None else {'params': state.params}
    if state.loss_scale is not None:
        others['scale'] = state.loss_scale
    return state.evaluation_params, {**others, 'optimizer': state.opt_state} if others else state.opt_state


def make_batch_loader(setup: Setup, task: Task) -> Callable[[int], Batch]:
    """Return a function (step) -> its batch on the devices; each of several processes makes only its own rows."""
    if not processes.is_multi_process():
        return lambda step: setup.layout.put_batch(task.batch(step))
    count = setup.config.train.batch_size
    rows = setup.layout.process_rows(count)
    return lambda step: setup.layout.put_batch(task.batch(step, rows), count)


def divergence_advice(manager: ocp.CheckpointManager) -> str:
    """Return what to do about a run that has diverged, in one line without a full stop."""
    newest = manager.latest_step()
    saved = 'there is no checkpoint yet' if newest is None else f'the newest checkpoint is from step {newest}'
    return f'{saved}. Try a lower optimizer.learning_rate, a longer optimizer.warmup or a smaller optimizer.clip'
