"""One attention call: what every implementation takes, what it gives back, and the checks that come before it."""

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
"""What is fixed when a program is compiled, of Python or NumPy."""


class AttentionCall(NamedTuple):
    """A checked call; shapes and meanings as in `attnlab.dot_product_attention`, always with the batch axis."""

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
    """What an implementation gives back; residual and weights are None where they were not asked for.

    output: [B, T, N, Hv] in the query's dtype.  weights: [B, N, T, S] float32 or wider, before dropout.
    residual: [B, T, N], the log of the softmax's sum of exponentials, a sink's included; the lowest finite number
    where the sum is empty.
    """

    output: Float[Array, 'B T N Hv']
    residual: Float[Array, 'B T N'] | None
    weights: Float[Array, 'B N T S'] | None


def raise_unsupported(reasons: Iterable[tuple[str, bool, str]]) -> None:
    """Raise NotImplementedError for the first of (argument, whether it is refused, reason) that is refused."""
    for name, is_refused, reason in reasons:
        if is_refused:
            raise NotImplementedError(f'{name}: {reason}')


def output_or_tuple(attended: AttentionOutput) -> Array | tuple[Array, ...]:
    """The output alone, or a tuple of it and what else was asked for, in the order (output, residual, weights)."""
    more = tuple(x for x in attended[1:] if x is not None)
    return (attended.output, *more) if more else attended.output


def with_auto_axes(function: Callable[..., AttentionOutput], call: AttentionCall, *more: Array) -> AttentionOutput:
    """`function(call, *more)`, where the compiler divides what explicit mesh axes divide.

    An array's type holds its division over explicit axes (`jax.make_mesh` makes such by default), and the carries of
    loops over tiles and the reshapes of grouped heads would have to state it.  The output is divided as the query is
    in its rows, tokens and heads, and as the value is in its width.
    """
    leaves, tree = jax.tree.flatten((call, *more))
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    meshes = [own.mesh for own in (jax.typeof(x).sharding for x in arrays) if own.mesh.explicit_axes and any(own.spec)]
    if not meshes:
        return function(call, *more)
    query, key, value = (jax.typeof(x).sharding.spec for x in call[:3])

    def sharding(*entries: Any) -> NamedSharding:
        names: set[str] = set()
        parts = []
        for entry in entries:
            own = set(entry if isinstance(entry, tuple) else [] if entry is None else [entry])
            parts.append(None if own & names else entry)  # one mesh axis divides one axis of an array
            names |= own
        return NamedSharding(meshes[0], PartitionSpec(*parts))

    def rebuilt(*arrays: Array) -> AttentionOutput:
        rest = iter(arrays)
        return function(*tree.unflatten([next(rest) if isinstance(x, jax.Array) else x for x in leaves]))

    out: list[Any] = [
        sharding(*query[:3], value[3]), sharding(*query[:3]) if call.return_residual else None,
        sharding(query[0], query[2], query[1], key[1]) if call.return_weights else None,
    ]  # fmt: skip
    automatic: Any = jax.sharding.auto_axes(rebuilt, out_sharding=AttentionOutput(*out))
    return automatic(*arrays)


def static_number(name: str, x: Any) -> float:
    """A Python number from one of Python, NumPy or JAX.  Raises ValueError for what is no single known number."""
    try:
        if np.ndim(x) == 0:
            return float(x)
    except (TypeError, ValueError):
        pass
    raise ValueError(f'{name} is {x}; expected one number, fixed when the program is compiled')


def logit_scale(scale: Any, width: int) -> float | Array:
    """The factor of the logits, 1 / sqrt(width) if None.  Raises ValueError unless it is one number, traced or not.

    An array of one axis would be multiplied along keys or channels by broadcasting, and never along heads.
    """
    if scale is None:
        return 1.0 / math.sqrt(max(width, 1))
    if np.ndim(scale):
        raise ValueError(f'scale has shape {np.shape(scale)}; expected one number for all heads')
    return scale if isinstance(scale, jax.Array) else static_number('scale', scale)


def parse_block_sizes(sizes: Sequence[SupportsIndex] | None) -> tuple[int, int] | None:
    """(queries, keys) as Python integers.  Raises ValueError unless both are positive."""
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
    """Raises ValueError unless shapes, dtypes and options fit together, naming what came and what was expected."""
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
    _check_pairs('bias', call.bias, 'a float', (B, N, T, S))
    _check_mask(call.mask, B, N, T, S)
    for name, x in (('sinks', call.sinks), ('alibi_slopes', call.alibi_slopes)):
        if x is not None and (x.shape != (N,) or not jnp.issubdtype(x.dtype, jnp.floating)):
            raise ValueError(f'{name} has shape {x.shape} and dtype {x.dtype}; expected [N] = ({N},) floats')
    if call.logits_soft_cap is not None and not 0.0 < call.logits_soft_cap < math.inf:
        raise ValueError(f'logits_soft_cap is {call.logits_soft_cap}; expected a positive finite number or None')
    check_dropout(call.dropout_rate, call.dropout_rng)


def _check_mask(mask: Mask, B: int, N: int, T: int, S: int) -> None:
    _check_pairs('mask', mask.mask, 'boolean', (B, N, T, S))
    sizes = {'B': B, 'T': T, 'S': S}
    for name, axes in MASK_AXES.items():
        x = getattr(mask, name)
        if x is None or name == 'mask':
            continue
        if not jnp.issubdtype(x.dtype, jnp.signedinteger):  # windows subtract
            raise ValueError(f'{name} has dtype {x.dtype}; expected signed integers')
        shape = tuple(sizes[axis] for axis in axes)
        shapes = [shape, (1, *shape[1:])] if len(shape) > 1 else [shape]
        if x.shape not in shapes:
            raise ValueError(f'{name} has shape {x.shape}; expected {" or ".join(map(str, dict.fromkeys(shapes)))}')
    if (mask.query_segment_ids is None) != (mask.key_segment_ids is None):
        raise ValueError('query_segment_ids and key_segment_ids go together; got only one of them')
    if mask.prefix_lengths is not None and not mask.is_causal:
        raise ValueError('prefix_lengths spares keys from causality; expected is_causal with it')


def _check_pairs(name: str, x: Array | None, kind: str, shape: tuple[int, int, int, int]) -> None:
    if x is None:
        return
    if not jnp.issubdtype(x.dtype, jnp.floating if kind == 'a float' else jnp.bool_):
        raise ValueError(f'{name} has dtype {x.dtype}; expected {kind}')
    if x.ndim != 4 or any(have not in (1, want) for have, want in zip(x.shape, shape, strict=True)):
        raise ValueError(f'{name} has shape {x.shape}; expected 4 axes broadcastable to [B, N, T, S] = {shape}')


def check_dropout(rate: float, rng: Any) -> None:
    """Raises ValueError for a rate that is none, and for one without a key to draw from."""
    check_dropout_rate(rate)
    if rate > 0.0 and rng is None:
        raise ValueError(f"dropout_rate is {rate}, dropout_rng is None; pass a key (in Flax: rngs={{'dropout': key}})")


def check_dropout_rate(rate: float) -> None:
    """Raises ValueError for a dropout rate outside [0, 1), NaN included."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f'dropout_rate is {rate}; expected 0 <= rate < 1')
