"""A causal language model: blocks that read the past and say what comes next."""

import dataclasses
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attnlab.kernels.masks import Visibility, causal, packed
from attnlab.layers.block import Recipe, Stack
from attnlab.layers.positions import Added, AddedPositions, Past


class LanguageModel(nn.Module):
    """Embedding [V, D], causal blocks, output [D, V] (Radford et al. 2019; with other recipes LLaMA, Mixtral).

    positions: added to the embeddings, 'learned' for the first `context` of them; 'none' where the recipe turns
      (rotary) or biases (alibi, relative) by position, or where causality alone is to tell the order.
    tied: the output's matrix is the embedding's (Press and Wolf 2017).
    scan, remat: as in `Stack`.

    Where the recipe has slots, calls go on from the tokens of earlier ones, which the collection `cache` holds: see
    `attnlab.decode.cache`.
    """

    vocabulary: int
    width: int
    layers: int
    context: int
    recipe: Recipe
    positions: Added = 'learned'
    tied: bool = True
    scan: bool = False
    remat: Literal['none', 'full', 'dots'] = 'none'

    def setup(self) -> None:
        start = nn.initializers.normal(0.02 if self.recipe.init is None else self.recipe.init)
        self.embedding = nn.Embed(self.vocabulary, self.width, embedding_init=start)
        self.place = AddedPositions(self.positions, self.context)
        self.drop = nn.Dropout(self.recipe.dropout)
        self.past = Past(self.recipe.slots)
        self.stack = Stack(self.recipe, self.layers, self.scan, self.remat)
        if not self.tied:
            self.output = nn.Dense(self.vocabulary, use_bias=False, dtype=self.recipe.dtype, kernel_init=start)

    def __call__(
        self, tokens: Int[Array, 'B T'], segments: Int[Array, 'B T'] | None = None, deterministic: bool = True
    ) -> tuple[Float[Array, 'B T V'], dict[str, Array]]:
        """Logits of the token after each, float32 or wider, and what the experts of each layer say [L].

        Args:
          tokens: [B, T], each from 0 to V - 1: whoever makes batches checks that; one outside gives NaN.
          segments: [B, T], the document of each token, 0 in padding: a token sees its own document's past, positions
            start from 0 in each, and padding does not count for experts.  One document a row if None.  With a cache
            all but the padding goes on with the row's one document.

        Raises:
          ValueError: for rows longer than `context` where positions are learned, and for names that are none.
        """
        x, said = self.hidden(tokens, segments, deterministic)
        return self.logits(x), said

    def hidden(
        self, tokens: Int[Array, 'B T'], segments: Int[Array, 'B T'] | None = None, deterministic: bool = True
    ) -> tuple[Float[Array, 'B T D'], dict[str, Array]]:
        """What `logits` reads, and what the experts say."""
        rules, real = self._rules(tokens, segments)
        at = None if rules.query_positions is None else jnp.maximum(rules.query_positions, 0)
        x = self.drop(self.place(self.embedding(tokens), at), deterministic=deterministic)
        if self.recipe.dtype is not None:
            x = x.astype(self.recipe.dtype)
        if self.recipe.slots and at is not None:  # a token without a slot would be missing from what others see
            x = jnp.where((at < self.recipe.slots)[..., None], x, jnp.nan)
        return self.stack(x, rules, real, deterministic)

    def logits(self, x: Float[Array, '*B D']) -> Float[Array, '*B V']:
        """The output product, float32 or wider."""
        if self.tied:
            table = self.embedding.embedding.astype(x.dtype)
            logits = jnp.einsum('...d,vd->...v', x, table, preferred_element_type=jnp.float32)
        else:
            logits = self.output(x)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    def _rules(self, tokens: Array, segments: Array | None) -> tuple[Visibility, Bool[Array, 'B T'] | None]:
        """What each token may see, and which of them count."""
        real = None if segments is None else segments != 0
        if self.recipe.slots:
            real = jnp.ones(tokens.shape, bool) if real is None else real
            return self.past(real), real
        return (causal() if segments is None else packed(segments)), real


def with_cache(model: LanguageModel, slots: int) -> LanguageModel:
    """The same model, with a cache of so many tokens."""
    return model.clone(recipe=dataclasses.replace(model.recipe, slots=slots))
