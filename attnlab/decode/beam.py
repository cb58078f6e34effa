"""Beam search as one compiled loop."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from attnlab.decode.sampling import INVALID_TOKEN, DecodeStep, cast_loop_carry, has_valid_logits
from attnlab.errors import UserError


class Hypotheses(NamedTuple):
    """The best hypotheses of every row, best first; fewer than `beams` where no more exist.

    tokens: [B, beams, limit], up to and with the end, 0 behind it.
    scores: [B, beams], log P(tokens) / n ** length_penalty; -inf where there is no hypothesis.
    lengths: [B, beams], n, the end counted; 0 where there is no hypothesis.

    A row that met logits that are not `attnlab.decode.sampling.has_valid_logits` has no hypotheses: its scores are NaN, and its
    first tokens `NO_TOKEN`, for which `check_tokens` raises.
    """

    tokens: Int[Array, 'B beams limit']
    scores: Float[Array, 'B beams']
    lengths: Int[Array, 'B beams']


def beam_search(
    step: DecodeStep,
    state: Any,
    first: Int[Array, ' B'],
    *,
    beams: int,
    limit: int,
    end: int,
    length_penalty: float = 0.0,
) -> Hypotheses:
    """The hypotheses of the highest log P / n ** length_penalty that a beam of `beams` finds in `limit` tokens.

    A hypothesis is a sequence up to and with `end`, or one of `limit` tokens without it, cut; both are scored alike, n
    being the number of tokens, `end` one of them.  length_penalty 0 compares probabilities, 1 those of a mean token.

    Each step ranks all continuations of the live hypotheses by log P.  Those that end, and are among the first `beams`,
    are finished: they move, with the only score that they will ever have, to a pool of the best `beams`.  The first
    `beams` of the others live on, so a finished one takes no other's place.  As log P only falls and n is at most
    `limit`, a live one cannot come to score more than its log P / limit ** length_penalty; a row is done once, for all
    that live, this bound is no more than the worst score of a full pool.  What a row returns is thus final, whatever
    its batch mates do.  One beam without a length penalty is greedy decoding.

    `first` is what the first step is fed.  `step` is called with `beams` rows for every row, [B * beams]: each leaf of
    the state is repeated so, and gathered after each step by the hypotheses that live on.  Ties go to the hypothesis
    that finished first, then to the better beam, then to the lowest token.

    Raises:
      UserError: for beams, limit or length_penalty out of range, naming it.
      ValueError: for a leaf of the state, or `first`, that does not lead with the batch axis.
    """
    first = jnp.asarray(first, jnp.int32)
    _check(state, first, beams, limit, length_penalty)
    B = first.shape[0]
    repeated = np.repeat(np.arange(B), beams)
    state, previous = jax.tree.map(lambda x: x[repeated], (state, first))
    logits = jax.eval_shape(step, state, previous)[1]
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    V = logits.shape[-1]
    penalties = jnp.asarray(np.arange(1.0, limit + 1) ** length_penalty, wide)  # of 1, 2, .. limit tokens

    def unfinished(carry):
        t, _, _, live, pool, _ = carry
        return (t < limit) & jnp.any(live.scores[:, 0] / penalties[-1] > pool.scores[:, -1])

    def advance(carry):
        t, state, previous, live, pool, failed = carry
        state, logits, *_ = step(state, previous)
        exists = live.scores > -jnp.inf
        failed = failed | jnp.any(exists & ~has_valid_logits(logits).reshape(B, beams), axis=1)
        each = jax.nn.log_softmax(logits.astype(wide), axis=-1).reshape(B, beams, V) + live.scores[:, :, None]
        each = jnp.where((exists & ~failed[:, None])[:, :, None], each, -jnp.inf)
        # At most one continuation of each hypothesis ends: twice as many hold `beams` that do not.
        scores, found = jax.lax.top_k(each.reshape(B, beams * V), min(2 * beams, beams * V))
        parent, token = found // V, (found % V).astype(jnp.int32)
        ended = token == end
        tokens = _rows(live.tokens, parent).at[:, :, t].set(token)
        lengths = jnp.full(found.shape, t + 1)
        finished = Hypotheses(tokens, jnp.where(ended, scores / penalties[t], -jnp.inf), lengths)
        pool = _best(pool, jax.tree.map(lambda x: x[:, :beams], finished))
        scores, kept = jax.lax.top_k(jnp.where(ended, -jnp.inf, scores), beams)
        live = Hypotheses(_rows(tokens, kept), scores, lengths[:, :beams])
        source = (jnp.arange(B)[:, None] * beams + _rows(parent, kept)).reshape(-1)
        state = jax.tree.map(lambda x: x[source], state)
        return t + 1, state, _rows(token, kept).reshape(-1), live, pool, failed

    none = Hypotheses(
        jnp.zeros((B, beams, limit), jnp.int32), jnp.full((B, beams), -jnp.inf, wide), jnp.zeros((B, beams), jnp.int32)
    )
    live = none._replace(scores=none.scores.at[:, 0].set(0.0))  # all would say the same: one starts
    carry = jnp.int32(0), state, previous, live, none, jnp.zeros((B,), bool)
    carry = cast_loop_carry(carry, step, state, previous)
    *_, live, pool, failed = jax.lax.while_loop(unfinished, advance, carry)
    # Those that live at the limit are cut; before it, none of them scores more than the pool's worst.
    best = _best(pool, live._replace(scores=live.scores / penalties[-1]))
    nothing = Hypotheses(none.tokens.at[:, :, 0].set(INVALID_TOKEN), jnp.full_like(best.scores, jnp.nan), none.lengths)
    return jax.tree.map(lambda x, y: jnp.where(failed.reshape(-1, *[1] * (y.ndim - 1)), x, y), nothing, best)


def _best(pool: Hypotheses, more: Hypotheses) -> Hypotheses:
    """As many as the pool holds, the best of both, best first; of those that tie, such as at -inf, the pool's own."""
    both = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), pool, more)
    scores, kept = jax.lax.top_k(both.scores, pool.scores.shape[1])
    return Hypotheses(_rows(both.tokens, kept), scores, _rows(both.lengths, kept))


def _rows(x: Array, at: Int[Array, 'B k']) -> Array:
    """x[b, at[b]] for every b."""
    return jax.vmap(lambda x, at: x[at])(x, at)


def _check(state: Any, first: Array, beams: int, limit: int, length_penalty: float) -> None:
    for name, number in (('beams', beams), ('limit', limit)):
        if number < 1:
            raise UserError(f'{name} is {number}; expected at least 1')
    if not 0 <= length_penalty < math.inf:
        raise UserError(f'length_penalty is {length_penalty}; expected a finite number, at least 0')
    if first.ndim != 1:
        raise ValueError(f'first has shape {first.shape}; expected [B], one token a row')
    for path, leaf in jax.tree.leaves_with_path(state):
        if jnp.shape(leaf)[:1] != first.shape:
            name, shape = f'state{jax.tree_util.keystr(path)}', jnp.shape(leaf)
            raise ValueError(f'{name} has shape {shape}; expected the batch axis first, of {first.shape[0]} rows')
