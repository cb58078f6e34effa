"""One training step: the state, the pure update, and the state before the first step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attnlab.kernels.losses import LossSums
from attnlab.tasks.task import Batch, Params
from attnlab.train import precision
from attnlab.train.devices import Layout
from attnlab.train.optimizer import OptimizerFactory, Schedule

LossFunction = Callable[[Params, Batch, jax.Array], LossSums]
"""(parameters, batch, key) -> sums."""

StepMetrics = dict[str, jax.Array]
"""Metrics of a step, on the devices."""


class TrainState(NamedTuple):
    """Everything that a step changes.

    step: steps done.  optimizer: the optimizer's state.
    average: exponential moving average of the parameters, if the config has one.
    scale: loss scale, in float16.
    """

    step: jax.Array
    params: Params
    optimizer: optax.OptState
    average: Params | None = None
    scale: precision.LossScale | None = None

    @property
    def used(self) -> Params:
        """The parameters to evaluate."""
        return self.params if self.average is None else self.average


class Hyperparameters(NamedTuple):
    """Numbers of a config that a compiled step takes as arguments: runs that differ only in them share a program."""

    seed: np.uint32 | jax.Array
    learning_rate: np.float32 | jax.Array
    weight_decay: np.float32 | jax.Array


UpdateFunction = Callable[[TrainState, Batch, Hyperparameters], tuple[TrainState, StepMetrics]]
"""The pure training step."""


def initial_state(
    init: Callable[[jax.Array], Params],
    optimize: OptimizerFactory,
    seed: np.uint32 | jax.Array | int,
    params: Params | None = None,
    *,
    ema: float = 0.0,
    scaled: bool = False,
) -> TrainState:
    """The state before the first step, from the given parameters or those that `init` makes of the seed; pure."""
    # A step donates the state's memory, so each array must be there once and belong to the state alone.
    copied = lambda tree: jax.tree.map(jnp.copy, tree)
    first = init(jax.random.key(seed)) if params is None else copied(params)
    average, scale = copied(first) if ema else None, precision.initial_loss_scale() if scaled else None
    return TrainState(jnp.int32(0), first, optimize(0.0, 0.0).init(first), average, scale)


def noise_keys(seed: Any, count: int, step: Any, device: Any) -> jax.Array:
    """A PRNG key for each of `count` micro-batches; device: its number where devices draw noise of their own."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.random.split(key if device is None else jax.random.fold_in(key, device), count)


def make_update(
    loss: LossFunction,
    optimize: OptimizerFactory,
    schedule: Schedule,
    *,
    accumulate: int = 1,
    ema: float = 0.0,
    layout: Layout | None = None,
) -> UpdateFunction:
    """The pure training step.

    The gradient is that of the batch's total loss divided by the batch's total weight, into however many micro-batches
    `accumulate` cuts the batch: a token counts the same in a short micro-batch and in a long one. Noise depends on seed
    and step alone.

    ema: decay of the average, at most (1 + i) / (10 + i) in step i, so that the initial parameters are soon forgotten.
    layout: devices that the step runs on, if there are several.

    If the state has a loss scale, a step whose gradient is not finite changes only the scale and the step number; see
    `attnlab.train.precision`.
    """
    axis = None if layout is None else layout.axis

    def update(state: TrainState, batch: Batch, given: Hyperparameters) -> tuple[TrainState, StepMetrics]:
        keys = noise_keys(given.seed, accumulate, state.step, None if axis is None else jax.lax.axis_index(axis))
        parts = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)
        parts = parts if layout is None else layout.constrain(parts)
        grads, sums = _total(precision.make_scaled_gradient(loss, state.scale), state.params, parts, keys)
        if axis is not None:
            grads, sums = jax.lax.psum((grads, sums), axis)
        weight = jnp.maximum(sums.weight, 1)
        grads = jax.tree.map(lambda g: g / weight, grads)
        done = state.step if state.scale is None else state.step - state.scale.skipped  # skipped steps do not count
        rate: Any = given.learning_rate * schedule(done)
        updates, memory = optimize(rate, given.weight_decay).update(grads, state.optimizer, state.params)
        values = {'loss': sums.total / weight, **{name: x / weight for name, x in sums.extras.items()}}
        values |= {'gradient_norm': optax.tree.norm(grads), 'weight': sums.weight, 'learning_rate': rate}
        params = optax.apply_updates(state.params, updates)
        average = None if state.average is None else _averaged(state.average, params, state.step, ema)
        new = TrainState(state.step + 1, params, memory, average)
        if state.scale is None:
            return new, values
        good = precision.all_finite((grads, sums.total))
        scale = precision.adjust_loss_scale(state.scale, good)
        values |= {'loss_scale': state.scale.factor, 'skipped': scale.skipped}
        chosen = precision.select_tree(good, new, state._replace(scale=None))
        return chosen._replace(step=new.step, scale=scale), values

    return update


def _total(
    gradient: Callable[[Params, Batch, jax.Array], tuple[Params, LossSums]],
    params: Params,
    parts: Batch,
    keys: jax.Array,
) -> tuple[Params, LossSums]:
    """Gradient and sums, added up over micro-batches [accumulate, rows, ...]."""
    first = gradient(params, jax.tree.map(lambda x: x[0], parts), keys[0])
    if len(keys) == 1:
        return first

    def add(carry: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, carry, gradient(params, *part)), None

    total, _ = jax.lax.scan(add, first, jax.tree.map(lambda x: x[1:], (parts, keys)))
    return total


def _averaged(average: Params, params: Params, step: jax.Array, ema: float) -> Params:
    # `optax.incremental_update` rounds otherwise: part * new + (1 - part) * old.
    part = 1.0 - jnp.minimum(ema, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda old, new: (old + part * (new - old)).astype(old.dtype), average, params)
