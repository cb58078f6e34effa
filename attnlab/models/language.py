"""A causal language model: a Transformer that says what comes next."""

from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attnlab.kernels.masks import Visibility, causal
from attnlab.kernels.positions import sinusoidal
from attnlab.layers.block import Recipe, Stack
from attnlab.layers.positions import LearnedPositions

Positions = Literal['learned', 'sinusoidal', 'none']


class LanguageModel(nn.Module):
    """Embedding [V, D], causal blocks, output [D, V] (Radford et al. 2019; with other recipes LLaMA, Mixtral).

    positions: added to the embeddings, 'learned' for the first `context` of them; 'none' where the recipe turns
      (rotary) or biases (alibi) by position, or where causality alone is to tell the order.
    tied: the output's matrix is the embedding's (Press and Wolf 2017).
    scan, remat: as in `Stack`.
    """

    vocabulary: int
    width: int
    layers: int
    context: int
    recipe: Recipe
    positions: Positions = 'learned'
    tied: bool = True
    scan: bool = False
    remat: Literal['none', 'full', 'dots'] = 'none'

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, 'B T'],
        rules: Visibility | None = None,
        positions: Int[Array, '#B T'] | None = None,
        real: Bool[Array, 'B T'] | None = None,
        deterministic: bool = True,
    ) -> tuple[Float[Array, 'B T V'], dict[str, Array]]:
        """Logits of the token after each, float32 or wider, and what the experts of each layer say [L].

        Args:
          tokens: [B, T], each from 0 to V - 1: whoever makes batches checks that; one outside gives NaN.
          rules: what holds beside causality, such as `masks.segments`; its positions too.
          positions: [B, T] or [1, T]; if None those of the rules, else the places in the row.
          real: [B, T], which tokens count for experts; all if None.

        Raises:
          ValueError: for rows longer than `context` where positions are learned, and for names that are none.
        """
        rules = causal() if rules is None else rules & causal()
        at = rules.query_positions if positions is None else positions
        embed = nn.Embed(self.vocabulary, self.width, embedding_init=self._start(), name='embedding')
        x = embed(tokens)
        match self.positions:
            case 'learned':
                table = LearnedPositions(self.context, self.width, name='positions')
                x = x + (table(tokens.shape[1])[None] if at is None else table(at))
            case 'sinusoidal':
                x = x + sinusoidal(jnp.arange(tokens.shape[1])[None] if at is None else at, self.width)
            case 'none':
                pass
            case other:
                raise ValueError(f"positions is {other!r}; expected 'learned', 'sinusoidal' or 'none'")
        x = nn.Dropout(self.recipe.dropout, deterministic=deterministic)(x)
        if self.recipe.dtype is not None:
            x = x.astype(self.recipe.dtype)
        x, said = Stack(self.recipe, self.layers, self.scan, self.remat, name='stack')(
            x, rules, positions, real, deterministic
        )
        if self.tied:
            logits = jnp.einsum('btd,vd->btv', x, embed.embedding.astype(x.dtype), preferred_element_type=jnp.float32)
        else:
            logits = nn.Dense(self.vocabulary, use_bias=False, dtype=self.recipe.dtype, kernel_init=self._start(),
                              name='output')(x)  # fmt: skip
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), said

    def _start(self) -> Any:
        return nn.initializers.normal(0.02 if self.recipe.init is None else self.recipe.init)
