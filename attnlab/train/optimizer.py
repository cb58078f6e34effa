"""The optimizer and its schedule, from a config."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attnlab import parameters
from attnlab.configs.run import OptimizerConfig
from attnlab.train import checksum

Scalar = jax.Array | np.floating | float
"""Traced or not."""

Schedule = optax.Schedule
"""The learning rate of step i, i from 0, as a part of its peak."""

OptimizerFactory = Callable[[Scalar, Scalar], optax.GradientTransformation]
"""(learning rate, weight decay) of a step, traced or not -> what makes its updates; its state depends on neither."""


def make_schedule(config: OptimizerConfig, total: int, warmup: int) -> Schedule:
    """Linear warm-up from 0 over `warmup` steps, then the shape named by `config.schedule` until step `total`."""
    rest = max(total - warmup, 1)
    match config.schedule:
        case 'constant':
            after = optax.constant_schedule(1.0)
        case 'cosine':
            after = optax.cosine_decay_schedule(1.0, rest)
        case 'linear':
            after = optax.linear_schedule(1.0, 0.0, rest)
        case _:  # rsqrt
            # Vaswani et al. 2017, section 5.3: from the peak at the warm-up's end, with the square root of the step.
            start = max(warmup, 1)
            # `join_schedules` asks every part at every step, this one before its start too.
            after = lambda i: (start / (start + jnp.maximum(i, 0))) ** 0.5
    return optax.join_schedules([optax.linear_schedule(0.0, 1.0, max(warmup, 1)), after], [warmup])


def make_optimizer_factory(config: OptimizerConfig) -> OptimizerFactory:
    """Clipping by the global norm (0: none), then Adam or SGD; decay, decoupled, on what is `weight_decay_mask` only.

    With a `layer_decay` the rate of a block is that times the rate of the next one (Bao et al. 2022, section 3.2).
    """
    direction = optax.scale_by_adam(b2=config.b2) if config.name == 'adam' else optax.identity()
    decay = config.layer_decay

    def optimize(rate: Scalar, weight_decay: Scalar) -> optax.GradientTransformation:
        parts = [optax.clip_by_global_norm(config.clip)] if config.clip else []
        parts.append(direction)
        if config.weight_decay:
            parts.append(optax.add_decayed_weights(weight_decay, mask=weight_decay_mask))  # pyright: ignore[reportArgumentType]
        if decay < 1.0:
            parts.append(optax.stateless(lambda updates, _: scale_by_depth(updates, decay)))
        return optax.chain(*parts, optax.scale(-rate))

    return optimize


def scale_by_depth(updates: optax.Updates, decay: float) -> optax.Updates:
    """Updates times decay^(L + 1 - depth): the depth of block l, from 1, is l, that of parameters behind the blocks
    L + 1, and that of those before them 0."""
    found, tree = jax.tree_util.tree_flatten_with_path(updates)
    leaves = [(checksum.path_string(keys), leaf) for keys, leaf in found]
    blocks = sorted({block for path, _ in leaves if (block := parameters.find_block(path)) is not None})
    layers = max([len(blocks), *(leaf.shape[0] for path, leaf in leaves if parameters.is_stacked(path))])

    def scaled(path: str, leaf: jax.Array) -> jax.Array:
        if parameters.is_stacked(path):
            depth = jnp.arange(1, layers + 1).reshape(-1, *[1] * (leaf.ndim - 1))
        elif (block := parameters.find_block(path)) is not None:
            depth = blocks.index(block) + 1
        else:
            depth = layers + 1 if parameters.is_after_blocks(path) else 0
        return leaf * decay ** (layers + 1 - depth)

    return tree.unflatten(scaled(path, leaf) for path, leaf in leaves)


def weight_decay_mask(params: optax.Params) -> optax.Params:
    """Whether weight decay applies, for each parameter of a tree."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: parameters.is_decayed(checksum.path_string(keys), x.ndim), params
    )
