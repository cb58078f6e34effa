"""The optimizer and the learning-rate schedule of a config."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attnlab import parameters
from attnlab.configs.run import OptimizerConfig
from attnlab.train import checksum

Scalar = jax.Array | np.floating | float
"""A number, traced or not."""

Schedule = optax.Schedule
"""(step i, from 0) -> learning rate as a fraction of its peak."""

OptimizerFactory = Callable[[Scalar, Scalar], optax.GradientTransformation]
"""(learning rate, weight decay) of a step -> optimizer.  The optimizer's state depends on neither of the two."""


def make_schedule(config: OptimizerConfig, total: int, warmup: int) -> Schedule:
    """Return the schedule: linear warm-up from 0 over `warmup` steps, then `config.schedule` until step `total`."""
    remaining = max(total - warmup, 1)
    match config.schedule:
        case 'constant':
            after_warmup = optax.constant_schedule(1.0)
        case 'cosine':
            after_warmup = optax.cosine_decay_schedule(1.0, remaining)
        case 'linear':
            after_warmup = optax.linear_schedule(1.0, 0.0, remaining)
        case _:  # rsqrt
            # Vaswani et al. 2017, section 5.3: from the peak at the end of the warm-up, decay with the inverse square
            # root of the step.
            start = max(warmup, 1)
            # `join_schedules` evaluates every part at every step, so this one also at steps before its start.
            after_warmup = lambda i: (start / (start + jnp.maximum(i, 0))) ** 0.5
    return optax.join_schedules([optax.linear_schedule(0.0, 1.0, max(warmup, 1)), after_warmup], [warmup])


def make_optimizer_factory(config: OptimizerConfig) -> OptimizerFactory:
    """Return a function that makes the optimizer of a step.

    The optimizer clips gradients by their global norm (0: no clipping), applies Adam or SGD, and adds decoupled weight
    decay to the parameters of `weight_decay_mask`.  If `layer_decay` is less than 1, the learning rate of a block is
    that factor times the learning rate of the next block (Bao et al. 2022, section 3.2).
    """
    direction = optax.scale_by_adam(b2=config.b2) if config.name == 'adam' else optax.identity()
    layer_decay = config.layer_decay

    def make_optimizer(learning_rate: Scalar, weight_decay: Scalar) -> optax.GradientTransformation:
        parts = [optax.clip_by_global_norm(config.clip)] if config.clip else []
        parts.append(direction)
        if config.weight_decay:
            decay = optax.add_decayed_weights(weight_decay, mask=weight_decay_mask)  # pyright: ignore[reportArgumentType]
            parts.append(decay)
        if layer_decay < 1.0:
            parts.append(optax.stateless(lambda updates, _: scale_by_depth(updates, layer_decay)))
        return optax.chain(*parts, optax.scale(-learning_rate))

    return make_optimizer


def scale_by_depth(updates: optax.Updates, decay: float) -> optax.Updates:
    """Multiply updates by decay^(L + 1 - depth), for a model with L blocks.

    The depth of block l, from 1, is l; that of parameters after the blocks is L + 1, and that of parameters before
    them 0.
    """
    leaves_with_keys, tree = jax.tree_util.tree_flatten_with_path(updates)
    leaves = [(checksum.path_string(keys), leaf) for keys, leaf in leaves_with_keys]
    blocks = sorted({block for path, _ in leaves if (block := parameters.find_block(path)) is not None})
    layers = max([len(blocks), *(leaf.shape[0] for path, leaf in leaves if parameters.is_stacked(path))])

    def scale(path: str, leaf: jax.Array) -> jax.Array:
        if parameters.is_stacked(path):
            depth = jnp.arange(1, layers + 1).reshape(-1, *[1] * (leaf.ndim - 1))
        elif (block := parameters.find_block(path)) is not None:
            depth = blocks.index(block) + 1
        else:
            depth = layers + 1 if parameters.is_after_blocks(path) else 0
        return leaf * decay ** (layers + 1 - depth)

    return tree.unflatten(scale(path, leaf) for path, leaf in leaves)


def weight_decay_mask(params: optax.Params) -> optax.Params:
    """Return, for each parameter of a tree, whether weight decay applies to it."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: parameters.is_decayed(checksum.path_string(keys), x.ndim), params
    )
