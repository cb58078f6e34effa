"""Sinusoidal encodings against the formula, ALiBi slopes and T5 buckets against the rules of the published code."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.kernels.positions import (
    alibi_slopes,
    relative_position_buckets,
    sinusoidal_encoding,
    sinusoidal_encoding_2d,
)
from tests.kernels.calls import run_compiled, same

EPS = float(np.finfo(np.float32).eps)


def encode(positions, width, **kwargs):
    return run_compiled(sinusoidal_encoding, jnp.asarray(positions), width=width, **kwargs)


def reference_row(position, width, base=10000.0):
    """Return the encoding of one position in float64, column by column."""
    angles = [position * base ** (-2 * (column // 2) / width) for column in range(width)]
    return [math.cos(a) if column % 2 else math.sin(a) for column, a in enumerate(angles)]


# Sinusoidal encodings


@pytest.mark.parametrize(('width', 'expected'), [
    (4, [0.841471, 0.540302, 0.010000, 0.999950]),
    (5, [0.841471, 0.540302, 0.025116, 0.999685, 0.000631]),
])  # fmt: skip
def test_known_rows_of_even_and_odd_width(width, expected):
    np.testing.assert_allclose(encode([1], width)[0], expected, atol=6e-7)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize('width', [1, 2, 7, 16])
@pytest.mark.parametrize('positions', [[0, 1, 2, 50], [[3], [-4]], [0.5, -7.25], 9])
def test_encoding_matches_formula(positions, width):
    output = encode(positions, width)
    assert output.shape == (*np.shape(positions), width) and output.dtype == jnp.float32
    expected = [reference_row(p, width) for p in np.ravel(positions)]
    np.testing.assert_allclose(output.reshape(-1, width), expected, atol=64 * EPS)


def test_base_changes_encoding():
    np.testing.assert_allclose(encode([3], 8, base=100.0)[0], reference_row(3, 8, 100.0), atol=8 * EPS)


def test_sine_and_cosine_of_a_pair_have_the_same_frequency():
    squares = np.asarray(encode(np.arange(-500, 501), 32)).reshape(-1, 16, 2) ** 2
    np.testing.assert_allclose(squares.sum(-1), 1, atol=4 * EPS)


def test_position_zero_and_empty_positions():
    np.testing.assert_array_equal(encode([0], 5)[0], [0, 1, 0, 1, 0])
    assert encode(jnp.zeros(0, int), 5).shape == (0, 5)


def test_error_at_large_positions_is_that_of_float32_angles():
    error = np.abs(encode([100_000], 128)[0] - np.array(reference_row(100_000, 128)))
    assert 1e-3 < error.max() < 6e-3 and error[:2].max() < 2 * EPS


@pytest.mark.parametrize(('positions', 'width', 'message'), [
    ([1], 0, 'width is 0; expected a positive number of columns'),
    ([True], 4, 'positions have dtype bool; expected integers or floats'),
])  # fmt: skip
def test_invalid_width_and_positions_raise(as_used, positions, width, message):
    with pytest.raises(ValueError, match=message):
        sinusoidal_encoding(positions, width)


# Grids


def encode_grid(rows, columns, width):
    return np.asarray(run_compiled(sinusoidal_encoding_2d, rows=rows, columns=columns, width=width)).reshape(
        rows, columns, width
    )


def test_grid_of_3_rows_and_4_columns_is_row_major():
    output = encode_grid(3, 4, 8)
    for r, c in np.ndindex(3, 4):
        np.testing.assert_allclose(output[r, c], reference_row(r, 4) + reference_row(c, 4), atol=8 * EPS)
    tokens = output.reshape(12, 8)
    assert np.all(tokens[0:4, :4] == tokens[0, :4]) and np.any(tokens[0, :4] != tokens[4, :4])
    assert np.all(tokens[[0, 4, 8], 4:] == tokens[0, 4:]) and np.any(tokens[0, 4:] != tokens[1, 4:])


def test_transposing_square_grid_swaps_the_halves():
    output = encode_grid(3, 3, 8)
    np.testing.assert_array_equal(output.swapaxes(0, 1), np.concatenate([output[..., 4:], output[..., :4]], axis=-1))


@pytest.mark.parametrize('width', [0, 6, 9])
def test_width_that_does_not_divide_by_4_raises(width):
    with pytest.raises(ValueError, match=f'width is {width}; expected a positive multiple of 4'):
        sinusoidal_encoding_2d(2, 2, width)


# ALiBi


def reference_slopes(heads):
    """Return the slopes by the rule of the paper, a recursion over powers of two."""
    if (power := math.log2(heads)).is_integer():
        first = 2 ** (-(2 ** -(power - 3)))
        return [first ** (n + 1) for n in range(heads)]
    below = 2 ** math.floor(power)
    return reference_slopes(below) + reference_slopes(2 * below)[::2][: heads - below]


def test_slopes_of_eight_heads_are_powers_of_a_half():
    np.testing.assert_array_equal(alibi_slopes(8), [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256])


@pytest.mark.parametrize('heads', [1, 2, 3, 5, 6, 7, 12, 16, 20, 31, 33])
def test_slopes_match_reference_for_any_number_of_heads(heads):
    slopes = alibi_slopes(heads)
    assert slopes.shape == (heads,) and slopes.dtype == jnp.float32
    np.testing.assert_allclose(slopes, reference_slopes(heads), rtol=EPS)


def test_zero_heads_raise():
    with pytest.raises(ValueError, match='heads is 0; expected a positive number'):
        alibi_slopes(0)


# T5's buckets


def reference_buckets(queries, keys, buckets, max_distance, bidirectional):
    """Return the buckets by the rule of the T5 code, pair by pair, in float64."""
    result = np.zeros((len(queries), len(keys)), int)
    for (t, q), (s, k) in ((a, b) for a in enumerate(queries) for b in enumerate(keys)):
        distance, count = q - k, buckets
        if bidirectional:
            count = buckets // 2
            result[t, s] = count if distance < 0 else 0
            distance = abs(distance)
        distance, exact = max(distance, 0), count // 2
        if distance < exact:
            result[t, s] += distance
        else:
            large = exact + int(math.log(distance / exact) / math.log(max_distance / exact) * (count - exact))
            result[t, s] += min(large, count - 1)
    return result


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize('bidirectional', [True, False])
@pytest.mark.parametrize(('buckets', 'max_distance'), [(32, 128), (64, 256), (8, 20), (4, 3), (12, 1000)])
def test_buckets_match_t5(buckets, max_distance, bidirectional):
    queries = np.array([0, 3, -2, 511])
    keys = np.concatenate([np.arange(-300, 300), [-(10**6), 10**6]])
    kwargs = {'buckets': buckets, 'max_distance': max_distance, 'bidirectional': bidirectional}
    output = run_compiled(relative_position_buckets, jnp.asarray(queries), jnp.asarray(keys), **kwargs)
    np.testing.assert_array_equal(output, reference_buckets(queries, keys, **kwargs))
    empty = {buckets // 2} if bidirectional else set()  # the bucket for distance 0 after the query
    assert output.dtype == jnp.int32 and set(np.unique(output).tolist()) == set(range(buckets)) - empty


def test_bounds_of_default_buckets():
    """The bounds are 8 * 16^(k / 8) and 16 * 8^(k / 16), rounded up; powers of two must not depend on a logarithm."""
    zero, before = jnp.zeros(1, int), -jnp.array([0, 7, 8, 11, 12, 15, 16, 22, 23, 31, 32, 63, 64, 90, 91, 4000])
    both = run_compiled(relative_position_buckets, zero, before, bidirectional=True)
    assert both[0].tolist() == [0, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 13, 14, 14, 15, 15]
    before = -jnp.array([0, 15, 16, 18, 19, 112, 113, 128, 4000, -1, -99])
    causal = run_compiled(relative_position_buckets, zero, before, bidirectional=False)
    assert causal[0].tolist() == [0, 15, 16, 16, 17, 30, 31, 31, 31, 0, 0]


def test_batch_rows_have_their_own_positions():
    queries, keys = jnp.array([[0, 5], [7, 7]]), jnp.array([[0, 1, 2], [3, 9, -4]])
    output = run_compiled(relative_position_buckets, queries, keys, bidirectional=True)
    for row in range(2):
        same(output[row], run_compiled(relative_position_buckets, queries[row], keys[row], bidirectional=True))
    assert run_compiled(relative_position_buckets, jnp.zeros(0, int), keys[0], bidirectional=False).shape == (0, 3)


@pytest.mark.parametrize(('kwargs', 'message'), [
    ({'buckets': 1, 'bidirectional': False}, 'buckets is 1; expected at least 2'),
    ({'buckets': 2}, 'buckets is 2; expected an even number >= 4, half for each side'),
    ({'buckets': 33}, 'buckets is 33; expected an even number >= 4, half for each side'),
    ({'max_distance': 8}, 'max_distance is 8; expected more than 8'),
    ({'max_distance': 16, 'bidirectional': False}, 'max_distance is 16; expected more than 16'),
    ({'query_positions': [0.5]}, 'query_positions has dtype float32; expected signed integers'),
    ({'key_positions': jnp.zeros(2, 'uint32')}, 'key_positions has dtype uint32; expected signed integers'),
    ({'key_positions': [[1, 2]]}, r'have shapes \(2,\), \(1, 2\); expected \[T\] and \[S\]'),
    ({'query_positions': 1, 'key_positions': 1}, r'have shapes \(\), \(\); expected \[T\] and \[S\]'),
])  # fmt: skip
def test_invalid_bucket_arguments_raise(as_used, kwargs, message):
    arguments = {'query_positions': [0, 1], 'key_positions': [0, 1], 'bidirectional': True} | kwargs
    with pytest.raises(ValueError, match=message):
        relative_position_buckets(**arguments)


@pytest.mark.slow
def test_distances_of_int8_positions_do_not_wrap_around():
    """100 and -100 fit int8, but their distance does not."""
    queries, keys = np.array([100, 5], np.int8), np.array([-100, 100], np.int8)
    expected = relative_position_buckets(jnp.array([100, 5]), jnp.array([-100, 100]), bidirectional=True)
    np.testing.assert_array_equal(relative_position_buckets(queries, keys, bidirectional=True), expected)
    np.testing.assert_array_equal(expected, [[15, 0], [15, 31]])


def test_positions_beyond_int32_raise():
    with pytest.raises(ValueError, match='positions holds 0 .. 1099511627776; expected -2147483648 .. 2147483647'):
        sinusoidal_encoding(np.array([0, 2**40]), 4)


def test_numpy_numbers_equal_python_numbers(as_used):
    np.testing.assert_array_equal(alibi_slopes(np.int64(6)), alibi_slopes(6))
    keys = np.arange(-900, 900, 7)
    sizes = lambda convert: {'buckets': convert(64), 'max_distance': convert(777), 'bidirectional': True}
    buckets = lambda convert: relative_position_buckets([0], keys, **sizes(convert))
    np.testing.assert_array_equal(buckets(np.int64), buckets(int))
