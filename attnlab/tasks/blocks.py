"""Counting and auxiliary losses of models that are stacks of Transformer blocks."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax.numpy as jnp

from attnlab.configs import BlockConfig, Section
from attnlab.kernels.losses import LossSums
from attnlab.layers.mlp import default_mlp_width

M = TypeVar('M', bound=BlockConfig)


def outline_config(model: M, layers: int | None, active: bool) -> M:
    """The config of a model for `Outlined.outline`, which has the same arguments.

    Dense attention, because all of its matrix products can be counted.
    """
    changes: dict[str, Any] = {} if layers is None else {'layers': layers, 'scan': False}
    if active:
        changes['implementation'] = 'dense'
    if active and model.experts:
        width = model.mlp_width or default_mlp_width(model.mlp, model.width)
        changes |= {'mlp_width': width * (model.experts_per_token + model.shared_expert), 'experts': 0}
    return dataclasses.replace(model, **changes)


def add_expert_losses(model: Section, sums: LossSums, aux: Mapping[str, Any]) -> LossSums:
    """A loss with the auxiliary losses `aux` of the experts of a model, and their means among the extras."""
    if not aux:
        return sums
    assert isinstance(model, BlockConfig)
    logged = {f'experts_{name}': jnp.mean(value) * sums.weight for name, value in aux.items()}
    more = model.load_balance * jnp.sum(aux['load_balance']) + model.router_z * jnp.sum(aux['z'])
    return LossSums(sums.total + more * sums.weight, sums.weight, sums.extras | logged)
