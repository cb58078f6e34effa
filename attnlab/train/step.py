"""The training step: its state, the pure update function, and the initial state."""

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
"""(parameters, batch, PRNG key) -> loss sums."""

StepMetrics = dict[str, jax.Array]
"""Metrics of one step by name, scalars on the devices."""


class TrainState(NamedTuple):
    """Everything that a training step changes.

    step: [] int32, number of steps done.
    params: the model's parameters.
    opt_state: state of the optimizer.
    ema_params: exponential moving average of the parameters; None if the config has none.
    loss_scale: the loss scale of training in float16; None in other dtypes.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    ema_params: Params | None = None
    loss_scale: precision.LossScale | None = None

    @property
    def evaluation_params(self) -> Params:
        """The parameters to evaluate: the moving average if there is one."""
        return self.params if self.ema_params is None else self.ema_params


class Hyperparameters(NamedTuple):
    """Numbers of a config that are arguments of a compiled step: runs that differ only in them share a program."""

    seed: np.uint32 | jax.Array
    learning_rate: np.float32 | jax.Array
    weight_decay: np.float32 | jax.Array


UpdateFunction = Callable[[TrainState, Batch, Hyperparameters], tuple[TrainState, StepMetrics]]
"""The pure training step: (state, batch, hyperparameters) -> (new state, metrics)."""


def initial_state(
    init: Callable[[jax.Array], Params],
    make_optimizer: OptimizerFactory,
    seed: np.uint32 | jax.Array | int,
    params: Params | None = None,
    *,
    ema: float = 0.0,
    scaled: bool = False,
) -> TrainState:
    """Return the state before the first step; a pure function.

    init: (PRNG key) -> initial parameters; called with a key made from the seed if `params` is None.
    params: parameters to start from.
    ema: decay of the moving average; 0 for no average.
    scaled: whether the state has a loss scale.
    """

    def copy(tree: Params) -> Params:
        # A step donates the state's memory, so no array may occur twice in the state or be used elsewhere.
        return jax.tree.map(jnp.copy, tree)

    first = init(jax.random.key(seed)) if params is None else copy(params)
    ema_params = copy(first) if ema else None
    loss_scale = precision.initial_loss_scale() if scaled else None
    return TrainState(jnp.int32(0), first, make_optimizer(0.0, 0.0).init(first), ema_params, loss_scale)


def noise_keys(seed: Any, count: int, step: Any, device: Any) -> jax.Array:
    """Return the PRNG keys of a step's `count` micro-batches, [count].

    device: number of the device if each device draws its own noise; None if not.
    """
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.random.split(key if device is None else jax.random.fold_in(key, device), count)


def make_update(
    loss: LossFunction,
    make_optimizer: OptimizerFactory,
    schedule: Schedule,
    *,
    accumulate: int = 1,
    ema: float = 0.0,
    layout: Layout | None = None,
) -> UpdateFunction:
    """Return the pure training step.

    The gradient is that of the total loss of the batch divided by the total weight of the batch, for any number
    `accumulate` of micro-batches: a token counts the same in a short micro-batch and in a long one.  Noise depends only
    on the seed and the step.

    accumulate: number of micro-batches that the batch is divided into.
    ema: decay of the moving average of the parameters.  In step i, from 0, at most (1 + i) / (10 + i) is used, so that
      the initial parameters soon lose their weight.
    layout: the devices that the step runs on; None for one device.

    If the state has a loss scale, a step with a gradient that is not finite changes only the loss scale and the step
    number; see `attnlab.train.precision`.
    """
    axis = None if layout is None else layout.axis

    def update(state: TrainState, batch: Batch, hyperparameters: Hyperparameters) -> tuple[TrainState, StepMetrics]:
        device = None if axis is None else jax.lax.axis_index(axis)
        keys = noise_keys(hyperparameters.seed, accumulate, state.step, device)
        micro_batches = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)
        micro_batches = micro_batches if layout is None else layout.constrain(micro_batches)
        gradient = precision.make_scaled_gradient(loss, state.loss_scale)
        grads, sums = _accumulate_gradients(gradient, state.params, micro_batches, keys)
        if axis is not None:
            grads, sums = jax.lax.psum((grads, sums), axis)
        weight = jnp.maximum(sums.weight, 1)
        grads = jax.tree.map(lambda g: g / weight, grads)
        # The schedule does not count skipped steps.
        updates_done = state.step if state.loss_scale is None else state.step - state.loss_scale.skipped
        learning_rate: Any = hyperparameters.learning_rate * schedule(updates_done)
        optimizer = make_optimizer(learning_rate, hyperparameters.weight_decay)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = {'loss': sums.total / weight, **{name: x / weight for name, x in sums.extras.items()}}
        metrics |= {'gradient_norm': optax.tree.norm(grads), 'weight': sums.weight, 'learning_rate': learning_rate}
        params = optax.apply_updates(state.params, updates)
        ema_params = None if state.ema_params is None else _update_ema(state.ema_params, params, state.step, ema)
        new_state = TrainState(state.step + 1, params, opt_state, ema_params)
        if state.loss_scale is None:
            return new_state, metrics
        is_finite = precision.all_finite((grads, sums.total))
        loss_scale = precision.adjust_loss_scale(state.loss_scale, is_finite)
        metrics |= {'loss_scale': state.loss_scale.factor, 'skipped': loss_scale.skipped}
        selected = precision.select_tree(is_finite, new_state, state._replace(loss_scale=None))
        return selected._replace(step=new_state.step, loss_scale=loss_scale), metrics

    return update


def _accumulate_gradients(
    gradient: Callable[[Params, Batch, jax.Array], tuple[Params, LossSums]],
    params: Params,
    micro_batches: Batch,
    keys: jax.Array,
) -> tuple[Params, LossSums]:
    """Sum the gradients and loss sums of all micro-batches, whose arrays are [accumulate, rows, ...]."""
    first = gradient(params, jax.tree.map(lambda x: x[0], micro_batches), keys[0])
    if len(keys) == 1:
        return first

    def add(carry: Any, micro_batch_and_key: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, carry, gradient(params, *micro_batch_and_key)), None

    total, _ = jax.lax.scan(add, first, jax.tree.map(lambda x: x[1:], (micro_batches, keys)))
    return total


def _update_ema(ema_params: Params, params: Params, step: jax.Array, ema: float) -> Params:
    # Not `optax.incremental_update`: that computes part * new + (1 - part) * old, which rounds differently.
    part = 1.0 - jnp.minimum(ema, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda old, new: (old + part * (new - old)).astype(old.dtype), ema_params, params)
