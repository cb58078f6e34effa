"""Greedy decoding as one compiled loop."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnlab.decode.sampling import INVALID_TOKEN, cast_loop_carry, has_valid_logits

AttentionStep = Callable[[Any, Int[Array, ' B']], tuple[Any, Float[Array, 'B V'], Float[Array, 'B S']]]
"""(state, previous tokens [B]) -> (next state, logits [B, V], attention [B, S])."""


class GreedyResult(NamedTuple):
    """tokens: [B, T], each row up to and with its EOS, 0 behind it.  weights: [B, T, S], row t made token t.

    A row that met logits that are not `attnlab.decode.sampling.has_valid_logits` ends with `NO_TOKEN`, whose weights are 0.
    """

    tokens: Int[Array, 'B T']
    weights: Float[Array, 'B T S']


def greedy_search(step: AttentionStep, state: Any, batch: int, *, bos: int, eos: int, limit: int) -> GreedyResult:
    """The most probable token at every step, until each row has said EOS or `limit` tokens.

    A row whose logits are not `attnlab.decode.sampling.has_valid_logits` ends with `NO_TOKEN`; `check_tokens` raises for it.

    Ties go to the lowest token.  Rows do not see each other: a row's tokens do not depend on its neighbours.
    """
    first = jnp.full((batch,), bos, jnp.int32)
    shapes = jax.eval_shape(step, state, first)
    tokens = jnp.zeros((batch, limit), jnp.int32)
    weights = jnp.zeros((batch, limit, shapes[2].shape[-1]), shapes[2].dtype)

    def unfinished(carry):
        t, _, _, done, _, _ = carry
        return (t < limit) & ~jnp.all(done)

    def advance(carry):
        t, state, previous, done, tokens, weights = carry
        state, logits, row = step(state, previous)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        token = jnp.where(done, 0, jnp.where(has_valid_logits(logits), best, INVALID_TOKEN))
        done = done | (token == INVALID_TOKEN)
        tokens = tokens.at[:, t].set(token)
        weights = weights.at[:, t].set(jnp.where(done[:, None], 0.0, row))
        return t + 1, state, jnp.maximum(token, 0), done | (token == eos), tokens, weights

    done = jnp.zeros((batch,), bool)
    carry = cast_loop_carry((jnp.int32(0), state, first, done, tokens, weights), step, state, first)
    *_, tokens, weights = jax.lax.while_loop(unfinished, advance, carry)
    return GreedyResult(tokens, weights)
