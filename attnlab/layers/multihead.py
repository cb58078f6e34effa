"""Multi-head attention as a module with flax's parameters, and our attention as flax's `attention_fn`."""

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
    """`rms_norm` of each head with a learned gain per channel, which all heads share; no mean, no bias."""

    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, 'B T N H']) -> Float[Array, 'B T N H']:
        return rms_norm(x, self.param('scale', nn.initializers.ones, x.shape[-1:], self.param_dtype))


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2) over `attnlab.dot_product_attention`.

    Parameters are those of `flax.linen.MultiHeadDotProductAttention`, in shape, name and start: `query` [D, N, H],
    `key` and `value` [C, K, H], `out` [N, H, out], each `kernel` with a `bias`.  What flax does not have adds its own.

    heads: N.  kv_heads: K, a divisor of N (Ainslie et al. 2023); N if None.  head_width: H; D / N if None.
    out_features: D if None.
    qk_norm: 'rms' divides every query and key head by its root mean square, with learned gains `query_norm` and
      `key_norm` [H] (Dehghani et al. 2023, section 2, who subtract the mean too).  'l2' gives heads length one and
      multiplies logits by a learned number `qk_scale` in place of 1 / sqrt(H) (Henry et al. 2020); it starts from
      sqrt(H), where logits are those of 'rms', as the lengths are unknown from which the paper computes its start.
    encoding: turns queries and keys, after their norm, or gives a bias: see `attnlab.layers.positions`.
    sinks: a learned logit `sinks` [N] that takes part in the softmax's sum, from zero.
    dropout_rate: of attention weights.
    dtype: of the computation, that of inputs and parameters if None.  param_dtype, kernel_init, bias_init: as in flax.
    out_init: of the kernel of `out`; `kernel_init` if None.
    implementation: as in `attnlab.dot_product_attention`.
    cache_length: S, how many tokens the collection `cache` holds; 0 for none.  Then self-attention is from tokens at
      `query_positions` of the rules, each of which is also its slot, to all that the cache holds after them; one whose
      position is negative or from S on is not kept.  Attention to `keys` projects them in the first call alone.

    Where the collection `intermediates` is mutable, the weights are sown there as `attention_weights` [B, N, T, S].
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
        """Attends from `queries` to `keys`, or to the queries themselves.

        Args:
          queries: [B, T, D].
          keys: [B, S, C], where keys and values are made from; `queries` if None.
          mask: boolean, True attends, broadcastable to [B, N, T, S]; or one of `attnlab.kernels.masks`.
          bias: added to the logits, broadcastable to [B, N, T, S], in place of a learned bias of the encoding.
          positions: [B, T] or [1, T] int, of the tokens of self-attention: causality, windows and the encoding compare
            them.  The mask may carry positions instead, those of queries and keys apart; without any, tokens stand at
            their row and column numbers.
          deterministic: no dropout; otherwise it draws from the `dropout` stream of rngs.
          return_weights: also the weights, which only dense gives: whatever `implementation` says, it is dense then.

        Returns:
          [B, T, out], or with its weights [B, N, T, S], before dropout.

        Raises:
          ValueError: for sizes, names and rates that do not fit, naming what came and what was expected.
        """
        self._check(queries, keys)
        if keys is not None and positions is not None:
            raise ValueError('positions are those of self-attention; with keys, expected them in the rules of mask')
        N, K = self.heads, self._kv_heads
        H = queries.shape[-1] // N if self.head_width is None else self.head_width
        dense = functools.partial(
            nn.DenseGeneral, use_bias=self.use_bias, dtype=self.dtype, param_dtype=self.param_dtype,
            kernel_init=self.kernel_init, bias_init=self.bias_init,
        )  # fmt: skip
        query, scale = self._normed(dense((N, H), name='query')(queries), 'query')
        here, there = _positions(mask, positions)
        query = self.encoding.rotate(query, here)

        def project(memory: AnyArray, at: AnyArray | None) -> tuple[Array, Array]:
            key, _ = self._normed(dense((K, H), name='key')(memory), 'key')
            return self.encoding.rotate(key, at), dense((K, H), name='value')(memory)

        if keys is not None:
            key, value = self._once(functools.partial(project, keys, there))
        elif self.cache_length:
            key, value = self._remembered(*project(queries, here), here)
        else:
            key, value = project(queries, there)
        if bias is None:
            bidirectional = not (isinstance(mask, Mask) and mask.is_causal)
            bias = self.encoding.bias(N, (query.shape[1], key.shape[1]), (here, there), bidirectional)
        rate = _rate(self.dropout_rate, deterministic)
        # Without the stream flax would draw from that of the parameters, if there is one.
        draws = rate > 0.0 and (self.has_rng('dropout') or self.is_initializing())
        sown = self.is_mutable_collection('intermediates') and not self.is_initializing()
        attended = dot_product_attention(
            query, key, value, bias, mask, scale=scale, query_positions=positions, key_positions=positions,
            sinks=self.param('sinks', nn.initializers.zeros, (N,), self.param_dtype) if self.sinks else None,
            alibi_slopes=self.encoding.slopes(N),
            dropout_rate=rate, dropout_rng=self.make_rng('dropout') if draws else None,
            implementation=_with_weights(self.implementation) if return_weights or sown else self.implementation,
            return_weights=return_weights or sown,
        )  # fmt: skip
        output, weights = _parts(attended)
        if sown:
            self.sow('intermediates', 'attention_weights', weights)
        out_features = queries.shape[-1] if self.out_features is None else self.out_features
        output = dense(out_features, axis=(-2, -1), name='out', kernel_init=self.out_init or self.kernel_init)(output)
        return (output, weights) if return_weights and weights is not None else output

    @property
    def _kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    def _normed(self, x: Array, name: Literal['query', 'key']) -> tuple[Array, float | None]:
        """Queries or keys after their norm, and the scale of their product."""
        match self.qk_norm:
            case None:
                return x, None
            case 'rms':
                return HeadNorm(self.param_dtype, name=f'{name}_norm')(x), None
            case 'l2':
                if name == 'key':
                    return l2_norm(x), 1.0
                start = nn.initializers.constant(math.sqrt(x.shape[-1]))
                scale = self.param('qk_scale', start, (), self.param_dtype)
                # Into the queries, as some implementations take no scale that is learned.
                return (l2_norm(x) * scale).astype(x.dtype), 1.0
            case _:
                raise ValueError(f"qk_norm is {self.qk_norm!r}; expected 'l2', 'rms' or None")

    def _once(self, project: Callable[[], tuple[Array, Array]]) -> tuple[Array, Array]:
        """Keys and values of a memory that all calls attend to: with a cache, as they were in the first one."""
        return self.variable('cache', 'cached_memory', project).value if self.cache_length else project()

    def _remembered(self, key: Array, value: Array, at: AnyArray | None) -> tuple[Array, Array]:
        """All keys and values up to these [B, S, K, H], which go into the slots `at` [B, T]."""
        if at is None:
            raise ValueError('a cache needs to know where queries stand; expected query_positions in the rules of mask')
        at = widen_integers('query_positions', at)
        slots = jnp.where(at < 0, self.cache_length, at)  # a negative one would count from the end
        row = jnp.arange(key.shape[0])[:, None]

        def kept(name: str, new: Array) -> Array:
            shape = (new.shape[0], self.cache_length, *new.shape[2:])
            stored = self.variable('cache', name, jnp.zeros, shape, new.dtype)
            stored.value = stored.value.at[row, slots].set(new, mode='drop')
            return stored.value

        return kept('cached_key', key), kept('cached_value', value)

    def _check(self, queries: AnyArray, keys: AnyArray | None) -> None:
        """Raises ValueError for heads and widths that make no head, and for inputs of another rank or batch."""
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
    """Our attention in place of flax's: `flax.linen.MultiHeadDotProductAttention(attention_fn=attention_fn)`.

    Takes what `flax.linen.dot_product_attention` takes, any number of batch axes and masks of numbers included, where
    what is not zero attends.  It differs from it where `attnlab.dot_product_attention` differs from JAX's (a row under
    a mask all over gives zero, and flax the mean), and in that

    - dropout is independent for every batch row and head, whatever `broadcast_dropout` says, which flax sets to True
      unless told otherwise: flax drops the same weights in all of them;
    - the softmax is float32 or wider, whatever `force_fp32_for_softmax` says, and so are the weights that are sown
      where flax gives `module`; the output has the dtype that the inputs are promoted to, where flax, told to, gives
      float32;
    - a dropout rate outside [0, 1) is refused, `deterministic` or not.

    implementation: as in `attnlab.dot_product_attention`, to be set with `functools.partial`.

    Raises:
      NotImplementedError: for `precision` and the functions that stand for einsum, unless None.
      ValueError: as `attnlab.dot_product_attention`.
    """
    for name, given in (
        ('precision', precision), ('einsum_dot_general', einsum_dot_general),
        ('qk_attn_weights_einsum', qk_attn_weights_einsum), ('attn_weights_value_einsum', attn_weights_value_einsum),
    ):  # fmt: skip
        if given is not None:
            raise NotImplementedError(f'{name} is {given!r}: implementations choose their own products; expected None')
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    lead = query.shape[:-3]
    if not lead == key.shape[:-3] == value.shape[:-3]:
        shapes = query.shape, key.shape, value.shape
        raise ValueError(f'query, key, value have shapes {shapes}; expected [*B, length, heads, width], the same *B')
    mask = None if mask is None else jnp.asarray(mask).astype(bool)
    rate = _rate(dropout_rate, deterministic)
    query, key, value = (x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) for x in (query, key, value))
    attended = dot_product_attention(
        query, key, value, _one_batch_axis('bias', bias, lead), _one_batch_axis('mask', mask, lead),
        dropout_rate=rate, dropout_rng=dropout_rng if rate else None,
        implementation=implementation if module is None else _with_weights(implementation),
        return_weights=module is not None,
    )  # fmt: skip
    output, weights = _parts(attended)
    if module is not None and weights is not None:
        module.sow('intermediates', 'attention_weights', weights.reshape(*lead, *weights.shape[1:]))
    return output.reshape(*lead, *output.shape[1:])


def _one_batch_axis(name: str, x: AnyArray | None, lead: tuple[int, ...]) -> Array | None:
    """[#B, #N, #T, #S] of what broadcasts to [*lead, N, T, S], axes in front missing or of size one."""
    if x is None:
        return None
    x = jnp.asarray(x)
    missing = len(lead) + 3 - x.ndim
    shape = (1,) * missing + x.shape
    batch, pairs = shape[: len(lead)], shape[len(lead) :]
    if missing < 0 or any(have not in (1, want) for have, want in zip(batch, lead, strict=True)):
        raise ValueError(f'{name} has shape {x.shape}; expected one that broadcasts to [*B, N, T, S] with *B = {lead}')
    x = x.reshape(shape)
    if math.prod(batch) != 1:
        x = jnp.broadcast_to(x, (*lead, *pairs))
    return x.reshape(math.prod(x.shape[: len(lead)]), *pairs)


def _positions(mask: AnyArray | Mask | None, positions: AnyArray | None) -> tuple[AnyArray | None, AnyArray | None]:
    """Where queries and keys stand, as given or as the rules say; None for their row and column numbers."""
    if positions is not None:
        return positions, positions
    return (mask.query_positions, mask.key_positions) if isinstance(mask, Mask) else (None, None)


def _rate(rate: float, deterministic: bool) -> float:
    """The rate to drop at.  One out of range is refused even where nothing is dropped."""
    check_dropout_rate(rate)
    return 0.0 if deterministic else rate


def _parts(attended: Array | tuple[Array, ...]) -> tuple[Array, Array | None]:
    """The output, and the weights where they were asked for."""
    return (attended[0], attended[1]) if isinstance(attended, tuple) else (attended, None)


def _with_weights(implementation: str | tuple[str, ...] | None) -> str:
    if implementation not in (None, 'dense', 'xla'):
        logging.info('attention weights are asked for: dense, which has them, takes the place of %s', implementation)
    return 'dense'
