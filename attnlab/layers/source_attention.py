"""Attention from one decoder state to all source states."""

from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnlab.kernels.additive import additive_attention
from attnlab.kernels.attention import dot_product_attention

ScoreFunction = Literal['additive', 'dot']


class SourceAttention(nn.Module):
    """f_att of a sequence-to-sequence decoder: a state looks at the source states and takes their weighted mean.

    additive: v . tanh(W s + U h), the hidden layer `features` wide (Bahdanau et al. 2015, appendix A.1.2).
    dot: (W s) . (U h) / sqrt(features) (Luong et al. 2015, section 3.1 "general", scaled as in Vaswani et al. 2017).
    The source part U h is `keys`, computed once a sentence.
    """

    score: ScoreFunction
    features: int
    use_bias: bool = True

    def setup(self) -> None:
        self.query = nn.Dense(self.features, use_bias=self.use_bias)
        self.key = nn.Dense(self.features, use_bias=False)
        if self.score == 'additive':
            self.vector = self.param('vector', nn.initializers.lecun_normal(), (self.features, 1), jnp.float32)
        elif self.score != 'dot':
            raise ValueError(f"score is {self.score!r}; expected 'additive' or 'dot'")

    def keys(self, memory: Float[Array, 'B S C']) -> Float[Array, 'B S H']:
        """The part of the score that no decoder state changes."""
        return self.key(memory)

    def __call__(
        self,
        state: Float[Array, 'B D'],
        keys: Float[Array, 'B S H'],
        memory: Float[Array, 'B S C'],
        lengths: Int[Array, ' B'],
    ) -> tuple[Float[Array, 'B C'], Float[Array, 'B S']]:
        """state [B, D], keys [B, S, H], memory [B, S, C], source lengths [B]: context [B, C] and weights [B, S]."""
        query = self.query(state)[:, None, None, :]
        key, value = keys[:, :, None, :], memory[:, :, None, :]
        if self.score == 'additive':
            context, weights = additive_attention(
                query, key, value, self.vector.T, key_value_seq_lengths=lengths, return_weights=True
            )
        else:
            context, weights = dot_product_attention(
                query, key, value, key_value_seq_lengths=lengths, return_weights=True
            )
        return jnp.squeeze(context, (1, 2)), jnp.squeeze(weights, (1, 2))
