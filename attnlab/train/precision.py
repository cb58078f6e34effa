"""Loss scaling for training in float16, where small gradients become zero and large ones infinite.

float16 has 5 exponent bits: numbers below 6e-8 become zero, where bfloat16 and float32 reach down to 1e-38.  The loss
is multiplied by a scale before the gradient is computed, which shifts all gradients up, and the gradient is divided by
the scale afterwards, in float32 (Micikevicius et al. 2018, section 3.2).  The scale adapts itself: see
`adjust_loss_scale`.

`flax.training.dynamic_scale` decides after each gradient whether it was finite; here there is one decision for all
micro-batches and devices of a step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from attnlab.configs.run import RunConfig
from attnlab.kernels.losses import LossSums
from attnlab.tasks.task import Batch, Params

T = TypeVar('T')

INITIAL_SCALE, MIN_SCALE, MAX_SCALE = 2.0**15, 1.0, 2.0**24
GROWTH_INTERVAL = 2000
"""Number of successive steps with finite gradients after which the scale doubles."""


class LossScale(NamedTuple):
    """State of the loss scaling.

    factor: [] float32, the number that the mean loss of a micro-batch is multiplied by.
    good: [] int32, number of successive steps with a finite gradient.
    skipped: [] int32, number of all steps whose gradient was not finite.
    """

    factor: jax.Array
    good: jax.Array
    skipped: jax.Array


def uses_float16(config: RunConfig) -> bool:
    """Return whether the model computes in float16; not all models have a choice of dtype."""
    return getattr(getattr(config, 'model', None), 'dtype', None) == 'float16'


def initial_loss_scale() -> LossScale:
    """Return the loss scale of the first step."""
    return LossScale(jnp.float32(INITIAL_SCALE), jnp.int32(0), jnp.int32(0))


def make_scaled_gradient(
    loss: Callable[[Params, Batch, jax.Array], LossSums], scale: LossScale | None
) -> Callable[[Params, Batch, jax.Array], tuple[Params, LossSums]]:
    """Return a function (parameters, batch, PRNG key) -> (gradient of the total loss, loss sums).

    scale: the loss scale under which the gradient is computed; None for no scaling.
    """

    def scaled_loss(
        params: Params, batch: Batch, rng: jax.Array
    ) -> tuple[jax.Array, tuple[LossSums, jax.Array | None]]:
        sums = loss(params, batch, rng)
        if scale is None:
            return sums.total, (sums, None)
        # Scale the mean loss: the total over thousands of tokens would be thousands of times as large.
        factor = scale.factor / jnp.maximum(sums.weight, 1)
        return sums.total * factor, (sums, factor)

    def gradient(params: Params, batch: Batch, rng: jax.Array) -> tuple[Params, LossSums]:
        (_, (sums, factor)), grads = jax.value_and_grad(scaled_loss, has_aux=True)(params, batch, rng)
        return (grads if factor is None else jax.tree.map(lambda g: g / factor, grads)), sums

    return gradient


def all_finite(tree: Any) -> jax.Array:
    """Return whether all numbers of a tree are finite, [] bool."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


def select_tree(use_new: jax.Array, new: T, old: T) -> T:
    """Return the new tree if `use_new` ([] bool) is True, otherwise the old one."""
    return jax.tree.map(lambda new, old: jnp.where(use_new, new, old), new, old)


def adjust_loss_scale(scale: LossScale, is_finite: jax.Array) -> LossScale:
    """Return the loss scale of the next step.

    The scale is halved after a step whose gradient was not finite, and doubled after `GROWTH_INTERVAL` successive steps
    with finite gradients.  It stays between `MIN_SCALE` and `MAX_SCALE`: there it is finite and can come down within a
    few steps.

    is_finite: [] bool, whether loss and gradient of this step were finite.
    """
    grows = scale.good + 1 >= GROWTH_INTERVAL
    grown_factor = jnp.where(grows, jnp.minimum(2 * scale.factor, MAX_SCALE), scale.factor)
    good = jnp.where(is_finite & ~grows, scale.good + 1, 0)
    factor = jnp.where(is_finite, grown_factor, jnp.maximum(scale.factor / 2, MIN_SCALE))
    return LossScale(factor, good, scale.skipped + jnp.where(is_finite, 0, 1))
