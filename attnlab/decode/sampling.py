"""Sampling as one compiled loop: temperature, top-k, top-p."""

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
"""(state, previous tokens [B]) -> (next state, logits [B, V]); what more it gives, such as attention, is not read.

The state is a tree of arrays that lead with the batch axis: row b of every leaf belongs to row b of the tokens.
"""


INVALID_TOKEN = -1
"""In place of a token whose logits are not usable: the row ends there.  See `has_valid_logits` and `check_decoded_tokens`."""


class SampleResult(NamedTuple):
    """tokens: [B, limit], each row up to and with its end, 0 behind it.  lengths: [B], how many, the end counted.

    A row that met logits that are not `has_valid_logits` ends with `INVALID_TOKEN`, which `lengths` does not count.
    """

    tokens: Int[Array, 'B limit']
    lengths: Int[Array, ' B']


def sample_tokens(
    step: DecodeStep,
    state: Any,
    first: Int[Array, ' B'],
    *,
    rng: Key[Array, '...'] | UInt32[Array, '...'],
    limit: int,
    stop: int | Int[Array, ''] | None = None,
    end: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> SampleResult:
    """Tokens drawn from softmax(logits / temperature), until each row has said `end` or `limit` tokens.

    `stop` tokens are enough if given, a number that may differ from call to call of one compiled program.

    `first` is what the first step is fed, such as BOS or the last token of a prompt; it is not among the tokens.
    Filters apply in the order temperature, `keep_top_k`, `keep_top_p`: p is of the probability that the first two
    leave.  Temperature 0 takes the most probable token, the lowest of those that tie.

    A row whose logits are not `has_valid_logits` ends with `INVALID_TOKEN`, and its batch mates go on.  A full cache, whose logits are
    NaN, ends a row so.  `check_decoded_tokens` raises for such a row.

    Rows do not see each other.  Token t of row b is drawn with fold_in(fold_in(rng, b), t); `rng` may also be the keys
    of the rows [B], so that a row alone, with its own key, says what it says in any batch.

    Raises:
      UserError: for a limit, temperature, top_k or top_p out of range, naming it.
      ValueError: for `first` or `rng` of another shape.
    """
    if limit < 1:
        raise UserError(f'limit is {limit}; expected at least 1 token')
    if not 0 <= temperature < math.inf:
        raise UserError(f'temperature is {temperature}; expected a finite number, at least 0')
    if top_k is not None:
        _check_top_k(top_k)
    if top_p is not None:
        _check_top_p(top_p)
    first = jnp.asarray(first, jnp.int32)
    keys = _row_keys(rng, first)
    enough = limit if stop is None else jnp.minimum(limit, stop)

    def choose(t, logits):
        if temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = _wide(logits)
        # The largest becomes 0 first, and no temperature divides it into an infinity.
        logits = logits - jnp.max(logits, axis=-1, keepdims=True)
        logits = logits / max(temperature, float(jnp.finfo(jnp.float32).tiny))
        logits = logits if top_k is None else keep_top_k(logits, top_k)
        logits = logits if top_p is None else keep_top_p(logits, top_p)
        now = jax.vmap(jax.random.fold_in, (0, None))(keys, t)
        return jax.vmap(jax.random.categorical)(now, logits).astype(jnp.int32)

    def unfinished(carry):
        t, _, _, done, _, _ = carry
        return (t < enough) & ~jnp.all(done)

    def advance(carry):
        t, state, previous, done, tokens, lengths = carry
        state, logits, *_ = step(state, previous)
        token = jnp.where(done, 0, jnp.where(has_valid_logits(logits), choose(t, logits), INVALID_TOKEN))
        failed = token == INVALID_TOKEN
        tokens, lengths = tokens.at[:, t].set(token), lengths + ~(done | failed)
        done = done | failed if end is None else done | failed | (token == end)
        return t + 1, state, jnp.maximum(token, 0), done, tokens, lengths

    B = first.shape[0]
    tokens, lengths = jnp.zeros((B, limit), jnp.int32), jnp.zeros((B,), jnp.int32)
    carry = jnp.int32(0), state, first, jnp.zeros((B,), bool), tokens, lengths
    *_, tokens, lengths = jax.lax.while_loop(unfinished, advance, cast_loop_carry(carry, step, state, first, keys, end))
    return SampleResult(tokens, lengths)


def has_valid_logits(logits: Float[Array, '*B V']) -> Bool[Array, '*B']:
    """Whether logits are those of a distribution: no NaN, no plus infinity, and not minus infinity everywhere."""
    # Not from the maximum alone: on a CPU XLA's maximum of a large array loses NaN.
    return ~jnp.any(jnp.isnan(logits), axis=-1) & jnp.isfinite(jnp.max(logits, axis=-1))


def check_decoded_tokens(tokens: Int[ArrayLike, 'B *more']) -> None:
    """Raise RunError where a row of decoded tokens ended with `INVALID_TOKEN`, naming the row and the token."""
    failed = np.argwhere(np.asarray(tokens) == INVALID_TOKEN)
    if len(failed):
        row, token = failed[0][0], failed[0][-1]
        came = f'row {row}: the logits of token {token} are NaN or infinite'
        raise RunError(f'{came}; expected numbers: the parameters are not, or the cache has no room for more tokens')


def cast_loop_carry(carry: Any, step: Callable[..., Any], state: Any, first: Array, *used: Any) -> Any:
    """The carry of a loop over `step`, with the types that it has after a turn also inside of `jax.shard_map`.

    There each array varies over mesh axes: those of state, first and what the loop has `used` besides, and those of
    what `step` closes over, such as parameters, which show in its results alone.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return carry
    return mesh_axes.match_varying_axes(carry, used, jax.eval_shape(step, state, first))


def keep_top_k(logits: Float[Array, '*B V'], k: int) -> Float[Array, '*B V']:
    """The k largest logits, the others -inf: exactly k of them, where they tie the lowest; all if k is above V."""
    k = _check_top_k(k)
    zeros_tie = jnp.where(logits == 0, 0, logits)  # lax.top_k puts 0.0 above -0.0
    _, kept = jax.lax.top_k(zeros_tie, min(k, logits.shape[-1]))
    return _masked(logits, kept, jnp.ones(kept.shape, bool))


def keep_top_p(logits: Float[Array, '*B V'], p: float) -> Float[Array, '*B V']:
    """The logits of the smallest set of tokens whose probability reaches p, the others -inf.

    The most probable come first, the lowest of those that tie; at least one stays, and all of them for p = 1.
    Source: the nucleus of Holtzman et al. 2020, section 3.1.
    """
    _check_top_p(p)
    if p == 1:  # rounding must not cost the last ones
        return logits
    order = jnp.argsort(-logits, axis=-1, stable=True)
    probabilities = jax.nn.softmax(_wide(jnp.take_along_axis(logits, order, axis=-1)), axis=-1)
    reached = jnp.cumsum(probabilities, axis=-1) >= p
    return _masked(logits, order, jnp.concatenate([jnp.ones_like(reached[..., :1]), ~reached[..., :-1]], axis=-1))


def _masked(logits: Float[Array, '*B V'], at: Int[Array, '*B k'], keep: Bool[Array, '*B k']) -> Float[Array, '*B V']:
    """-inf wherever `keep` does not say otherwise of position `at`."""
    kept = jnp.put_along_axis(jnp.zeros(logits.shape, bool), at, keep, axis=-1, inplace=False)
    return jnp.where(kept, logits, -jnp.inf)


def _wide(logits: Float[Array, '*B V']) -> Float[Array, '*B V']:
    """In float32 or wider."""
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _row_keys(rng: Key[Array, '...'] | UInt32[Array, '...'], first: Int[Array, ' B']) -> Key[Array, ' B']:
    """A typed key for each row."""
    if first.ndim != 1:
        raise ValueError(f'first has shape {first.shape}; expected [B], one token a row')
    rng = rng if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(rng)
    if rng.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(first.shape[0]))
    if rng.shape != first.shape:
        raise ValueError(f'rng holds keys of shape {rng.shape}; expected one key or [B] = {first.shape}')
    return rng


def _check_top_k(k: int) -> int:
    """Any integer, NumPy's too, as one of Python."""
    if not hasattr(k, '__index__') or k < 1:
        raise UserError(f'top_k is {k}; expected a whole number, at least 1')
    return operator.index(k)


def _check_top_p(p: float) -> None:
    if not 0 < p <= 1:
        raise UserError(f'top_p is {p}; expected 0 < top_p <= 1')
