"""Attention masks as descriptions: an implementation computes an array, or a tile of it, only where it needs one.

mask = causal_mask() & window_mask(128, 0) & padding_mask(keys=lengths)
attnlab.dot_product_attention(query, key, value, mask=mask)
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Int

AnyArray = Array | np.ndarray
"""An array of JAX or NumPy."""

IntegerLists = Sequence[int] | Sequence[Sequence[int]]
"""Integers with one axis or two, as Python lists."""

WindowSize = SupportsIndex | Sequence[SupportsIndex]
"""The size of both sides of a window, or (left, right)."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """The mask of one attention call: a query attends to a key if every field that is set allows it.

    mask: boolean, True attends, broadcastable to [B, N, T, S].
    query_seq_lengths, key_value_seq_lengths: [B]; positions at and after a length are masked.
    query_positions, key_positions: [B, T], [B, S]; compared by causality and windows; row and column numbers if None.
    query_segment_ids, key_segment_ids: [B, T], [B, S]; a query attends only to equal ids.
    prefix_lengths: [B]; all queries attend to that many first keys, in spite of causality.
    is_causal: a query attends to no later key.
    window: (left, right), how far before and after itself a query attends.

    It is a pytree of its arrays; `is_causal` and `window` are part of its structure, and fixed in a compiled program.
    The constructor also takes NumPy arrays and integers of any width, and stores JAX arrays of int32 or wider.
    """

    mask: Bool[Array, '#B #N #T #S'] | None = None
    query_seq_lengths: Int[Array, ' B'] | None = None
    key_value_seq_lengths: Int[Array, ' B'] | None = None
    query_positions: Int[Array, '#B T'] | None = None
    key_positions: Int[Array, '#B S'] | None = None
    query_segment_ids: Int[Array, '#B T'] | None = None
    key_segment_ids: Int[Array, '#B S'] | None = None
    prefix_lengths: Int[Array, ' B'] | None = None
    is_causal: bool = False
    window: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in _FIELDS:
            object.__setattr__(self, name, _convert_field(name, getattr(self, name)))

    def __and__(self, other: 'Mask') -> 'Mask':
        """Return the mask that allows the pairs that both allow.

        Raises ValueError if both have positions, or both have segment ids, that are not the same arrays.
        """
        if self.is_causal and other.is_causal and (self.prefix_lengths is None or other.prefix_lengths is None):
            # Causality without a prefix forbids what the other mask's prefix allows.
            self, other = self.replace(prefix_lengths=None), other.replace(prefix_lengths=None)
        return Mask(**{name: _merge_fields(name, getattr(self, name), getattr(other, name)) for name in _FIELDS})

    def replace(self, **changes: Any) -> 'Mask':
        """Return the mask with some fields changed."""
        return dataclasses.replace(self, **changes)

    def restricts_any_pair(self) -> bool:
        """Return whether any field is set that can forbid a pair; positions alone cannot."""
        fields = {name: getattr(self, name) for name in _FIELDS if not name.endswith('positions')}
        return any(x is not None and x is not False for x in fields.values())

    def map_arrays(self, function: Callable[[Array, str], Any]) -> 'Mask':
        """Return a mask that holds `function(array, axes)` for each array; `axes` is its entry in `MASK_AXES`."""
        arrays = ((getattr(self, name), axes) for name, axes in MASK_AXES.items())
        return _unflatten_mask(
            (self.is_causal, self.window), (None if x is None else function(x, axes) for x, axes in arrays)
        )


MASK_AXES = {
    'mask': 'BNTS', 'query_seq_lengths': 'B', 'key_value_seq_lengths': 'B', 'query_positions': 'BT',
    'key_positions': 'BS', 'query_segment_ids': 'BT', 'key_segment_ids': 'BS', 'prefix_lengths': 'B',
}  # fmt: skip
"""The axes of each array of a mask, one letter each."""

_STATIC = ('is_causal', 'window')
_FIELDS = (*MASK_AXES, *_STATIC)


def _unflatten_mask(static: tuple, arrays: Iterable[Any]) -> Mask:
    """Make a mask without the conversions of the constructor, because JAX also puts objects other than arrays into a
    pytree."""
    mask = object.__new__(Mask)
    for name, value in zip((*_STATIC, *MASK_AXES), (*static, *arrays), strict=True):
        object.__setattr__(mask, name, value)
    return mask


jax.tree_util.register_pytree_with_keys(
    Mask,
    lambda mask: (
        [(jax.tree_util.GetAttrKey(name), getattr(mask, name)) for name in MASK_AXES],
        tuple(getattr(mask, name) for name in _STATIC),
    ),
    _unflatten_mask,
)


def _convert_field(name: str, x: Any) -> Any:
    """Return the value of a field as `Mask` stores it; a value in the stored form is returned as it is."""
    match name:
        case _ if x is None:
            return None
        case 'is_causal':
            return bool(x)
        case 'window':
            return window_sides(x, 'window')
        case 'mask':
            return x if isinstance(x, jax.Array) else jnp.asarray(x)
        case _:
            return widen_integers(name, x)


def widen_integers(name: str, x: ArrayLike | IntegerLists) -> Array:
    """Convert signed integers of any shape to int32 or wider.

    Window sizes and cache lengths do not fit int8 and int16.

    Raises ValueError, with the argument's `name`, for values beyond the range of JAX's integers, which JAX would wrap
    around without an error; lengths are clipped to the largest integer instead.  Other dtypes are returned as they are:
    the caller checks whether it takes them.
    """
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
        if x.dtype == object:
            raise ValueError(f'{name} is {x.tolist()}; expected integers of at most 64 bits')
        if x.dtype.kind in 'iu' and x.size:
            limits = np.iinfo(jax.dtypes.canonicalize_dtype(x.dtype))
            if not name.endswith('lengths') and (x.min() < limits.min or x.max() > limits.max):
                raise ValueError(f'{name} holds {x.min()} .. {x.max()}; expected {limits.min} .. {limits.max}')
            x = np.clip(x, limits.min, limits.max)
        x = jnp.asarray(x)
    is_narrow = jnp.issubdtype(x.dtype, jnp.signedinteger) and x.dtype.itemsize < 4
    return x.astype(jnp.int32) if is_narrow else x


def window_sides(size: Any, name: str = 'local_window_size') -> tuple[int, int] | None:
    """Return (left, right) of a window size: one integer for both sides, or two, of Python or NumPy.

    Raises ValueError, with the argument's `name`, for anything else and for negative sizes.
    """
    if size is None:
        return None
    try:
        left, right = map(operator.index, size if np.ndim(size) else (size, size))
    except (TypeError, ValueError):
        left = right = -1
    if min(left, right) < 0:
        raise ValueError(f'{name} is {size}; expected a number or (left, right), none of them negative')
    return min(left, 2**30), min(right, 2**30)  # they are added to positions, which are int32


def _merge_fields(name: str, first: Any, second: Any) -> Any:
    if first is None or first is False or first is second:
        return second
    if second is None or second is False:
        return first
    match name:
        case 'mask':
            return first & second
        case 'query_seq_lengths' | 'key_value_seq_lengths' | 'prefix_lengths':
            return jnp.minimum(first, second)
        case 'window':
            return min(first[0], second[0]), min(first[1], second[1])
        case 'is_causal':
            return True
        case _:
            raise ValueError(f'{name} is given twice; expected it in one of the masks that are combined')


class MaskArguments(TypedDict, total=False):
    """The mask arguments of the attention functions, except `mask` itself."""

    is_causal: bool
    query_seq_lengths: Int[AnyArray, ' B'] | IntegerLists | None
    key_value_seq_lengths: Int[AnyArray, ' B'] | IntegerLists | None
    local_window_size: WindowSize | None
    query_positions: Int[AnyArray, '#B T'] | IntegerLists | None
    key_positions: Int[AnyArray, '#B S'] | IntegerLists | None
    query_segment_ids: Int[AnyArray, '#B T'] | IntegerLists | None
    key_segment_ids: Int[AnyArray, '#B S'] | IntegerLists | None


def mask_from_arguments(mask: AnyArray | Mask | None, arguments: MaskArguments) -> Mask:
    """Return the mask of an attention call, from its `mask` and its other mask arguments.

    Raises TypeError for unknown arguments, ValueError for arguments with invalid values.
    """
    if unknown := arguments.keys() - MaskArguments.__annotations__.keys():
        raise TypeError(f'unexpected keyword arguments {sorted(unknown)}; expected {[*MaskArguments.__annotations__]}')
    fields: dict[str, Any] = {**arguments}
    from_keywords = _make_mask(window=window_sides(fields.pop('local_window_size', None)), **fields)
    return from_keywords & (mask if isinstance(mask, Mask) else _make_mask(mask=mask))


def _make_mask(**fields: Any) -> Mask:
    """Return a `Mask` from fields that may be lists, NumPy arrays and integers of any width."""
    return Mask(**{name: _convert_field(name, x) for name, x in fields.items()})


def causal_mask(
    query_positions: Int[AnyArray, '#B T'] | IntegerLists | None = None,
    key_positions: Int[AnyArray, '#B S'] | IntegerLists | None = None,
) -> Mask:
    """Allow no key after the query; positions are row and column numbers unless given."""
    return _make_mask(is_causal=True, query_positions=query_positions, key_positions=key_positions)


def window_mask(left: SupportsIndex, right: SupportsIndex) -> Mask:
    """Allow keys at most `left` before and `right` after the query, including the query's own position."""
    return _make_mask(window=window_sides((left, right), 'the window'))


def prefix_mask(lengths: Int[AnyArray, ' B'] | IntegerLists) -> Mask:
    """Allow no key after the query, except the first `lengths[b]` keys (prefix LM, Raffel et al. 2020, 3.2.1)."""
    return _make_mask(is_causal=True, prefix_lengths=lengths)


def padding_mask(
    queries: Int[AnyArray, ' B'] | IntegerLists | None = None, keys: Int[AnyArray, ' B'] | IntegerLists | None = None
) -> Mask:
    """Allow only the first `queries[b]` queries and the first `keys[b]` keys."""
    return _make_mask(query_seq_lengths=queries, key_value_seq_lengths=keys)


def segment_mask(
    queries: Int[AnyArray, '#B T'] | IntegerLists, keys: Int[AnyArray, '#B S'] | IntegerLists | None = None
) -> Mask:
    """Allow keys with the segment id of the query; the ids of the keys are those of the queries if None."""
    return _make_mask(query_segment_ids=queries, key_segment_ids=queries if keys is None else keys)


def packed_mask(ids: Int[AnyArray, 'B T'] | IntegerLists) -> Mask:
    """Mask for documents packed into rows: causal within each segment, with positions that start from 0 in each."""
    return segment_mask(ids) & causal_mask(*(positions_in_segments(ids),) * 2)


def positions_in_segments(ids: Int[AnyArray, 'B T'] | IntegerLists) -> Int[Array, 'B T']:
    """Return positions that start from 0 wherever the segment id changes along a row."""
    ids = widen_integers('ids', ids)
    columns = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    is_start = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    return columns - jax.lax.cummax(jnp.where(is_start, columns, 0), axis=1)


def query_and_key_positions(mask: Mask, T: int, S: int) -> tuple[Int[Array, '#B T'], Int[Array, '#B S']]:
    """Return the positions of queries and keys: those of the mask, or row and column numbers."""
    queries, keys = mask.query_positions, mask.key_positions
    return jnp.arange(T)[None] if queries is None else queries, jnp.arange(S)[None] if keys is None else keys


def position_distances(mask: Mask, T: int, S: int) -> Int[Array, '#B 1 T S']:
    """Return |query position - key position|."""
    queries, keys = query_and_key_positions(mask, T, S)
    return jnp.abs(queries[:, None, :, None] - keys[:, None, None, :])


def mask_as_array(mask: Mask, T: int, S: int) -> Bool[Array, '#B #N #T #S'] | None:
    """Return the mask as one boolean array, or None if every query attends to every key."""
    queries, keys = query_and_key_positions(mask, T, S)
    query, key = queries[:, None, :, None], keys[:, None, None, :]
    conditions = []
    if mask.mask is not None:
        conditions.append(mask.mask)
    if mask.query_seq_lengths is not None:
        conditions.append(length_mask(mask.query_seq_lengths, T)[:, None, :, None])
    if mask.key_value_seq_lengths is not None:
        conditions.append(length_mask(mask.key_value_seq_lengths, S)[:, None, None, :])
    if mask.query_segment_ids is not None and mask.key_segment_ids is not None:
        conditions.append(mask.query_segment_ids[:, None, :, None] == mask.key_segment_ids[:, None, None, :])
    if mask.is_causal:
        causal = key <= query
        if mask.prefix_lengths is not None:
            causal = causal | length_mask(mask.prefix_lengths, S)[:, None, None, :]
        conditions.append(causal)
    if mask.window is not None:
        left, right = mask.window
        conditions.append((key >= query - left) & (key <= query + right))
    return functools.reduce(operator.and_, conditions) if conditions else None


def length_mask(lengths: Int[Array, ' B'], size: int) -> Bool[Array, 'B size']:
    """Return True for the first `lengths[b]` of `size` positions."""
    return jax.lax.broadcasted_iota(jnp.int32, (lengths.shape[0], size), 1) < lengths[:, None]
