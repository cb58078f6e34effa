"""Multi-head attention with the parameters of Flax's module, and an `attention_fn` for Flax's module."""

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from flax.linen.linear import default_kernel_init
from jaxtyping import Array, Bool, Float, Int, Shaped

from attnlab.kernels.attention import dot_product_attention
from attnlab.kernels.call import check_dropout_rate
from attnlab.kernels.masks import Mask, widen_integers
from attnlab.kernels.norms import l2_norm, rms_norm
from attnlab.layers.positions import NoEncoding, PositionEncoding

AnyArray = Array | np.ndarray


class HeadNorm(nn.Module):
    """`rms_norm` of each head, with a learned scale [H] that all heads share; no mean is subtracted, no bias added."""

    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, 'B T N H']) -> Float[Array, 'B T N H']:
        """Return the normalised heads [B, T, N, H]."""
        return rms_norm(x, self.param('scale', nn.initializers.ones, x.shape[-1:], self.param_dtype))


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2) over `attnlab.dot_product_attention`.

    Parameters have the shapes, names and initial values of `flax.linen.MultiHeadDotProductAttention`: `query`
    [D, N, H], `key` and `value` [C, K, H], `out` [N, H, out], each a `kernel` with a `bias`.  Features that Flax does
    not have add parameters of their own.

    heads: N, the number of query heads.
    kv_heads: K, the number of key and value heads, a divisor of N (Ainslie et al. 2023); None: N.
    head_width: H; None: D / N.
    out_features: the width of the output; None: D.
    use_bias: whether the projections have biases.
    qk_norm: 'rms' divides every query and key head by its root mean square, with learned scales `query_norm` and
      `key_norm` [H] (Dehghani et al. 2023, section 2, who also subtract the mean).  'l2' gives heads length one and
      multiplies the logits by a learned number `qk_scale` in place of 1 / sqrt(H) (Henry et al. 2020).  The paper
      initialises it from sequence lengths, which are unknown here; it starts at sqrt(H), where logits equal those of
      'rms'.  None: no norm.
    encoding: the position encoding, which rotates queries and keys after their norm, or adds a bias to the logits; see
      `attnlab.layers.positions`.
    sinks: adds a learned logit per head, `sinks` [N], to the sum of the softmax; it starts at zero.
    dropout_rate: dropout rate of attention weights.
    dtype: dtype of the computation; None: inputs and parameters are promoted.
    param_dtype, kernel_init, bias_init: as in Flax.
    out_init: initialiser of the kernel of `out`; None: `kernel_init`.
    implementation: as in `attnlab.dot_product_attention`.
    cache_length: the number of tokens that the collection `cache` holds; 0: no cache.  With a cache, self-attention
      writes the keys and values of each token to the cache at its position, given by `query_positions` of the mask, and
      attends to the whole cache.  A token whose position is negative or at least `cache_length` is not written.
      Attention to `keys` projects them in the first call only.

    If the collection `intermediates` is mutable, the weights are sown there as `attention_weights` [B, N, T, S].
    """

    heads: int
    kv_heads: int | None = None
    head_width: int | None = None
    out_features: int | None = None
    use_bias: bool = True
    qk_norm: Literal['l2', 'rms'] | None = None
    encoding: PositionEncoding = NoEncoding()
    sinks: bool = False
    dropout_rate: float = 0.0
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Array] = default_kernel_init
    out_init: Callable[..., Array] | None = None
    bias_init: Callable[..., Array] = nn.initializers.zeros
    implementation: str | tuple[str, ...] | None = None
    cache_length: int = 0

    @nn.compact
    def __call__(
        self,
        queries: Float[AnyArray, '*B T D'],
        keys: Float[AnyArray, '*B S C'] | None = None,
        *,
        mask: Bool[AnyArray, '... #N #T #S'] | Mask | None = None,
        bias: Float[AnyArray, '... #N #T #S'] | None = None,
        positions: Int[AnyArray, '#B T'] | None = None,
        deterministic: bool = True,
        return_weights: bool = False,
    ) -> Float[Array, '*B T out'] | tuple[Array, Array]:
        """Attend from `queries` to `keys`, or to the queries themselves.

        Args:
          queries: [B, T, D].
          keys: [B, S, C], the input of the key and value projections; None: `queries`.
          mask: boolean, True attends, broadcastable to [B, N, T, S]; or an `attnlab.kernels.masks.Mask`.
          bias: added to the logits, broadcastable to [B, N, T, S]; replaces the learned bias of the encoding.
          positions: [B, T] or [1, T] int, the positions of the tokens in self-attention, which causality, windows and
            the encoding compare.  The mask can hold positions instead, different ones for queries and keys.  With
            neither, the position of a token is its index.
          deterministic: no dropout; otherwise it draws from the `dropout` stream of rngs.
          return_weights: also return the weights, which only the implementation 'dense' computes; it then replaces
            `implementation`.

        Returns:
          The output [B, T, out], or (output, weights [B, N, T, S] before dropout).

        Raises:
          ValueError: if a size, name or rate is not valid, or positions are missing or given twice.
        """
        self._check_shapes(queries, keys)
        if keys is not None and positions is not None:
            raise ValueError('positions apply to self-attention only; with keys, expected positions in the mask')
        N, K = self.heads, self._kv_heads
        H = queries.shape[-1] // N if self.head_width is None else self.head_width
        dense = functools.partial(
            nn.DenseGeneral, use_bias=self.use_bias, dtype=self.dtype, param_dtype=self.param_dtype,
            kernel_init=self.kernel_init, bias_init=self.bias_init,
        )  # fmt: skip
        query, scale = self._normalised(dense((N, H), name='query')(queries), 'query')
        query_positions, key_positions = _query_and_key_positions(mask, positions)
        query = self.encoding.rotate(query, query_positions)

        def project(memory: AnyArray, memory_positions: AnyArray | None) -> tuple[Array, Array]:
            key, _ = self._normalised(dense((K, H), name='key')(memory), 'key')
            return self.encoding.rotate(key, memory_positions), dense((K, H), name='value')(memory)

        if keys is not None:
            key, value = self._cached_memory(functools.partial(project, keys, key_positions))
        elif self.cache_length:
            key, value = self._write_cache(*project(queries, query_positions), query_positions)
        else:
            key, value = project(queries, key_positions)
        if bias is None:
            bidirectional = not (isinstance(mask, Mask) and mask.is_causal)
            lengths = query.shape[1], key.shape[1]
            bias = self.encoding.bias(N, lengths, (query_positions, key_positions), bidirectional)
        rate = _effective_rate(self.dropout_rate, deterministic)
        # Without a `dropout` stream, Flax's make_rng would draw from the stream of the parameters, if there is one.
        has_dropout_rng = rate > 0.0 and (self.has_rng('dropout') or self.is_initializing())
        sow_weights = self.is_mutable_collection('intermediates') and not self.is_initializing()
        needs_weights = return_weights or sow_weights
        attended = dot_product_attention(
            query, key, value, bias, mask, scale=scale, query_positions=positions, key_positions=positions,
            sinks=self.param('sinks', nn.initializers.zeros, (N,), self.param_dtype) if self.sinks else None,
            alibi_slopes=self.encoding.alibi_slopes(N),
            dropout_rate=rate, dropout_rng=self.make_rng('dropout') if has_dropout_rng else None,
            implementation=_weights_implementation(self.implementation) if needs_weights else self.implementation,
            return_weights=needs_weights,
        )  # fmt: skip
        output, weights = _split_output(attended)
        if sow_weights:
            self.sow('intermediates', 'attention_weights', weights)
        out_features = queries.shape[-1] if self.out_features is None else self.out_features
        output = dense(out_features, axis=(-2, -1), name='out', kernel_init=self.out_init or self.kernel_init)(output)
        return (output, weights) if return_weights and weights is not None else output

    @property
    def _kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    def _normalised(self, x: Array, name: Literal['query', 'key']) -> tuple[Array, float | None]:
        """Return queries or keys after their norm, and the scale of the logits (None: the default)."""
        match self.qk_norm:
            case None:
                return x, None
            case 'rms':
                return HeadNorm(self.param_dtype, name=f'{name}_norm')(x), None
            case 'l2':
                if name == 'key':
                    return l2_norm(x), 1.0
                init = nn.initializers.constant(math.sqrt(x.shape[-1]))
                scale = self.param('qk_scale', init, (), self.param_dtype)
                # The queries are multiplied by the scale, because some implementations take no learned scale.
                return (l2_norm(x) * scale).astype(x.dtype), 1.0
            case _:
                raise ValueError(f"qk_norm is {self.qk_norm!r}; expected 'l2', 'rms' or None")

    def _cached_memory(self, project: Callable[[], tuple[Array, Array]]) -> tuple[Array, Array]:
        """Return the keys and values of a memory, which are the same in all calls; with a cache, of the first call."""
        return self.variable('cache', 'cached_memory', project).value if self.cache_length else project()

    def _write_cache(self, key: Array, value: Array, positions: AnyArray | None) -> tuple[Array, Array]:
        """Write keys and values to the cache at `positions` [B, T]; return all cached ones [B, cache_length, K, H]."""
        if positions is None:
            raise ValueError('a cache needs the positions of queries; expected query_positions in the mask')
        positions = widen_integers('query_positions', positions)
        # A negative index would count from the end; an index of cache_length is dropped.
        indices = jnp.where(positions < 0, self.cache_length, positions)
        row = jnp.arange(key.shape[0])[:, None]

        def write(name: str, new: Array) -> Array:
            shape = (new.shape[0], self.cache_length, *new.shape[2:])
            cached = self.variable('cache', name, jnp.zeros, shape, new.dtype)
            cached.value = cached.value.at[row, indices].set(new, mode='drop')
            return cached.value

        return write('cached_key', key), write('cached_value', value)

    def _check_shapes(self, queries: AnyArray, keys: AnyArray | None) -> None:
        """Raise ValueError if a size is not positive or does not divide, or an input has a wrong rank or batch size."""
        for name in ('heads', 'kv_heads', 'head_width', 'out_features'):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f'{name} is {size}; expected a positive number')
        if self.heads % self._kv_heads:
            raise ValueError(f'kv_heads is {self.kv_heads}; expected a divisor of heads, {self.heads}')
        if queries.ndim != 3:
            raise ValueError(f'queries have shape {queries.shape}; expected [B, T, D]')
        B, _, D = queries.shape
        if keys is not None and (keys.ndim != 3 or keys.shape[0] != B):
            raise ValueError(f'keys have shape {keys.shape}; expected [B, S, C] with B = {B} as in queries')
        if self.head_width is None and D % self.heads:
            raise ValueError(f'queries have width {D}; expected a multiple of {self.heads} heads, or head_width')


def attention_fn(
    query: Float[Array, '*B T N H'],
    key: Float[Array, '*B S K H'],
    value: Float[Array, '*B S K Hv'],
    bias: Float[Array, '...'] | None = None,
    mask: Shaped[AnyArray, '...'] | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
    *,
    implementation: str | tuple[str, ...] | None = None,
) -> Float[Array, '*B T N Hv']:
    """Replace Flax's attention: `flax.linen.MultiHeadDotProductAttention(attention_fn=attention_fn)`.

    The arguments are those of `flax.linen.dot_product_attention`, including any number of batch axes and numeric masks,
    in which a nonzero entry means that the query may attend.  It differs from Flax as follows:

    - A row that is masked everywhere gives zero (Flax: the mean of the values), and so on for the other differences
      that `attnlab.dot_product_attention` has from `jax.nn.dot_product_attention`.
    - Dropout is independent for every batch row and head.  `broadcast_dropout` has no effect; its default in Flax is
      True, which drops the same weights in all rows and heads.
    - The softmax is float32 or wider; `force_fp32_for_softmax` has no effect.  If Flax passes `module`,
      the sown weights have the dtype of the softmax.  The output has the dtype that the inputs are promoted to; Flax
      gives float32 if `force_fp32_for_softmax` is set.
    - A dropout rate outside [0, 1) raises an error, even if `deterministic`.

    implementation: as in `attnlab.dot_product_attention`; set it with `functools.partial`.

    Raises:
      NotImplementedError: if `precision` or a function in place of einsum is given.
      ValueError: if `attnlab.dot_product_attention` raises it.
    """
    for name, argument in (
        ('precision', precision), ('einsum_dot_general', einsum_dot_general),
        ('qk_attn_weights_einsum', qk_attn_weights_einsum), ('attn_weights_value_einsum', attn_weights_value_einsum),
    ):  # fmt: skip
        if argument is not None:
            raise NotImplementedError(f'{name} is {argument!r}, which no implementation supports; expected None')
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    batch_shape = query.shape[:-3]
    if not batch_shape == key.shape[:-3] == value.shape[:-3]:
        shapes = query.shape, key.shape, value.shape
        raise ValueError(f'query, key, value have shapes {shapes}; expected [*B, length, heads, width], the same *B')
    mask = None if mask is None else jnp.asarray(mask).astype(bool)
    rate = _effective_rate(dropout_rate, deterministic)
    query, key, value = (x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) for x in (query, key, value))
    attended = dot_product_attention(
        query, key, value, _flatten_batch('bias', bias, batch_shape), _flatten_batch('mask', mask, batch_shape),
        dropout_rate=rate, dropout_rng=dropout_rng if rate else None,
        implementation=implementation if module is None else _weights_implementation(implementation),
        return_weights=module is not None,
    )  # fmt: skip
    output, weights = _split_output(attended)
    if module is not None and weights is not None:
        module.sow('intermediates', 'attention_weights', weights.reshape(*batch_shape, *weights.shape[1:]))
    return output.reshape(*batch_shape, *output.shape[1:])


def _flatten_batch(name: str, x: AnyArray | None, batch_shape: tuple[int, ...]) -> Array | None:
    """Return [#B, #N, #T, #S] from x, which broadcasts to [*batch_shape, N, T, S]; leading axes may be missing."""
    if x is None:
        return None
    x = jnp.asarray(x)
    missing = len(batch_shape) + 3 - x.ndim
    shape = (1,) * missing + x.shape
    batch, pairs = shape[: len(batch_shape)], shape[len(batch_shape) :]
    if missing < 0 or any(size not in (1, full_size) for size, full_size in zip(batch, batch_shape, strict=True)):
        expected = f'one that broadcasts to [*B, N, T, S] with *B = {batch_shape}'
        raise ValueError(f'{name} has shape {x.shape}; expected {expected}')
    x = x.reshape(shape)
    if math.prod(batch) != 1:
        x = jnp.broadcast_to(x, (*batch_shape, *pairs))
    return x.reshape(math.prod(x.shape[: len(batch_shape)]), *pairs)


def _query_and_key_positions(
    mask: AnyArray | Mask | None, positions: AnyArray | None
) -> tuple[AnyArray | None, AnyArray | None]:
    """Return the positions of queries and keys: `positions` for both, or those of the mask; None: token indices."""
    if positions is not None:
        return positions, positions
    return (mask.query_positions, mask.key_positions) if isinstance(mask, Mask) else (None, None)


def _effective_rate(rate: float, deterministic: bool) -> float:
    """Return the dropout rate, 0 if deterministic.  A rate out of range raises ValueError in both cases."""
    check_dropout_rate(rate)
    return 0.0 if deterministic else rate


def _split_output(attended: Array | tuple[Array, ...]) -> tuple[Array, Array | None]:
    """Return the output, and the weights or None."""
    return (attended[0], attended[1]) if isinstance(attended, tuple) else (attended, None)


def _weights_implementation(implementation: str | tuple[str, ...] | None) -> str:
    """Return 'dense', the implementation that returns weights; log it if another one was requested."""
    if implementation not in (None, 'dense', 'xla'):
        logging.info("attention weights are requested: the implementation is 'dense' in place of %s", implementation)
    return 'dense'
