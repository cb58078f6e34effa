"""The training loop: batches in, checkpoints and metrics out, whatever the task."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attnlab.errors import RunError, Stopped, UserError
from attnlab.kernels.losses import Sums
from attnlab.tasks.task import Batch, Params, Task
from attnlab.train import checkpoint, devices, metrics, nans, optimizer, precision, processes, utilisation
from attnlab.train.ahead import ahead
from attnlab.train.clock import Clock
from attnlab.train.durations import steps
from attnlab.train.profile import traced
from attnlab.train.progress import bar
from attnlab.train.signals import Wishes, common_wishes, wishes

Watch = Callable[[int, dict[str, float]], None]
"""(step, scores of an evaluation)."""


class State(NamedTuple):
    """All that a step changes: the number of steps done, the parameters, the optimizer's state and, where there is one,
    the average of the parameters, which is what is evaluated and used; in float16 also the loss's scale."""

    step: jax.Array
    params: Params
    optimizer: Any
    average: Params | None = None
    scale: precision.Scale | None = None

    @property
    def used(self) -> Params:
        """The parameters to evaluate."""
        return self.params if self.average is None else self.average


class Given(NamedTuple):
    """The numbers of a config that compiled steps take as arguments: runs that differ in them alone share a program."""

    seed: Any
    learning_rate: Any
    weight_decay: Any


class Plan(NamedTuple):
    """A config's durations in steps; `patience` counts evaluations, 0 sets no limit."""

    total: int
    warmup: int
    log: int
    evaluate: int
    save: int
    patience: int


def plan(config: Any, examples: int) -> Plan:
    """Resolves every duration of a config; raises UserError for one that makes no sense."""
    train = config.train
    for key in ('batch_size', 'accumulate'):
        if train[key] < 1:
            raise UserError(f'train.{key} is {train[key]}; expected 1 or more')
    if train.batch_size % train.accumulate:
        raise UserError(f'train.accumulate is {train.accumulate}; expected a divisor of batch_size {train.batch_size}')
    if not 0.0 <= train.get('ema', 0.0) < 1.0:
        raise UserError(f'train.ema is {train.ema}; expected 0 (no average) <= decay < 1')
    if train.patience < 0:
        raise UserError(f'train.patience is {train.patience}; expected 0 (never stop early) or more')
    count = partial(steps, batch_size=train.batch_size, examples=examples)
    total = count(train.duration, 'train.duration')
    keys = ('log_every', 'eval_every', 'save_every')
    periods = {key: count(train[key], f'train.{key}', total=total) for key in keys}
    for key, value in {'duration': total, **periods}.items():
        if value < 1:
            raise UserError(f'train.{key} is {train[key]!r}, less than one step; expected one step or more')
    warmup = count(config.optimizer.warmup, 'optimizer.warmup', total=total)
    return Plan(total, warmup, periods['log_every'], periods['eval_every'], periods['save_every'], train.patience)


def recipe(config: Any, examples: int) -> tuple[Plan, optimizer.Schedule, optimizer.Optimize]:
    """Durations, schedule and optimizer of a config; raises UserError for values that make no sense."""
    durations = plan(config, examples)
    schedule = optimizer.schedule(config.optimizer, durations.total, durations.warmup)
    return durations, schedule, optimizer.build(config.optimizer)


def given(config: Any) -> Given:
    """What steps are given of a config."""
    numbers = config.optimizer.learning_rate, config.optimizer.weight_decay
    return Given(np.uint32(config.seed), *map(np.float32, numbers))


def draws(seed: Any, count: int, step: Any, place: Any) -> jax.Array:
    """A key for each of `count` micro-batches of a step; place: of a device with noise of its own, else None."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.random.split(key if place is None else jax.random.fold_in(key, place), count)


def make_update(
    loss: Callable[[Params, Batch, jax.Array], Sums],
    optimize: optimizer.Optimize,
    schedule: optimizer.Schedule,
    accumulate: int,
    ema: float = 0.0,
    constrain: Callable[[Batch], Batch] = lambda parts: parts,
    axis: str | None = None,
) -> Callable[[State, Batch, Given], tuple[State, dict[str, jax.Array]]]:
    """The pure training step: (state, batch, what is given) -> (state, values).

    The gradient is of the total over the whole batch divided by its whole weight, however many micro-batches it is
    cut into, so that a token counts the same in a short and in a long one.  Noise comes from (seed, step) alone.
    ema: where the state has an average, the part of it that stays; less in the first steps, (1 + i) / (10 + i) at most
    in step i, so that it does not start from where the parameters started.
    Where the state has a scale, a step whose gradient is not finite changes that and the number of steps alone; see
    `attnlab.train.precision`.
    constrain, axis: as in `attnlab.train.devices.Layout`.
    """

    def update(state: State, batch: Batch, given: Given) -> tuple[State, dict[str, jax.Array]]:
        keys = draws(given.seed, accumulate, state.step, None if axis is None else jax.lax.axis_index(axis))
        parts = constrain(jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch))
        gradient = precision.gradient(loss, state.scale)

        def one(carry: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, gradient(state.params, *part)), None

        grads, sums = gradient(state.params, jax.tree.map(lambda x: x[0], parts), keys[0])
        if accumulate > 1:
            rest = jax.tree.map(lambda x: x[1:], (parts, keys))
            (grads, sums), _ = jax.lax.scan(one, (grads, sums), rest)
        if axis is not None:
            grads, sums = jax.lax.psum((grads, sums), axis)
        weight = jnp.maximum(sums.weight, 1)
        grads = jax.tree.map(lambda g: g / weight, grads)
        done = state.step if state.scale is None else state.step - state.scale.skipped  # a skipped one is made up for
        rate = given.learning_rate * schedule(done)
        updates, memory = optimize(rate, given.weight_decay).update(grads, state.optimizer, state.params)
        values = {'loss': sums.total / weight, **{name: x / weight for name, x in sums.extras.items()}}
        values |= {'gradient_norm': optax.tree.norm(grads), 'weight': sums.weight, 'learning_rate': rate}
        params = optax.apply_updates(state.params, updates)
        average = None if state.average is None else _averaged(state.average, params, state.step, ema)
        made = State(state.step + 1, params, memory, average)
        if state.scale is None:
            return made, values
        good = precision.finite((grads, sums.total))
        scale = precision.adjusted(state.scale, good)
        values |= {'loss_scale': state.scale.factor, 'skipped': scale.skipped}
        kept = precision.chosen(good, made, state._replace(scale=None))
        return kept._replace(step=made.step, scale=scale), values

    return update


def _averaged(average: Params, params: Params, step: jax.Array, ema: float) -> Params:
    part = 1.0 - jnp.minimum(ema, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda old, new: (old + part * (new - old)).astype(old.dtype), average, params)


def compiled(config: Any, task: Task, layout: devices.Layout, state: State) -> Callable[[State, Batch], Any]:
    """`make_update` of a config, as it runs on a layout's devices, with what is given; state: to show how it lies."""
    _, schedule, optimize = recipe(config, task.examples)
    train = config.train
    update = make_update(
        task.loss, optimize, schedule, train.accumulate, train.get('ema', 0.0), layout.constrain, layout.axis
    )
    run, numbers = layout.compile(update, state), layout.state(layout.start(Given, *given(config)))
    return lambda state, batch: run(state, batch, numbers)


def initial(
    init: Callable[[jax.Array], Params],
    optimize: optimizer.Optimize,
    seed: Any,
    params: Params | None = None,
    *,
    ema: float = 0.0,
    scaled: bool = False,
) -> State:
    """The state before the first step, pure; from the parameters that `init` makes of a key if none are given."""
    # Copies: a step takes over the state's memory, of each array once.
    copied = lambda tree: jax.tree.map(jnp.copy, tree)
    first: Any = init(jax.random.key(seed)) if params is None else copied(params)
    average, scale = copied(first) if ema else None, precision.start() if scaled else None
    return State(jnp.int32(0), first, optimize(0.0, 0.0).init(first), average, scale)


def starter(config: Any, task: Task) -> Callable[..., State]:
    """`initial` of a config, pure: (seed, parameters or None) -> state."""
    _, _, optimize = recipe(config, task.examples)
    return partial(initial, task.init, optimize, ema=config.train.get('ema', 0.0), scaled=precision.asked(config))


def train(
    config: Any,
    task: Task,
    workdir: Path,
    params: Params | None = None,
    *,
    debug_nans: bool = False,
    profile: tuple[int, int] | None = None,
    watch: Watch = lambda step, scores: None,
) -> dict[str, float]:
    """Trains in `workdir`, from its latest checkpoint if it has one; returns the last and the best scores.

    params: where a run without a checkpoint starts from; the task's own start if None.
    debug_nans: keeps the state before each step, so that the RunError names what was not finite first.
    profile: the first and the last step of a trace, written to `workdir`/profile.
    watch: called behind an evaluation that is not the last one, once it is saved; it may raise, as `Pruned`.

    Raises RunError when the loss is no longer finite, naming the step, and Stopped, after a save, when SIGTERM or
    SIGINT asks it to stop.
    """
    durations, layout, make = plan(config, task.examples), layout_of(config), starter(config, task)
    with checkpoint.manager(workdir) as manager:
        state, progress = _restore_or_start(manager, layout, make, (np.uint32(config.seed), params))
        start = int(state.step)
        checkpoint.set_aside(manager, start)
        first = processes.first()
        with metrics.writer(workdir, start, first) as write, bar(durations.total, start, first) as advance:
            batch = _batch(task, layout, config.train.batch_size)
            wished = common_wishes if processes.several() else wishes
            with ExitStack() as stack:
                batches = stack.enter_context(closing(ahead(batch, start, durations.total)))
                stop = stack.enter_context(wished())
                state = layout.state(state)
                update, explain = compiled(config, task, layout, state), lambda step: _advice(manager)
                if debug_nans:
                    draw = partial(draws, np.uint32(config.seed), config.train.accumulate)
                    update, explain = nans.remembering(update, task, layout, draw)
                if profile is not None and first:
                    update = stack.enter_context(traced(update, workdir / 'profile', start, profile))
                return _run(
                    state, progress, task=task, durations=durations, manager=manager, write=write, layout=layout,
                    watch=watch, batches=batches, update=update, advance=advance, stop=stop, explain=explain,
                )  # fmt: skip


def _advice(manager: Any) -> str:
    newest = manager.latest_step()
    saved = 'there is no checkpoint yet' if newest is None else f'the newest checkpoint is from step {newest}'
    return f'{saved}. Try a lower optimizer.learning_rate, a longer optimizer.warmup or a smaller optimizer.clip'


def layout_of(config: Any) -> devices.Layout:
    """How a config's batches are divided among devices; raises UserError where they cannot be."""
    train = config.train
    rows = train.batch_size // train.accumulate
    return devices.layout(train.get('parallel', 'jit'), train.get('mesh', 'data=0'), rows)


def _batch(task: Task, layout: devices.Layout, count: int) -> Callable[[int], Batch]:
    """The batch of a step on its devices, of which each process makes the rows that it has."""
    if not processes.several():
        return lambda step: layout.batch(task.batch(step))
    rows = layout.rows(count)
    return lambda step: layout.batch(task.batch(step, rows), count)


def _restore_or_start(
    manager: Any, layout: devices.Layout, make: Callable[[Any, Params | None], State], args: tuple[Any, Params | None]
) -> tuple[State, checkpoint.Progress]:
    stored = layout.stored(jax.eval_shape(make, *args))
    saved = checkpoint.latest(manager, *_stored(stored))
    if saved is None:
        return layout.start(make, *args), checkpoint.Progress()
    logging.info('continues from step %d', saved.step)
    step = layout.start(lambda step: step, np.int32(saved.step))
    if stored.average is None and stored.scale is None:
        return State(step, saved.params, saved.optimizer), saved.progress
    average = None if stored.average is None else saved.params
    return State(step, **{'params': saved.params, **saved.optimizer}, average=average), saved.progress


def _stored(state: State) -> tuple[Params, Any]:
    """What a checkpoint calls parameters and optimizer: those to use, and with them what training goes on from."""
    beside = {} if state.average is None else {'params': state.params}
    if state.scale is not None:
        beside['scale'] = state.scale
    return state.used, {**beside, 'optimizer': state.optimizer} if beside else state.optimizer


def _run(
    state: State,
    progress: checkpoint.Progress,
    *,
    task: Task,
    durations: Plan,
    manager: Any,
    write: metrics.Write,
    layout: devices.Layout,
    watch: Watch,
    batches: Iterator[Batch],
    update: Callable[[State, Batch], tuple[State, dict[str, jax.Array]]],
    advance: Callable[[int, dict[str, float]], None],
    stop: Wishes,
    explain: Callable[[int], str],
) -> dict[str, float]:
    name, direction = task.best
    sign = 1.0 if direction == 'max' else -1.0
    flops = utilisation.counter(task.loss, state.params, layout.axis is not None)
    clock = Clock(flops, utilisation.peak(layout.count, jax.devices()[0].device_kind))
    scores: dict[str, float] = {}
    last: tuple[int, dict[str, jax.Array], utilisation.Shape] | None = None

    def settle() -> None:
        """Reads the values of the step before, by now computed while the host went on."""
        nonlocal last
        if last is None:
            return
        (step, values, shape), last = last, None
        # Each takes its time to read, so most of them are where they are written.
        read = lambda names: {name: float(x) for name, x in layout.local({n: values[n] for n in names}).items()}
        found = read({'loss', 'gradient_norm', 'weight', 'loss_scale'} & values.keys())
        for key in ('loss', 'gradient_norm'):  # a gradient that is not finite has spoilt the parameters already
            if not math.isfinite(found[key]) and found.get('loss_scale', 1.0) <= precision.LOWEST:
                raise RunError(f'step {step}: the {key} is {found[key]}; {explain(step)}')
        clock.count(found['weight'], shape)
        if step % durations.log == 0 or step == 1:  # the loss of the first is that before anything is learned
            told = read(name for name in values if name != 'weight')
            # Of a step that was skipped, what is not finite is left out.
            write(step, 'train', {key: x for key, x in told.items() if math.isfinite(x) or 'skipped' not in told})
        if step % durations.log == 0:
            write(step, 'speed', clock.rates())
        first = {name: scores[name], **scores} if scores else {}  # the line may have no room for the others
        advance(step, {'loss': found['loss']} | {f'valid {key}': value for key, value in first.items()})

    stopped = bool(durations.patience) and progress.waited >= durations.patience
    begun = step = int(layout.local(state.step))
    while step < durations.total and not stopped:
        with clock.spend('wait'):
            batch = next(batches)
        state, values = update(state, batch)
        step += 1
        settle()
        last = step, values, utilisation.shape_of(batch)
        if step == begun + 1:  # the first sign of life waits for no program of another width
            settle()
        evaluating = step % durations.evaluate == 0 or step == durations.total
        if stop(step) or evaluating or step % durations.save == 0:  # asked in every step, for the others' sake
            settle()
            if evaluating:
                with clock.spend('evaluate'):
                    scores = processes.agreed(layout.use(task.validate, state.used))
                for key, value in scores.items():  # the step before may have spoilt the parameters with a finite loss
                    if not math.isfinite(value):
                        raise RunError(f'step {step}: the {key} is {value} when evaluated; {_advice(manager)}')
                write(step, 'valid', scores)
                if progress.best is None or sign * scores[name] > sign * progress.best:
                    progress = checkpoint.Progress(scores[name], step, 0)
                else:
                    progress = progress._replace(waited=progress.waited + 1)
                stopped = bool(durations.patience) and progress.waited >= durations.patience
            with clock.spend('save'):
                params, memory = _stored(layout.kept(state))
                checkpoint.save(manager, checkpoint.Saved(step, params, memory, progress))
            if (wish := stop(step)) and step < durations.total:
                checkpoint.finish(manager)
                raise Stopped(wish, step)
            if evaluating and step < durations.total and not stopped:
                watch(step, scores)
    settle()
    checkpoint.finish(manager)
    if stopped:
        logging.info('stopped at step %d: no better %s in %d evaluations', step, name, progress.waited)
    return scores | {'step': step, f'best_{name}': progress.best, 'best_step': progress.best_step}  # type: ignore
