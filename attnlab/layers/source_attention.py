"""Attention from a decoder state to the source states, for recurrent models."""

from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnlab.kernels.additive import additive_attention
from attnlab.kernels.attention import dot_product_attention

ScoreFunction = Literal['additive', 'dot']


class SourceAttention(nn.Module):
    """Attention of a sequence-to-sequence decoder: the weighted mean of the source states for a decoder state s.

    score: the function of a decoder state s and a source state h whose softmax gives the weights.
      'additive': v . tanh(W s + U h), with a hidden layer of width `features` (Bahdanau et al. 2015, appendix A.1.2).
      'dot': (W s) . (U h) / sqrt(features) (Luong et al. 2015, section 3.1 "general", with the scale of Vaswani et al.
      2017).
    features: H, the width of W s and U h.
    use_bias: whether W s has a bias.

    U h does not depend on the decoder state, so `project_keys` computes it once for each sentence.
    """

    score: ScoreFunction
    features: int
    use_bias: bool = True

    def setup(self) -> None:
        """Create the projections.  Raises ValueError if the score is unknown."""
        self.query = nn.Dense(self.features, use_bias=self.use_bias)
        self.key = nn.Dense(self.features, use_bias=False)
        if self.score == 'additive':
            self.vector = self.param('vector', nn.initializers.lecun_normal(), (self.features, 1), jnp.float32)
        elif self.score != 'dot':
            raise ValueError(f"score is {self.score!r}; expected 'additive' or 'dot'")

    def project_keys(self, memory: Float[Array, 'B S C']) -> Float[Array, 'B S H']:
        """Return U h [B, S, H] for the source states [B, S, C]."""
        return self.key(memory)

    def __call__(
        self,
        state: Float[Array, 'B D'],
        keys: Float[Array, 'B S H'],
        memory: Float[Array, 'B S C'],
        lengths: Int[Array, ' B'],
    ) -> tuple[Float[Array, 'B C'], Float[Array, 'B S']]:
        """Return the context [B, C], and the weights [B, S].

        Args:
          state: [B, D], the decoder state s.
          keys: [B, S, H], from `project_keys`.
          memory: [B, S, C], the source states h.
          lengths: [B], the number of real tokens in each source sentence.
        """
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
