"""The encoder-decoder Transformer."""

import math

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnlab.configs.align import TranslatorConfig
from attnlab.kernels.masks import causal_mask, padding_mask
from attnlab.layers.block import TransformerStack, compute_dtype
from attnlab.layers.positions import AddPositionEmbeddings, CachePositions, PositionEncoding, make_position_encoding


class TransformerSeq2Seq(nn.Module):
    """The encoder-decoder of Vaswani et al. 2017; other configs give later variants of its blocks.

    Token 0 is padding, which follows the real tokens.  A source is [tokens, EOS], a decoder input [BOS, tokens].
    Encoder and decoder have `config.layers` blocks each.  The output matrix is the target embedding, and embeddings are
    multiplied by sqrt(D).  A shared embedding (section 3.4 of the paper) needs vocabularies of one size.

    source_vocabulary, target_vocabulary: sizes of the vocabularies.
    cache_length: the number of tokens that the collection `cache` holds; 0: no cache.  With a cache, `decode` continues
      after the tokens of earlier calls.
    """

    source_vocabulary: int
    target_vocabulary: int
    config: TranslatorConfig
    cache_length: int = 0

    def setup(self) -> None:
        """Create the layers.  Raises ValueError if an embedding is shared and the vocabularies differ in size."""
        config = self.config
        if config.shared_embedding and self.source_vocabulary != self.target_vocabulary:
            sizes = f'{self.source_vocabulary} and {self.target_vocabulary}'
            raise ValueError(f'vocabularies have {sizes} tokens; expected one size for a shared embedding')
        init = nn.initializers.normal(1 / math.sqrt(config.width))
        self.embed_target = nn.Embed(self.target_vocabulary, config.width, embedding_init=init)
        if not config.shared_embedding:
            self.embed_source = nn.Embed(self.source_vocabulary, config.width, embedding_init=init)
        self.place_source = AddPositionEmbeddings(self.encoding)
        self.place_target = AddPositionEmbeddings(self.encoding)
        self.drop = nn.Dropout(config.dropout)
        self.past = CachePositions(self.cache_length)
        self.encoder = TransformerStack(config, self.encoding)
        self.decoder = TransformerStack(config, self.encoding, cross=True, cache_length=self.cache_length)

    @property
    def encoding(self) -> PositionEncoding:
        """The position encoding of the source and of the target."""
        return make_position_encoding(self.config)

    def __call__(
        self, source: Int[Array, 'B S'], inputs: Int[Array, 'B T'], deterministic: bool = True
    ) -> tuple[Float[Array, 'B T V'], dict[str, Array]]:
        """Return the logits [B, T, V] for source [B, S] and decoder inputs [B, T] (teacher forcing), and `aux` [2L].

        `aux` holds the auxiliary losses and statistics of the experts: of the encoder's layers, then of the decoder's.
        Unless `deterministic`, dropout draws from the `dropout` stream of rngs.
        """
        memory, encoder_aux = self.encode(source, deterministic)
        x, aux = self.decode(source, memory, inputs, deterministic)
        return self.logits(x), {name: jnp.concatenate([encoder_aux[name], aux[name]]) for name in aux}

    def encode(
        self, source: Int[Array, 'B S'], deterministic: bool = True
    ) -> tuple[Float[Array, 'B S D'], dict[str, Array]]:
        """Return the encoder states [B, S, D] of source tokens [B, S], and `aux` of the encoder [L]."""
        token_mask = source != 0
        embed = self.embed_target if self.config.shared_embedding else self.embed_source
        x = self._drop_and_cast(self.place_source(embed(source) * math.sqrt(self.config.width)), deterministic)
        return self.encoder(x, padding_mask(keys=jnp.sum(token_mask, axis=1)), token_mask, deterministic)

    def decode(
        self,
        source: Int[Array, 'B S'],
        memory: Float[Array, 'B S D'],
        tokens: Int[Array, 'B T'],
        deterministic: bool = True,
    ) -> tuple[Float[Array, 'B T D'], dict[str, Array]]:
        """Return the input of `logits` [B, T, D], and `aux` of the decoder [L].

        Args:
          source: [B, S], the source tokens; only their padding is used.
          memory: [B, S, D], the encoder states of the source.
          tokens: [B, T], the decoder inputs.  With a cache, all are real and continue after those of earlier calls.
          deterministic: no dropout.
        """
        cached = self.cache_length > 0
        mask = self.past(jnp.ones(tokens.shape, bool)) if cached else causal_mask()
        x = self.place_target(self.embed_target(tokens) * math.sqrt(self.config.width), mask.query_positions)
        x = self._drop_and_cast(x, deterministic)
        memory_mask = padding_mask(keys=jnp.sum(source != 0, axis=1))
        return self.decoder(x, mask, None if cached else tokens != 0, deterministic, memory, memory_mask)

    def logits(self, x: Float[Array, '*B D']) -> Float[Array, '*B V']:
        """Return the logits [..., V] of decoder states [..., D], float32 or wider."""
        table = self.embed_target.embedding.astype(x.dtype)
        return jnp.einsum('...d,vd->...v', x, table, preferred_element_type=jnp.float32)

    def _drop_and_cast(self, x: Array, deterministic: bool) -> Array:
        """Apply dropout to embeddings, and cast them to the dtype of the computation."""
        x = self.drop(x, deterministic=deterministic)
        return x.astype(compute_dtype(self.config) or x.dtype)
