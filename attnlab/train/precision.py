"""Loss scaling: in float16 small gradients are zero and large ones infinite unless the loss is multiplied first.

float16 has 5 bits of exponent: below 6e-8 all is zero, where bfloat16 and float32 go on to 1e-38.  So the loss is
multiplied by a scale before the gradient is taken, which shifts all of it up, and the gradient divided by it after, in
float32 (Micikevicius et al. 2018, section 3.2).  The scale looks for itself: see `adjust_loss_scale`.

`flax.training.dynamic_scale` decides at each call for a gradient; here one decision is for all micro-batches and
devices of a step.
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
"""After so many good steps in a row the scale doubles."""


class LossScale(NamedTuple):
    """What a step knows of its loss's scale.

    factor: [] float32, what the mean loss of a micro-batch is multiplied by.
    good: [] int32, steps in a row whose gradient was finite.  skipped: [] int32, all steps whose gradient was not.
    """

    factor: jax.Array
    good: jax.Array
    skipped: jax.Array


def uses_float16(config: RunConfig) -> bool:
    """Whether the model computes in float16; only some models have a choice of dtype."""
    return getattr(getattr(config, 'model', None), 'dtype', None) == 'float16'


def initial_loss_scale() -> LossScale:
    """The scale of the first step."""
    return LossScale(jnp.float32(INITIAL_SCALE), jnp.int32(0), jnp.int32(0))


def make_scaled_gradient(
    loss: Callable[[Params, Batch, jax.Array], LossSums], scale: LossScale | None
) -> Callable[[Params, Batch, jax.Array], tuple[Params, LossSums]]:
    """(params, batch, key) -> (gradient of the loss's total, its sums); the gradient taken under the scale, if any."""

    def scaled(params: Params, batch: Batch, rng: jax.Array) -> tuple[jax.Array, tuple[LossSums, jax.Array | None]]:
        sums = loss(params, batch, rng)
        if scale is None:
            return sums.total, (sums, None)
        # Of the mean: that of a total over thousands of tokens would be thousands of times as large.
        factor = scale.factor / jnp.maximum(sums.weight, 1)
        return sums.total * factor, (sums, factor)

    def of(params: Params, batch: Batch, rng: jax.Array) -> tuple[Params, LossSums]:
        (_, (sums, factor)), grads = jax.value_and_grad(scaled, has_aux=True)(params, batch, rng)
        return (grads if factor is None else jax.tree.map(lambda g: g / factor, grads)), sums

    return of


def all_finite(tree: Any) -> jax.Array:
    """Whether all numbers of a tree are."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


def select_tree(good: jax.Array, new: T, old: T) -> T:
    """The new tree after a good step, the old one after another."""
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old)


def adjust_loss_scale(scale: LossScale, good: jax.Array) -> LossScale:
    """The next step's scale: half after a step that was not good, double after `GROWTH_INTERVAL` good ones in a row.

    It stays between `MIN_SCALE` and `MAX_SCALE`, where it is finite and comes down within a few steps.
    """
    grows = scale.good + 1 >= GROWTH_INTERVAL
    up = jnp.where(grows, jnp.minimum(2 * scale.factor, MAX_SCALE), scale.factor)
    count = jnp.where(good & ~grows, scale.good + 1, 0)
    return LossScale(
        jnp.where(good, up, jnp.maximum(scale.factor / 2, MIN_SCALE)), count, scale.skipped + jnp.where(good, 0, 1)
    )
