"""The Transformer of 2017: an encoder that sees all of the source, a decoder that sees it and its own past."""

import math
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnlab.kernels.masks import causal, padding
from attnlab.layers.block import Recipe, Stack
from attnlab.layers.positions import Added, AddedPositions, Past


class TransformerSeq2Seq(nn.Module):
    """Encoder-decoder of Vaswani et al. 2017; with another recipe, of today.

    Token 0 is padding everywhere, behind the real tokens.  A source is [tokens, EOS], a decoder input [BOS, tokens].

    layers: of the encoder, and of the decoder.  context: how many positions there are, where they are learned.
    shared: one embedding for both languages (their section 3.4), whose vocabularies then have one size.  The output's
      matrix is the target's embedding; embeddings are multiplied by sqrt(D).
    scan, remat: as in `Stack`.

    Where the recipe has slots, `decode` goes on from the tokens of earlier calls, which the collection `cache` holds.
    """

    source_vocabulary: int
    target_vocabulary: int
    width: int
    layers: int
    context: int
    recipe: Recipe
    positions: Added = 'sinusoidal'
    shared: bool = False
    scan: bool = False
    remat: Literal['none', 'full', 'dots'] = 'none'

    def setup(self) -> None:
        if self.shared and self.source_vocabulary != self.target_vocabulary:
            sizes = f'{self.source_vocabulary} and {self.target_vocabulary}'
            raise ValueError(f'vocabularies have {sizes} tokens; expected one size for a shared embedding')
        start = nn.initializers.normal(1 / math.sqrt(self.width))
        self.embed_target = nn.Embed(self.target_vocabulary, self.width, embedding_init=start)
        if not self.shared:
            self.embed_source = nn.Embed(self.source_vocabulary, self.width, embedding_init=start)
        self.place_source = AddedPositions(self.positions, self.context)
        self.place_target = AddedPositions(self.positions, self.context)
        self.drop = nn.Dropout(self.recipe.dropout)
        self.past = Past(self.recipe.slots)
        self.encoder = Stack(self.recipe, self.layers, self.scan, self.remat)
        self.decoder = Stack(self.recipe, self.layers, self.scan, self.remat, cross=True)

    def __call__(
        self, source: Int[Array, 'B S'], inputs: Int[Array, 'B T'], deterministic: bool = True
    ) -> tuple[Float[Array, 'B T V'], dict[str, Array]]:
        """Teacher forcing: source [B, S] and decoder inputs [B, T] give logits [B, T, V], and what experts say [2L]."""
        memory, heard = self.encode(source, deterministic)
        x, said = self.decode(source, memory, inputs, deterministic)
        return self.logits(x), {name: jnp.concatenate([heard[name], each]) for name, each in said.items()}

    def encode(
        self, source: Int[Array, 'B S'], deterministic: bool = True
    ) -> tuple[Float[Array, 'B S D'], dict[str, Array]]:
        """The states of source tokens [B, S], and what the encoder's experts say [L]."""
        real = source != 0
        embed = self.embed_target if self.shared else self.embed_source
        x = self._enter(self.place_source(embed(source) * math.sqrt(self.width)), deterministic)
        return self.encoder(x, padding(keys=jnp.sum(real, axis=1)), real, deterministic)

    def decode(
        self,
        source: Int[Array, 'B S'],
        memory: Float[Array, 'B S D'],
        tokens: Int[Array, 'B T'],
        deterministic: bool = True,
    ) -> tuple[Float[Array, 'B T D'], dict[str, Array]]:
        """What `logits` reads, from the source, its states and the decoder's inputs, and what the experts say [L].

        With a cache all tokens are real ones, which go on behind those of earlier calls.
        """
        cached = self.recipe.slots > 0
        rules = self.past(jnp.ones(tokens.shape, bool)) if cached else causal()
        x = self.place_target(self.embed_target(tokens) * math.sqrt(self.width), rules.query_positions)
        x = self._enter(x, deterministic)
        seen = padding(keys=jnp.sum(source != 0, axis=1))
        return self.decoder(x, rules, None if cached else tokens != 0, deterministic, memory, seen)

    def logits(self, x: Float[Array, '*B D']) -> Float[Array, '*B V']:
        """The output product, float32 or wider."""
        table = self.embed_target.embedding.astype(x.dtype)
        return jnp.einsum('...d,vd->...v', x, table, preferred_element_type=jnp.float32)

    def _enter(self, x: Array, deterministic: bool) -> Array:
        x = self.drop(x, deterministic=deterministic)
        return x if self.recipe.dtype is None else x.astype(self.recipe.dtype)
