"""The optimizer and its schedule, from a config."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from attnlab.errors import UserError

Schedule = Callable[[Any], Any]
"""The learning rate of step i, i from 0."""


def schedule(config: Any, total: int, warmup: int) -> Schedule:
    """Linear warm-up from 0 over `warmup` steps, then the shape named by `config.schedule` until step `total`."""
    peak = config.learning_rate
    rest = max(total - warmup, 1)
    match config.schedule:
        case 'constant':
            after = optax.constant_schedule(peak)
        case 'cosine':
            after = optax.cosine_decay_schedule(peak, rest)
        case 'linear':
            after = optax.linear_schedule(peak, 0.0, rest)
        case 'rsqrt':
            # Vaswani et al. 2017, section 5.3: from the peak at the warm-up's end, with the square root of the step.
            start = max(warmup, 1)
            # `join_schedules` asks every part at every step, this one before its start too.
            after = lambda i: peak * (start / (start + jnp.maximum(i, 0))) ** 0.5
        case name:
            raise UserError(f"optimizer.schedule is {name!r}; expected 'constant', 'cosine', 'linear' or 'rsqrt'")
    return optax.join_schedules([optax.linear_schedule(0.0, peak, max(warmup, 1)), after], [warmup])


def build(config: Any, rate: Schedule) -> optax.GradientTransformation:
    """Clipping by the global norm (0: none), then Adam or SGD; decay, decoupled, on matrices only."""
    for name in ('learning_rate', 'clip', 'weight_decay'):
        if not 0.0 <= config[name] < math.inf:
            raise UserError(f'optimizer.{name} is {config[name]}; expected a finite number, 0 or more')
    if not 0.0 <= config.b2 < 1.0:
        raise UserError(f'optimizer.b2 is {config.b2}; expected 0 <= b2 < 1')
    match config.name:
        case 'adam':
            direction = optax.scale_by_adam(b2=config.b2)
        case 'sgd':
            direction = optax.identity()
        case name:
            raise UserError(f"optimizer.name is {name!r}; expected 'adam' or 'sgd'")
    parts = [optax.clip_by_global_norm(config.clip)] if config.clip else []
    parts.append(direction)
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=matrices))
    return optax.chain(*parts, optax.scale_by_learning_rate(rate))


def matrices(params: Any) -> Any:
    """True for leaves of two or more axes: biases, norms and gains are not decayed."""
    return jax.tree.map(lambda x: x.ndim > 1, params)
