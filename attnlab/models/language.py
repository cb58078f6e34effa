"""A causal language model."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attnlab.configs.language import LanguageModelConfig
from attnlab.kernels.masks import Mask, causal_mask, packed_mask
from attnlab.layers.block import TransformerStack, compute_dtype
from attnlab.layers.positions import AddPositionEmbeddings, CachePositions, PositionEncoding, make_position_encoding


class LanguageModel(nn.Module):
    """Embedding [V, D], causal blocks, output [D, V] (Radford et al. 2019; with other configs LLaMA, Mixtral).

    vocabulary: V.  cache_length: tokens that the collection `cache` holds, 0: no cache.  With a cache, a call continues
      after the tokens of earlier calls: see `attnlab.decode.cache`.
    """

    vocabulary: int
    config: LanguageModelConfig
    cache_length: int = 0

    def setup(self) -> None:
        config = self.config
        start = nn.initializers.normal(config.init or 0.02)
        self.embedding = nn.Embed(self.vocabulary, config.width, embedding_init=start)
        self.place = AddPositionEmbeddings(self.encoding)
        self.drop = nn.Dropout(config.dropout)
        self.past = CachePositions(self.cache_length)
        self.stack = TransformerStack(config, self.encoding, cache_length=self.cache_length)
        if not config.tied:
            self.output = nn.Dense(self.vocabulary, use_bias=False, dtype=compute_dtype(config), kernel_init=start)

    @property
    def encoding(self) -> PositionEncoding:
        """The encoding of positions."""
        return make_position_encoding(self.config)

    def __call__(
        self, tokens: Int[Array, 'B T'], segments: Int[Array, 'B T'] | None = None, deterministic: bool = True
    ) -> tuple[Float[Array, 'B T V'], dict[str, Array]]:
        """Logits of the next token at each position, float32 or wider, and `aux` of the experts of each layer [L].

        Args:
          tokens: [B, T], each from 0 to V - 1, which the code that makes batches checks; one outside gives NaN.
          segments: [B, T], the document of each token, 0 in padding: a token sees its own document's past, positions
            start from 0 in each, and padding does not count for experts.  One document a row if None.  With a cache
            all real tokens continue the row's one document.

        Raises:
          ValueError: for rows longer than `context` where positions are learned.
        """
        x, aux = self.hidden(tokens, segments, deterministic)
        return self.logits(x), aux

    def hidden(
        self, tokens: Int[Array, 'B T'], segments: Int[Array, 'B T'] | None = None, deterministic: bool = True
    ) -> tuple[Float[Array, 'B T D'], dict[str, Array]]:
        """The input of `logits`, and `aux`."""
        mask, token_mask = self._mask(tokens, segments)
        at = None if mask.query_positions is None else jnp.maximum(mask.query_positions, 0)
        x = self.drop(self.place(self.embedding(tokens), at), deterministic=deterministic)
        x = x.astype(compute_dtype(self.config) or x.dtype)
        if self.cache_length and at is not None:  # a token without a slot would be missing from what others see
            x = jnp.where((at < self.cache_length)[..., None], x, jnp.nan)
        return self.stack(x, mask, token_mask, deterministic)

    def logits(self, x: Float[Array, '*B D']) -> Float[Array, '*B V']:
        """The output product, float32 or wider."""
        if self.config.tied:
            table = self.embedding.embedding.astype(x.dtype)
            logits = jnp.einsum('...d,vd->...v', x, table, preferred_element_type=jnp.float32)
        else:
            logits = self.output(x)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    def _mask(self, tokens: Array, segments: Array | None) -> tuple[Mask, Bool[Array, 'B T'] | None]:
        """The mask of attention, and the mask of real tokens (None: all are)."""
        token_mask = None if segments is None else segments != 0
        if self.cache_length:
            token_mask = jnp.ones(tokens.shape, bool) if token_mask is None else token_mask
            return self.past(token_mask), token_mask
        return (causal_mask() if segments is None else packed_mask(segments)), token_mask
