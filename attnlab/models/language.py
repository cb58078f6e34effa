"""A causal Transformer language model."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attnlab.configs.language import LanguageModelConfig
from attnlab.kernels.masks import Mask, causal_mask, packed_mask
from attnlab.layers.block import TransformerStack, compute_dtype
from attnlab.layers.positions import AddPositionEmbeddings, CachePositions, PositionEncoding, make_position_encoding


class LanguageModel(nn.Module):
    """Embedding [V, D], causal blocks, output matrix [D, V] (Radford et al. 2019; other configs give LLaMA or Mixtral).

    vocabulary: V, the size of the vocabulary.
    cache_length: the number of tokens that the collection `cache` holds; 0: no cache.  With a cache, a call continues
      after the tokens of earlier calls; see `attnlab.decode.cache`.
    """

    vocabulary: int
    config: LanguageModelConfig
    cache_length: int = 0

    def setup(self) -> None:
        """Create the layers."""
        config = self.config
        init = nn.initializers.normal(config.init or 0.02)
        self.embedding = nn.Embed(self.vocabulary, config.width, embedding_init=init)
        self.place = AddPositionEmbeddings(self.encoding)
        self.drop = nn.Dropout(config.dropout)
        self.past = CachePositions(self.cache_length)
        self.stack = TransformerStack(config, self.encoding, cache_length=self.cache_length)
        if not config.tied:
            self.output = nn.Dense(self.vocabulary, use_bias=False, dtype=compute_dtype(config), kernel_init=init)

    @property
    def encoding(self) -> PositionEncoding:
        """The position encoding."""
        return make_position_encoding(self.config)

    def __call__(
        self, tokens: Int[Array, 'B T'], segments: Int[Array, 'B T'] | None = None, deterministic: bool = True
    ) -> tuple[Float[Array, 'B T V'], dict[str, Array]]:
        """Return the logits of the next token at each position [B, T, V], float32 or wider, and `aux`.

        Args:
          tokens: [B, T], ids from 0 to V - 1.  The code that makes batches checks the range; an id outside gives NaN.
          segments: [B, T], the document of each token, 0 for padding.  A token attends to the past of its own document,
            positions start from 0 in each document, and experts ignore padding.  None: each row is one document.  With
            a cache, all real tokens continue the one document of their row.
          deterministic: no dropout; otherwise it draws from the `dropout` stream of rngs.

        Returns:
          The logits, and `aux`: the auxiliary losses and statistics of the experts in each layer, a dict of arrays [L].

        Raises:
          ValueError: if positions are learned and a row has more than `config.context` tokens.
        """
        x, aux = self.hidden(tokens, segments, deterministic)
        return self.logits(x), aux

    def hidden(
        self, tokens: Int[Array, 'B T'], segments: Int[Array, 'B T'] | None = None, deterministic: bool = True
    ) -> tuple[Float[Array, 'B T D'], dict[str, Array]]:
        """Return the input of `logits` [B, T, D], and `aux`; arguments and errors are those of a call."""
        mask, token_mask = self._mask(tokens, segments)
        positions = None if mask.query_positions is None else jnp.maximum(mask.query_positions, 0)
        x = self.drop(self.place(self.embedding(tokens), positions), deterministic=deterministic)
        x = x.astype(compute_dtype(self.config) or x.dtype)
        if self.cache_length and positions is not None:
            # A token beyond the cache is not stored, so later tokens would not attend to it: its logits become NaN.
            x = jnp.where((positions < self.cache_length)[..., None], x, jnp.nan)
        return self.stack(x, mask, token_mask, deterministic)

    def logits(self, x: Float[Array, '*B D']) -> Float[Array, '*B V']:
        """Return the logits [..., V] of hidden states [..., D], float32 or wider."""
        if self.config.tied:
            table = self.embedding.embedding.astype(x.dtype)
            logits = jnp.einsum('...d,vd->...v', x, table, preferred_element_type=jnp.float32)
        else:
            logits = self.output(x)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    def _mask(self, tokens: Array, segments: Array | None) -> tuple[Mask, Bool[Array, 'B T'] | None]:
        """Return the attention mask, and the mask of real tokens (None: all are real)."""
        token_mask = None if segments is None else segments != 0
        if self.cache_length:
            token_mask = jnp.ones(tokens.shape, bool) if token_mask is None else token_mask
            return self.past(token_mask), token_mask
        return (causal_mask() if segments is None else packed_mask(segments)), token_mask
