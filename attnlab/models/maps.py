"""Calls of a whole model: with dropout or without, and with the attention weights that its layers sow."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def attention_maps(intermediates: Mapping[str, Any]) -> dict[str, Float[Array, 'B L N T S']]:
    """The weights of each kind of attention in a model, by name: 'attention' or, say, 'decoder/cross_attention'.

    intermediates: what `model.apply(..., mutable=['intermediates'])` gives, of blocks in a loop or in a scan.
    """
    found: dict[str, dict[int, Array]] = {}
    for path, weights in jax.tree_util.tree_flatten_with_path(intermediates)[0]:
        *names, last, _ = (str(getattr(part, 'key', getattr(part, 'idx', part))) for part in path)
        if last != 'attention_weights':
            continue
        kind = '/'.join(name for name in names if not name.startswith('block') and name != 'stack')
        at = next(name for name in names if name.startswith('block'))
        stacked = weights if at == 'blocks' else weights[None]
        first = 0 if at == 'blocks' else int(at.removeprefix('block_'))
        found.setdefault(kind, {}).update({first + layer: each for layer, each in enumerate(stacked)})
    return {kind: jnp.stack([by[layer] for layer in sorted(by)], axis=1) for kind, by in sorted(found.items())}


def apply_with_attention_maps(module: nn.Module, params: Any, *inputs: Array) -> tuple[Any, dict[str, Array]]:
    """The output of a model and its `attention_maps`."""
    both: Any = module.apply({'params': params}, *inputs, mutable=['intermediates'])
    output, sown = both
    return output, attention_maps(sown.get('intermediates', {}))


def dropout_kwargs(rng: Array | None) -> dict[str, Any]:
    """Keyword arguments of `model.apply` by which dropout draws from a PRNG key; no dropout if the key is None."""
    return {} if rng is None else {'deterministic': False, 'rngs': {'dropout': rng}}
