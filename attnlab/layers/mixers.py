"""Layers that a block may have in place of attention.

Each reads a token's past within its segment.  With a cache (collection `cache`) a call continues after the last real
token of the call before, with any padding between.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jaxtyping import Array, Bool, Float, Int

from attnlab.kernels.convolution import sliding_convolution
from attnlab.layers.recurrent import CellKind, RecurrentLayer


class CausalConvolution(nn.Module):
    """A causal convolution D -> D (van den Oord et al. 2016): `kernel` [kernel_size, D, D], `bias` [D].

    A kernel size of 4 has as many parameters as the four products of multi-head attention.
    """

    kernel_size: int
    use_bias: bool = True
    kernel_init: Callable[..., Array] = nn.initializers.lecun_normal()
    dtype: Any = None
    cache: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B T D'],
        segment_ids: Int[Array, 'B T'] | None = None,
        token_mask: Bool[Array, 'B T'] | None = None,
    ) -> Float[Array, 'B T D']:
        """x [B, T, D]: the same shape.  token_mask: the tokens that a cache keeps, None: all."""
        if self.kernel_size < 1:
            raise ValueError(f'kernel_size is {self.kernel_size}; expected a positive number')
        D = x.shape[-1]
        kernel = self.param('kernel', self.kernel_init, (self.kernel_size, D, D), jnp.float32)
        bias = self.param('bias', nn.initializers.zeros, (D,), jnp.float32) if self.use_bias else None
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        if self.cache:
            y = self._continued(x, kernel, jnp.ones(x.shape[:2], bool) if token_mask is None else token_mask)
        else:
            y = sliding_convolution(x, kernel, is_causal=True, segment_ids=segment_ids)
        return y if bias is None else y + bias[None, None]

    def _continued(self, x: Array, kernel: Array, token_mask: Array) -> Array:
        """The cache holds the last kernel_size - 1 tokens; the real ones of this call are moved up behind them."""
        B, _, D = x.shape
        past = self.variable('cache', 'past', jnp.zeros, (B, self.kernel_size - 1, D), x.dtype)
        order = jnp.argsort(~token_mask, axis=1, stable=True)
        both = jnp.concatenate([past.value, jnp.take_along_axis(x, order[..., None], axis=1)], axis=1)
        y = sliding_convolution(both, kernel, is_causal=True)[:, self.kernel_size - 1 :]
        last = jnp.sum(token_mask, axis=1)[:, None] + jnp.arange(self.kernel_size - 1)[None]
        past.value = jnp.take_along_axis(both, last[..., None], axis=1)
        return jnp.take_along_axis(y, jnp.argsort(order, axis=1)[..., None], axis=1)


class RecurrentMixer(nn.Module):
    """A recurrent layer D -> D, from the first token to the last: parameters of `attnlab.layers.recurrent.RecurrentCell`.

    It computes in float32 or wider: a narrower state would be rounded at every token.
    """

    kind: CellKind
    cache: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B T D'],
        segment_ids: Int[Array, 'B T'] | None = None,
        token_mask: Bool[Array, 'B T'] | None = None,
    ) -> Float[Array, 'B T D']:
        """x [B, T, D]: the same shape.  token_mask: the tokens that change the state, None: all."""
        D = x.shape[-1]
        mask = jnp.ones(x.shape[:2], bool) if token_mask is None else token_mask
        layer = RecurrentLayer(self.kind, D, name='layer')
        came, x = x.dtype, x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if not self.cache:
            starts = None
            if segment_ids is not None:
                fresh = segment_ids[:, 1:] != segment_ids[:, :-1]
                starts = jnp.concatenate([jnp.zeros_like(mask[:, :1]), fresh], axis=1)
            return layer(x, mask, starts=starts)[0].astype(came)
        zeros = jnp.zeros((x.shape[0], D), x.dtype)
        state = self.variable('cache', 'state', lambda: (zeros, zeros) if self.kind == 'lstm' else zeros)
        outputs, state.value = layer(x, mask, state.value)
        return outputs.astype(came)
