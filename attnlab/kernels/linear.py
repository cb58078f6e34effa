"""Linear attention: a feature map in place of the softmax's exponential, so that no pair is ever formed."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attnlab.kernels import mesh_axes
from attnlab.kernels.call import AttentionCall, AttentionOutput, check_call, with_auto_axes
from attnlab.kernels.masks import AnyArray, IntegerLists, Mask, causal_mask, length_mask, padding_mask

CHUNK_SIZE = 64
"""Tokens a step of the causal scan: longer ones form more pairs, shorter ones store more states for the gradient."""


def linear_attention(
    query: Float[AnyArray, 'B T N H'],
    key: Float[AnyArray, 'B S K H'],
    value: Float[AnyArray, 'B S K Hv'],
    *,
    is_causal: bool = False,
    query_seq_lengths: Int[AnyArray, ' B'] | IntegerLists | None = None,
    key_value_seq_lengths: Int[AnyArray, ' B'] | IntegerLists | None = None,
    feature_map: str = 'elu',
    chunk: int | None = None,
) -> Float[Array, 'B T N Hv']:
    """phi(Q) (phi(K)^T V) / (phi(Q) sum of phi(K)) (Katharopoulos et al. 2020, equations 5 to 12).

    The sums over keys are a state [H, Hv] a head: time is O((T + S) H Hv) and memory O(T + S), in the gradient too.
    A causal call carries the state from chunk to chunk of the sequence and forms pairs inside a chunk only.

    Args:
      query: [B, T, N, H].
      key, value: [B, S, K, H] and [B, S, K, Hv], N a multiple of K; heads are repeated 0, 0, 1, 1.
      is_causal: no key after the query; rows and columns are aligned at the top left.
      query_seq_lengths, key_value_seq_lengths: [B] int; positions at and after the length take no part.
      feature_map: 'elu' for elu(x) + 1, 'relu' for max(x, 0).
      chunk: tokens a step of a causal call, `CHUNK_SIZE` if None.

    Returns:
      [B, T, N, Hv] in the dtype of `query`; sums are float32 or wider.  A row gives exactly zero, and sends a zero
      gradient, where it may see no key and where the features of all that it sees add up to zero: those of 'relu'
      may, those of 'elu' only where keys are below about -80 in all their components, which float32 cannot hold.

    Raises:
      ValueError: for shapes, dtypes, names and numbers that do not fit, naming what came and what was expected.
    """
    query, key, value = map(jnp.asarray, (query, key, value))
    mask = causal_mask() if is_causal else Mask()
    call = AttentionCall(query, key, value, mask & padding_mask(query_seq_lengths, key_value_seq_lengths), scale=1.0)
    check_call(call)
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f'feature_map is {feature_map!r}; expected one of {sorted(FEATURE_MAPS)}')
    if chunk is not None and chunk < 1:
        raise ValueError(f'chunk is {chunk}; expected a positive number of tokens or None')
    attend = lambda call: AttentionOutput(_attend(call, feature_map, chunk or CHUNK_SIZE), None, None)
    return with_auto_axes(attend, call).output


def _attend(call: AttentionCall, feature_map: str, chunk: int) -> Float[Array, 'B T N Hv']:
    query, key, value, mask = call[:4]
    is_causal = mask.is_causal
    B, T, N, H = query.shape
    S, K, Hv = value.shape[1:]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    within = jnp.ones((B, S), bool) if (lengths := mask.key_value_seq_lengths) is None else length_mask(lengths, S)
    within = within[:, :, None]
    # What is not finite would spoil sums that it has no part in: it is taken out here and marked at the end.
    whole_query = jnp.all(jnp.isfinite(query), axis=-1)
    whole_key = jnp.all(jnp.isfinite(key), axis=-1) & jnp.all(jnp.isfinite(value), axis=-1)
    taken = (whole_key & within)[..., None]
    of_queries, of_keys = FEATURE_MAPS[feature_map]
    queries = of_queries(jnp.where(whole_query[..., None], query, 0).astype(wide))
    keys = jnp.where(taken, of_keys(jnp.where(taken, key, 0).astype(wide)), 0.0)
    # A column of ones beside the values sums the features in the same products.
    values = jnp.concatenate([jnp.where(taken, value, 0).astype(wide), jnp.ones((B, S, K, 1), wide)], axis=-1)
    # Heads before positions, as every backend likes its matrix products.
    queries = queries.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
    sums = _causal(queries, keys, values, chunk) if is_causal else _full(queries, keys, values)
    total = sums[..., -1:]
    output = jnp.where(total == 0.0, 0.0, _divide(sums[..., :-1], jnp.where(total == 0.0, 1.0, total)))
    output = output.transpose(0, 3, 1, 2, 4).reshape(B, T, N, Hv)
    broken = ~whole_query | jnp.repeat(_sees_any(within & ~whole_key, T, is_causal), N // K, axis=2)
    output = jnp.where(broken[..., None], jnp.nan, output)
    live = _sees_any(within, T, is_causal)
    if (lengths := mask.query_seq_lengths) is not None:
        live = live & length_mask(lengths, T)[:, :, None]
    return jnp.where(live[..., None], output, 0.0).astype(query.dtype)


def _elu_of_queries(x: Float[Array, '*B H']) -> Float[Array, '*B H']:
    """A row may be scaled as it likes, as its scale cancels: the largest feature is at least 1 and never vanishes."""
    lowest = jnp.finfo(x.dtype).min
    largest = jnp.max(jax.lax.stop_gradient(x), axis=-1, keepdims=True, initial=lowest)
    return _elu_of_keys(x - jnp.minimum(largest, 0.0))


def _elu_of_keys(x: Float[Array, '*B H']) -> Float[Array, '*B H']:
    """elu(x) + 1 without the rounding of exp(x) - 1 + 1, which is zero from -17 on."""
    return jnp.where(x > 0.0, x + 1.0, jnp.exp(jnp.where(x > 0.0, 0.0, x)))


FEATURE_MAPS: dict[str, tuple[Callable, Callable]] = {
    'elu': (_elu_of_queries, _elu_of_keys),
    'relu': (jax.nn.relu, jax.nn.relu),
}
"""Name to the features of queries and of keys, functions of [..., H]."""


def _full(
    queries: Float[Array, 'B K G T H'], keys: Float[Array, 'B K S H'], values: Float[Array, 'B K S V']
) -> Float[Array, 'B K G T V']:
    """For every query the sum over all keys of (query . key) value."""
    return jnp.einsum('bkgth,bkhv->bkgtv', queries, jnp.einsum('bksh,bksv->bkhv', keys, values))


def _causal(
    queries: Float[Array, 'B K G T H'], keys: Float[Array, 'B K S H'], values: Float[Array, 'B K S V'], chunk: int
) -> Float[Array, 'B K G T V']:
    """For every query the sum over the keys up to it of (query . key) value, a chunk of both a step."""
    B, K, _, T, H = queries.shape
    size = min(chunk, max(T, 1))
    count = -(-T // size)

    def chunks(x):
        """[..., length, width] to [count, ..., size, width], with zeros for what is not there."""
        x = x[..., :T, :]  # keys after the last query are seen by none
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, count * size - x.shape[-2]), (0, 0)])
        return jnp.moveaxis(x.reshape(*x.shape[:-2], count, size, x.shape[-1]), -3, 0)

    def step(state, inputs):
        queries, keys, values = inputs
        pairs = jnp.tril(jnp.einsum('bkgth,bksh->bkgts', queries, keys))
        output = jnp.einsum('bkgts,bksv->bkgtv', pairs, values) + jnp.einsum('bkgth,bkhv->bkgtv', queries, state)
        return state + jnp.einsum('bksh,bksv->bkhv', keys, values), output

    # Pairs are formed again for the gradient, which so keeps one state a chunk.
    step = jax.checkpoint(step, prevent_cse=False)
    state = mesh_axes.match_varying_axes(jnp.zeros((B, K, H, values.shape[-1]), values.dtype), queries, keys, values)
    _, output = jax.lax.scan(step, state, (chunks(queries), chunks(keys), chunks(values)))
    output = jnp.moveaxis(output, 0, -3)
    return output.reshape(*output.shape[:-3], count * size, output.shape[-1])[..., :T, :]


@jax.custom_jvp
def _divide(x: Float[Array, '*B Hv'], y: Float[Array, '*B 1']) -> Float[Array, '*B Hv']:
    """x / y.  JAX's derivative squares y, and the square of a small number is zero; this one does not."""
    return x / y


@_divide.defjvp
def _divide_slope(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    ratio = _divide(x, y)
    return ratio, (dx - ratio * dy) / y


def _sees_any(marks: Bool[Array, 'B S K'], T: int, is_causal: bool) -> Bool[Array, 'B T K']:
    """Which queries have a marked key before them or at their place, or anywhere if not causal."""
    if not is_causal:
        return jnp.broadcast_to(jnp.any(marks, axis=1, keepdims=True), (marks.shape[0], T, marks.shape[2]))
    # An extra mark behind the last key is the first where there is no other, and T is after every query.
    first = jnp.argmax(jnp.pad(marks, ((0, 0), (0, 1), (0, 0)), constant_values=True), axis=1, keepdims=True)
    first = jnp.where(first == marks.shape[1], T, first)
    return jax.lax.broadcasted_iota(jnp.int32, (marks.shape[0], T, marks.shape[2]), 1) >= first
