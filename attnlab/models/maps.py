"""Helpers to apply a model: dropout arguments, and the attention weights that its layers sow."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def attention_maps(intermediates: Mapping[str, Any]) -> dict[str, Float[Array, 'B L N T S']]:
    """Return the weights of each kind of attention in a model [B, L, N, T, S], by its name.

    A name is the path of the attention without the stack and the block: 'attention', or 'decoder/cross_attention'.

    intermediates: the collection from `model.apply(..., mutable=['intermediates'])`; blocks may be scanned or not.
    """
    maps_by_layer: dict[str, dict[int, Array]] = {}
    for path, weights in jax.tree_util.tree_flatten_with_path(intermediates)[0]:
        # The last part of a path is the index in the tuple that `sow` makes.
        *names, sown_name, _ = (str(getattr(part, 'key', getattr(part, 'idx', part))) for part in path)
        if sown_name != 'attention_weights':
            continue
        kind = '/'.join(name for name in names if not name.startswith('block') and name != 'stack')
        block = next(name for name in names if name.startswith('block'))
        by_layer = maps_by_layer.setdefault(kind, {})
        if block == 'blocks':  # scanned: [L, B, N, T, S]
            by_layer.update(enumerate(weights))
        else:
            by_layer[int(block.removeprefix('block_'))] = weights
    return {
        kind: jnp.stack([by_layer[layer] for layer in sorted(by_layer)], axis=1)
        for kind, by_layer in sorted(maps_by_layer.items())
    }


def apply_with_attention_maps(module: nn.Module, params: Any, *inputs: Array) -> tuple[Any, dict[str, Array]]:
    """Return the output of a model, and its `attention_maps` [B, L, N, T, S] by name."""
    output_and_state: Any = module.apply({'params': params}, *inputs, mutable=['intermediates'])
    output, state = output_and_state
    return output, attention_maps(state.get('intermediates', {}))


def dropout_kwargs(rng: Array | None) -> dict[str, Any]:
    """Return the keyword arguments of `model.apply` for dropout with this PRNG key; None: no dropout."""
    return {} if rng is None else {'deterministic': False, 'rngs': {'dropout': rng}}
