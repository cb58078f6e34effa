"""`Mask` against the oracle's definition of which query may attend to which key."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import additive_attention, dot_product_attention
from attnlab.kernels.masks import (
    Mask,
    causal_mask,
    length_mask,
    mask_as_array,
    packed_mask,
    padding_mask,
    positions_in_segments,
    prefix_mask,
    segment_mask,
    window_mask,
)  # fmt: skip
from tests.kernels import oracle
from tests.kernels.combinations import make_arguments, small_combination
from tests.quick import QUICK


@pytest.mark.parametrize('seed', range(60))
def test_mask_allows_what_every_field_allows(seed):
    combination = small_combination(seed, additive=True)
    (B, T, S, N, *_), (_, kwargs, _) = combination.sizes, make_arguments(combination)
    expected = [oracle.is_visible(*index, **kwargs) for index in np.ndindex(B, N, T, S)]
    window = kwargs.pop('local_window_size', None)
    window = (window, window) if isinstance(window, int) else window
    fields = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in kwargs.items()}
    array = mask_as_array(Mask(**fields, window=window), T, S)
    if array is None:
        assert all(expected)
    else:
        np.testing.assert_array_equal(jnp.broadcast_to(array, (B, N, T, S)).ravel(), expected)


ARRAY_SHAPES = {
    'empty': (Mask(), None),
    'positions': (Mask(query_positions=jnp.zeros((2, 3), int)), None),
    'mask': (Mask(mask=jnp.ones((1, 4, 1, 5), bool)), (1, 4, 1, 5)),
    'query lengths': (Mask(query_seq_lengths=jnp.array([1, 2])), (2, 1, 3, 1)),
    'key lengths': (Mask(key_value_seq_lengths=jnp.array([1, 2])), (2, 1, 1, 5)),
    'causality': (Mask(is_causal=True), (1, 1, 3, 5)),
    'window': (Mask(window=(1, 1)), (1, 1, 3, 5)),
    'segments': (Mask(query_segment_ids=jnp.zeros((2, 3), int), key_segment_ids=jnp.zeros((1, 5), int)),
                 (2, 1, 3, 5)),
}  # fmt: skip


@pytest.mark.parametrize('mask, shape', ARRAY_SHAPES.values(), ids=ARRAY_SHAPES)
def test_array_has_the_smallest_broadcastable_shape(mask, shape):
    array = mask_as_array(mask, 3, 5)
    assert (None if array is None else array.shape) == shape
    assert array is None or array.dtype == bool


def test_length_mask_is_true_for_first_positions():
    mask = length_mask(jnp.array([0, 2, 3, 9]), 3)
    np.testing.assert_array_equal(mask, [[0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]])
    assert mask.dtype == bool and length_mask(jnp.zeros(0, int), 0).shape == (0, 0)


# Combined masks

IDS = jnp.array([[0, 0, 3, 3, 3], [1, 2, 2, 2, 7]])
MASK = jnp.asarray(np.random.default_rng(0).random((2, 1, 5, 5)) < 0.7)
POSITIONS = jnp.array([[4, 3, 2, 1, 0]])
COMBINABLE = {
    'causal': causal_mask(),
    'causal by positions': causal_mask(POSITIONS, POSITIONS),
    'window': window_mask(2, 1),
    'narrower window': window_mask(1, 3),
    'prefix': prefix_mask(jnp.array([2, 0])),
    'longer prefix': prefix_mask(jnp.array([1, 4])),
    'lengths': padding_mask(jnp.array([3, 5]), jnp.array([4, 2])),
    'other lengths': padding_mask(keys=jnp.array([1, 5])),
    'segments': segment_mask(IDS),
    'mask': Mask(MASK),
    'other mask': Mask(MASK[:1].swapaxes(2, 3)),
}
CHANGED_BY_POSITIONS = {'causal', 'window', 'narrower window', 'prefix', 'longer prefix'}


@pytest.mark.parametrize('first', COMBINABLE)
def test_combined_masks_allow_what_both_allow(first):
    full_array = lambda mask: jnp.broadcast_to(mask_as_array(mask, 5, 5), (2, 1, 5, 5))
    for second in COMBINABLE:
        if 'causal by positions' in (first, second) and CHANGED_BY_POSITIONS & {first, second}:
            continue  # the positions of one mask apply to both
        both = full_array(COMBINABLE[first] & COMBINABLE[second])
        np.testing.assert_array_equal(
            both, full_array(COMBINABLE[first]) & full_array(COMBINABLE[second]), err_msg=second
        )
    for alone in (COMBINABLE[first] & Mask(), Mask() & COMBINABLE[first]):
        jax.tree.map(np.testing.assert_array_equal, alone, COMBINABLE[first])


def test_prefix_mask_is_causal_after_the_prefix():
    allowed = mask_as_array(prefix_mask(jnp.array([2, 0])), 3, 4)[:, 0]
    np.testing.assert_array_equal(allowed[0], [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]])
    np.testing.assert_array_equal(allowed[1], [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]])


def test_packed_mask_is_causal_within_each_segment():
    np.testing.assert_array_equal(positions_in_segments(IDS), [[0, 1, 0, 1, 2], [0, 0, 1, 2, 0]])
    assert positions_in_segments(jnp.zeros((0, 3), int)).shape == (0, 3) and positions_in_segments(
        jnp.zeros((1, 0), int)
    ).shape == (1, 0)
    same_segment, causal = IDS[:, :, None] == IDS[:, None, :], np.tri(5, dtype=bool)[None]
    np.testing.assert_array_equal(mask_as_array(packed_mask(IDS), 5, 5)[:, 0], same_segment & causal)


def test_masks_that_cannot_be_combined_raise():
    with pytest.raises(ValueError, match='query_segment_ids is given twice; expected it in one'):
        segment_mask(IDS) & segment_mask(IDS + 1)
    with pytest.raises(ValueError, match='query_positions is given twice'):
        causal_mask(POSITIONS, POSITIONS) & packed_mask(IDS)
    with pytest.raises(ValueError, match=r'the window is \(1, -1\); expected'):
        window_mask(1, -1)
    with pytest.raises(ValueError, match='prefix_lengths exempts keys from causality; expected is_causal'):
        x = jnp.ones((2, 5, 1, 1))
        dot_product_attention(x, x, x, mask=Mask(prefix_lengths=jnp.array([1, 2])))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('implementation', ['dense', 'blockwise'])
def test_attention_combines_mask_with_mask_arguments(implementation):
    random = np.random.default_rng(0)
    query, key, value = (jnp.asarray(random.normal(size=(2, 5, 1, 3)), jnp.float32) for _ in range(3))
    mask = causal_mask() & padding_mask(keys=jnp.array([4, 3])) & segment_mask(IDS)
    attend = lambda **kwargs: dot_product_attention(query, key, value, implementation=implementation, **kwargs)
    expected = attend(mask=mask_as_array(mask & window_mask(1, 0), 5, 5))
    np.testing.assert_allclose(attend(mask=mask, local_window_size=(1, 0)), expected, atol=1e-6)
    np.testing.assert_allclose(attend(mask=mask & window_mask(1, 0), is_causal=True), expected, atol=1e-6)


def test_masks_pass_through_transformations_without_arrays():
    mask = causal_mask() & window_mask(2, 0) & padding_mask(keys=jnp.array([4, 3]))
    through = jax.jit(lambda mask: mask)(mask)
    assert through.is_causal is True and through.window == (2, 0) and through.mask is None
    array = jax.jit(lambda mask: mask_as_array(mask, 5, 5))(mask)
    np.testing.assert_array_equal(array, mask_as_array(mask, 5, 5))
    doubled = jax.vmap(lambda mask: mask_as_array(mask, 5, 5))(jax.tree.map(lambda x: jnp.stack([x, x - 1]), mask))
    np.testing.assert_array_equal(doubled[0], array)
    assert [str(path[0]) for path, _ in jax.tree_util.tree_leaves_with_path(mask)] == ['.key_value_seq_lengths']


# Lists, NumPy integers, narrow and large integers


ROWS = [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]
MASKS_OF_LISTS = {
    'lengths': lambda convert: padding_mask(queries=convert([3, 5]), keys=convert([5, 2])),
    'prefix': lambda convert: prefix_mask(convert([3, 0])),
    'segments': lambda convert: segment_mask(convert(ROWS)),
    'packed': lambda convert: packed_mask(convert(ROWS)),
    'positions': lambda convert: causal_mask(convert(ROWS), convert(ROWS)) & window_mask(*convert([1, 0])),
}
CONVERSIONS = {'list': lambda x: x, 'numpy': np.array, 'int8': lambda x: np.array(x, np.int8), 'int64': np.int64}


@pytest.mark.parametrize('convert', CONVERSIONS.values(), ids=CONVERSIONS)
@pytest.mark.parametrize('make_mask', MASKS_OF_LISTS.values(), ids=MASKS_OF_LISTS)
def test_masks_accept_lists_and_numpy_arrays(make_mask, convert):
    expected = mask_as_array(
        make_mask(lambda x: jnp.asarray(x) if np.ndim(x) > 1 or len(x) > 2 or x[1] != 0 else x), 5, 5
    )
    np.testing.assert_array_equal(mask_as_array(make_mask(convert), 5, 5), expected)


NARROW = {
    'int16, a window of 40,000': ('int16', {'local_window_size': 40_000}),
    'int8, a window of 1,000': ('int8', {'local_window_size': (1000, 1000)}),
    'int8, ALiBi': ('int8', {'alibi_slopes': jnp.array([0.01])}),
    'int8, causality': ('int8', {'is_causal': True}),
}


@pytest.mark.parametrize('implementation', ['dense', 'blockwise', 'additive'])
@pytest.mark.parametrize('dtype, kwargs', NARROW.values(), ids=NARROW)
def test_narrow_positions_equal_int32(implementation, dtype, kwargs):
    if implementation == 'additive' and 'alibi_slopes' in kwargs:
        pytest.skip('additive attention takes no slopes')
    query, key = jnp.ones((1, 2, 1, 2)), jnp.arange(6.0).reshape(1, 3, 1, 2)

    @partial(jax.jit, compiler_options=QUICK)
    def attend(queries, keys):
        options = {'query_positions': queries, 'key_positions': keys, **kwargs}
        if implementation == 'additive':
            return additive_attention(query, key, key, jnp.ones((1, 2)), **options)
        blocks = {'block_sizes': (2, 2)} if implementation == 'blockwise' else {}
        return dot_product_attention(query, key, key, **options, **blocks, implementation=implementation)

    positions = jnp.array([[100, -100]]), jnp.array([[-100, 120, 0]])
    output = attend(*(x.astype(dtype) for x in positions))
    np.testing.assert_array_equal(output, attend(*positions))
    assert jnp.all(output[0, :1] > 0)


@pytest.mark.parametrize('implementation', ['dense', 'blockwise'])
def test_narrow_lengths_and_segments_equal_int32(implementation):
    """There are 300 keys: int8 cannot hold the padded length that blockwise compares with."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 300, 1, 2)), jnp.float32)
    ids = jnp.arange(300)[None] // 100

    @partial(jax.jit, compiler_options=QUICK)
    def attend(lengths, ids):
        return dot_product_attention(
            x, x, x, key_value_seq_lengths=lengths, query_segment_ids=ids, key_segment_ids=ids,
            implementation=implementation,
        )  # fmt: skip

    expected = attend(jnp.array([100]), ids)
    np.testing.assert_array_equal(attend(jnp.array([100], 'int8'), ids.astype('int8')), expected)
    assert jnp.all(jnp.any(expected[0, :100] != 0, axis=(1, 2))) and not jnp.any(expected[0, 100:])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('implementation', ['dense', 'blockwise'])
def test_arguments_accept_python_and_numpy_numbers(implementation):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 1, 2)), jnp.float32)
    blocks = (lambda *sizes: {}) if implementation == 'dense' else (lambda *sizes: {'block_sizes': sizes})
    attend = lambda **kwargs: dot_product_attention(x, x, x, **kwargs, implementation=implementation)
    with_numpy = attend(
        local_window_size=np.int64(1), scale=np.float32(0.5), logits_soft_cap=np.float32(2),
        dropout_rate=np.float32(0), **blocks(np.int64(2), np.int32(4)), key_value_seq_lengths=[3, 5],
    )  # fmt: skip
    with_python = attend(
        local_window_size=1, scale=0.5, logits_soft_cap=2.0, **blocks(2, 4), key_value_seq_lengths=jnp.array([3, 5])
    )
    np.testing.assert_array_equal(with_numpy, with_python)
    np.testing.assert_array_equal(
        attend(local_window_size=[np.int64(1), 0], **blocks(2, 4)), attend(local_window_size=(1, 0), **blocks(2, 4))
    )
    wide_window = attend(mask=window_mask(2**40, 0), key_value_seq_lengths=[2**40, 5], **blocks(2, 4))
    np.testing.assert_array_equal(wide_window, attend(is_causal=True, **blocks(2, 4)))


X = jnp.ones((2, 8, 8, 4))
INVALID = {
    r'scale has shape \(8,\); expected one number': {'scale': jnp.ones(8)},
    r'scale has shape \(2,\); expected one number': {'scale': [1.0, 2.0]},
    r'scale is wide; expected one number': {'scale': 'wide'},
    r'logits_soft_cap is \[1. 1.\]; expected one number': {'logits_soft_cap': np.ones(2)},
    r'dropout_rate is \[0.\]; expected one number': {'dropout_rate': np.zeros(1)},
    r'local_window_size is 1.5; expected a number or \(left, right\)': {'local_window_size': 1.5},
    r"block_sizes is \(8.0, 8\); expected": {'block_sizes': (8.0, 8)},
    r'query_positions holds 0 .. 1099511627776; expected -2147483648 .. 2147483647': {
        'query_positions': np.array([[0] * 7 + [2**40]])
    },
    r'query_positions is \[\[1180591620717411303424\]\]; expected integers of at most 64 bits': {
        'query_positions': [[2**70]]
    },
}  # fmt: skip


@pytest.mark.parametrize('implementation', [None, 'dense', 'blockwise'])
@pytest.mark.parametrize('message, kwargs', INVALID.items())
def test_arguments_that_are_not_one_number_or_too_large_raise(as_used, implementation, message, kwargs):
    with pytest.raises(ValueError, match=message):
        dot_product_attention(X, X, X, **kwargs, implementation=implementation)
