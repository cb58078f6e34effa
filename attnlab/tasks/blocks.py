"""Functions for all models that are stacks of Transformer blocks: a countable config, auxiliary losses of experts."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax.numpy as jnp

from attnlab.configs import BlockConfig, Section
from attnlab.kernels.losses import LossSums
from attnlab.layers.mlp import default_mlp_width

ModelConfig = TypeVar('ModelConfig', bound=BlockConfig)


def outline_config(model: ModelConfig, layers: int | None, countable: bool) -> ModelConfig:
    """Return the model config that `SupportsOutline.outline` uses for the same `layers` and `countable`.

    A countable config has dense attention, because all matrix products of dense attention can be counted.
    """
    changes: dict[str, Any] = {} if layers is None else {'layers': layers, 'scan': False}
    if countable:
        changes['implementation'] = 'dense'
    if countable and model.experts:
        width = model.mlp_width or default_mlp_width(model.mlp, model.width)
        changes |= {'mlp_width': width * (model.experts_per_token + model.shared_expert), 'experts': 0}
    return dataclasses.replace(model, **changes)


def add_expert_losses(model: Section, sums: LossSums, aux: Mapping[str, Any]) -> LossSums:
    """Add the auxiliary losses of a mixture of experts to a loss, and log the mean of each as `experts_NAME`.

    aux: auxiliary losses and statistics by name, each an array with one value for each layer; empty without experts.
    """
    if not aux:
        return sums
    assert isinstance(model, BlockConfig)
    logged = {f'experts_{name}': jnp.mean(value) * sums.weight for name, value in aux.items()}
    auxiliary_loss = model.load_balance * jnp.sum(aux['load_balance']) + model.router_z * jnp.sum(aux['z'])
    return LossSums(sums.total + auxiliary_loss * sums.weight, sums.weight, sums.extras | logged)
