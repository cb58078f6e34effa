"""Which experts tokens go to, read off the documentation token by token; and products by expert."""

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
from tests.kernels.calls import compiled, finite, same
from tests.kernels.oracle import near
from tests.quick import QUICK

B, T, E, A = 3, 6, 4, 2
_RANDOM = np.random.default_rng(0)
LOGITS = jnp.asarray(_RANDOM.normal(size=(B, T, E)) + [2.0, 1.0, 0.0, 0.0], jnp.float32)  # expert 0 is in demand
MASK = jnp.asarray([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]], bool)


def judged(logits, experts_per_token, mask, limits, order='choice', renormalised=True):
    """What `route` gives, in float64, one token after the other: experts, weights, kept, load_balance, z, dropped."""
    logits = np.asarray(logits, np.float64)
    B, T, E = logits.shape
    experts, weights = np.zeros((B, T, experts_per_token), int), np.zeros((B, T, experts_per_token))
    kept = np.zeros((B, T, experts_per_token), bool)
    counts, mass, squares, tokens = np.zeros(E), np.zeros(E), 0.0, 0
    for b in range(B):
        places = [limits[b]] * E
        queue = [(a, t) for a in range(experts_per_token) for t in range(T)]
        for a, t in queue if order == 'choice' else sorted(queue, key=lambda pair: pair[::-1]):
            experts[b, t] = sorted(range(E), key=lambda e: -logits[b, t, e])[:experts_per_token]
            if mask[b, t] and places[experts[b, t, a]] > 0:
                places[experts[b, t, a]] -= 1
                kept[b, t, a] = True
        for t in np.flatnonzero(mask[b]):
            exponentials = np.exp(logits[b, t])
            among = exponentials[experts[b, t]].sum() if renormalised else exponentials.sum()
            weights[b, t] = kept[b, t] * exponentials[experts[b, t]] / among
            mass += exponentials / exponentials.sum()
            squares += math.log(exponentials.sum()) ** 2
            counts[experts[b, t]] += 1
            tokens += 1
    balance = E * np.sum(counts / experts_per_token / max(tokens, 1) * mass / max(tokens, 1))
    return experts, weights, kept, balance, squares / max(tokens, 1), (~kept & mask[..., None]).sum()


def checked(logits, experts_per_token, mask, limits, capacity, **kwargs):
    have = compiled(route_tokens, logits, experts_per_token=experts_per_token, mask=mask, capacity=capacity, **kwargs)
    where = np.ones(logits.shape[:2], bool) if mask is None else np.asarray(mask)
    want = judged(logits, experts_per_token, where, limits, **kwargs)
    # Whatever the experts of padding are, it is not kept.
    np.testing.assert_array_equal(np.asarray(have.experts)[where], want[0][where])
    np.testing.assert_array_equal(have.kept, want[2])
    assert have.dropped == want[5] and have.experts.dtype == have.dropped.dtype == jnp.int32
    near(have.weights, want[1], 1e-6, 'weights')
    near(have.load_balance, want[3], 1e-6, 'load_balance')
    near(have.z, want[4], 1e-6, 'z')
    return have


def routed(logits, experts_per_token, capacity=99):
    """On the host, by one program for all capacities."""
    limits = jnp.asarray(np.full(len(logits), capacity))
    logits = jnp.asarray(logits, jnp.float32)
    return host(compiled(route_tokens, logits, experts_per_token=experts_per_token, capacity=limits))


def host(tree):
    return jax.tree.map(np.asarray, tree)


def test_the_capacity_of_an_expert():
    """Case 30: ceil(T / E * factor * A), at most T."""
    assert math.ceil(3 / 8 * 4 * 4) == 6 and expert_capacity(3, 8, 4, 4.0) == 3
    assert expert_capacity(8, 4, 1, 1.0) == 2
    assert expert_capacity(7, 4, 2, 1.0) == 4  # 3.5
    assert expert_capacity(100, 2, 1, 1.1) == 55 and math.ceil(100 / 2 * 1.1) == 56
    assert expert_capacity(0, 4, 2, 2.0) == 0
    assert expert_capacity(5, 8, 1, 0.01) == 1
    for factor in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match='capacity factor is'):
            expert_capacity(3, 2, 1, factor)


@pytest.mark.parametrize('order', ['choice', 'token'])
def test_every_token_goes_where_the_documentation_says(order):
    every = checked(LOGITS, A, None, [T] * B, None, order=order)
    assert jnp.all(every.kept) and every.dropped == 0
    near(jnp.sum(every.weights, -1), np.ones((B, T)), 1e-6, 'sums')
    some = checked(LOGITS, A, None, [2] * B, 2, order=order)
    assert 0 < some.dropped < B * T * A
    checked(LOGITS, A, MASK, [T] * B, None, order=order)
    checked(LOGITS, A, MASK, [3, 1, 2], jnp.array([3, 1, 2]), order=order, renormalised=False)


def test_who_keeps_a_place():
    """Tokens 0, 1 want expert 0 second, token 2 first: by choices token 2 comes first of them, by tokens last."""
    logits = jnp.asarray([[[1.0, 2, 0], [1, 2, 0], [2, 1, 0]]])
    kept = lambda order: compiled(route_tokens, logits, experts_per_token=2, capacity=2, order=order).kept[0].tolist()
    assert kept('choice') == [[True, True], [True, False], [True, False]]
    assert kept('token') == [[True, True], [True, True], [False, False]]


def test_all_to_one_expert():
    """Case 30: tokens 0 and 1 are served; those dropped have weight zero, and the rest does not grow."""
    logits = np.tile([3.0, 0, 0, 0], (1, 8, 1))
    routing = routed(logits, 1, 2)
    assert routing.kept[0, :, 0].tolist() == [True, True] + [False] * 6
    np.testing.assert_array_equal(routing.weights[0, :, 0], [1.0, 1.0] + [0.0] * 6)
    assert routing.dropped == 6
    many = routed(logits, 2, 2)
    np.testing.assert_allclose(many.weights[0, 0], np.exp([3.0, 0]) / np.exp([3.0, 0]).sum(), rtol=1e-6)
    same(many.weights[0, 2:], np.zeros((6, 2)))


def test_the_losses_of_even_and_of_uneven_routing():
    one = np.tile([60.0, 0, 0, 0], (1, 8, 1))
    near(routed(one, 1).load_balance, 4.0, 1e-6, 'all to one')
    even = np.tile(60.0 * np.eye(4), (1, 2, 1))
    near(routed(even, 1).load_balance, 1.0, 1e-6, 'even')
    near(routed(np.zeros((1, 8, 4)), 2).load_balance, 1.0, 1e-6, 'even probabilities')
    near(routed(np.zeros((1, 8, 4)), 2).z, math.log(4) ** 2, 1e-6, 'z')


def test_the_gradients_of_losses_and_weights():
    """Against differences of the oracle, where no step changes a choice; padding gets none."""
    by = np.cos(np.arange(B * T * A)).reshape(B, T, A)

    def loss(logits, mask, limits):
        routing = route_tokens(logits, A, mask, capacity=limits)
        return jnp.sum(routing.weights * by.astype('float32')) + routing.load_balance + 0.5 * routing.z

    def want(logits):
        _, weights, _, balance, z, _ = judged(logits, A, np.asarray(MASK), [2] * B)
        return np.sum(weights * by) + balance + 0.5 * z

    slopes = np.asarray(compiled(jax.grad(loss), LOGITS, mask=MASK, limits=jnp.array([2] * B)))
    base, step = np.asarray(LOGITS, np.float64), 1e-6
    for at in np.ndindex(B, T, E):
        move = np.zeros_like(base)
        move[at] = step
        near(slopes[at], (want(base + move) - want(base - move)) / (2 * step), 2e-6, f'slope {at}')
    real = np.asarray(MASK)
    assert np.all(slopes[~real] == 0) and np.all(np.any(slopes[real] != 0, -1))


def test_ties_go_to_the_lowest_expert():
    """Case 32; zeros of either sign are equal."""
    tied = np.zeros((1, 8, 4))
    tied[0, 1, ::2], tied[0, 2, 1:] = -0.0, 5.0
    assert routed(tied, 2).experts.tolist() == [[[0, 1], [0, 1], [1, 2]] + [[0, 1]] * 5]


def test_close_logits_are_told_apart():
    """Case 32: softmax in bfloat16 ties and takes expert 0; and in float32 those one bit apart."""
    for logits in (jnp.array([0, 0.002], jnp.bfloat16), jnp.array([1.0, 1.0 + 2**-23])):
        routing = compiled(route_tokens, logits[None, None], experts_per_token=1, renormalised=False)
        assert routing.experts.item() == 1 and routing.weights.dtype == jnp.float32


@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_what_is_not_a_number_is_not_passed_over(bad):
    """Case 32: `top_k` ranks NaN first and the softmax of the others would be sound."""
    logits = np.array(LOGITS)
    logits[1, 2, 3] = bad
    clean, spoilt = (routed(x, A) for x in (LOGITS, logits))
    assert np.all(np.isnan(spoilt.weights[1, 2])) and np.isnan(spoilt.load_balance)
    assert not np.isfinite(spoilt.z)
    if math.isnan(bad):
        assert spoilt.experts[1, 2].tolist() == clean.experts[1, 2].tolist() and 3 not in spoilt.experts[1, 2]
    others = np.ones((B, T), bool)
    others[1, 2] = False
    same(spoilt.weights[others], clean.weights[others])
    assert np.all(np.isnan(routed(logits, A, 0).weights[1, 2])), 'dropped, and still seen'


def test_minus_infinity_closes_an_expert():
    routing = routed(np.where(np.arange(E) == 0, -np.inf, LOGITS), A)
    assert finite(routing[1:]) and np.all(routing.experts != 0)


def test_padding_never_matters():
    """Case 30: wherever it stands and whatever is in it, NaN included."""
    where = np.array([0, 2, 3, 5, 6, 8])
    wide, mask = np.full((B, 9, E), np.nan, 'float32'), np.zeros((B, 9), bool)
    wide[:, where], mask[:, where] = LOGITS, True
    padded = host(compiled(route_tokens, jnp.asarray(wide), experts_per_token=A, mask=jnp.asarray(mask), capacity=2))
    plain = routed(LOGITS, A, 2)
    for name in ('experts', 'weights', 'kept'):
        same(getattr(padded, name)[:, where], getattr(plain, name))
    near(padded.load_balance, plain.load_balance, 1e-6, 'load_balance')
    near(padded.z, plain.z, 1e-6, 'z')
    assert padded.dropped == plain.dropped > 0 and not np.any(padded.kept[~mask])
    same(padded.weights[~mask], np.zeros((9, A)))


def test_rows_do_not_compete():
    whole = routed(LOGITS, A, 2)
    turned = routed(LOGITS[::-1], A, 2)
    for name in ('experts', 'weights', 'kept'):
        same(getattr(turned, name)[::-1], getattr(whole, name))


def test_no_tokens():
    """All padding, no row, no token: losses are zero, and nothing is NaN."""
    for shape, mask in (((B, T, E), jnp.zeros((B, T), bool)), ((0, T, E), None), ((B, 0, E), None)):
        routing = host(compiled(route_tokens, jnp.zeros(shape), experts_per_token=A, mask=mask, capacity=1))
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
def test_what_does_not_fit(change, message, as_used):
    with pytest.raises(ValueError, match=message):
        route_tokens(**dict(logits=LOGITS, experts_per_token=A) | change)


# Products by expert

GROUPS = jnp.asarray([2, 0, 3, 2, 2, 4, 0, 2, 2, 4, 2])  # of 4 experts: none of 1, and two rows of nobody
D, F = 3, 5


def multiplied(rows, kernel, groups, size):
    """Rows times the matrices of their experts, by way of blocks."""
    places = sort_into_blocks(groups, len(kernel), size)
    y = gather_rows(rows, places.sources, places.slots).reshape(-1, size, rows.shape[1])
    y = block_matmul(y, kernel, places.experts, places.used)
    return gather_rows(y.reshape(-1, kernel.shape[2]), places.slots, places.sources)


def sloped(rows, kernel, groups, by, size):
    loss = lambda rows, kernel: jnp.sum(by * multiplied(rows, kernel, groups, size))
    return multiplied(rows, kernel, groups, size), jax.grad(loss, (0, 1))(rows, kernel)


def drawn(M, experts=4, dtype='float32'):
    random = np.random.default_rng(M)
    shapes = (M, D), (experts, D, F), (M, F)
    return [jnp.asarray(random.integers(-4, 5, shape), dtype) for shape in shapes]


@pytest.mark.parametrize('size', [1, 2, 8])
def test_products_and_their_gradients_are_those_of_a_loop(size):
    """Of whole numbers, so exactly; rows of nobody give zero and get no gradient."""
    rows, kernel, by = drawn(len(GROUPS))
    output, slopes = compiled(sloped, rows, kernel, GROUPS, by, size=size)
    want, to_rows, to_kernel = np.zeros_like(by), np.zeros_like(rows), np.zeros_like(kernel)
    for i, e in enumerate(np.asarray(GROUPS)):
        if e < 4:
            want[i] = rows[i] @ kernel[e]
            to_rows[i] = by[i] @ kernel[e].T
            to_kernel[e] += np.outer(rows[i], by[i])
    same(output, want)
    same(slopes, (to_rows, to_kernel))


def test_products_under_vmap_and_remat():
    rows, kernel, by = drawn(len(GROUPS))
    run = functools.partial(sloped, size=2)
    both = jnp.stack([GROUPS, (GROUPS + 1) % 5])
    each = [compiled(sloped, rows, kernel, groups, by, size=2) for groups in both]
    together = compiled(jax.vmap(jax.checkpoint(run), (None, None, 0, None)), rows, kernel, both, by)
    same(host(together), jax.tree.map(lambda *x: np.stack(x), *each))


def test_a_row_that_is_not_a_number_spoils_no_other():
    rows, kernel, _ = drawn(len(GROUPS))
    run = lambda rows: compiled(multiplied, rows, kernel, GROUPS, size=8)
    third = np.arange(len(GROUPS)) == 3
    bad = jnp.asarray(np.where(third[:, None], np.float32(np.nan), rows))
    spoilt, plain = host((run(bad), run(rows)))
    assert np.all(np.isnan(spoilt[3]))
    same(spoilt[~third], plain[~third])


def test_gradients_of_low_precision_are_summed_in_float32():
    """A running sum of ones in bfloat16 stalls at 256."""
    ones = jnp.ones((1024, 1), jnp.bfloat16)
    loss = lambda kernel: jnp.sum(multiplied(ones, kernel, jnp.zeros(1024, int), 1).astype(jnp.float32))
    slope = compiled(jax.grad(loss), jnp.ones((2, 1, 1), jnp.bfloat16))
    assert slope.dtype == jnp.bfloat16 and slope.tolist() == [[[1024.0]], [[0.0]]]


def test_blocks_hold_all_rows_and_few_more():
    for M in (0, 5, 40):
        for groups in (np.zeros(M, int), np.arange(M) % 4, np.full(M, 4)):
            places = jax.tree.map(
                np.asarray, compiled(sort_into_blocks, jnp.asarray(groups, jnp.int32), experts=4, size=8)
            )
            counts = np.bincount(groups, minlength=5)[:4]
            assert places.used == sum(math.ceil(count / 8) for count in counts) <= len(places.experts)
            held = places.sources[places.sources < M]
            assert sorted(held) == np.flatnonzero(groups < 4).tolist()
            assert all(places.experts[slot // 8] == e for slot, e in zip(places.slots, groups, strict=True) if e < 4)
    assert [expert_block_size(rows, 8) for rows in (0, 1, 700, 1536, 10**6)] == [8, 8, 16, 32, 128]


def test_no_rows():
    rows, kernel, by = drawn(0)
    output, slopes = compiled(sloped, rows, kernel, jnp.zeros(0, int), by, size=8)
    assert output.shape == (0, F)
    same(slopes, (rows, jnp.zeros_like(kernel)))


def test_integers_and_lists_of_numpy_and_python_are_served_alike(as_used):
    """Capacity 2 for all rows, and one for each row."""
    of = lambda experts_per_token, capacity: jax.jit(
        lambda: (route_tokens(LOGITS, experts_per_token, MASK, capacity=capacity).kept), compiler_options=QUICK
    )()
    expected = judged(LOGITS, 2, MASK, [2, 2, 2])[2], judged(LOGITS, 2, MASK, [2, 0, 1])[2]
    np.testing.assert_array_equal(of(np.int64(2), np.int64(2)), expected[0])
    for each in ([2, 0, 1], np.array([2, 0, 1], np.uint8)):
        np.testing.assert_array_equal(of(2, each), expected[1])
    with pytest.raises(ValueError, match='capacity is -1'):
        of(2, np.int64(-1))
    assert expert_capacity(np.int64(100), np.int64(2), np.int64(1), np.float64(1.1)) == 55
