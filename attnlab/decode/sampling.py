"""Sampling of tokens in one compiled loop, with temperature, top-k and top-p."""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key, UInt32

from attnlab.errors import RunError, UserError
from attnlab.kernels import mesh_axes

DecodeStep = Callable[[Any, Int[Array, ' B']], tuple[Any, Float[Array, 'B V'], *tuple[Any, ...]]]
"""A decoding step: (state, previous tokens [B]) -> (next state, logits [B, V]).  Further results are ignored.

The state is a tree of arrays whose first axis is the batch: row b of every leaf belongs to row b of the tokens.
"""


INVALID_TOKEN = -1
"""Stands for a token whose logits are invalid, and ends its row.  See `has_valid_logits`, `check_decoded_tokens`."""


class SampleResult(NamedTuple):
    """Sampled tokens.

    tokens: [B, max_tokens] int32, each row up to and including its end-of-sequence token, then 0.
    lengths: [B] int32, the number of tokens in each row, including the end-of-sequence token.

    A row whose logits became invalid (`has_valid_logits`) ends with `INVALID_TOKEN`, which `lengths` does not count.
    """

    tokens: Int[Array, 'B max_tokens']
    lengths: Int[Array, ' B']


def sample_tokens(
    step: DecodeStep,
    state: Any,
    first_tokens: Int[Array, ' B'],
    *,
    rng: Key[Array, '...'] | UInt32[Array, '...'],
    max_tokens: int,
    dynamic_max_tokens: int | Int[Array, ''] | None = None,
    eos_id: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> SampleResult:
    """Sample tokens from softmax(logits / temperature) until each row has an `eos_id` or `max_tokens` tokens.

    The filters are applied in the order temperature, `keep_top_k`, `keep_top_p`: p is a part of the probability that
    remains after the first two.  Temperature 0 takes the most probable token, and the lowest of those that tie.

    A row whose logits are invalid (`has_valid_logits`) ends with `INVALID_TOKEN`; the other rows continue.  A full
    cache gives NaN logits, so it also ends a row this way.  `check_decoded_tokens` raises for such a row.

    Rows are independent.  Token t of row b is drawn with the key fold_in(fold_in(rng, b), t).

    Args:
      step: the decoding step.
      state: the state before the first step.
      first_tokens: [B], input of the first step, such as BOS or the last token of a prompt; not part of the result.
      rng: one PRNG key, or a key for each row [B].  With keys for rows, a row has the same tokens in every batch.
      max_tokens: maximum number of tokens, and the width of the result.
      dynamic_max_tokens: a lower maximum, which may differ between calls of one compiled program; None: `max_tokens`.
      eos_id: the end-of-sequence token; None: every row has the maximum number of tokens.
      temperature: divisor of the logits.
      top_k, top_p: arguments of `keep_top_k` and `keep_top_p`; None: no filter.

    Raises:
      UserError: if max_tokens, temperature, top_k or top_p is out of range.
      ValueError: if `first_tokens` or `rng` has a wrong shape.
    """
    if max_tokens < 1:
        raise UserError(f'max_tokens is {max_tokens}; expected at least 1 token')
    if not 0 <= temperature < math.inf:
        raise UserError(f'temperature is {temperature}; expected a finite number, at least 0')
    if top_k is not None:
        _check_top_k(top_k)
    if top_p is not None:
        _check_top_p(top_p)
    first_tokens = jnp.asarray(first_tokens, jnp.int32)
    row_keys = _row_keys(rng, first_tokens)
    steps = max_tokens if dynamic_max_tokens is None else jnp.minimum(max_tokens, dynamic_max_tokens)

    def choose(t, logits):
        if temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = _widen(logits)
        # The maximum becomes 0 before the division, so that no temperature makes the quotient infinite.
        logits = logits - jnp.max(logits, axis=-1, keepdims=True)
        logits = logits / max(temperature, float(jnp.finfo(jnp.float32).tiny))
        logits = logits if top_k is None else keep_top_k(logits, top_k)
        logits = logits if top_p is None else keep_top_p(logits, top_p)
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, t)
        return jax.vmap(jax.random.categorical)(step_keys, logits).astype(jnp.int32)

    def unfinished(carry):
        t, _, _, done, _, _ = carry
        return (t < steps) & ~jnp.all(done)

    def advance(carry):
        t, state, previous, done, tokens, lengths = carry
        state, logits, *_ = step(state, previous)
        token = jnp.where(done, 0, jnp.where(has_valid_logits(logits), choose(t, logits), INVALID_TOKEN))
        failed = token == INVALID_TOKEN
        tokens, lengths = tokens.at[:, t].set(token), lengths + ~(done | failed)
        done = done | failed if eos_id is None else done | failed | (token == eos_id)
        return t + 1, state, jnp.maximum(token, 0), done, tokens, lengths

    B = first_tokens.shape[0]
    tokens, lengths = jnp.zeros((B, max_tokens), jnp.int32), jnp.zeros((B,), jnp.int32)
    carry = jnp.int32(0), state, first_tokens, jnp.zeros((B,), bool), tokens, lengths
    carry = cast_loop_carry(carry, step, state, first_tokens, row_keys, eos_id)
    *_, tokens, lengths = jax.lax.while_loop(unfinished, advance, carry)
    return SampleResult(tokens, lengths)


def has_valid_logits(logits: Float[Array, '*B V']) -> Bool[Array, '*B']:
    """Whether each row of logits defines a distribution: no NaN, no plus infinity, not minus infinity everywhere."""
    # The maximum alone does not show NaN: on a CPU, XLA's maximum of a large array loses it.
    return ~jnp.any(jnp.isnan(logits), axis=-1) & jnp.isfinite(jnp.max(logits, axis=-1))


def check_decoded_tokens(tokens: Int[ArrayLike, 'B *more']) -> None:
    """Raise RunError if a row of decoded tokens ended with `INVALID_TOKEN`, with the row and the token's index."""
    failed = np.argwhere(np.asarray(tokens) == INVALID_TOKEN)
    if len(failed):
        row, token = failed[0][0], failed[0][-1]
        raise RunError(
            f'row {row}: the logits of token {token} are NaN or infinite; expected finite numbers: '
            'the parameters are not finite, or the cache has no room for more tokens'
        )


def cast_loop_carry(carry: Any, step: Callable[..., Any], state: Any, first_tokens: Array, *read: Any) -> Any:
    """Return the carry of a decoding loop, cast to the type that it has after a step; needed in `jax.shard_map`.

    In `jax.shard_map` an array varies over mesh axes.  After a step the carry varies over the axes of the state, the
    first tokens, the arrays that the loop body reads (`read`), and the arrays that `step` closes over, such as
    parameters.  The last are visible only in the types of the results of `step`.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return carry
    return mesh_axes.match_varying_axes(carry, read, jax.eval_shape(step, state, first_tokens))


def keep_top_k(logits: Float[Array, '*B V'], k: int) -> Float[Array, '*B V']:
    """Keep exactly the k largest logits and set the others to -inf; of equal logits the lowest tokens come first.

    All logits are kept if k is larger than V.
    """
    k = _check_top_k(k)
    unsigned_zeros = jnp.where(logits == 0, 0, logits)  # lax.top_k ranks 0.0 above -0.0, which must tie
    _, largest = jax.lax.top_k(unsigned_zeros, min(k, logits.shape[-1]))
    return _mask_logits(logits, largest, jnp.ones(largest.shape, bool))


def keep_top_p(logits: Float[Array, '*B V'], p: float) -> Float[Array, '*B V']:
    """Keep the logits of the smallest set of tokens whose probability reaches p, and set the others to -inf.

    The most probable tokens come first, and of equal ones the lowest.  At least one token is kept, and all for p = 1.
    Source: the nucleus of Holtzman et al. 2020, section 3.1.
    """
    _check_top_p(p)
    if p == 1:  # the sum of rounded probabilities may reach 1 before the last tokens
        return logits
    order = jnp.argsort(-logits, axis=-1, stable=True)
    probabilities = jax.nn.softmax(_widen(jnp.take_along_axis(logits, order, axis=-1)), axis=-1)
    reached = jnp.cumsum(probabilities, axis=-1) >= p
    keep = jnp.concatenate([jnp.ones_like(reached[..., :1]), ~reached[..., :-1]], axis=-1)
    return _mask_logits(logits, order, keep)


def _mask_logits(
    logits: Float[Array, '*B V'], tokens: Int[Array, '*B k'], keep: Bool[Array, '*B k']
) -> Float[Array, '*B V']:
    """Set all logits to -inf, except those of `tokens` where `keep` is True."""
    keep = jnp.put_along_axis(jnp.zeros(logits.shape, bool), tokens, keep, axis=-1, inplace=False)
    return jnp.where(keep, logits, -jnp.inf)


def _widen(logits: Float[Array, '*B V']) -> Float[Array, '*B V']:
    """Cast logits to float32 or wider."""
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _row_keys(rng: Key[Array, '...'] | UInt32[Array, '...'], first_tokens: Int[Array, ' B']) -> Key[Array, ' B']:
    """Return a typed PRNG key for each row."""
    if first_tokens.ndim != 1:
        raise ValueError(f'first_tokens has shape {first_tokens.shape}; expected [B], one token a row')
    rng = rng if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(rng)
    if rng.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(first_tokens.shape[0]))
    if rng.shape != first_tokens.shape:
        raise ValueError(f'rng holds keys of shape {rng.shape}; expected one key or [B] = {first_tokens.shape}')
    return rng


def _check_top_k(k: int) -> int:
    """Return k, which may be a NumPy integer, as a Python int.  Raises UserError unless k is an integer above 0."""
    if not hasattr(k, '__index__') or k < 1:
        raise UserError(f'top_k is {k}; expected a whole number, at least 1')
    return operator.index(k)


def _check_top_p(p: float) -> None:
    if not 0 < p <= 1:
        raise UserError(f'top_p is {p}; expected 0 < top_p <= 1')
