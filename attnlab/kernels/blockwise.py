"""Attention over tiles of queries by keys, in memory that grows with T + S: the way in and out of `kernels.flash`."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnlab.kernels import dense, dropout, flash
from attnlab.kernels.call import Attended, Call
from attnlab.kernels.tiles import Grid, Rules


def dot_product(call: Call) -> Attended:
    """As `dense.dot_product`; memory O(T + S) beside what comes in and goes out, forward and backward."""
    if call.return_weights:
        raise NotImplementedError('return_weights: blockwise never forms them')
    B, T, N, H = call.query.shape
    S, K, Hv = call.value.shape[1:]
    if 0 in (B, T, N, H, S, Hv):  # nothing to cut
        return dense.dot_product(call._replace(block_sizes=None))
    plan, floats, others = _prepare(call, jax.default_backend())
    attended: Any = flash.attend(plan, floats, others)
    output, residual = attended
    output = output.reshape(B, N, -1, Hv)[:, :, :T].swapaxes(1, 2).astype(call.query.dtype)
    residual = jax.lax.stop_gradient(residual.reshape(B, N, -1)[:, :, :T].swapaxes(1, 2))
    return Attended(output, residual if call.return_residual else None, None)


def pays(call: Call, platform: str) -> bool:
    """Whether tiles are likely faster than the whole matrix."""
    T, S = call.query.shape[1], call.key.shape[1]
    return T * S >= (256 * 256 if platform == 'cpu' else 2048 * 2048)


def block_sizes(T: int, S: int, N: int, platform: str) -> tuple[int, int]:
    """Blocks of about equal length; on a CPU the fewer queries the more heads, for a tile holds all of them."""
    keys = _even(S, 512)
    queries = max(64, min(512, 2**21 // (N * keys))) if platform == 'cpu' else 512
    return _even(T, queries), keys


def _even(length: int, limit: int) -> int:
    """The length cut into the fewest blocks of at most `limit`, rounded up to a multiple of 8."""
    blocks = math.ceil(length / limit)
    return math.ceil(length / blocks / 8) * 8


# Into the layout of the tiles


def _prepare(call: Call, platform: str) -> tuple[flash.Plan, flash.Floats, flash.Others]:
    B, T, N, H = call.query.shape
    S, K = call.key.shape[1:3]
    queries, keys = call.block_sizes or block_sizes(T, S, N, platform)
    keys += keys % 2  # dropout draws for pairs of keys
    grid = Grid(math.ceil(T / queries) * queries, math.ceil(S / keys) * keys, queries, keys)
    wide = jnp.promote_types(call.query.dtype, jnp.float32)
    rows, columns = (T, grid.T), (S, grid.S)
    query = (call.query.astype(wide) * call.scale).swapaxes(1, 2).reshape(B, K, N // K, T, H)
    sinks, slopes = (None if x is None else x.astype(wide).reshape(K, N // K) for x in (call.sinks, call.alibi_slopes))
    floats = flash.Floats(
        _filled(query, {3: rows}), _filled(call.key.swapaxes(1, 2), {2: columns}),
        _filled(call.value.swapaxes(1, 2), {2: columns}),
        None if call.bias is None else _filled(_by_group(call.bias.astype(wide), K), {3: rows, 4: columns}),
        sinks, slopes,
    )  # fmt: skip
    rules = call.rules
    restricts = rules.restrict()
    if grid.S > S:  # the padding is hidden like that of a batch
        rules = rules.replace(key_value_seq_lengths=_at_most(S, rules.key_value_seq_lengths, B))
    if grid.T > T and restricts:  # queries that are none must not look at keys that no query sees
        rules = rules.replace(query_seq_lengths=_at_most(T, rules.query_seq_lengths, B))
    plan = flash.Plan(
        grid, T, rules.is_causal, rules.window, call.logits_soft_cap, call.dropout_rate,
        rules.restrict(), platform != 'cpu',
    )  # fmt: skip
    edge = lambda x, axes: None if x is None else _filled(x, axes, 'edge')
    cut = Rules(
        None if rules.mask is None else _filled(_by_group(rules.mask, K), {3: rows, 4: columns}),
        rules.query_seq_lengths, rules.key_value_seq_lengths,
        edge(rules.query_positions, {1: rows}), edge(rules.key_positions, {1: columns}),
        edge(rules.query_segment_ids, {1: rows}), edge(rules.key_segment_ids, {1: columns}),
        rules.prefix_lengths,
    )  # fmt: skip
    words = dropout.seed(call.dropout_rng) if call.dropout_rate and call.dropout_rng is not None else None
    return plan, floats, flash.Others(cut, jnp.arange(B), words)


def _at_most(limit: int, lengths: Array | None, B: int) -> Array:
    return jnp.full(B, limit) if lengths is None else jnp.minimum(lengths, limit)


def _by_group(pairs: Array, K: int) -> Array:
    """[#B, #N, #T, #S] as [#B, #K, #G, #T, #S]."""
    B, N, T, S = pairs.shape
    return pairs.reshape(B, *((K, N // K) if N > 1 else (1, 1)), T, S)


def _filled(x: Array, axes: dict[int, tuple[int, int]], mode: Any = 'constant') -> Array:
    """Each axis filled up from its length to whole blocks; one of size one that stands for all stays."""
    more = [(0, 0)] * x.ndim
    for axis, (have, want) in axes.items():
        if x.shape[axis] == have:
            more[axis] = (0, want - have)
    return jnp.pad(x, more, mode) if any(after for _, after in more) else x
