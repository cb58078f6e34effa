"""Routing of a mixture of experts, and matrix products in which every row has the matrix of its expert."""

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
    """The experts of each token; losses and counts are over real (not padding) tokens only.

    experts: [B, T, A] int32, the most probable first; among equal probabilities, the lowest number first.
    weights: [B, T, A] float32 or wider, the factors of the experts' outputs in the sum.  Zero for choices that are not
      kept; NaN for a real token that has a logit of NaN or plus infinity, or none above minus infinity.
    kept: [B, T, A] bool, False for choices beyond the capacity of their expert and for padding.
    load_balance: E sum_e f_e P_e (Fedus et al. 2022, section 2.2), with f_e the fraction of all choices that are expert
      e, kept or not, and P_e the mean probability of e: 1 if both are uniform, E if one expert gets all tokens.
    z: the mean of logsumexp(logits)^2 (Zoph et al. 2022, section 3.3).
    dropped: [] int32, the number of choices of real tokens that are not kept.
    """

    experts: Int[Array, 'B T A']
    weights: Float[Array, 'B T A']
    kept: Bool[Array, 'B T A']
    load_balance: Float[Array, '']
    z: Float[Array, '']
    dropped: Int[Array, '']


def expert_capacity(tokens: int, experts: int, experts_per_token: int, factor: float) -> int:
    """Return how many tokens one expert takes: ceil(tokens / experts * factor * experts_per_token), at most `tokens`.

    Computed with fractions, not floats: of 100 tokens, one of two experts takes 55 at factor 1.1, not 56.

    Raises:
      ValueError: if the factor is not a positive finite number.
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
    """Route every token to the experts with its largest logits.

    Args:
      logits: [B, T, E] of the router, any float; all computations are in float32 or wider.
      experts_per_token: A, the number of experts of a token.
      mask: [B, T], True for real tokens; all are real if None.  Padding never changes the result, even if NaN: it is
        routed nowhere, takes no capacity and is not counted.
      capacity: how many tokens of one batch row an expert takes, one number or one for each row; unlimited if None.
        Rows never compete with each other.
      order: the priority of choices if an expert cannot take all.  'choice': first choices in the order of tokens, then
        second choices in the order of tokens, and so on (Lepikhin et al. 2021, algorithm 1); a later token's first
        choice can displace an earlier token's second choice.  'token': all choices of a token before those of later
        tokens; a later token never changes an earlier one, as a causal model needs.
      renormalised: weights are the softmax over the chosen logits, and add up to 1 before any choice is dropped; the
        weights of kept choices do not grow.  Otherwise they are the probabilities among all E.  With A = 1 renormalised
        weights are always 1, and the router learns only from its auxiliary losses; therefore Fedus et al. 2022 take
        probabilities.

    Raises:
      ValueError: if shapes, dtypes or numbers do not fit; the message has the value and what is expected.
    """
    if isinstance(capacity, np.integer):
        capacity = int(capacity)
    if not isinstance(capacity, int | None):
        capacity = jnp.asarray(capacity)
    _check_arguments(logits, experts_per_token, mask, capacity, order)
    E = logits.shape[-1]
    is_real = jnp.ones(logits.shape[:2], bool) if mask is None else mask
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    wide = jnp.where(is_real[..., None], wide, 0.0)
    lse = jax.nn.logsumexp(wide, axis=-1)
    experts = _top_experts(jax.lax.stop_gradient(wide), experts_per_token)
    chosen = jnp.take_along_axis(wide, experts, axis=-1)
    weights = jax.nn.softmax(chosen, axis=-1) if renormalised else jnp.exp(chosen - lse[..., None])
    is_choice = jnp.broadcast_to(is_real[..., None], experts.shape)
    kept = is_choice
    if capacity is not None:
        kept = is_choice & _within_capacity(jnp.where(is_choice, experts, E), capacity, order)
    # A logit that is not a number may be that of an expert that is not chosen; the weights must be NaN even then.
    weights = jnp.where(jnp.isfinite(lse)[..., None], jnp.where(kept, weights, 0.0), jnp.nan)

    tokens = jnp.maximum(jnp.sum(is_real), 1).astype(wide.dtype)
    counts = jnp.zeros(E, wide.dtype).at[experts].add(is_choice.astype(wide.dtype))
    probabilities = jnp.where(is_real[..., None], jax.nn.softmax(wide, axis=-1), 0.0)
    load_balance = E * jnp.sum(counts / (experts_per_token * tokens) * jnp.sum(probabilities, axis=(0, 1)) / tokens)
    z = jnp.sum(jnp.where(is_real, lse**2, 0.0)) / tokens
    return Routing(experts, weights, kept, load_balance, z, jnp.sum(is_choice & ~kept, dtype=jnp.int32))


def _top_experts(logits: Float[Array, 'B T E'], experts_per_token: int) -> Int[Array, 'B T A']:
    """Return the experts with the largest logits; NaN counts as the smallest, and -0.0 equals 0.0.

    `top_k` alone treats NaN as the largest, and 0.0 as larger than -0.0.
    """
    ordered = jnp.where(jnp.isnan(logits), -jnp.inf, jnp.where(logits == 0.0, 0.0, logits))
    return jax.lax.top_k(ordered, experts_per_token)[1]


def _within_capacity(
    experts: Int[Array, 'B T A'], capacity: int | Int[Array, '*#B'], order: RoutingOrder
) -> Bool[Array, 'B T A']:
    """Return whether each choice is among the first `capacity` of its expert in its batch row."""
    B, T, A = experts.shape
    queue = experts.swapaxes(1, 2) if order == 'choice' else experts
    ranks = _ranks_in_group(queue.reshape(B, T * A)).reshape(queue.shape)
    ranks = ranks.swapaxes(1, 2) if order == 'choice' else ranks
    return ranks < jnp.broadcast_to(jnp.asarray(capacity), (B,))[:, None, None]


def _ranks_in_group(groups: Int[Array, '*B M']) -> Int[Array, '*B M']:
    """Return how many earlier entries on the last axis belong to the same group as each entry."""
    indices = jax.lax.broadcasted_iota(jnp.int32, groups.shape, groups.ndim - 1)
    order = jnp.argsort(groups, axis=-1, stable=True)
    ordered = jnp.take_along_axis(groups, order, axis=-1)
    is_first = jnp.concatenate([jnp.ones_like(ordered[..., :1], bool), ordered[..., 1:] != ordered[..., :-1]], axis=-1)
    ranks = indices - jax.lax.cummax(jnp.where(is_first, indices, 0), axis=groups.ndim - 1)
    return jnp.put_along_axis(jnp.zeros_like(indices), order, ranks, axis=-1, inplace=False)


def _check_arguments(
    logits: Array, experts_per_token: int, mask: Array | None, capacity: int | Array | None, order: str
) -> None:
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
# Rows are sorted by expert into blocks of equal size, each of one expert; the last block of an expert is padded with
# zero rows.  Only the blocks that hold rows are multiplied, one after the other.  So the work is that of the chosen
# experts and a part of a block for each, on any device, with shapes that do not depend on the routing.
# (`jax.lax.ragged_dot` multiplies every row with all E matrices where XLA has no kernel for it, as on CPUs.)


class ExpertBlocks(NamedTuple):
    """The positions of M rows in n blocks of size b.

    slots: [M], the position of each row among the n b, or n b for a row of no expert.
    sources: [n b], the row at each position, or M for an empty position.
    experts: [n], the expert of each block.
    used: [], the number of blocks that hold rows; they come first.
    """

    slots: Int[Array, ' M']
    sources: Int[Array, ' slots']
    experts: Int[Array, ' n']
    used: Int[Array, '']


def expert_block_size(rows: int, experts: int) -> int:
    """Return a block size, a power of two from 8 to 128.

    It is about a quarter of each expert's share of the rows if they are even, so that few positions are empty.
    """
    return 2 ** min(max(int(math.log2(max(rows // (4 * experts), 1))), 3), 7)


def sort_into_blocks(groups: Int[Array, ' M'], experts: int, size: int) -> ExpertBlocks:
    """Sort rows by expert, stably, into blocks of `size`.

    groups: [M], the expert of each row, or `experts` for a row of no expert.
    """
    M = groups.shape[0]
    n = max((M + min(experts, M) * (size - 1)) // size, 1)
    counts = jnp.zeros(experts, jnp.int32).at[groups].add(1, mode='drop')
    ends = jnp.cumsum((counts + size - 1) // size)
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends]) * size
    slots = jnp.where(groups < experts, starts[groups] + _ranks_in_group(groups), n * size)
    sources = jnp.full(n * size, M, jnp.int32).at[slots].set(jnp.arange(M, dtype=jnp.int32), mode='drop')
    block_experts = jnp.searchsorted(ends, jnp.arange(n), side='right', method='compare_all')
    return ExpertBlocks(slots, sources, jnp.minimum(block_experts, experts - 1), ends[-1])


def gather_rows(x: Float[Array, 'M D'], indices: Int[Array, ' R'], inverse: Int[Array, ' M']) -> Float[Array, 'R D']:
    """Return the rows `indices` of `x`, [R, D]; zero where the index is M.

    inverse: [M], the position of each row of `x` in the result, or R for none.  With it the gradient is a gather too.
    """
    return _gather(*mesh_axes.match_varying_axes((x, indices, inverse)))


@jax.custom_vjp
def _gather(x: Array, indices: Array, inverse: Array) -> Array:
    return _take_rows(x, indices)


def _gather_forward(x: Array, indices: Array, inverse: Array) -> tuple[Array, Array]:
    return _take_rows(x, indices), inverse


def _gather_backward(inverse: Array, d_out: Array) -> tuple[Array, None, None]:
    return _take_rows(d_out, inverse), None, None


def _take_rows(x: Array, indices: Array) -> Array:
    if x.shape[0] == 0:
        return jnp.zeros((indices.shape[0], x.shape[1]), x.dtype)
    return x.at[indices].get(mode='fill', fill_value=0)


_gather.defvjp(_gather_forward, _gather_backward)


def block_matmul(
    x: Float[Array, 'n b D'], kernel: Float[Array, 'E D F'], experts: Int[Array, ' n'], used: Int[Array, '']
) -> Float[Array, 'n b F']:
    """Return x_i kernel_(experts_i) for the first `used` blocks, zero for the others; sums are float32 or wider."""
    return _multiply(*mesh_axes.match_varying_axes((x, kernel, experts, used)))


@jax.custom_vjp
def _multiply(x: Array, kernel: Array, experts: Array, used: Array) -> Array:
    def step(i, y):
        return y.at[i].set(_wide_matmul(_index(x, i), _index(kernel, experts[i]), x.dtype))

    zeros = mesh_axes.match_varying_axes(jnp.zeros((*x.shape[:2], kernel.shape[2]), x.dtype), x)
    return jax.lax.fori_loop(0, used, step, zeros)


def _multiply_forward(x: Array, kernel: Array, experts: Array, used: Array) -> tuple[Array, tuple[Array, ...]]:
    return _multiply(x, kernel, experts, used), (x, kernel, experts, used)


def _multiply_backward(saved: tuple[Array, ...], d_out: Array) -> tuple[Array, Array, None, None]:
    """Return the gradients of x and kernel.

    They are written by hand because JAX's gradient of the forward loop would add an array of the size of all kernels,
    [E, D, F], for every block.
    """
    x, kernel, experts, used = saved
    wide = jnp.promote_types(kernel.dtype, jnp.float32)

    def step(i, gradients):
        d_x, d_kernel = gradients
        expert, block_d_out = experts[i], _index(d_out, i)
        d_x = d_x.at[i].set(_wide_matmul(block_d_out, _index(kernel, expert).T, x.dtype))
        return d_x, d_kernel.at[expert].add(_wide_matmul(_index(x, i).T, block_d_out, wide))

    zeros = mesh_axes.match_varying_axes((jnp.zeros_like(x), jnp.zeros(kernel.shape, wide)), x)
    d_x, d_kernel = jax.lax.fori_loop(0, used, step, zeros)
    return d_x, d_kernel.astype(kernel.dtype), None, None


_multiply.defvjp(_multiply_forward, _multiply_backward)


def _index(x: Array, i: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _wide_matmul(a: Array, b: Array, dtype: jnp.dtype) -> Array:
    """Return a b, summed in float32 or wider and rounded to `dtype`."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.matmul(a, b, preferred_element_type=wide).astype(dtype)
