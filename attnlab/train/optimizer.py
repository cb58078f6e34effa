"""The optimizer and its schedule, from a config."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from attnlab.configs.run import OptimizerConfig

_BLOCK = re.compile(r'(?:stage_(\d+)_)?block_(\d+)')

Schedule = Callable[[Any], Any]
"""The learning rate of step i, i from 0, as a part of its peak."""

Optimize = Callable[[Any, Any], optax.GradientTransformation]
"""(learning rate, weight decay) of a step, traced or not -> what makes its updates; its state depends on neither."""


def schedule(config: OptimizerConfig, total: int, warmup: int) -> Schedule:
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


def build(config: OptimizerConfig) -> Optimize:
    """Clipping by the global norm (0: none), then Adam or SGD; decay, decoupled, on what is `decayed` only.

    With a `layer_decay` the rate of a block is that times the rate of the next one (Bao et al. 2022, section 3.2).
    """
    direction = optax.scale_by_adam(b2=config.b2) if config.name == 'adam' else optax.identity()
    decay = config.layer_decay

    def optimize(rate: Any, weight_decay: Any) -> optax.GradientTransformation:
        parts = [optax.clip_by_global_norm(config.clip)] if config.clip else []
        parts.append(direction)
        if config.weight_decay:
            parts.append(optax.add_decayed_weights(weight_decay, mask=decayed))
        if decay < 1.0:
            parts.append(optax.stateless(lambda updates, _: by_depth(updates, decay)))
        return optax.chain(*parts, optax.scale(-rate))

    return optimize


def by_depth(updates: Any, decay: float) -> Any:
    """Updates of a model of blocks times decay^(L + 1 - depth): block l from 1 has depth l, what stands behind the
    blocks L + 1, what stands before them 0."""
    found, tree = jax.tree_util.tree_flatten_with_path(updates)
    leaves = [(_names(path), leaf) for path, leaf in found]
    blocks = sorted({at for names, _ in leaves if (at := _block(names)) is not None})
    stacked = [leaf.shape[0] for names, leaf in leaves if 'blocks' in names]
    layers = max([len(blocks), *stacked])

    def scaled(names: list[str], leaf: jax.Array) -> jax.Array:
        if 'blocks' in names:  # a scan's, one behind the other
            depth = jnp.arange(1, layers + 1).reshape(-1, *[1] * (leaf.ndim - 1))
        elif (at := _block(names)) is not None:
            depth = blocks.index(at) + 1
        else:
            depth = layers + 1 if {'stack', 'head', 'pool'} & set(names) else 0
        return leaf * decay ** (layers + 1 - depth)

    return tree.unflatten(scaled(names, leaf) for names, leaf in leaves)


def decayed(params: Any) -> Any:
    """True for matrices, which heads and experts may give more axes; biases, norms' scales and vectors are not decayed.

    The first axis of what a scan over blocks stacks is none of the parameter's.
    """

    def is_matrix(path: Any, leaf: Any) -> bool:
        names = _names(path)
        return names[-1] not in ('bias', 'scale') and leaf.ndim - ('blocks' in names) > 1

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def _names(path: Any) -> list[str]:
    return [str(part.key) for part in path]


def _block(names: list[str]) -> tuple[int, int] | None:
    """(stage, number) of the block that a parameter is of: block_2 of a Transformer, stage_1_block_2 of a ResNet."""
    found = next(filter(None, map(_BLOCK.match, names)), None)
    return (int(found[1] or 0), int(found[2])) if found else None
