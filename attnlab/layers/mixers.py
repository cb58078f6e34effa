"""Layers that mix tokens, in place of attention in a block.

Each output depends on the past of its token, within its segment.  With a cache (Flax collection `cache`), a call
continues after the last real token of the previous call; padding between them has no effect.
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
    """A causal convolution D -> D (van den Oord et al. 2016).  Parameters: `kernel` [kernel_size, D, D], `bias` [D].

    With a kernel size of 4 it has as many parameters as the four matrices of multi-head attention.
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
        """Return the output [B, T, D].

        Args:
          x: [B, T, D].
          segment_ids: [B, T], the segment of each token; None: one segment in each row.  A cache ignores them.
          token_mask: [B, T], True for tokens that enter the cache; None: all.  Without a cache it has no effect.

        Raises:
          ValueError: if kernel_size is not positive.
        """
        if self.kernel_size < 1:
            raise ValueError(f'kernel_size is {self.kernel_size}; expected a positive number')
        D = x.shape[-1]
        kernel = self.param('kernel', self.kernel_init, (self.kernel_size, D, D), jnp.float32)
        bias = self.param('bias', nn.initializers.zeros, (D,), jnp.float32) if self.use_bias else None
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        if self.cache:
            y = self._convolve_with_cache(x, kernel, jnp.ones(x.shape[:2], bool) if token_mask is None else token_mask)
        else:
            y = sliding_convolution(x, kernel, is_causal=True, segment_ids=segment_ids)
        return y if bias is None else y + bias[None, None]

    def _convolve_with_cache(self, x: Array, kernel: Array, token_mask: Array) -> Array:
        """Convolve the real tokens, moved to the front of their row, with the cached last kernel_size - 1 tokens."""
        B, _, D = x.shape
        past = self.variable('cache', 'past', jnp.zeros, (B, self.kernel_size - 1, D), x.dtype)
        real_first = jnp.argsort(~token_mask, axis=1, stable=True)
        both = jnp.concatenate([past.value, jnp.take_along_axis(x, real_first[..., None], axis=1)], axis=1)
        y = sliding_convolution(both, kernel, is_causal=True)[:, self.kernel_size - 1 :]
        last = jnp.sum(token_mask, axis=1)[:, None] + jnp.arange(self.kernel_size - 1)[None]
        past.value = jnp.take_along_axis(both, last[..., None], axis=1)
        return jnp.take_along_axis(y, jnp.argsort(real_first, axis=1)[..., None], axis=1)


class RecurrentMixer(nn.Module):
    """A recurrent layer D -> D from the first token to the last, with the parameters of a `RecurrentCell`.

    The computation is in float32 or wider, because a narrower state would be rounded at every token.
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
        """Return the output [B, T, D].

        Args:
          x: [B, T, D].
          segment_ids: [B, T], the segment of each token; None: one segment in each row.  A cache ignores them.
          token_mask: [B, T], True for tokens that change the state; None: all.
        """
        D, input_dtype = x.shape[-1], x.dtype
        token_mask = jnp.ones(x.shape[:2], bool) if token_mask is None else token_mask
        layer = RecurrentLayer(self.kind, D, name='layer')
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if not self.cache:
            starts = None
            if segment_ids is not None:
                changes = segment_ids[:, 1:] != segment_ids[:, :-1]
                starts = jnp.concatenate([jnp.zeros_like(token_mask[:, :1]), changes], axis=1)
            return layer(x, token_mask, starts=starts)[0].astype(input_dtype)
        zeros = jnp.zeros((x.shape[0], D), x.dtype)
        state = self.variable('cache', 'state', lambda: (zeros, zeros) if self.kind == 'lstm' else zeros)
        outputs, state.value = layer(x, token_mask, state.value)
        return outputs.astype(input_dtype)
