"""The training loop: batches in, checkpoints and metrics out, whatever the task."""

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
"""(step, scores of an evaluation); it may raise, as `Pruned`."""


class TrainOptions(TypedDict, total=False):
    """Keyword arguments of a training that are no part of its config.

    debug_nans: keep the state before each step, so that `Diverged` names the first value that was not finite.
    profile: the first and the last step of a trace, written to the directory's profile/.
    watch: called after each evaluation but the last, once it is saved.
    """

    debug_nans: bool
    profile: tuple[int, int] | None
    watch: EvaluationCallback


def run_training_loop(
    config: RunConfig, task: Task, workdir: Path, params: Params | None = None, **options: Unpack[TrainOptions]
) -> dict[str, float]:
    """Train in `workdir`, from its latest checkpoint if it has one; returns the last and the best scores.

    params: where a run without a checkpoint starts from; the task's own initial parameters if None.

    Raises Diverged when a loss, gradient or score is no longer finite, and Stopped, after a save, on SIGTERM or SIGINT.
    """
    setup = make_setup(config, task.examples)
    total, layout = setup.durations.total, setup.layout
    with ExitStack() as stack:
        manager = stack.enter_context(checkpoint.checkpoint_manager(workdir))
        state, progress = restore_state(setup, task, manager, params)
        start = int(state.step)
        checkpoint.set_aside_damaged(manager, start)
        first = processes.is_first_process()
        write = stack.enter_context(metrics.metrics_writer(workdir, start, first))
        advance = stack.enter_context(progress_bar(total, start, first))
        batches = stack.enter_context(closing(prefetch_batches(make_batch_loader(setup, task), start, total)))
        stop = stack.enter_context(
            catch_shared_stop_signals() if processes.is_multi_process() else catch_stop_signals()
        )
        state = layout.replicate(state)
        update, advice = setup.compiled(task.loss, state), lambda step: divergence_advice(manager)
        if options.get('debug_nans'):
            update, advice = nans.remember_states(update, task, setup)
        if (profile := options.get('profile')) is not None and first:
            update = stack.enter_context(trace_steps(update, workdir / 'profile', start, profile))
        trainer = Trainer(
            setup=setup, task=task, state=state, progress=progress, step=start, manager=manager, batches=batches,
            update=update, stop=stop, write=write, advance=advance, advice=advice, watch=options.get('watch'),
        )  # fmt: skip
        return trainer.run()


@dataclass(kw_only=True)
class Trainer:
    """A run from its restored state to its end.

    state: replicated on the layout's devices.  step: steps done.
    update: the compiled step.  stop: the signal that asks the run to stop, if one came.
    write, advance: report a step to the metrics files and to the bar.
    advice: what to do about a step that was not finite.
    scores: those of the newest evaluation.
    pending: step, values and batch shape of the newest step, which the device may still compute.
    """

    setup: Setup
    task: Task
    state: TrainState
    progress: checkpoint.RunProgress
    step: int
    manager: ocp.CheckpointManager
    batches: Iterator[Batch]
    update: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
    stop: StopCheck
    write: metrics.WriteMetrics
    advance: Callable[[int, dict[str, float]], None]
    advice: Callable[[int], str]
    watch: EvaluationCallback | None
    scores: dict[str, float] = field(default_factory=dict)
    pending: tuple[int, StepMetrics, utilisation.BatchShape] | None = None

    def __post_init__(self) -> None:
        layout = self.setup.layout
        flops = utilisation.make_flops_counter(self.task.loss, self.state.params, layout.axis is not None)
        self.clock = Clock(flops, utilisation.peak_flops(layout.count, jax.devices()[0].device_kind))

    def run(self) -> dict[str, float]:
        """Take the remaining steps; returns the last and the best scores."""
        durations, start = self.setup.durations, self.step
        while self.step < durations.total and not self.out_of_patience:
            self.take_step()
            if self.step == start + 1:  # its metrics are written before the program of another width is compiled
                self.log()
            evaluating = self.step % durations.evaluate == 0 or self.step == durations.total
            # Several processes agree on `stop` in every step.
            if self.stop(self.step) or evaluating or self.step % durations.save == 0:
                self.log()
                if evaluating:
                    self.evaluate()
                self.save()
                self.stop_if_asked()
                if evaluating and self.watch and self.step < durations.total and not self.out_of_patience:
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
        with self.clock.spend('wait'):
            batch = next(self.batches)
        self.state, values = self.update(self.state, batch)
        self.step += 1
        self.log()
        self.pending = self.step, values, utilisation.batch_shape(batch)

    def log(self) -> None:
        """Read the values of the pending step, check them and report them; raises Diverged."""
        if self.pending is None:
            return
        (step, values, shape), self.pending = self.pending, None
        # Reading a value from the device is slow: read these every step, the rest only when they are written.
        found = self._read(values, {'loss', 'gradient_norm', 'weight', 'loss_scale'})
        for name in ('loss', 'gradient_norm'):  # a gradient that is not finite has spoilt the parameters already
            if not math.isfinite(found[name]) and found.get('loss_scale', 1.0) <= precision.MIN_SCALE:
                raise Diverged(step, name, found[name], self.advice(step))
        self.clock.count(found['weight'], shape)
        log_every = self.setup.durations.log
        if step % log_every == 0 or step == 1:  # the loss of step 1 is that of the initial parameters
            shown = self._read(values, values.keys() - {'weight'})
            # A step that the loss scale skipped has values that are not finite.
            self.write(step, 'train', {k: x for k, x in shown.items() if math.isfinite(x) or 'skipped' not in shown})
        if step % log_every == 0:
            self.write(step, 'speed', self.clock.rates())
        name, _ = self.task.best
        first = {name: self.scores[name], **self.scores} if self.scores else {}  # the line may have no room for more
        self.advance(step, {'loss': found['loss']} | {f'valid {name}': value for name, value in first.items()})

    def _read(self, values: StepMetrics, names: Set[str]) -> dict[str, float]:
        local = self.setup.layout.local({name: x for name, x in values.items() if name in names})
        return {name: float(x) for name, x in local.items()}

    def evaluate(self) -> None:
        """Score the parameters on the validation split, and note whether they are the best so far."""
        with self.clock.spend('evaluate'):
            self.scores = processes.broadcast_scores(self.setup.layout.use(self.task.validate, self.state.used))
        for name, value in self.scores.items():  # the step before may have spoilt the parameters with a finite loss
            if not math.isfinite(value):
                raise Diverged(self.step, f'validation {name}', value, divergence_advice(self.manager))
        self.write(self.step, 'valid', self.scores)
        name, direction = self.task.best
        score, best = self.scores[name], self.progress.best
        if best is None or (score > best if direction == 'max' else score < best):
            self.progress = checkpoint.RunProgress(score, self.step, 0)
        else:
            self.progress = self.progress._replace(waited=self.progress.waited + 1)

    @property
    def out_of_patience(self) -> bool:
        """Whether the config ends the run, as its last evaluations found nothing better."""
        return 0 < self.setup.config.train.patience <= self.progress.waited

    def save(self) -> None:
        """Begin a checkpoint, which is written while training goes on."""
        with self.clock.spend('save'):
            items = checkpoint_items(self.setup.layout.unreplicate(self.state))
            checkpoint.save_checkpoint(self.manager, checkpoint.Checkpoint(self.step, *items, self.progress))

    def stop_if_asked(self) -> None:
        """Raise Stopped, with the checkpoint written, if a signal came."""
        if (number := self.stop(self.step)) and self.step < self.setup.durations.total:
            checkpoint.wait_for_save(self.manager)
            raise Stopped(number, self.step)


def restore_state(
    setup: Setup, task: Task, manager: ocp.CheckpointManager, params: Params | None
) -> tuple[TrainState, checkpoint.RunProgress]:
    """The state of the latest checkpoint; without one the initial state, from `params` if given."""
    make, seed = partial(setup.initial, task.init), np.uint32(setup.config.seed)  # one function: JAX traces it once
    shapes = setup.layout.stored(jax.eval_shape(make, seed, params))
    saved = checkpoint.restore_latest(manager, *checkpoint_items(shapes))
    if saved is None:
        return setup.layout.start(make, seed, params), checkpoint.RunProgress()
    logging.info('continues from step %d', saved.step)
    step = setup.layout.start(lambda step: step, np.int32(saved.step))
    if shapes.average is None and shapes.scale is None:
        return TrainState(step, saved.params, saved.optimizer), saved.progress
    average = None if shapes.average is None else saved.params
    return TrainState(step, **{'params': saved.params, **saved.optimizer}, average=average), saved.progress


def checkpoint_items(state: TrainState) -> tuple[Params, Any]:
    """The checkpoint items `params` (the average, if there is one) and `optimizer` (what else resuming needs)."""
    beside = {} if state.average is None else {'params': state.params}
    if state.scale is not None:
        beside['scale'] = state.scale
    return state.used, {**beside, 'optimizer': state.optimizer} if beside else state.optimizer


def make_batch_loader(setup: Setup, task: Task) -> Callable[[int], Batch]:
    """(step) -> the batch on its devices; each of several processes makes its own rows."""
    if not processes.is_multi_process():
        return lambda step: setup.layout.batch(task.batch(step))
    count = setup.config.train.batch_size
    rows = setup.layout.rows(count)
    return lambda step: setup.layout.batch(task.batch(step, rows), count)


def divergence_advice(manager: ocp.CheckpointManager) -> str:
    """What to do about a run that diverged, without a full stop."""
    newest = manager.latest_step()
    saved = 'there is no checkpoint yet' if newest is None else f'the newest checkpoint is from step {newest}'
    return f'{saved}. Try a lower optimizer.learning_rate, a longer optimizer.warmup or a smaller optimizer.clip'
