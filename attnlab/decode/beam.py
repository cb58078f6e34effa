"""Beam search in one compiled loop."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from attnlab.decode.sampling import INVALID_TOKEN, DecodeStep, cast_loop_carry, has_valid_logits
from attnlab.errors import UserError


class Hypotheses(NamedTuple):
    """The best hypotheses of every row, best first; fewer than `beams` if no more exist.

    tokens: [B, beams, max_tokens] int32, up to and including the end-of-sequence token, then 0.
    scores: [B, beams], log P(tokens) / n ** length_penalty; -inf if there is no hypothesis.
    lengths: [B, beams] int32, n, including the end-of-sequence token; 0 if there is no hypothesis.

    A row whose logits became invalid (`attnlab.decode.sampling.has_valid_logits`) has no hypotheses: its scores are
    NaN and its first tokens `INVALID_TOKEN`, for which `check_decoded_tokens` raises.
    """

    tokens: Int[Array, 'B beams max_tokens']
    scores: Float[Array, 'B beams']
    lengths: Int[Array, 'B beams']


def beam_search(
    step: DecodeStep,
    state: Any,
    first_tokens: Int[Array, ' B'],
    *,
    beams: int,
    max_tokens: int,
    eos_id: int,
    length_penalty: float = 0.0,
) -> Hypotheses:
    """Return the hypotheses with the highest log P / n ** length_penalty that beam search finds in `max_tokens` steps.

    A hypothesis is a sequence up to and including `eos_id`, or a sequence of `max_tokens` tokens without it.  Both are
    scored alike; n is the number of tokens, including `eos_id`.  A length_penalty of 0 compares the probabilities of
    sequences, 1 the mean log-probabilities of their tokens.

    Each step ranks all continuations of the live hypotheses by log P.  Continuations that end with `eos_id` and are
    among the first `beams` are finished: they move, with their final score, to a pool of the best `beams`.  The first
    `beams` of the other continuations stay live, so a finished hypothesis takes no place in the beam.  A live
    hypothesis cannot reach a score above log P / max_tokens ** length_penalty, because log P only decreases and n is
    at most `max_tokens`.  A row is done when this bound is, for all its live hypotheses, at most the worst score of a
    full pool.  The result of a row is then final and does not depend on the rest of the batch.  One beam without a
    length penalty is greedy decoding.

    Ties go to the hypothesis that finished first, then to the better beam, then to the lowest token.

    Args:
      step: the decoding step.  It is called with B * beams rows: each leaf of the state is repeated `beams` times, and
        after each step the rows of the hypotheses that stay live are gathered.
      state: the state before the first step.
      first_tokens: [B], input of the first step, such as BOS or the last token of a prompt; not part of the result.
      beams: the number of live hypotheses, and of returned ones.
      max_tokens: maximum number of tokens.
      eos_id: the end-of-sequence token.
      length_penalty: exponent of the length that log P is divided by.

    Raises:
      UserError: if beams, max_tokens or length_penalty is out of range.
      ValueError: if `first_tokens` or a leaf of the state does not have the batch as its first axis.
    """
    first_tokens = jnp.asarray(first_tokens, jnp.int32)
    _check_arguments(state, first_tokens, beams, max_tokens, length_penalty)
    B = first_tokens.shape[0]
    repeated_rows = np.repeat(np.arange(B), beams)
    state, previous = jax.tree.map(lambda x: x[repeated_rows], (state, first_tokens))
    logits = jax.eval_shape(step, state, previous)[1]
    score_dtype = jnp.promote_types(logits.dtype, jnp.float32)
    V = logits.shape[-1]
    # The divisor of log P for 1, 2, .. max_tokens tokens.
    penalties = jnp.asarray(np.arange(1.0, max_tokens + 1) ** length_penalty, score_dtype)

    def unfinished(carry):
        t, _, _, live, pool, _ = carry
        return (t < max_tokens) & jnp.any(live.scores[:, 0] / penalties[-1] > pool.scores[:, -1])

    def advance(carry):
        t, state, previous, live, pool, failed = carry
        state, logits, *_ = step(state, previous)
        exists = live.scores > -jnp.inf
        failed = failed | jnp.any(exists & ~has_valid_logits(logits).reshape(B, beams), axis=1)
        log_p = jax.nn.log_softmax(logits.astype(score_dtype), axis=-1).reshape(B, beams, V) + live.scores[:, :, None]
        log_p = jnp.where((exists & ~failed[:, None])[:, :, None], log_p, -jnp.inf)
        # At most one continuation of each hypothesis ends, so the best 2 * beams contain `beams` that do not end.
        scores, candidates = jax.lax.top_k(log_p.reshape(B, beams * V), min(2 * beams, beams * V))
        parent, token = candidates // V, (candidates % V).astype(jnp.int32)
        ended = token == eos_id
        tokens = _take_rows(live.tokens, parent).at[:, :, t].set(token)
        lengths = jnp.full(candidates.shape, t + 1)
        finished = Hypotheses(tokens, jnp.where(ended, scores / penalties[t], -jnp.inf), lengths)
        pool = _merge_best(pool, jax.tree.map(lambda x: x[:, :beams], finished))
        scores, selected = jax.lax.top_k(jnp.where(ended, -jnp.inf, scores), beams)
        live = Hypotheses(_take_rows(tokens, selected), scores, lengths[:, :beams])
        state_rows = (jnp.arange(B)[:, None] * beams + _take_rows(parent, selected)).reshape(-1)
        state = jax.tree.map(lambda x: x[state_rows], state)
        return t + 1, state, _take_rows(token, selected).reshape(-1), live, pool, failed

    empty = Hypotheses(
        jnp.zeros((B, beams, max_tokens), jnp.int32),
        jnp.full((B, beams), -jnp.inf, score_dtype),
        jnp.zeros((B, beams), jnp.int32),
    )
    # Only one hypothesis is live at first: all beams would have the same continuations.
    live = empty._replace(scores=empty.scores.at[:, 0].set(0.0))
    carry = jnp.int32(0), state, previous, live, empty, jnp.zeros((B,), bool)
    carry = cast_loop_carry(carry, step, state, previous)
    *_, live, pool, failed = jax.lax.while_loop(unfinished, advance, carry)
    # After max_tokens steps the live hypotheses are results too; after fewer, none scores above the worst of the pool.
    best = _merge_best(pool, live._replace(scores=live.scores / penalties[-1]))
    invalid = Hypotheses(
        empty.tokens.at[:, :, 0].set(INVALID_TOKEN), jnp.full_like(best.scores, jnp.nan), empty.lengths
    )
    return jax.tree.map(lambda x, y: jnp.where(failed.reshape(-1, *[1] * (y.ndim - 1)), x, y), invalid, best)


def _merge_best(pool: Hypotheses, others: Hypotheses) -> Hypotheses:
    """Return the best hypotheses of both, best first, as many as `pool` has; ties, such as at -inf, go to `pool`."""
    both = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), pool, others)
    scores, selected = jax.lax.top_k(both.scores, pool.scores.shape[1])
    return Hypotheses(_take_rows(both.tokens, selected), scores, _take_rows(both.lengths, selected))


def _take_rows(x: Array, indices: Int[Array, 'B k']) -> Array:
    """Return x[b, indices[b]] for every b."""
    return jax.vmap(lambda row, row_indices: row[row_indices])(x, indices)


def _check_arguments(state: Any, first_tokens: Array, beams: int, max_tokens: int, length_penalty: float) -> None:
    for name, number in (('beams', beams), ('max_tokens', max_tokens)):
        if number < 1:
            raise UserError(f'{name} is {number}; expected at least 1')
    if not 0 <= length_penalty < math.inf:
        raise UserError(f'length_penalty is {length_penalty}; expected a finite number, at least 0')
    if first_tokens.ndim != 1:
        raise ValueError(f'first_tokens has shape {first_tokens.shape}; expected [B], one token a row')
    for path, leaf in jax.tree.leaves_with_path(state):
        if jnp.shape(leaf)[:1] != first_tokens.shape:
            name, shape, rows = f'state{jax.tree_util.keystr(path)}', jnp.shape(leaf), first_tokens.shape[0]
            raise ValueError(f'{name} has shape {shape}; expected the batch axis first, of {rows} rows')
