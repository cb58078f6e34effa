"""Greedy decoding in one compiled loop."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnlab.decode.sampling import INVALID_TOKEN, cast_loop_carry, has_valid_logits

AttentionStep = Callable[[Any, Int[Array, ' B']], tuple[Any, Float[Array, 'B V'], Float[Array, 'B S']]]
"""A decoding step with attention: (state, previous tokens [B]) -> (next state, logits [B, V], weights [B, S])."""


class GreedyResult(NamedTuple):
    """Greedily decoded tokens and the attention weights of each.

    tokens: [B, max_tokens] int32, each row up to and including its end-of-sequence token, then 0.
    weights: [B, max_tokens, S], row t for token t, 0 after the end-of-sequence token.

    A row whose logits became invalid (`attnlab.decode.sampling.has_valid_logits`) ends with `INVALID_TOKEN`, whose
    weights are 0.
    """

    tokens: Int[Array, 'B T']
    weights: Float[Array, 'B T S']


def greedy_search(
    step: AttentionStep, state: Any, batch_size: int, *, bos_id: int, eos_id: int, max_tokens: int
) -> GreedyResult:
    """Take the most probable token at every step until each row has an `eos_id` or `max_tokens` tokens.

    Ties go to the lowest token.  Rows are independent: a row's tokens do not depend on the rest of the batch.

    A row whose logits are invalid (`attnlab.decode.sampling.has_valid_logits`) ends with `INVALID_TOKEN`;
    `check_decoded_tokens` raises for it.
    """
    first_tokens = jnp.full((batch_size,), bos_id, jnp.int32)
    shapes = jax.eval_shape(step, state, first_tokens)
    tokens = jnp.zeros((batch_size, max_tokens), jnp.int32)
    weights = jnp.zeros((batch_size, max_tokens, shapes[2].shape[-1]), shapes[2].dtype)

    def unfinished(carry):
        t, _, _, done, _, _ = carry
        return (t < max_tokens) & ~jnp.all(done)

    def advance(carry):
        t, state, previous, done, tokens, weights = carry
        state, logits, step_weights = step(state, previous)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        token = jnp.where(done, 0, jnp.where(has_valid_logits(logits), best, INVALID_TOKEN))
        done = done | (token == INVALID_TOKEN)
        tokens = tokens.at[:, t].set(token)
        weights = weights.at[:, t].set(jnp.where(done[:, None], 0.0, step_weights))
        return t + 1, state, jnp.maximum(token, 0), done | (token == eos_id), tokens, weights

    done = jnp.zeros((batch_size,), bool)
    carry = jnp.int32(0), state, first_tokens, done, tokens, weights
    carry = cast_loop_carry(carry, step, state, first_tokens)
    *_, tokens, weights = jax.lax.while_loop(unfinished, advance, carry)
    return GreedyResult(tokens, weights)
