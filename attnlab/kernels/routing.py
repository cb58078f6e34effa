"""Mixture of experts: which experts a token goes to, and products in which every row has the matrix of its expert."""

import math
from fractions import Fraction
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from attnlab.kernels import mesh_axes

RoutingOrder = Literal['choice', 'token']


class Routing(NamedTuple):
    """Where tokens go; losses and counts are over real tokens only.

    experts: [B, T, A] int32, the most probable first; of equal ones the lowest number first.
    weights: [B, T, A] float32 or wider, of the experts' outputs in the sum.  Zero where not kept; NaN for a real token
      that has a logit of NaN or plus infinity, or none above minus infinity.
    kept: [B, T, A] bool, false for choices beyond the capacity of their expert and for padding.
    load_balance: E sum_e f_e P_e (Fedus et al. 2022, section 2.2), with f_e the part of all choices that fell on expert
      e, kept or not, and P_e the mean probability of e: 1 where both are even, E where one expert takes all.
    z: the mean of logsumexp(logits)^2 (Zoph et al. 2022, section 3.3).
    dropped: [] int32, how many choices of real tokens are not kept.
    """

    experts: Int[Array, 'B T A']
    weights: Float[Array, 'B T A']
    kept: Bool[Array, 'B T A']
    load_balance: Float[Array, '']
    z: Float[Array, '']
    dropped: Int[Array, '']


def expert_capacity(tokens: int, experts: int, experts_per_token: int, factor: float) -> int:
    """ceil(tokens / experts * factor * experts_per_token), at most `tokens`: how many tokens one expert takes.

    Computed as written, in fractions: of 100 tokens, one of two experts takes 55 at factor 1.1, not 56.

    Raises:
      ValueError: for a factor that is not a positive finite number.
    """
    if not 0.0 < factor < math.inf:
        raise ValueError(f'the capacity factor is {factor}; expected a positive finite number')
    share = Fraction(str(float(factor))) * experts_per_token / experts
    return min(tokens, math.ceil(tokens * share))


def route_tokens(
    logits: Float[Array, 'B T E'],
    experts_per_token: int,
    mask: Bool[Array, 'B T'] | None = None,
    *,
    capacity: int | Int[ArrayLike, '*#B'] | list[int] | None = None,
    order: RoutingOrder = 'choice',
    renormalised: bool = True,
) -> Routing:
    """Sends every token to the `experts_per_token` experts of its largest logits.

    Args:
      logits: [B, T, E] of the router, any float; all below is float32 or wider.
      experts_per_token: A, how many experts a token goes to.
      mask: [B, T], true for real tokens; all are if None.  Whatever stands elsewhere, NaN included, never matters: it
        goes nowhere, takes no place and counts for nothing.
      capacity: how many tokens of one batch row an expert takes, a number or one for every row; all if None.  Rows
        never compete with each other.
      order: who comes first where an expert cannot take all.  'choice': first choices in the order of tokens, then
        second choices in the order of tokens, and so on (Lepikhin et al. 2021, algorithm 1).  There a token can take a
        place from the second choice of an earlier one.  'token': all choices of a token before those of later tokens;
        what comes later changes nothing, as a causal model needs.
      renormalised: weights are the softmax over the chosen logits, and add up to 1 before any is dropped: those kept
        do not grow.  Otherwise they are the probabilities among all E.  With A = 1 renormalised weights are always 1,
        and the router learns from its losses alone; hence Fedus et al. 2022 take probabilities.

    Raises:
      ValueError: for shapes, dtypes and numbers that do not fit, naming what came and what was expected.
    """
    if isinstance(capacity, np.integer):
        capacity = int(capacity)
    if not isinstance(capacity, int | None):
        capacity = jnp.asarray(capacity)
    _check(logits, experts_per_token, mask, capacity, order)
    E = logits.shape[-1]
    real = jnp.ones(logits.shape[:2], bool) if mask is None else mask
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    wide = jnp.where(real[..., None], wide, 0.0)
    log_sum = jax.nn.logsumexp(wide, axis=-1)
    experts = _largest(jax.lax.stop_gradient(wide), experts_per_token)
    chosen = jnp.take_along_axis(wide, experts, axis=-1)
    weights = jax.nn.softmax(chosen, axis=-1) if renormalised else jnp.exp(chosen - log_sum[..., None])
    choices = jnp.broadcast_to(real[..., None], experts.shape)
    kept = choices if capacity is None else choices & _first(jnp.where(choices, experts, E), capacity, order)
    # A logit that is not a number may be that of an expert not chosen: it must not pass unseen.
    weights = jnp.where(jnp.isfinite(log_sum)[..., None], jnp.where(kept, weights, 0.0), jnp.nan)

    tokens = jnp.maximum(jnp.sum(real), 1).astype(wide.dtype)
    counts = jnp.zeros(E, wide.dtype).at[experts].add(choices.astype(wide.dtype))
    probabilities = jnp.where(real[..., None], jax.nn.softmax(wide, axis=-1), 0.0)
    load_balance = E * jnp.sum(counts / (experts_per_token * tokens) * jnp.sum(probabilities, axis=(0, 1)) / tokens)
    z = jnp.sum(jnp.where(real, log_sum**2, 0.0)) / tokens
    return Routing(experts, weights, kept, load_balance, z, jnp.sum(choices & ~kept, dtype=jnp.int32))


def _largest(logits: Float[Array, 'B T E'], experts_per_token: int) -> Int[Array, 'B T A']:
    """The experts of the largest logits.  `top_k` takes NaN for the largest of all, and 0.0 for larger than -0.0."""
    ordered = jnp.where(jnp.isnan(logits), -jnp.inf, jnp.where(logits == 0.0, 0.0, logits))
    return jax.lax.top_k(ordered, experts_per_token)[1]


def _first(
    experts: Int[Array, 'B T A'], capacity: int | Int[Array, '*#B'], order: RoutingOrder
) -> Bool[Array, 'B T A']:
    """Whether each choice is among the first `expert_capacity` of its expert in its row."""
    B, T, A = experts.shape
    queue = experts.swapaxes(1, 2) if order == 'choice' else experts
    ranks = _ranks(queue.reshape(B, T * A)).reshape(queue.shape)
    ranks = ranks.swapaxes(1, 2) if order == 'choice' else ranks
    return ranks < jnp.broadcast_to(jnp.asarray(capacity), (B,))[:, None, None]


def _ranks(groups: Int[Array, '*B M']) -> Int[Array, '*B M']:
    """How many entries before each one, on the last axis, are of its group."""
    at = jax.lax.broadcasted_iota(jnp.int32, groups.shape, groups.ndim - 1)
    by_group = jnp.argsort(groups, axis=-1, stable=True)
    ordered = jnp.take_along_axis(groups, by_group, axis=-1)
    new = jnp.concatenate([jnp.ones_like(ordered[..., :1], bool), ordered[..., 1:] != ordered[..., :-1]], axis=-1)
    ranks = at - jax.lax.cummax(jnp.where(new, at, 0), axis=groups.ndim - 1)
    return jnp.put_along_axis(jnp.zeros_like(at), by_group, ranks, axis=-1, inplace=False)


def _check(logits: Array, experts_per_token: int, mask: Array | None, capacity: int | Array | None, order: str) -> None:
    if logits.ndim != 3 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f'logits have shape {logits.shape} and dtype {logits.dtype}; expected [B, T, E] floats')
    B, T, E = logits.shape
    if not 1 <= experts_per_token <= E:
        raise ValueError(f'experts_per_token is {experts_per_token}; expected 1 to {E}, the number of experts')
    if mask is not None and (mask.shape != (B, T) or mask.dtype != bool):
        raise ValueError(f'mask has shape {mask.shape} and dtype {mask.dtype}; expected [B, T] = {(B, T)} booleans')
    if isinstance(capacity, int) and capacity < 0:
        raise ValueError(f'capacity is {capacity}; expected None or at least 0')
    if not isinstance(capacity, int | None) and capacity.shape not in ((), (B,)):
        raise ValueError(f'capacity has shape {capacity.shape}; expected one number or [B] = {(B,)}')
    if order not in ('choice', 'token'):
        raise ValueError(f"order is {order!r}; expected 'choice' or 'token'")


# Products by expert.
#
# Rows are sorted by expert into blocks of equal size, each of one expert, with zero rows where an expert's last block
# is not full; blocks are multiplied one after the other, and no more of them than there are.  So the work is that of
# the selected experts and a part of a block each, on any device, with shapes that do not depend on the routing.
# (`jax.lax.ragged_dot` multiplies every row with all E matrices where XLA has no kernel for it, as on CPUs.)


class ExpertBlocks(NamedTuple):
    """Where M rows stand in n blocks of b.

    slots: [M], the place of each row among the n b, or n b for a row of no expert.
    sources: [n b], the row that stands in each place, or M for an empty one.
    experts: [n], of each block.
    used: [], how many blocks hold rows; they come first.
    """

    slots: Int[Array, ' M']
    sources: Int[Array, ' places']
    experts: Int[Array, ' n']
    used: Int[Array, '']


def expert_block_size(rows: int, experts: int) -> int:
    """A quarter of an expert's even share of the rows, so that little is empty, as a power of two from 8 to 128."""
    return 2 ** min(max(int(math.log2(max(rows // (4 * experts), 1))), 3), 7)


def sort_into_blocks(groups: Int[Array, ' M'], experts: int, size: int) -> ExpertBlocks:
    """Sorts rows by expert, in their order, into blocks of `size`.

    groups: [M], the expert of each row, or `experts` for a row that goes to none.
    """
    M = groups.shape[0]
    n = max((M + min(experts, M) * (size - 1)) // size, 1)
    counts = jnp.zeros(experts, jnp.int32).at[groups].add(1, mode='drop')
    ends = jnp.cumsum((counts + size - 1) // size)
    firsts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends]) * size
    slots = jnp.where(groups < experts, firsts[groups] + _ranks(groups), n * size)
    sources = jnp.full(n * size, M, jnp.int32).at[slots].set(jnp.arange(M, dtype=jnp.int32), mode='drop')
    of_block = jnp.searchsorted(ends, jnp.arange(n), side='right', method='compare_all')
    return ExpertBlocks(slots, sources, jnp.minimum(of_block, experts - 1), ends[-1])


def gather_rows(x: Float[Array, 'M D'], take: Int[Array, ' R'], back: Int[Array, ' M']) -> Float[Array, 'R D']:
    """[R, D], the rows `take` of `x`, zero where `take` is M.

    back: [M], where each row of `x` went, or R: the same move turned round, so that the gradient is one as well.
    """
    return _move(*mesh_axes.match_varying_axes((x, take, back)))


@jax.custom_vjp
def _move(x: Array, take: Array, back: Array) -> Array:
    return _rows(x, take)


def _moved(x: Array, take: Array, back: Array) -> tuple[Array, Array]:
    return _rows(x, take), back


def _moved_back(back: Array, slope: Array) -> tuple[Array, None, None]:
    return _rows(slope, back), None, None


def _rows(x: Array, take: Array) -> Array:
    if x.shape[0] == 0:
        return jnp.zeros((take.shape[0], x.shape[1]), x.dtype)
    return x.at[take].get(mode='fill', fill_value=0)


_move.defvjp(_moved, _moved_back)


def block_matmul(
    x: Float[Array, 'n b D'], kernel: Float[Array, 'E D F'], experts: Int[Array, ' n'], used: Int[Array, '']
) -> Float[Array, 'n b F']:
    """x_i kernel_(experts_i) for the first `used` blocks, zero after them; sums are float32 or wider."""
    return _multiply(*mesh_axes.match_varying_axes((x, kernel, experts, used)))


@jax.custom_vjp
def _multiply(x: Array, kernel: Array, experts: Array, used: Array) -> Array:
    def step(i, y):
        return y.at[i].set(_product(_at(x, i), _at(kernel, experts[i]), x.dtype))

    start = mesh_axes.match_varying_axes(jnp.zeros((*x.shape[:2], kernel.shape[2]), x.dtype), x)
    return jax.lax.fori_loop(0, used, step, start)


def _block_product(x: Array, kernel: Array, experts: Array, used: Array) -> tuple[Array, tuple[Array, ...]]:
    return _multiply(x, kernel, experts, used), (x, kernel, experts, used)


def _block_slopes(saved: tuple[Array, ...], slope: Array) -> tuple[Array, Array, None, None]:
    """JAX's own gradient of the loop would add a whole [E, D, F] at every block."""
    x, kernel, experts, used = saved
    wide = jnp.promote_types(kernel.dtype, jnp.float32)

    def step(i, slopes):
        to_x, to_kernel = slopes
        e, here = experts[i], _at(slope, i)
        to_x = to_x.at[i].set(_product(here, _at(kernel, e).T, x.dtype))
        return to_x, to_kernel.at[e].add(_product(_at(x, i).T, here, wide))

    start = mesh_axes.match_varying_axes((jnp.zeros_like(x), jnp.zeros(kernel.shape, wide)), x)
    to_x, to_kernel = jax.lax.fori_loop(0, used, step, start)
    return to_x, to_kernel.astype(kernel.dtype), None, None


_multiply.defvjp(_block_product, _block_slopes)


def _at(x: Array, i: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _product(a: Array, b: Array, dtype: jnp.dtype) -> Array:
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.matmul(a, b, preferred_element_type=wide).astype(dtype)
