"""The masking rules of every attention function, forward and backward.

If query and key are zero, all visible keys have the same weight, so the output is a mean that needs no reference.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import dot_product_attention
from tests.kernels import oracle
from tests.kernels.calls import (
    B,
    H,
    K,
    N,
    S,
    T,
    finite,
    make_qkv,
    run_with_gradients,
    run_with_gradients_eagerly,
    same,
    visible_means,
)
from tests.quick import QUICK

NAN, INF = float('nan'), float('inf')


# Rows that may attend to no key


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    'dtype, select', [('float32', 'where'), ('float32', 'multiply'), ('bfloat16', 'multiply'), ('float16', 'where')]
)
def test_empty_row_has_zero_output_and_zero_gradient(attend, dtype, select):
    query, key, value = make_qkv(dtype, T=3)
    mask = (jnp.arange(3) < 2)[None, None, :, None]
    output_mask = mask.swapaxes(1, 2)

    def loss(arrays):
        output = attend(*arrays, mask=mask)
        masked = output * output_mask if select == 'multiply' else jnp.where(output_mask, output, 0)
        return jnp.sum(jnp.sin(masked)), output

    gradients, output = jax.grad(loss, has_aux=True)((query, key, value))
    assert jnp.all(output[:, 2] == 0)
    assert jnp.all(gradients[0][:, 2] == 0)
    assert finite((output, gradients)) and all(jnp.any(x != 0) for x in gradients)


@pytest.mark.quick_cases(1)
def test_empty_row_stops_nan_gradient(attend):
    def loss(arrays):
        output = attend(*arrays, query_seq_lengths=jnp.array([2, 0]))
        length = jnp.sqrt(jnp.sum(output**2, axis=-1))  # its gradient at the zero row is infinite
        return jnp.sum(jnp.where(length > 0, length, 0))

    gradients = jax.grad(loss)(make_qkv())
    assert finite(gradients)
    assert not any(jnp.any(x[1] != 0) for x in gradients)


@pytest.mark.quick_cases(1)
def test_bias_of_minus_infinity_equals_mask(attend):
    visible = np.tri(T, S, -1, dtype=bool)[None, None]  # row 0 is empty
    bias = jnp.where(visible, 0.0, -INF)
    results, gradients = run_with_gradients(attend, *make_qkv(), bias, quick=False)
    masked, expected = run_with_gradients(
        attend, *make_qkv(), jnp.zeros((1, 1, T, S)), mask=jnp.asarray(visible), quick=False
    )
    # Not bit-equal, because these are two programs: jax 0.12 rounds the last bit differently.
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-6, atol=3e-7)
    jax.tree.map(close, (results, gradients), (masked, expected))
    assert finite((results, gradients)) and not np.any(jax.tree.leaves(results)[0][:, 0])


# Masked entries


MASKS = {
    'key lengths': ({'key_value_seq_lengths': jnp.array([3, 0])}, np.s_[:, :0]),
    'mask': ({'mask': jnp.asarray([[0, 1, 1, 0, 1], [0] * 5], bool)[:, None, None, :]}, np.s_[:, :0]),
    'segments': ({'query_segment_ids': jnp.array([[0, 1, 1, 2], [0] * 4]),
                  'key_segment_ids': jnp.array([[1, 1, 9, 9, 1], [9] * 5])}, np.s_[:1, [0, 3]]),
    'query and key lengths': ({'query_seq_lengths': jnp.array([2, 4]), 'key_value_seq_lengths': jnp.array([5, 2])},
                        np.s_[:1, 2:]),
}  # fmt: skip


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize('mask_arguments, rows', MASKS.values(), ids=MASKS)
def test_masked_entries_are_ignored(attend, mask_arguments, rows):
    query, key, value = make_qkv()
    shape = np.broadcast_shapes((B, N, T, S), np.shape(mask_arguments.get('mask', True)))
    numpy_arguments = {name: np.asarray(x) for name, x in mask_arguments.items()}
    visible = np.array([oracle.is_visible(*index, **numpy_arguments) for index in np.ndindex(shape)]).reshape(shape)
    key_unused = jnp.asarray(~visible.any((1, 2)))[:, :, None, None]
    query_unused = jnp.asarray(~visible.any((1, 3)))[:, :, None, None]
    assert query_unused[rows].all() and key_unused.any()
    bias = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)

    def arrays_with(masked_value):
        return (
            jnp.where(query_unused, masked_value, query), jnp.where(key_unused, masked_value, key),
            jnp.where(key_unused, masked_value, value), jnp.where(jnp.asarray(visible), bias, masked_value),
        )  # fmt: skip

    expected = run_with_gradients(attend, *arrays_with(0.0), **mask_arguments)
    for masked_value in (NAN, INF, -INF, 3e38):
        same(run_with_gradients(attend, *arrays_with(masked_value), **mask_arguments), expected)


LAST_HIDDEN = {
    'mask': {'mask': jnp.arange(5)[None, None, None, :] < 3},
    'causality': {'is_causal': True},
    'window': {'local_window_size': (4, 0)},
    'lengths': {'key_value_seq_lengths': jnp.array([3])},
}
"""Mask arguments under which 3 queries attend to at most the first 3 of 5 keys."""
LOGITS = {
    'cap, scale, slopes': lambda x: {'logits_soft_cap': 5.0, 'scale': x[0, 0, 0, 0], 'alibi_slopes': x[0, 0, :, 0]},
    'l2, cap, sinks': lambda x: {'logits_soft_cap': 5.0, 'qk_norm': 'l2', 'sinks': x[0, 0, :, 0]},
    'rms, scale': lambda x: {'qk_norm': 'rms', 'scale': x[0, 0, 0, 0]},
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('mask_arguments', LAST_HIDDEN.values(), ids=LAST_HIDDEN)
@pytest.mark.parametrize('implementation', ['dense', 'blockwise'])
def test_masked_key_with_overflowing_logits_has_gradients_of_zero_key(implementation, mask_arguments, dtype):
    query, key, value = (x[:1].astype(dtype) for x in make_qkv(T=3))
    blocks = {} if implementation == 'dense' else {'block_sizes': (2, 4)}

    @partial(jax.jit, compiler_options=QUICK)
    def gradients(key, value):
        def loss(arrays, name):
            options = LOGITS[name](arrays[3])
            output = dot_product_attention(
                *arrays[:3], **options, **mask_arguments, **blocks, implementation=implementation
            )
            return jnp.sum(jnp.sin(output.astype('float32'))), output

        option = jnp.cos(jnp.arange(4.0))[None, None, :, None]  # a scale, slopes or sinks
        return [jax.grad(loss, has_aux=True)((query, key, value, option), name) for name in LOGITS]

    # Numbers of both signs, so that a logit may be infinity minus infinity.
    huge = float(jnp.finfo(dtype).max) * jnp.where(jnp.arange(H) % 2, -1, 1).astype(dtype)
    masked_set_to = lambda x: (key.at[:, 3:].set(x), value.at[:, 3:].set(x))
    same(gradients(*masked_set_to(huge)), gradients(*masked_set_to(jnp.zeros(H, dtype))))


@pytest.mark.parametrize('bad', [NAN, INF])
@pytest.mark.parametrize('name', ['key', 'value'])
def test_nonfinite_key_reaches_only_rows_that_attend_to_it(attend, name, bad):
    query, key, value = make_qkv(T=S)
    arrays = {'key': key, 'value': value}
    is_bad = np.zeros((S, K), bool)
    is_bad[-1, 1] = True  # the last key of the second key head: visible to the last row of the last two query heads

    def call(x):
        changed = arrays | {name: jnp.where(is_bad[None, :, :, None], x, arrays[name])}
        return attend(query, **changed, is_causal=True)

    reached = np.zeros((1, S, N, 1), bool)
    reached[:, -1, 2:] = True
    output = call(bad)
    assert not jnp.any(jnp.isfinite(output) & reached)
    assert jnp.all(jnp.isfinite(output) | reached)
    same(jnp.where(reached, 0, output), jnp.where(reached, 0, call(0.0)))


@pytest.mark.parametrize('where', ['query', 'bias', 'query without a mask', 'bias without a mask'])
def test_visible_nan_gives_nan(attend, where):
    query, key, value = make_qkv()
    bias = jnp.zeros((1, 1, T, S))
    query, bias = (query.at[0, 1, 0, 0].set(NAN), bias) if 'query' in where else (query, bias.at[0, 0, 1, 0].set(NAN))
    kwargs = {} if 'without' in where else {'key_value_seq_lengths': jnp.array([3, 3])}
    bad = np.zeros((B, T, N), bool)
    bad[(0, 1, 0) if 'query' in where else np.s_[:, 1]] = True
    output = attend(query, key, value, bias, **kwargs)
    np.testing.assert_array_equal(jnp.isnan(output).any(-1), bad)


# Causality, lengths, windows, segments


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    'T, S, top_left, bottom_right',
    [
        (2, 5, [1, 1.5], [2.5, 3]),
        (5, 2, [1, 1.5, 1.5, 1.5, 1.5], [0, 0, 0, 1, 1.5]),
        (1, 5, [1], [3]),
    ],
)
def test_causality_is_aligned_top_left_or_by_positions(attend, T, S, top_left, bottom_right):
    np.testing.assert_allclose(visible_means(attend, T, S, is_causal=True), top_left, rtol=1e-6)
    positions = {'query_positions': jnp.arange(S - T, S)[None], 'key_positions': jnp.arange(S)[None]}
    np.testing.assert_allclose(visible_means(attend, T, S, is_causal=True, **positions), bottom_right, rtol=1e-6)


@pytest.mark.quick_cases(1)
def test_causal_output_does_not_depend_on_later_keys(attend):
    query, key, value = make_qkv(T=S)
    (output, *_), _ = run_with_gradients(attend, query, key, value, is_causal=True)
    changed = tuple(x.at[:, -1].add(1.0) for x in (key, value))
    (changed_output, *_), _ = run_with_gradients(attend, query, *changed, is_causal=True)
    same(output[:, :-1], changed_output[:, :-1])
    assert not jnp.allclose(output[:, -1], changed_output[:, -1], atol=1e-2)
    (not_causal, *_), _ = run_with_gradients(attend, query, key, value)
    assert not jnp.allclose(output[:, :-1], not_causal[:, :-1], atol=1e-2)


@pytest.mark.quick_cases(1)
def test_decoding_one_query_at_a_time_equals_causal_call(attend):
    query, key, value = make_qkv(T=S)
    whole = attend(query, key, value, is_causal=True)

    def step(t, row):
        return t + 1, attend(row[:, None], key, value, is_causal=True, query_positions=t[None, None])[:, 0]

    _, rows = jax.lax.scan(step, jnp.int32(0), query.swapaxes(0, 1))
    np.testing.assert_allclose(rows.swapaxes(0, 1), whole, atol=1e-6)


def test_key_lengths_and_query_lengths(attend):
    four = jnp.array([4])
    np.testing.assert_allclose(visible_means(attend, 6, 6, key_value_seq_lengths=four), [2.5] * 6, rtol=1e-6)
    both = visible_means(attend, 6, 6, key_value_seq_lengths=four, query_seq_lengths=jnp.array([2]))
    np.testing.assert_allclose(both, [2.5, 2.5, 0, 0, 0, 0], rtol=1e-6)


@pytest.mark.quick_cases(1)
def test_padded_example_equals_example_alone(attend):
    """Three examples of three queries and three keys, so that exchanged axes fit, and give a wrong result."""
    query, key, value = (jnp.concatenate([x, x[:1] + 1]) for x in make_qkv(T=3, S=3))
    lengths = [0, 1, 3]
    rows = attend(query, key, value, key_value_seq_lengths=jnp.array(lengths))
    for b, length in enumerate(lengths):
        alone = attend(query[b : b + 1], key[b : b + 1, :length], value[b : b + 1, :length])
        np.testing.assert_allclose(rows[b : b + 1], alone, atol=1e-6)
    assert jnp.all(rows[0] == 0)


@pytest.mark.slow
def test_batch_row_of_length_zero_does_not_change_others(attend):
    query, key, value = make_qkv()
    (output, *_), gradients = run_with_gradients(attend, query, key, value, key_value_seq_lengths=jnp.array([S - 1, 0]))
    (alone, *_), expected = run_with_gradients(
        attend, query[:1], key[:1], value[:1], key_value_seq_lengths=jnp.array([S - 1])
    )
    same(output[:1], alone)
    same(jax.tree.map(lambda x: x[:1], gradients), expected)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('shape', [(B, 1, 1, S), (1, 1, T, S), (1, N, 1, 1)])
def test_broadcast_mask_equals_full_mask(attend, shape):
    mask = jnp.asarray(np.random.default_rng(2).random(shape) < 0.6)
    full = jnp.broadcast_to(mask, (B, N, T, S))
    same(run_with_gradients(attend, *make_qkv(), mask=mask), run_with_gradients(attend, *make_qkv(), mask=full))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    'shape, mapped', [((1, N, T, S), False), ((B, 1, 1, S), False), ((1, 1, T, S), False), ((B, 1, 1, S), True)]
)
def test_gradient_of_broadcast_bias_is_sum_of_full_gradient(attend, shape, mapped):
    bias = jnp.asarray(np.random.default_rng(3).normal(size=shape), jnp.float32)
    run = lambda bias: run_with_gradients(attend, *make_qkv(), bias, is_causal=True)
    small, full = bias, jnp.broadcast_to(bias, (B, N, T, S))
    if mapped:
        (results, gradients), (expected, whole) = (jax.vmap(run)(x[None]) for x in (small, full))
        results, gradients, expected, whole = jax.tree.map(lambda x: x[0], (results, gradients, expected, whole))
    else:
        (results, gradients), (expected, whole) = run(small), run(full)
    np.testing.assert_allclose(results[0], expected[0], atol=1e-6)
    axes = tuple(axis for axis in range(4) if shape[axis] == 1)
    assert gradients[3].shape == shape and jnp.any(gradients[3] != 0)
    np.testing.assert_allclose(gradients[3], jnp.sum(whole[3], axes, keepdims=True), atol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('dtype, x64', [('float16', False), ('bfloat16', True)])
def test_causality_and_padding_combine_to_one_mask(attend, dtype, x64):
    query, key, value = (x.astype(dtype) for x in make_qkv(T=S))
    padding = jnp.array([[0, 1, 1, 1, 1]], bool)[:, None, None, :]
    low = jnp.full((1, 1, 1, S), -20, dtype)
    with jax.enable_x64(x64):
        both = run_with_gradients(attend, query, key, value, low, mask=padding, is_causal=True)
        one = run_with_gradients(attend, query, key, value, low, mask=padding & jnp.tri(S, dtype=bool)[None, None])
    same(both, one)
    assert both[0][0].dtype == dtype and jnp.all(both[0][0][:, 0] == 0)


@pytest.mark.slow
def test_intermediate_values_are_finite(attend):
    """Run operation by operation, so that JAX checks each result: rows with all, some and no keys, and a low bias."""
    low = jnp.full((1, 1, 1, S), jnp.finfo('float32').min / 2)
    with jax.debug_nans(True), jax.debug_infs(True):
        run_with_gradients_eagerly(
            None, *make_qkv(), low, attend=attend.args[0], key_value_seq_lengths=jnp.array([3, 0]), is_causal=True
        )


@pytest.mark.slow
def test_window_contains_query_position_and_both_sides(attend):
    window = lambda size, T=5, **kwargs: visible_means(attend, T, 5, local_window_size=size, **kwargs)
    np.testing.assert_allclose(window((1, 0)), [1, 1.5, 2.5, 3.5, 4.5], rtol=1e-6)
    np.testing.assert_allclose(window(1), [1.5, 2, 3, 4, 4.5], rtol=1e-6)
    np.testing.assert_allclose(window((0, 0)), [1, 2, 3, 4, 5], rtol=1e-6)
    np.testing.assert_allclose(window((5, 0)), visible_means(attend, 5, 5, is_causal=True), rtol=1e-6)
    np.testing.assert_allclose(window(1, is_causal=True), window((1, 0)), rtol=1e-6)
    np.testing.assert_allclose(window((1, 0), key_value_seq_lengths=jnp.array([2])), [1, 1.5, 2, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(window((1, 0), T=1, query_positions=jnp.array([[3]])), [3.5], rtol=1e-6)


@pytest.mark.slow
def test_packed_segments_do_not_interact(attend):
    query, key, value = make_qkv(T=S)
    ids = jnp.array([[0, 0, 1, 1, 9]])
    kwargs = {'query_segment_ids': ids, 'key_segment_ids': ids, 'is_causal': True}
    second = np.zeros((1, S, 1, 1))
    second[:, 2:4] = 1
    (output, *_), gradients = run_with_gradients(
        attend, query, key, value, loss_weights=jnp.asarray(second, jnp.float32), **kwargs
    )
    for part in (slice(0, 2), slice(2, 4)):
        alone = attend(query[:, part], key[:, part], value[:, part], is_causal=True)
        np.testing.assert_allclose(output[:, part], alone, atol=3e-7)
    for gradient in gradients:
        assert jnp.all(gradient[:, :2] == 0) and jnp.all(gradient[:, 4] == 0) and jnp.any(gradient[:, 2:4] != 0)
    (changed, *_), _ = run_with_gradients(attend, *(x.at[:, 0].add(1) for x in (query, key, value)), **kwargs)
    same(changed[:, 2:], output[:, 2:])
    assert jnp.any(changed[:, :2] != output[:, :2])


# Heads


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('heads', [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_query_heads_share_key_heads_in_groups(attend, heads):
    many, few = heads
    value = jnp.broadcast_to(jnp.arange(1.0, few + 1)[None, None, :, None], (1, 2, few, 2))
    output = attend(jnp.zeros((1, 2, many, 2)), jnp.zeros((1, 2, few, 2)), value)
    np.testing.assert_allclose(output[0, 0, :, 0], np.repeat(np.arange(1, few + 1), many // few), rtol=1e-6)


@pytest.mark.quick_cases(1)
def test_gradients_of_shared_heads_are_sums_over_groups(attend):
    query, key, value = make_qkv()
    _, (_, dk, dv) = run_with_gradients(attend, query, key, value, is_causal=True)
    _, (_, *each) = run_with_gradients(
        attend, query, *(jnp.repeat(x, N // K, axis=2) for x in (key, value)), is_causal=True
    )
    for few, many in zip((dk, dv), each, strict=True):
        np.testing.assert_allclose(few, many.reshape(B, S, K, N // K, H).sum(3), atol=1e-5)
