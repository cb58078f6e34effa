"""Routing against a reference that follows the documentation token cotangent token, and matrix products by expert."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.kernels.routing import (
    block_matmul,
    expert_block_size,
    expert_capacity,
    gather_rows,
    route_tokens,
    sort_into_blocks,
)
from tests.kernels.calls import finite, run_compiled, same
from tests.kernels.oracle import near
from tests.quick import QUICK

B, T, E, A = 3, 6, 4, 2
_RANDOM = np.random.default_rng(0)
# Expert 0 is chosen most often.
LOGITS = jnp.asarray(_RANDOM.normal(size=(B, T, E)) + [2.0, 1.0, 0.0, 0.0], jnp.float32)
MASK = jnp.asarray([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]], bool)


def reference(logits, experts_per_token, mask, limits, order='choice', renormalised=True):
    """Return experts, weights, kept, load_balance, z and dropped, in float64, token by token."""
    logits = np.asarray(logits, np.float64)
    B, T, E = logits.shape
    experts, weights = np.zeros((B, T, experts_per_token), int), np.zeros((B, T, experts_per_token))
    kept = np.zeros((B, T, experts_per_token), bool)
    counts, probability_sums, squares, tokens = np.zeros(E), np.zeros(E), 0.0, 0
    for b in range(B):
        free = [limits[b]] * E
        queue = [(a, t) for a in range(experts_per_token) for t in range(T)]
        for a, t in queue if order == 'choice' else sorted(queue, key=lambda pair: pair[::-1]):
            experts[b, t] = sorted(range(E), key=lambda e: -logits[b, t, e])[:experts_per_token]
            if mask[b, t] and free[experts[b, t, a]] > 0:
                free[experts[b, t, a]] -= 1
                kept[b, t, a] = True
        for t in np.flatnonzero(mask[b]):
            exponentials = np.exp(logits[b, t])
            divisor = exponentials[experts[b, t]].sum() if renormalised else exponentials.sum()
            weights[b, t] = kept[b, t] * exponentials[experts[b, t]] / divisor
            probability_sums += exponentials / exponentials.sum()
            squares += math.log(exponentials.sum()) ** 2
            counts[experts[b, t]] += 1
            tokens += 1
    tokens = max(tokens, 1)
    load_balance = E * np.sum(counts / experts_per_token / tokens * probability_sums / tokens)
    return experts, weights, kept, load_balance, squares / tokens, (~kept & mask[..., None]).sum()


def route_and_check(logits, experts_per_token, mask, limits, capacity, **kwargs):
    """Return the routing, after comparing it with the reference."""
    have = run_compiled(
        route_tokens, logits, experts_per_token=experts_per_token, mask=mask, capacity=capacity, **kwargs
    )
    is_real = np.ones(logits.shape[:2], bool) if mask is None else np.asarray(mask)
    want = reference(logits, experts_per_token, is_real, limits, **kwargs)
    # The experts of padding are arbitrary, because no choice of it is kept.
    np.testing.assert_array_equal(np.asarray(have.experts)[is_real], want[0][is_real])
    np.testing.assert_array_equal(have.kept, want[2])
    assert have.dropped == want[5] and have.experts.dtype == have.dropped.dtype == jnp.int32
    near(have.weights, want[1], 1e-6, 'weights')
    near(have.load_balance, want[3], 1e-6, 'load_balance')
    near(have.z, want[4], 1e-6, 'z')
    return have


def route_on_host(logits, experts_per_token, capacity=99):
    """Return the routing as NumPy arrays, computed by one program for all capacities."""
    limits = jnp.asarray(np.full(len(logits), capacity))
    return to_numpy(
        run_compiled(
            route_tokens, jnp.asarray(logits, jnp.float32), experts_per_token=experts_per_token, capacity=limits
        )
    )


def to_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def test_expert_capacity():
    """ceil(T / E * factor * A), at most T (case 30)."""
    assert math.ceil(3 / 8 * 4 * 4) == 6 and expert_capacity(3, 8, 4, 4.0) == 3
    assert expert_capacity(8, 4, 1, 1.0) == 2
    assert expert_capacity(7, 4, 2, 1.0) == 4  # 3.5
    assert expert_capacity(100, 2, 1, 1.1) == 55 and math.ceil(100 / 2 * 1.1) == 56
    assert expert_capacity(0, 4, 2, 2.0) == 0
    assert expert_capacity(5, 8, 1, 0.01) == 1
    for factor in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match='capacity factor is'):
            expert_capacity(3, 2, 1, factor)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('order', ['choice', 'token'])
def test_routing_matches_reference(order):
    every = route_and_check(LOGITS, A, None, [T] * B, None, order=order)
    assert jnp.all(every.kept) and every.dropped == 0
    near(jnp.sum(every.weights, -1), np.ones((B, T)), 1e-6, 'sums')
    some = route_and_check(LOGITS, A, None, [2] * B, 2, order=order)
    assert 0 < some.dropped < B * T * A
    route_and_check(LOGITS, A, MASK, [T] * B, None, order=order)
    route_and_check(LOGITS, A, MASK, [3, 1, 2], jnp.array([3, 1, 2]), order=order, renormalised=False)


@pytest.mark.slow
def test_order_decides_which_choices_are_kept():
    """Expert 0 is the second choice of tokens 0 and 1 and the first choice of token 2.

    In the order of choices token 2 gets expert 0 first, in the order of tokens last.
    """
    logits = jnp.asarray([[[1.0, 2, 0], [1, 2, 0], [2, 1, 0]]])
    kept = lambda order: (
        run_compiled(route_tokens, logits, experts_per_token=2, capacity=2, order=order).kept[0].tolist()
    )
    assert kept('choice') == [[True, True], [True, False], [True, False]]
    assert kept('token') == [[True, True], [True, True], [False, False]]


def test_all_tokens_choose_one_expert():
    """Tokens 0 and 1 are kept; dropped choices have weight zero, and the other weights do not grow (case 30)."""
    logits = np.tile([3.0, 0, 0, 0], (1, 8, 1))
    routing = route_on_host(logits, 1, 2)
    assert routing.kept[0, :, 0].tolist() == [True, True] + [False] * 6
    np.testing.assert_array_equal(routing.weights[0, :, 0], [1.0, 1.0] + [0.0] * 6)
    assert routing.dropped == 6
    many = route_on_host(logits, 2, 2)
    np.testing.assert_allclose(many.weights[0, 0], np.exp([3.0, 0]) / np.exp([3.0, 0]).sum(), rtol=1e-6)
    same(many.weights[0, 2:], np.zeros((6, 2)))


def test_losses_of_uniform_and_of_skewed_routing():
    one = np.tile([60.0, 0, 0, 0], (1, 8, 1))
    near(route_on_host(one, 1).load_balance, 4.0, 1e-6, 'all to one')
    even = np.tile(60.0 * np.eye(4), (1, 2, 1))
    near(route_on_host(even, 1).load_balance, 1.0, 1e-6, 'even')
    near(route_on_host(np.zeros((1, 8, 4)), 2).load_balance, 1.0, 1e-6, 'even probabilities')
    near(route_on_host(np.zeros((1, 8, 4)), 2).z, math.log(4) ** 2, 1e-6, 'z')


def test_gradients_of_losses_and_weights_match_finite_differences():
    """No step of the differences changes a choice; padding has no gradient."""
    cotangent = np.cos(np.arange(B * T * A)).reshape(B, T, A)

    def loss(logits, mask, limits):
        routing = route_tokens(logits, A, mask, capacity=limits)
        return jnp.sum(routing.weights * cotangent.astype('float32')) + routing.load_balance + 0.5 * routing.z

    def want(logits):
        _, weights, _, balance, z, _ = reference(logits, A, np.asarray(MASK), [2] * B)
        return np.sum(weights * cotangent) + balance + 0.5 * z

    gradient = np.asarray(run_compiled(jax.grad(loss), LOGITS, mask=MASK, limits=jnp.array([2] * B)))
    base, step = np.asarray(LOGITS, np.float64), 1e-6
    for index in np.ndindex(B, T, E):
        change = np.zeros_like(base)
        change[index] = step
        difference = (want(base + change) - want(base - change)) / (2 * step)
        near(gradient[index], difference, 2e-6, f'gradient {index}')
    is_real = np.asarray(MASK)
    assert np.all(gradient[~is_real] == 0) and np.all(np.any(gradient[is_real] != 0, -1))


def test_ties_choose_the_lowest_expert():
    """Zeros of either sign are equal (case 32)."""
    tied = np.zeros((1, 8, 4))
    tied[0, 1, ::2], tied[0, 2, 1:] = -0.0, 5.0
    assert route_on_host(tied, 2).experts.tolist() == [[[0, 1], [0, 1], [1, 2]] + [[0, 1]] * 5]


def test_close_logits_are_compared_exactly():
    """A softmax in bfloat16 would give a tie, and one in float32 for logits that differ in one bit (case 32)."""
    for logits in (jnp.array([0, 0.002], jnp.bfloat16), jnp.array([1.0, 1.0 + 2**-23])):
        routing = run_compiled(route_tokens, logits[None, None], experts_per_token=1, renormalised=False)
        assert routing.experts.item() == 1 and routing.weights.dtype == jnp.float32


@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_nonfinite_logit_gives_nan_weights(bad):
    """`top_k` would rank NaN first, and the softmax over other experts would be finite (case 32)."""
    logits = np.array(LOGITS)
    logits[1, 2, 3] = bad
    clean, spoiled = (route_on_host(x, A) for x in (LOGITS, logits))
    assert np.all(np.isnan(spoiled.weights[1, 2])) and np.isnan(spoiled.load_balance)
    assert not np.isfinite(spoiled.z)
    if math.isnan(bad):
        assert spoiled.experts[1, 2].tolist() == clean.experts[1, 2].tolist() and 3 not in spoiled.experts[1, 2]
    others = np.ones((B, T), bool)
    others[1, 2] = False
    same(spoiled.weights[others], clean.weights[others])
    assert np.all(np.isnan(route_on_host(logits, A, 0).weights[1, 2])), 'NaN although all choices are dropped'


def test_minus_infinity_excludes_an_expert():
    routing = route_on_host(np.where(np.arange(E) == 0, -np.inf, LOGITS), A)
    assert finite(routing[1:]) and np.all(routing.experts != 0)


def test_padding_is_ignored():
    """Padding may be at any position and hold any number, also NaN (case 30)."""
    positions = np.array([0, 2, 3, 5, 6, 8])
    wide, mask = np.full((B, 9, E), np.nan, 'float32'), np.zeros((B, 9), bool)
    wide[:, positions], mask[:, positions] = LOGITS, True
    padded = to_numpy(
        run_compiled(route_tokens, jnp.asarray(wide), experts_per_token=A, mask=jnp.asarray(mask), capacity=2)
    )
    plain = route_on_host(LOGITS, A, 2)
    for name in ('experts', 'weights', 'kept'):
        same(getattr(padded, name)[:, positions], getattr(plain, name))
    near(padded.load_balance, plain.load_balance, 1e-6, 'load_balance')
    near(padded.z, plain.z, 1e-6, 'z')
    assert padded.dropped == plain.dropped > 0 and not np.any(padded.kept[~mask])
    same(padded.weights[~mask], np.zeros((9, A)))


def test_batch_rows_do_not_compete():
    whole = route_on_host(LOGITS, A, 2)
    reversed_rows = route_on_host(LOGITS[::-1], A, 2)
    for name in ('experts', 'weights', 'kept'):
        same(getattr(reversed_rows, name)[::-1], getattr(whole, name))


def test_batches_without_real_tokens():
    """Only padding, no rows, or no tokens: losses are zero, and nothing is NaN."""
    for shape, mask in (((B, T, E), jnp.zeros((B, T), bool)), ((0, T, E), None), ((B, 0, E), None)):
        routing = to_numpy(run_compiled(route_tokens, jnp.zeros(shape), experts_per_token=A, mask=mask, capacity=1))
        assert finite(routing[1:]) and routing.load_balance == routing.z == routing.dropped == 0
        assert routing.weights.shape == (*shape[:2], A) and not np.any(routing.kept)


@pytest.mark.parametrize(('change', 'message'), [
    (dict(logits=LOGITS[0]), r'logits have shape \(6, 4\)'),
    (dict(logits=LOGITS.astype(int)), 'logits have shape .* dtype int32; expected'),
    (dict(experts_per_token=0), 'experts_per_token is 0; expected 1 to 4'),
    (dict(experts_per_token=5), 'experts_per_token is 5; expected 1 to 4'),
    (dict(mask=MASK[:2]), r'mask has shape \(2, 6\) .* expected \[B, T\] = \(3, 6\)'),
    (dict(mask=MASK.astype(int)), 'mask has .* dtype int32'),
    (dict(capacity=-1), 'capacity is -1'),
    (dict(capacity=jnp.ones(2, int)), r'capacity has shape \(2,\); expected one number or \[B\] = \(3,\)'),
    (dict(order='first'), "order is 'first'"),
])  # fmt: skip
def test_invalid_arguments_raise(change, message, as_used):
    with pytest.raises(ValueError, match=message):
        route_tokens(**dict(logits=LOGITS, experts_per_token=A) | change)


# Products by expert

GROUPS = jnp.asarray([2, 0, 3, 2, 2, 4, 0, 2, 2, 4, 2])  # 4 experts; expert 1 has no rows, and two rows have no expert
D, F = 3, 5


def expert_product(rows, kernel, groups, size):
    """Return the rows times the matrices of their experts, computed in blocks."""
    blocks = sort_into_blocks(groups, len(kernel), size)
    y = gather_rows(rows, blocks.sources, blocks.slots).reshape(-1, size, rows.shape[1])
    y = block_matmul(y, kernel, blocks.experts, blocks.used)
    return gather_rows(y.reshape(-1, kernel.shape[2]), blocks.slots, blocks.sources)


def output_and_gradients(rows, kernel, groups, cotangent, size):
    loss = lambda rows, kernel: jnp.sum(cotangent * expert_product(rows, kernel, groups, size))
    return expert_product(rows, kernel, groups, size), jax.grad(loss, (0, 1))(rows, kernel)


def random_inputs(M, experts=4, dtype='float32'):
    random = np.random.default_rng(M)
    shapes = (M, D), (experts, D, F), (M, F)
    return [jnp.asarray(random.integers(-4, 5, shape), dtype) for shape in shapes]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('size', [1, 2, 8])
def test_expert_product_and_gradients_match_loop(size):
    """All numbers are integers, so results are exact; rows of no expert give zero and have no gradient."""
    rows, kernel, cotangent = random_inputs(len(GROUPS))
    output, gradients = run_compiled(output_and_gradients, rows, kernel, GROUPS, cotangent, size=size)
    want, d_rows, d_kernel = np.zeros_like(cotangent), np.zeros_like(rows), np.zeros_like(kernel)
    for i, e in enumerate(np.asarray(GROUPS)):
        if e < 4:
            want[i] = rows[i] @ kernel[e]
            d_rows[i] = cotangent[i] @ kernel[e].T
            d_kernel[e] += np.outer(rows[i], cotangent[i])
    same(output, want)
    same(gradients, (d_rows, d_kernel))


@pytest.mark.slow
def test_expert_product_under_vmap_and_remat():
    rows, kernel, cotangent = random_inputs(len(GROUPS))
    run = functools.partial(output_and_gradients, size=2)
    batch = jnp.stack([GROUPS, (GROUPS + 1) % 5])
    expected = [run_compiled(output_and_gradients, rows, kernel, groups, cotangent, size=2) for groups in batch]
    mapped = run_compiled(jax.vmap(jax.checkpoint(run), (None, None, 0, None)), rows, kernel, batch, cotangent)
    same(to_numpy(mapped), jax.tree.map(lambda *x: np.stack(x), *expected))


def test_nan_row_does_not_change_other_rows():
    rows, kernel, _ = random_inputs(len(GROUPS))
    run = lambda rows: run_compiled(expert_product, rows, kernel, GROUPS, size=8)
    is_bad = np.arange(len(GROUPS)) == 3
    bad = jnp.asarray(np.where(is_bad[:, None], np.float32(np.nan), rows))
    spoiled, plain = to_numpy((run(bad), run(rows)))
    assert np.all(np.isnan(spoiled[3]))
    same(spoiled[~is_bad], plain[~is_bad])


def test_bfloat16_gradients_are_summed_in_float32():
    """A running sum of ones in bfloat16 stops growing at 256."""
    ones = jnp.ones((1024, 1), jnp.bfloat16)
    loss = lambda kernel: jnp.sum(expert_product(ones, kernel, jnp.zeros(1024, int), 1).astype(jnp.float32))
    gradient = run_compiled(jax.grad(loss), jnp.ones((2, 1, 1), jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16 and gradient.tolist() == [[[1024.0]], [[0.0]]]


def test_blocks_hold_every_row_once():
    for M in (0, 5, 40):
        for groups in (np.zeros(M, int), np.arange(M) % 4, np.full(M, 4)):
            blocks = jax.tree.map(
                np.asarray, run_compiled(sort_into_blocks, jnp.asarray(groups, jnp.int32), experts=4, size=8)
            )
            counts = np.bincount(groups, minlength=5)[:4]
            assert blocks.used == sum(math.ceil(count / 8) for count in counts) <= len(blocks.experts)
            sources = blocks.sources[blocks.sources < M]
            assert sorted(sources) == np.flatnonzero(groups < 4).tolist()
            assert all(blocks.experts[slot // 8] == e for slot, e in zip(blocks.slots, groups, strict=True) if e < 4)
    assert [expert_block_size(rows, 8) for rows in (0, 1, 700, 1536, 10**6)] == [8, 8, 16, 32, 128]


def test_zero_rows():
    rows, kernel, cotangent = random_inputs(0)
    output, gradients = run_compiled(output_and_gradients, rows, kernel, jnp.zeros(0, int), cotangent, size=8)
    assert output.shape == (0, F)
    same(gradients, (rows, jnp.zeros_like(kernel)))


def test_capacity_accepts_numpy_and_python_numbers_and_lists(as_used):
    """The capacity is 2 for all rows, or one number for each row."""
    kept = lambda experts_per_token, capacity: jax.jit(
        lambda: route_tokens(LOGITS, experts_per_token, MASK, capacity=capacity).kept, compiler_options=QUICK
    )()
    expected = reference(LOGITS, 2, MASK, [2, 2, 2])[2], reference(LOGITS, 2, MASK, [2, 0, 1])[2]
    np.testing.assert_array_equal(kept(np.int64(2), np.int64(2)), expected[0])
    for capacity in ([2, 0, 1], np.array([2, 0, 1], np.uint8)):
        np.testing.assert_array_equal(kept(2, capacity), expected[1])
    with pytest.raises(ValueError, match='capacity is -1'):
        kept(2, np.int64(-1))
    assert expert_capacity(np.int64(100), np.int64(2), np.int64(1), np.float64(1.1)) == 55
