"""The optimizer and its schedule, from a config."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from attnlab.errors import UserError

Schedule = Callable[[Any], Any]
"""The learning rate of step i, i from 0, as a part of its peak."""

Optimize = Callable[[Any, Any], optax.GradientTransformation]
"""(learning rate, weight decay) of a step, traced or not -> what makes its updates; its state depends on neither."""


def schedule(config: Any, total: int, warmup: int) -> Schedule:
    """Linear warm-up from 0 over `warmup` steps, then the shape named by `config.schedule` until step `total`."""
    rest = max(total - warmup, 1)
    match config.schedule:
        case 'constant':
            after = optax.constant_schedule(1.0)
        case 'cosine':
            after = optax.cosine_decay_schedule(1.0, rest)
        case 'linear':
            after = optax.linear_schedule(1.0, 0.0, rest)
        case 'rsqrt':
            # Vaswani et al. 2017, section 5.3: from the peak at the warm-up's end, with the square root of the step.
            start = max(warmup, 1)
            # `join_schedules` asks every part at every step, this one before its start too.
            after = lambda i: (start / (start + jnp.maximum(i, 0))) ** 0.5
        case name:
            raise UserError(f"optimizer.schedule is {name!r}; expected 'constant', 'cosine', 'linear' or 'rsqrt'")
    return optax.join_schedules([optax.linear_schedule(0.0, 1.0, max(warmup, 1)), after], [warmup])


def build(config: Any) -> Optimize:
    """Clipping by the global norm (0: none), then Adam or SGD; decay, decoupled, on matrices only.

    With a `layer_decay` the rate of a block is that times the rate of the next one (Bao et al. 2022, section 3.2).
    """
    for name in ('learning_rate', 'clip', 'weight_decay'):
        if not 0.0 <= config[name] < math.inf:
            raise UserError(f'optimizer.{name} is {config[name]}; expected a finite number, 0 or more')
    if not 0.0 <= config.b2 < 1.0:
        raise UserError(f'optimizer.b2 is {config.b2}; expected 0 <= b2 < 1')
    decay = config.get('layer_decay', 1.0)
    if not 0.0 < decay <= 1.0:
        raise UserError(f'optimizer.layer_decay is {decay}; expected 0 < decay <= 1')
    match config.name:
        case 'adam':
            direction = optax.scale_by_adam(b2=config.b2)
        case 'sgd':
            direction = optax.identity()
        case name:
            raise UserError(f"optimizer.name is {name!r}; expected 'adam' or 'sgd'")

    def optimize(rate: Any, weight_decay: Any) -> optax.GradientTransformation:
        parts = [optax.clip_by_global_norm(config.clip)] if config.clip else []
        parts.append(direction)
        if config.weight_decay:
            parts.append(optax.add_decayed_weights(weight_decay, mask=matrices))
        if decay < 1.0:
            parts.append(optax.stateless(lambda updates, _: by_depth(updates, decay)))
        return optax.chain(*parts, optax.scale(-rate))

    return optimize


def by_depth(updates: Any, decay: float) -> Any:
    """Updates of a model of blocks times decay^(L + 1 - depth): block l from 1 has depth l, what stands behind the
    blocks L + 1, what stands before them 0."""
    paths = [[str(part.key) for part in path] for path, _ in jax.tree_util.tree_flatten_with_path(updates)[0]]
    leaves, tree = jax.tree.flatten(updates)
    numbers = [int(name.removeprefix('block_')) for path in paths for name in path if name.startswith('block_')]
    stacked = [leaf.shape[0] for path, leaf in zip(paths, leaves, strict=True) if 'blocks' in path]
    layers = max([number + 1 for number in numbers] + stacked, default=0)

    def scaled(path: list[str], leaf: jax.Array) -> jax.Array:
        if 'blocks' in path:  # a scan's, one behind the other
            depth = jnp.arange(1, layers + 1).reshape(-1, *[1] * (leaf.ndim - 1))
        elif at := [name for name in path if name.startswith('block_')]:
            depth = int(at[0].removeprefix('block_')) + 1
        else:
            depth = layers + 1 if {'stack', 'head', 'pool'} & set(path) else 0
        return leaf * decay ** (layers + 1 - depth)

    return tree.unflatten(scaled(path, leaf) for path, leaf in zip(paths, leaves, strict=True))


def matrices(params: Any) -> Any:
    """True for leaves of two or more axes: biases, norms and gains are not decayed."""
    return jax.tree.map(lambda x: x.ndim > 1, params)
