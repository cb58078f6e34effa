"""Who may attend to whom, kept as a description until an implementation asks for the array.

rules = causal() & window(128, 0) & padding(keys=lengths)
attnlab.dot_product_attention(query, key, value, mask=rules)
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
IntegerLists = Sequence[int] | Sequence[Sequence[int]]
"""Integers of one axis or two, as Python lists."""

WindowSize = SupportsIndex | Sequence[SupportsIndex]
"""The size of both sides of a window, or (left, right)."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """The rules of one attention call; a query attends to a key where every given rule allows it.

    mask: boolean, True attends, broadcastable to [B, N, T, S].
    query_seq_lengths, key_value_seq_lengths: [B]; positions at and after a length take no part.
    query_positions, key_positions: [B, T], [B, S]; what causality and windows compare; row and column numbers if None.
    query_segment_ids, key_segment_ids: [B, T], [B, S]; attend only where equal.
    is_causal: no key after the query.  window: (left, right), the keys at most so far before and after the query.
    prefix_lengths: [B]; causality spares the first keys, which all queries see.

    A tree of arrays to JAX; is_causal and window are part of its structure, fixed in a compiled program.
    The constructor takes NumPy arrays and integers of any width too, and stores JAX arrays of int32 or wider.
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
            object.__setattr__(self, name, _stored(name, getattr(self, name)))

    def __and__(self, other: 'Mask') -> 'Mask':
        """Both rules.  Raises ValueError where each has positions or segments of its own."""
        if self.is_causal and other.is_causal and (self.prefix_lengths is None or other.prefix_lengths is None):
            # Plain causality beside a prefix spares nothing.
            self, other = self.replace(prefix_lengths=None), other.replace(prefix_lengths=None)
        return Mask(**{name: _merge(name, getattr(self, name), getattr(other, name)) for name in _FIELDS})

    def replace(self, **changes: Any) -> 'Mask':
        """The same mask but for some fields."""
        return dataclasses.replace(self, **changes)

    def restrict(self) -> bool:
        """Whether any field can rule anything out; positions by themselves do not."""
        fields = {name: getattr(self, name) for name in _FIELDS if not name.endswith('positions')}
        return any(x is not None and x is not False for x in fields.values())

    def map_arrays(self, function: Callable[[Array, str], Any]) -> 'Mask':
        """A mask that holds `function(array, axes)` for each array; axes as in `MASK_AXES`, one letter each."""
        arrays = ((getattr(self, name), axes) for name, axes in MASK_AXES.items())
        return _unflatten(
            (self.is_causal, self.window), (None if x is None else function(x, axes) for x, axes in arrays)
        )


MASK_AXES = {
    'mask': 'BNTS', 'query_seq_lengths': 'B', 'key_value_seq_lengths': 'B', 'query_positions': 'BT',
    'key_positions': 'BS', 'query_segment_ids': 'BT', 'key_segment_ids': 'BS', 'prefix_lengths': 'B',
}  # fmt: skip
"""The axes of each array of a mask."""

_STATIC = ('is_causal', 'window')
_FIELDS = (*MASK_AXES, *_STATIC)


def _unflatten(static: tuple, arrays: Iterable[Any]) -> Mask:
    """Without the checks of the constructor, because JAX puts more than arrays into a tree."""
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
    _unflatten,
)


def _stored(name: str, x: Any) -> Any:
    """A field of `Mask` as it is stored; what is stored already comes back itself."""
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
    """Convert signed integers to int32 or wider, because window sizes and cache lengths do not fit int8 and int16.

    Raises ValueError for values beyond the integers that JAX has here, which it would wrap around in silence; lengths
    are cut to the largest instead.  Other dtypes are returned as they are: the caller checks which it takes.
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
    narrow = jnp.issubdtype(x.dtype, jnp.signedinteger) and x.dtype.itemsize < 4
    return x.astype(jnp.int32) if narrow else x


def window_sides(size: Any, name: str = 'local_window_size') -> tuple[int, int] | None:
    """(left, right) of a window given as one integer for both sides or as two, Python's or NumPy's.

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
    return min(left, 2**30), min(right, 2**30)  # positions are int32, and added to


def _merge(name: str, one: Any, other: Any) -> Any:
    if one is None or one is False or one is other:
        return other
    if other is None or other is False:
        return one
    match name:
        case 'mask':
            return one & other
        case 'query_seq_lengths' | 'key_value_seq_lengths' | 'prefix_lengths':
            return jnp.minimum(one, other)
        case 'window':
            return min(one[0], other[0]), min(one[1], other[1])
        case 'is_causal':
            return True
        case _:
            raise ValueError(f'{name} is given twice; expected it in one of the rules that are combined')


def _mask(**fields: Any) -> Mask:
    """`Mask` of fields as users give them: lists, arrays of NumPy and integers of any width."""
    return Mask(**{name: _stored(name, x) for name, x in fields.items()})


class MaskArguments(TypedDict, total=False):
    """Keyword arguments of the attention functions that say which pairs attend."""

    is_causal: bool
    query_seq_lengths: Int[AnyArray, ' B'] | IntegerLists | None
    key_value_seq_lengths: Int[AnyArray, ' B'] | IntegerLists | None
    local_window_size: WindowSize | None
    query_positions: Int[AnyArray, '#B T'] | IntegerLists | None
    key_positions: Int[AnyArray, '#B S'] | IntegerLists | None
    query_segment_ids: Int[AnyArray, '#B T'] | IntegerLists | None
    key_segment_ids: Int[AnyArray, '#B S'] | IntegerLists | None


def mask_from_arguments(mask: AnyArray | Mask | None, arguments: MaskArguments) -> Mask:
    """The mask of an attention call.  Raises TypeError for arguments that do not exist, ValueError for bad ones."""
    if unknown := arguments.keys() - MaskArguments.__annotations__.keys():
        raise TypeError(f'unexpected keyword arguments {sorted(unknown)}; expected {[*MaskArguments.__annotations__]}')
    fields: dict[str, Any] = {**arguments}
    rules = _mask(window=window_sides(fields.pop('local_window_size', None)), **fields)
    return rules & (mask if isinstance(mask, Mask) else _mask(mask=mask))


def causal_mask(
    query_positions: Int[AnyArray, '#B T'] | IntegerLists | None = None,
    key_positions: Int[AnyArray, '#B S'] | IntegerLists | None = None,
) -> Mask:
    """No key after the query; by row and column numbers unless positions are given."""
    return _mask(is_causal=True, query_positions=query_positions, key_positions=key_positions)


def window_mask(left: SupportsIndex, right: SupportsIndex) -> Mask:
    """Keys at most `left` before and `right` after the query, which is itself always inside."""
    return _mask(window=window_sides((left, right), 'the window'))


def prefix_mask(lengths: Int[AnyArray, ' B'] | IntegerLists) -> Mask:
    """Causal but for the first `lengths[b]` keys, which every query sees (prefix LM, Raffel et al. 2020, 3.2.1)."""
    return _mask(is_causal=True, prefix_lengths=lengths)


def padding_mask(
    queries: Int[AnyArray, ' B'] | IntegerLists | None = None, keys: Int[AnyArray, ' B'] | IntegerLists | None = None
) -> Mask:
    """Only the first `queries[b]` queries and `keys[b]` keys take part."""
    return _mask(query_seq_lengths=queries, key_value_seq_lengths=keys)


def segment_mask(
    queries: Int[AnyArray, '#B T'] | IntegerLists, keys: Int[AnyArray, '#B S'] | IntegerLists | None = None
) -> Mask:
    """A query sees the keys of its own segment; `keys` are the same ids as `queries` if None."""
    return _mask(query_segment_ids=queries, key_segment_ids=queries if keys is None else keys)


def packed_mask(ids: Int[AnyArray, 'B T'] | IntegerLists) -> Mask:
    """Documents packed into rows, each causal on its own, with positions that start from 0 in each."""
    return segment_mask(ids) & causal_mask(*(positions_in_segments(ids),) * 2)


def positions_in_segments(ids: Int[AnyArray, 'B T'] | IntegerLists) -> Int[Array, 'B T']:
    """Positions that start from 0 wherever the segment id changes along a row."""
    ids = widen_integers('ids', ids)
    at = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    starts = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    return at - jax.lax.cummax(jnp.where(starts, at, 0), axis=1)


def query_and_key_positions(mask: Mask, T: int, S: int) -> tuple[Int[Array, '#B T'], Int[Array, '#B S']]:
    """Positions of queries and keys: those of the mask, else row and column numbers."""
    queries, keys = mask.query_positions, mask.key_positions
    return jnp.arange(T)[None] if queries is None else queries, jnp.arange(S)[None] if keys is None else keys


def position_distances(mask: Mask, T: int, S: int) -> Int[Array, '#B 1 T S']:
    """|query position - key position|."""
    queries, keys = query_and_key_positions(mask, T, S)
    return jnp.abs(queries[:, None, :, None] - keys[:, None, None, :])


def mask_as_array(mask: Mask, T: int, S: int) -> Bool[Array, '#B #N #T #S'] | None:
    """The mask as one boolean array, or None where all attend to all."""
    queries, keys = query_and_key_positions(mask, T, S)
    query, key = queries[:, None, :, None], keys[:, None, None, :]
    allowed = []
    if mask.mask is not None:
        allowed.append(mask.mask)
    if mask.query_seq_lengths is not None:
        allowed.append(length_mask(mask.query_seq_lengths, T)[:, None, :, None])
    if mask.key_value_seq_lengths is not None:
        allowed.append(length_mask(mask.key_value_seq_lengths, S)[:, None, None, :])
    if mask.query_segment_ids is not None and mask.key_segment_ids is not None:
        allowed.append(mask.query_segment_ids[:, None, :, None] == mask.key_segment_ids[:, None, None, :])
    if mask.is_causal:
        past = key <= query
        if mask.prefix_lengths is not None:
            past = past | length_mask(mask.prefix_lengths, S)[:, None, None, :]
        allowed.append(past)
    if mask.window is not None:
        left, right = mask.window
        allowed.append((key >= query - left) & (key <= query + right))
    return functools.reduce(operator.and_, allowed) if allowed else None


def length_mask(lengths: Int[Array, ' B'], size: int) -> Bool[Array, 'B size']:
    """True on the first `lengths[b]` of `size` positions."""
    return jax.lax.broadcasted_iota(jnp.int32, (lengths.shape[0], size), 1) < lengths[:, None]
