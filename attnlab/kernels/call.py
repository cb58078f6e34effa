"""The arguments of one attention call, its results, and the checks of the arguments."""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from attnlab.kernels.masks import MASK_AXES, Mask

StaticNumber = float | np.number
"""A Python or NumPy number that is a constant of the compiled program."""


class AttentionCall(NamedTuple):
    """The checked arguments of an attention function, as every implementation receives them.

    Shapes and meanings are those of `attnlab.dot_product_attention`; the batch axis is always there.
    """

    query: Float[Array, 'B T N H']
    key: Float[Array, 'B S K H']
    value: Float[Array, 'B S K Hv']
    mask: Mask
    scale: float | Float[Array, '']
    bias: Float[Array, '#B #N #T #S'] | None = None
    sinks: Float[Array, ' N'] | None = None
    alibi_slopes: Float[Array, ' N'] | None = None
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    dropout_rng: PRNGKeyArray | UInt32[Array, '...'] | None = None
    block_sizes: tuple[int, int] | None = None
    return_residual: bool = False
    return_weights: bool = False


class AttentionOutput(NamedTuple):
    """The results of an implementation; residual and weights are None unless the call requests them.

    output: [B, T, N, Hv] in the dtype of `query`.
    residual: [B, T, N], the logarithm of the sum of exponentials of the softmax, including a sink; the lowest finite
      number if the sum is empty.
    weights: [B, N, T, S] float32 or wider, before dropout.
    """

    output: Float[Array, 'B T N Hv']
    residual: Float[Array, 'B T N'] | None
    weights: Float[Array, 'B N T S'] | None


def raise_unsupported(reasons: Iterable[tuple[str, bool, str]]) -> None:
    """Raise NotImplementedError for the first (argument, is_unsupported, reason) that is unsupported."""
    for name, is_unsupported, reason in reasons:
        if is_unsupported:
            raise NotImplementedError(f'{name}: {reason}')


def output_or_tuple(outputs: AttentionOutput) -> Array | tuple[Array, ...]:
    """Return the output [B, T, N, Hv] alone, or a tuple (output, residual, weights) without those that are None."""
    optional = tuple(x for x in outputs[1:] if x is not None)
    return (outputs.output, *optional) if optional else outputs.output


def with_auto_axes(function: Callable[..., AttentionOutput], call: AttentionCall, *arrays: Array) -> AttentionOutput:
    """Return `function(call, *arrays)`, computed with explicit mesh axes turned into automatic ones.

    An array's type holds its division over explicit axes (`jax.make_mesh` makes these by default), so the carries of
    loops over tiles and the reshapes of grouped heads would have to state it.  With automatic axes the compiler
    chooses.  The output is divided like the query in its rows, tokens and heads, and like the value in its width.
    """
    leaves, tree = jax.tree.flatten((call, *arrays))
    leaf_arrays = [x for x in leaves if isinstance(x, jax.Array)]
    shardings = (jax.typeof(x).sharding for x in leaf_arrays)
    meshes = [sharding.mesh for sharding in shardings if sharding.mesh.explicit_axes and any(sharding.spec)]
    if not meshes:
        return function(call, *arrays)
    query, key, value = (jax.typeof(x).sharding.spec for x in call[:3])

    def sharding_of(*entries: Any) -> NamedSharding:
        """Return the sharding with these entries, None for an entry whose mesh axis an earlier one has."""
        used: set[str] = set()
        parts = []
        for entry in entries:
            names = set(entry if isinstance(entry, tuple) else [] if entry is None else [entry])
            parts.append(None if names & used else entry)
            used |= names
        return NamedSharding(meshes[0], PartitionSpec(*parts))

    def call_function(*leaf_arrays: Array) -> AttentionOutput:
        remaining = iter(leaf_arrays)
        return function(*tree.unflatten([next(remaining) if isinstance(x, jax.Array) else x for x in leaves]))

    out_sharding: list[Any] = [
        sharding_of(*query[:3], value[3]), sharding_of(*query[:3]) if call.return_residual else None,
        sharding_of(query[0], query[2], query[1], key[1]) if call.return_weights else None,
    ]  # fmt: skip
    automatic: Any = jax.sharding.auto_axes(call_function, out_sharding=AttentionOutput(*out_sharding))
    return automatic(*leaf_arrays)


def static_number(name: str, x: Any) -> float:
    """Return a number of Python, NumPy or JAX as a float.

    Raises ValueError, with the argument's `name`, if x is traced, has axes or is no number.
    """
    try:
        if np.ndim(x) == 0:
            return float(x)
    except (TypeError, ValueError):
        pass
    raise ValueError(f'{name} is {x}; expected one number, fixed when the program is compiled')


def logit_scale(scale: Any, width: int) -> float | Array:
    """Return the factor of the logits, a number or an array of shape []; 1 / sqrt(width) if `scale` is None.

    Raises ValueError unless `scale` is one number, which may be traced.  An array with an axis is refused because
    broadcasting would multiply it along keys or channels, never along heads.
    """
    if scale is None:
        return 1.0 / math.sqrt(max(width, 1))
    if np.ndim(scale):
        raise ValueError(f'scale has shape {np.shape(scale)}; expected one number for all heads')
    return scale if isinstance(scale, jax.Array) else static_number('scale', scale)


def parse_block_sizes(sizes: Sequence[SupportsIndex] | None) -> tuple[int, int] | None:
    """Return (queries, keys) as Python integers.  Raises ValueError unless both are positive integers."""
    if sizes is None:
        return None
    try:
        queries, keys = map(operator.index, sizes)
    except (TypeError, ValueError):
        queries = keys = 0
    if min(queries, keys) < 1:
        raise ValueError(f'block_sizes is {sizes}; expected (queries, keys), both positive')
    return queries, keys


def check_call(call: AttentionCall) -> None:
    """Raise ValueError unless shapes, dtypes and options fit together."""
    for name, x in (('query', call.query), ('key', call.key), ('value', call.value)):
        if x.ndim != 4:
            raise ValueError(f'{name} has shape {x.shape}; expected 4 axes [batch, length, heads, width]')
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f'{name} has dtype {x.dtype}; expected a float')
    B, T, N, H = call.query.shape
    S, K = call.key.shape[1], call.key.shape[2]
    if call.key.shape != (B, S, K, H):
        raise ValueError(f'key has shape {call.key.shape}; expected [B, S, K, H] with B = {B}, H = {H} as in query')
    if call.value.shape[:3] != (B, S, K):
        shape = call.value.shape
        raise ValueError(f'value has shape {shape}; expected [B, S, K, any] = [{B}, {S}, {K}, any] as in key')
    if K == 0 or N % K:
        raise ValueError(f'{N} query heads do not divide into groups over {K} key and value heads')
    _check_pair_array('bias', call.bias, 'a float', (B, N, T, S))
    _check_mask(call.mask, B, N, T, S)
    for name, x in (('sinks', call.sinks), ('alibi_slopes', call.alibi_slopes)):
        if x is not None and (x.shape != (N,) or not jnp.issubdtype(x.dtype, jnp.floating)):
            raise ValueError(f'{name} has shape {x.shape} and dtype {x.dtype}; expected [N] = ({N},) floats')
    if call.logits_soft_cap is not None and not 0.0 < call.logits_soft_cap < math.inf:
        raise ValueError(f'logits_soft_cap is {call.logits_soft_cap}; expected a positive finite number or None')
    check_dropout(call.dropout_rate, call.dropout_rng)


def _check_mask(mask: Mask, B: int, N: int, T: int, S: int) -> None:
    _check_pair_array('mask', mask.mask, 'boolean', (B, N, T, S))
    sizes = {'B': B, 'T': T, 'S': S}
    for name, axes in MASK_AXES.items():
        x = getattr(mask, name)
        if x is None or name == 'mask':
            continue
        if not jnp.issubdtype(x.dtype, jnp.signedinteger):  # a window subtracts positions
            raise ValueError(f'{name} has dtype {x.dtype}; expected signed integers')
        shape = tuple(sizes[axis] for axis in axes)
        allowed_shapes = [shape, (1, *shape[1:])] if len(shape) > 1 else [shape]
        if x.shape not in allowed_shapes:
            expected = ' or '.join(map(str, dict.fromkeys(allowed_shapes)))
            raise ValueError(f'{name} has shape {x.shape}; expected {expected}')
    if (mask.query_segment_ids is None) != (mask.key_segment_ids is None):
        raise ValueError('query_segment_ids and key_segment_ids go together; got only one of them')
    if mask.prefix_lengths is not None and not mask.is_causal:
        raise ValueError('prefix_lengths exempts keys from causality; expected is_causal with it')


def _check_pair_array(name: str, x: Array | None, kind: str, shape: tuple[int, int, int, int]) -> None:
    """Raise ValueError unless x is None or broadcasts to `shape` and is of the `kind`, 'a float' or 'boolean'."""
    if x is None:
        return
    if not jnp.issubdtype(x.dtype, jnp.floating if kind == 'a float' else jnp.bool_):
        raise ValueError(f'{name} has dtype {x.dtype}; expected {kind}')
    if x.ndim != 4 or any(size not in (1, full_size) for size, full_size in zip(x.shape, shape, strict=True)):
        raise ValueError(f'{name} has shape {x.shape}; expected 4 axes broadcastable to [B, N, T, S] = {shape}')


def check_dropout(rate: float, rng: Any) -> None:
    """Raise ValueError if the rate is outside [0, 1), or is positive and no PRNG key is given."""
    check_dropout_rate(rate)
    if rate > 0.0 and rng is None:
        raise ValueError(f"dropout_rate is {rate}, dropout_rng is None; pass a key (in Flax: rngs={{'dropout': key}})")


def check_dropout_rate(rate: float) -> None:
    """Raise ValueError if the rate is outside [0, 1) or NaN."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f'dropout_rate is {rate}; expected 0 <= rate < 1')
