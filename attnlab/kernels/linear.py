"""Linear attention: a feature map instead of the exponential of the softmax, so that no [T, S] matrix is formed."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attnlab.kernels import mesh_axes
from attnlab.kernels.call import AttentionCall, AttentionOutput, check_call, with_auto_axes
from attnlab.kernels.masks import AnyArray, IntegerLists, Mask, causal_mask, length_mask, padding_mask

CHUNK_SIZE = 64
"""Tokens in one step of the causal scan.  A larger chunk forms more pairs; a smaller one stores more states for the
gradient."""


def linear_attention(
    query: Float[AnyArray, 'B T N H'],
    key: Float[AnyArray, 'B S K H'],
    value: Float[AnyArray, 'B S K Hv'],
    *,
    is_causal: bool = False,
    query_seq_lengths: Int[AnyArray, ' B'] | IntegerLists | None = None,
    key_value_seq_lengths: Int[AnyArray, ' B'] | IntegerLists | None = None,
    feature_map: str = 'elu',
    chunk_size: int | None = None,
) -> Float[Array, 'B T N Hv']:
    """Return phi(Q) (phi(K)^T V) / (phi(Q) sum of phi(K)) (Katharopoulos et al. 2020, equations 5 to 12).

    The sums over keys are a state [H, Hv] for each head: time is O((T + S) H Hv) and memory O(T + S), in the gradient
    too.  A causal call carries the state from chunk to chunk of the sequence and forms pairs only inside a chunk.

    Args:
      query: [B, T, N, H].
      key, value: [B, S, K, H] and [B, S, K, Hv].  N is a multiple of K; heads are repeated 0, 0, 1, 1.
      is_causal: a query attends to no later key; rows and columns are aligned at the top left.
      query_seq_lengths, key_value_seq_lengths: [B] int; positions at and after the length are masked.
      feature_map: 'elu' for elu(x) + 1, 'relu' for max(x, 0).
      chunk_size: tokens in one step of a causal call, `CHUNK_SIZE` if None.

    Returns:
      [B, T, N, Hv] in the dtype of `query`; sums are float32 or wider.  A row gives exactly zero, and has a zero
      gradient, if it may attend to no key, or if the features of all keys that it attends to add up to zero.  With
      'relu' this may happen; with 'elu' only where keys are below about -80 in all their components, which float32
      cannot hold.

    Raises:
      ValueError: if shapes, dtypes, names or numbers do not fit; the message has the value and what is expected.
    """
    query, key, value = map(jnp.asarray, (query, key, value))
    mask = causal_mask() if is_causal else Mask()
    mask = mask & padding_mask(query_seq_lengths, key_value_seq_lengths)
    call = AttentionCall(query, key, value, mask, scale=1.0)
    check_call(call)
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f'feature_map is {feature_map!r}; expected one of {sorted(FEATURE_MAPS)}')
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f'chunk_size is {chunk_size}; expected a positive number of tokens or None')
    attend = lambda call: AttentionOutput(_attend(call, feature_map, chunk_size or CHUNK_SIZE), None, None)
    return with_auto_axes(attend, call).output


def _attend(call: AttentionCall, feature_map: str, chunk_size: int) -> Float[Array, 'B T N Hv']:
    query, key, value, mask = call[:4]
    is_causal = mask.is_causal
    B, T, N, H = query.shape
    S, K, Hv = value.shape[1:]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    lengths = mask.key_value_seq_lengths
    key_mask = (jnp.ones((B, S), bool) if lengths is None else length_mask(lengths, S))[:, :, None]
    # A non-finite number would change the sums of rows that do not attend to it.  So it is zeroed here, and the rows
    # that attend to it are set to NaN at the end.
    finite_query = jnp.all(jnp.isfinite(query), axis=-1)
    finite_key = jnp.all(jnp.isfinite(key), axis=-1) & jnp.all(jnp.isfinite(value), axis=-1)
    used_key = (finite_key & key_mask)[..., None]
    query_features, key_features = FEATURE_MAPS[feature_map]
    queries = query_features(jnp.where(finite_query[..., None], query, 0).astype(wide))
    keys = jnp.where(used_key, key_features(jnp.where(used_key, key, 0).astype(wide)), 0.0)
    # A column of ones beside the values sums the features in the same products.
    values = jnp.concatenate([jnp.where(used_key, value, 0).astype(wide), jnp.ones((B, S, K, 1), wide)], axis=-1)
    # Heads before positions: every backend is fast at such matrix products.
    queries = queries.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
    if is_causal:
        sums = _sum_values_causal(queries, keys, values, chunk_size)
    else:
        sums = _sum_values(queries, keys, values)
    divisor = sums[..., -1:]
    output = jnp.where(divisor == 0.0, 0.0, _divide(sums[..., :-1], jnp.where(divisor == 0.0, 1.0, divisor)))
    output = output.transpose(0, 3, 1, 2, 4).reshape(B, T, N, Hv)
    attends_to_nonfinite = jnp.repeat(_attends_to_any(key_mask & ~finite_key, T, is_causal), N // K, axis=2)
    output = jnp.where((~finite_query | attends_to_nonfinite)[..., None], jnp.nan, output)
    is_live = _attends_to_any(key_mask, T, is_causal)
    if (lengths := mask.query_seq_lengths) is not None:
        is_live = is_live & length_mask(lengths, T)[:, :, None]
    return jnp.where(is_live[..., None], output, 0.0).astype(query.dtype)


def _elu_query_features(x: Float[Array, '*B H']) -> Float[Array, '*B H']:
    """Return elu(x) + 1 up to a factor for each row, such that the largest feature is at least 1 and never underflows.

    The factor of a query row cancels in the quotient.
    """
    lowest = jnp.finfo(x.dtype).min
    largest = jnp.max(jax.lax.stop_gradient(x), axis=-1, keepdims=True, initial=lowest)
    return _elu_key_features(x - jnp.minimum(largest, 0.0))


def _elu_key_features(x: Float[Array, '*B H']) -> Float[Array, '*B H']:
    """Return elu(x) + 1, without the rounding of exp(x) - 1 + 1, which is zero from -17 on."""
    return jnp.where(x > 0.0, x + 1.0, jnp.exp(jnp.where(x > 0.0, 0.0, x)))


FEATURE_MAPS: dict[str, tuple[Callable, Callable]] = {
    'elu': (_elu_query_features, _elu_key_features),
    'relu': (jax.nn.relu, jax.nn.relu),
}
"""The feature maps of queries and of keys by name, functions of [..., H]."""


def _sum_values(
    queries: Float[Array, 'B K G T H'], keys: Float[Array, 'B K S H'], values: Float[Array, 'B K S V']
) -> Float[Array, 'B K G T V']:
    """Return for every query the sum over all keys of (query . key) value."""
    return jnp.einsum('bkgth,bkhv->bkgtv', queries, jnp.einsum('bksh,bksv->bkhv', keys, values))


def _sum_values_causal(
    queries: Float[Array, 'B K G T H'], keys: Float[Array, 'B K S H'], values: Float[Array, 'B K S V'],
    chunk_size: int,
) -> Float[Array, 'B K G T V']:  # fmt: skip
    """Return for every query the sum over the keys up to it of (query . key) value, computed chunk by chunk."""
    B, K, _, T, H = queries.shape
    size = min(chunk_size, max(T, 1))
    count = -(-T // size)

    def split_into_chunks(x):
        """Reshape [..., length, width] to [count, ..., size, width], padded with zeros."""
        x = x[..., :T, :]  # no query attends to keys after the last query
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, count * size - x.shape[-2]), (0, 0)])
        return jnp.moveaxis(x.reshape(*x.shape[:-2], count, size, x.shape[-1]), -3, 0)

    def step(state, inputs):
        queries, keys, values = inputs
        pairs = jnp.tril(jnp.einsum('bkgth,bksh->bkgts', queries, keys))
        output = jnp.einsum('bkgts,bksv->bkgtv', pairs, values) + jnp.einsum('bkgth,bkhv->bkgtv', queries, state)
        return state + jnp.einsum('bksh,bksv->bkhv', keys, values), output

    # The gradient recomputes the pairs, so that only one state a chunk is stored.
    step = jax.checkpoint(step, prevent_cse=False)
    state = jnp.zeros((B, K, H, values.shape[-1]), values.dtype)
    state = mesh_axes.match_varying_axes(state, queries, keys, values)
    _, output = jax.lax.scan(step, state, tuple(map(split_into_chunks, (queries, keys, values))))
    output = jnp.moveaxis(output, 0, -3)
    return output.reshape(*output.shape[:-3], count * size, output.shape[-1])[..., :T, :]


@jax.custom_jvp
def _divide(x: Float[Array, '*B Hv'], y: Float[Array, '*B 1']) -> Float[Array, '*B Hv']:
    """Return x / y.  JAX's derivative squares y, and the square of a small number is zero; this derivative does not."""
    return x / y


@_divide.defjvp
def _divide_jvp(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    ratio = _divide(x, y)
    return ratio, (dx - ratio * dy) / y


def _attends_to_any(marks: Bool[Array, 'B S K'], T: int, is_causal: bool) -> Bool[Array, 'B T K']:
    """Return which queries may attend to a marked key: one at or before their position if causal, else any."""
    if not is_causal:
        return jnp.broadcast_to(jnp.any(marks, axis=1, keepdims=True), (marks.shape[0], T, marks.shape[2]))
    # A sentinel mark after the last key: a column without marks gets the position T, which no query reaches.
    first = jnp.argmax(jnp.pad(marks, ((0, 0), (0, 1), (0, 0)), constant_values=True), axis=1, keepdims=True)
    first = jnp.where(first == marks.shape[1], T, first)
    return jax.lax.broadcasted_iota(jnp.int32, (marks.shape[0], T, marks.shape[2]), 1) >= first
