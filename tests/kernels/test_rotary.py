"""Rotary encodings against complex numbers in float64: a rotation by an angle is a product with exp(i angle)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.kernels.rotary import (
    LinearScaling,
    NTKScaling,
    YaRNScaling,
    rotary_encoding,
    rotary_encoding_2d,
    rotary_frequencies,
)
from tests.kernels.calls import run_compiled, same

EPS = float(np.finfo(np.float32).eps)
LAYOUTS = 'half', 'interleaved'


def rotate(x, positions, **kwargs):
    return run_compiled(rotary_encoding, jnp.asarray(x), jnp.asarray(positions), **kwargs)


def rotate_2d(x, rows, columns, **kwargs):
    return run_compiled(rotary_encoding_2d, x, rows=rows, columns=columns, **kwargs)


def random_array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def reference(x, positions, frequencies, layout, magnitude=1.0):
    """Rotate the first 2 * len(frequencies) channels of x [..., T, N, H] in float64."""
    x, R = np.asarray(x, np.float64), 2 * len(frequencies)
    first, second = (slice(R // 2), slice(R // 2, R)) if layout == 'half' else (slice(0, R, 2), slice(1, R, 2))
    angles = np.asarray(positions, np.float64)[..., None, None] * frequencies
    pairs = (x[..., first] + 1j * x[..., second]) * magnitude * np.exp(1j * angles)
    output = x.copy()
    output[..., first], output[..., second] = pairs.real, pairs.imag
    return output


# Layouts


@pytest.mark.slow
def test_known_values_of_both_layouts():
    x = jnp.arange(1.0, 5)[None, None, None]
    for layout, expected in (
        ('interleaved', [-1.142640, 1.922076, 2.959851, 4.029800]),
        ('half', [-1.984111, 1.959901, 2.462378, 4.019800]),
    ):
        np.testing.assert_allclose(rotate(x, [1], layout=layout)[0, 0, 0], expected, atol=1e-6)
    swap = np.array([0, 2, 1, 3])
    same(rotate(x[..., swap], [1], layout='half')[..., swap], rotate(x, [1], layout='interleaved'))


def test_layouts_agree_after_documented_permutation():
    x, R = random_array(1, 3, 2, 8), 8
    permutation = np.array([2 * c if c < R // 2 else 2 * c - R + 1 for c in range(R)])
    same(
        rotate(x, [0, 5, 9], layout='interleaved')[..., permutation],
        rotate(x[..., permutation], [0, 5, 9], layout='half'),
    )


# Rotation


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize(('shape', 'positions', 'fraction'), [
    ((2, 3, 4, 6), [0, 1, 2], 1.0),
    ((2, 3, 1, 8), [[0, -7, 2], [1000, 3, 3]], 0.25),
    ((2, 3, 1, 10), [[5, 0, 900]], 0.6),
    ((3, 2, 6), [0.5, -2.25, 3.0], 1.0),
    ((2, 1, 3, 1, 4), [[[1, 2, 3]], [[4, 5, 6]]], 1.0),
])  # fmt: skip
def test_pairs_are_rotated_by_position_times_frequency(shape, positions, fraction, layout):
    x, R = random_array(*shape), round(fraction * shape[-1])
    frequencies = np.array([10000.0 ** (-2 * i / R) for i in range(R // 2)])
    output = rotate(x, positions, layout=layout, fraction=fraction)
    bound = 4 * (np.abs(positions).max() + 1) * EPS * np.abs(x).max()
    np.testing.assert_allclose(output, reference(x, positions, frequencies, layout), atol=bound)
    same(output[..., R:], jnp.asarray(x)[..., R:])
    assert output.dtype == jnp.float32


@pytest.mark.parametrize('layout', LAYOUTS)
def test_position_zero_is_identity_and_norms_are_preserved(layout):
    x = random_array(2, 3, 1, 8)
    same(rotate(x, [0, 0, 0], layout=layout), jnp.asarray(x))
    lengths = np.linalg.norm(rotate(x, [-3, 77, 123_456], layout=layout), axis=-1)
    np.testing.assert_allclose(lengths, np.linalg.norm(x, axis=-1), rtol=4 * EPS)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_product_depends_only_on_position_difference(layout):
    """In float64, because float32 angles of large positions are rounded."""
    with jax.enable_x64(True):
        x, y = (jnp.asarray(random_array(1, 1, 1, 64, seed=seed), 'float64') for seed in (1, 2))
        near, far, other = (
            float(jnp.sum(rotate(x, [a], layout=layout) * rotate(y, [b], layout=layout)))
            for a, b in ((7, 3), (1007, 1003), (7, 2))
        )
    assert abs(near - far) < 1e-11 and abs(near - other) > 1e-2


def test_rotation_commutes_with_repeating_heads():
    keys = random_array(2, 3, 2, 4)
    before = jnp.repeat(rotate(keys, [3, 4, 9]), 2, axis=2)
    same(before, rotate(np.repeat(keys, 2, axis=2), [3, 4, 9]))


def test_gradient_is_inverse_rotation():
    x, weights = random_array(2, 3, 2, 6), random_array(2, 3, 2, 6, seed=1)

    def gradient(x, weights):
        return jax.grad(lambda x: jnp.sum(rotary_encoding(x, jnp.array([1, 5, -2])) * weights))(x)

    np.testing.assert_allclose(jax.jit(gradient)(x, weights), rotate(weights, [-1, -5, 2]), atol=4 * EPS)


def test_vmap_over_batch():
    x, positions = jnp.asarray(random_array(2, 3, 2, 6)), jnp.array([[0, 1, 2], [7, 8, 9]])
    same(run_compiled(jax.vmap(rotary_encoding), x, positions), rotate(x, positions))


@pytest.mark.parametrize('shape', [(0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 0, 4), (2, 3, 2, 0)])
def test_axes_of_size_zero(shape):
    assert rotate(jnp.zeros(shape), jnp.arange(shape[1])).shape == shape


# Precision


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_half_precision_has_float32_angles(dtype, layout):
    """Position 4097 is not a bfloat16; the nearest one, 4096, is one radian off."""
    x = jnp.asarray(random_array(1, 1, 2, 64), dtype)
    output = rotate(x, [4097], layout=layout)
    expected = reference(x, [4097], rotary_frequencies(64), layout)
    assert output.dtype == dtype
    np.testing.assert_allclose(output.astype('float32'), expected, atol=2e-3, rtol=float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize(('position', 'stated'), [(10_000, 3.5e-4), (100_000, 5.5e-3)])
def test_error_at_large_positions_is_as_documented(position, stated):
    x = np.zeros((1, 1, 1, 128), np.float32)
    x[..., :64] = 1
    for at in (position, -position):
        error = np.abs(rotate(x, [at]) - reference(x, [at], rotary_frequencies(128), 'half'))
        assert stated / 2 < error.max() < stated < position * EPS
        assert error[..., [0, 64]].max() < 2 * EPS  # pair 0 rotates by whole radians, which float32 represents exactly


# Frequencies and their scaling


def test_frequencies_are_powers_of_the_base():
    np.testing.assert_allclose(rotary_frequencies(8, 10000.0), [1, 0.1, 0.01, 0.001], rtol=1e-14)
    np.testing.assert_allclose(rotary_frequencies(4, 256.0), [1, 1 / 16], rtol=1e-14)
    assert (
        rotary_frequencies(7).shape == (4,)
        and rotary_frequencies(0).shape == (0,)
        and rotary_frequencies(2).dtype == np.float64
    )


@pytest.mark.parametrize('factor', [1.0, 2.0, 7.5])
def test_linear_scaling_divides_positions(factor):
    x = random_array(1, 3, 1, 8)
    positions = np.array([0, 3, 15])
    scaled = rotate(x, positions, scaling=LinearScaling(factor))
    np.testing.assert_allclose(scaled, rotate(x, positions / factor), atol=16 * EPS * np.abs(x).max())


@pytest.mark.parametrize(('width', 'base', 'factor'), [(64, 10000.0, 4.0), (128, 5e5, 8.0), (4, 100.0, 3.0)])
def test_ntk_keeps_first_pair_and_slows_last_by_factor(width, base, factor):
    output = rotary_frequencies(width, base, NTKScaling(factor))
    expected = [base ** (-2 * i / width) * factor ** (-2 * i / (width - 2)) for i in range(width // 2)]
    np.testing.assert_allclose(output, expected, rtol=1e-12)
    np.testing.assert_allclose(rotary_frequencies(width, base)[[0, -1]] / output[[0, -1]], [1, factor], rtol=1e-12)


def yarn_reference(width, base, factor, length, fast=32, slow=1):
    """Yield frequencies by the rule of the authors' code: pair d makes length * base^(-2d / width) / (2 pi) turns."""
    pair_index = lambda turns: width / 2 * math.log(length / (2 * math.pi * turns), base)
    first, last = max(math.floor(pair_index(fast)), 0), min(math.ceil(pair_index(slow)), width - 1)
    for d in range(width // 2):
        frequency = base ** (-2 * d / width)
        unscaled = 1 - min(max((d - first) / (last - first), 0), 1)
        yield unscaled * frequency + (1 - unscaled) * frequency / factor


@pytest.mark.parametrize(('width', 'base', 'factor', 'length'), [
    (128, 10000.0, 16.0, 4096), (64, 10000.0, 4.0, 2048), (64, 5e5, 8.0, 8192), (8, 10000.0, 2.0, 64),
    (4, 100.0, 2.0, 100_000), (128, 10000.0, 32.0, 128), (8, 8.0, 2.0, 740),
])  # fmt: skip
def test_yarn_matches_reference_and_keeps_fast_pairs(width, base, factor, length):
    output, plain = rotary_frequencies(width, base, YaRNScaling(factor, length)), rotary_frequencies(width, base)
    np.testing.assert_allclose(output, list(yarn_reference(width, base, factor, length)), rtol=1e-12)
    turns = length * plain / (2 * math.pi)
    np.testing.assert_allclose(output[turns >= 32], plain[turns >= 32], rtol=1e-12)
    np.testing.assert_allclose(output[turns <= 1], plain[turns <= 1] / factor, rtol=1e-12)
    assert np.all(np.diff(output / plain) <= 1e-12)


def test_yarn_matches_published_code():
    """The expected numbers are those of `LlamaYaRNScaledRotaryEmbedding` for (16, scale=4,
    original_max_position_embeddings=1024), computed in PyTorch's float32."""
    expected = [1.0, 3.1622776e-1, 8.1250004e-2, 1.9764237e-2, 4.3750000e-3, 7.9056947e-4, 2.5000001e-4, 7.9056947e-5]
    np.testing.assert_allclose(rotary_frequencies(16, 10000.0, YaRNScaling(4.0, 1024)), expected, rtol=4 * EPS)


def test_yarn_ramp_of_length_zero_is_a_step():
    """Over 5 positions no pair makes a turn; both ends of the ramp are below pair 0, and are moved to it."""
    plain = rotary_frequencies(8)
    np.testing.assert_allclose(rotary_frequencies(8, scaling=YaRNScaling(2.0, 5)), plain / [1, 2, 2, 2], rtol=1e-12)


@pytest.mark.parametrize('length, fast, slow, expected', [
    (64, 64.0, 32.0, 4.0),  # the fastest pair makes 10 turns, fewer than beta_slow: all are scaled
    (10**6, 2e-5, 1e-5, 1.0),  # the slowest pair makes 18 turns, more than beta_fast: none is scaled
])  # fmt: skip
def test_yarn_ramp_outside_all_pairs_scales_all_or_none(length, fast, slow, expected):
    output = rotary_frequencies(128, 10000.0, YaRNScaling(4.0, length, beta_fast=fast, beta_slow=slow))
    np.testing.assert_allclose(rotary_frequencies(128) / output, expected, rtol=1e-12)


def test_yarn_magnitude_applies_only_to_rotated_channels():
    yarn, x = YaRNScaling(8.0, 64), random_array(1, 3, 1, 8)
    assert yarn.magnitude == pytest.approx(0.1 * math.log(8) + 1) and YaRNScaling(1.0, 64).magnitude == 1
    output = rotate(x, [0, 5, 500], scaling=yarn, fraction=0.5)
    expected = reference(x, [0, 5, 500], rotary_frequencies(4, scaling=yarn), 'half', 0.1 * math.log(8) + 1)
    np.testing.assert_allclose(output, expected, atol=500 * EPS)
    same(output[..., 4:], jnp.asarray(x)[..., 4:])


def test_scalings_of_different_type_are_not_equal():
    x = jnp.asarray(random_array(1, 1, 1, 4))
    program = jax.jit(lambda x, scaling: rotary_encoding(x, jnp.array([9]), scaling=scaling), static_argnums=1)
    assert LinearScaling(2.0) != NTKScaling(2.0) and LinearScaling(2.0) == LinearScaling(2.0)
    assert jnp.any(program(x, LinearScaling(2.0)) != program(x, NTKScaling(2.0)))


# Grids


@pytest.mark.parametrize('layout', LAYOUTS)
def test_grid_rotates_half_by_row_and_half_by_column(layout):
    x = random_array(2, 12, 3, 8)
    output = rotate_2d(x, 3, 4, layout=layout)
    rows, columns, frequencies = np.arange(12) // 4, np.arange(12) % 4, np.array([1, 0.1])
    by_row = reference(x[..., :4], rows, frequencies, layout)
    by_column = reference(x[..., 4:], columns, frequencies, layout)
    np.testing.assert_allclose(output, np.concatenate([by_row, by_column], axis=-1), atol=16 * EPS)


def test_tokens_of_a_row_or_column_share_a_half():
    encoded = rotate_2d(jnp.ones((12, 1, 8)), 3, 4)[:, 0]
    row, column = encoded[:, :4].reshape(3, 4, 4), encoded[:, 4:].reshape(3, 4, 4)
    same(row, jnp.broadcast_to(row[:, :1], row.shape))
    same(column, jnp.broadcast_to(column[:1], column.shape))
    assert len(np.unique(row[:, 0], axis=0)) == 3 and len(np.unique(column[0], axis=0)) == 4


def test_transposing_square_grid_swaps_the_halves():
    x = random_array(9, 2, 8)
    swapped = lambda x: np.concatenate([x[..., 4:], x[..., :4]], axis=-1)
    transposed = lambda x: np.asarray(x).reshape(3, 3, 2, 8).swapaxes(0, 1).reshape(9, 2, 8)
    same(rotate_2d(swapped(transposed(x)), 3, 3), jnp.asarray(swapped(transposed(rotate_2d(x, 3, 3)))))


def test_product_depends_only_on_grid_offset():
    query, key = (jnp.broadcast_to(random_array(8, seed=seed), (12, 1, 8)) for seed in (1, 2))
    logits = np.einsum('tnh,snh->ts', rotate_2d(query, 3, 4), rotate_2d(key, 3, 4)).reshape(3, 4, 3, 4)
    np.testing.assert_allclose(logits[1:, 1:, 1:, 1:], logits[:-1, :-1, :-1, :-1], atol=32 * EPS)
    assert abs(logits[0, 0, 0, 1] - logits[0, 0, 1, 0]) > 0.01


# Errors


@pytest.mark.parametrize(('kwargs', 'message'), [
    ({'x': np.zeros((1, 3, 1, 5), 'f')}, 'x has heads of width 5; expected an even number of channels to rotate'),
    ({'fraction': 0.75}, r'width 4, of which fraction 0.75 is 3; expected an even number'),
    ({'fraction': 0.6}, r'width 4, of which fraction 0.6 is 2.4; expected an even number'),
    ({'fraction': 0.0}, 'fraction is 0.0; expected 0 < fraction <= 1'),
    ({'fraction': math.nan}, 'fraction is nan; expected 0 < fraction <= 1'),
    ({'layout': 'halves'}, "layout is 'halves'; expected 'half' or 'interleaved'"),
    ({'scaling': 'yarn'}, "scaling is 'yarn'; expected LinearScaling, NTKScaling, YaRNScaling or None"),
    ({'base': 1.0}, 'base is 1.0; expected a finite number > 1'),
    ({'base': math.inf}, 'base is inf; expected a finite number > 1'),
    ({'x': np.zeros((1, 3, 1, 2), 'f'), 'scaling': NTKScaling(2.0)}, 'NTK scaling of 2 channels; expected more than 2'),
    ({'x': np.zeros((1, 3, 1, 4), 'i')}, 'x has dtype int32; expected a float'),
    ({'x': np.zeros((3, 4), 'f')}, r'x has shape \(3, 4\); expected \[..., T, N, H\]'),
    ({'positions': np.zeros(3, bool)}, 'positions have dtype bool; expected integers or floats'),
    ({'positions': np.zeros(4, int)}, r'positions have shape \(4,\); expected \[T\] or \[..., T\] = \(1, 3\) as in x'),
    ({'positions': np.zeros((2, 3), int)}, r'positions have shape \(2, 3\)'),
    ({'positions': np.zeros((1, 1, 3), int)}, r'positions have shape \(1, 1, 3\)'),
    ({'positions': np.zeros((1, 1), int)}, r'positions have shape \(1, 1\)'),
    ({'positions': 3}, r'positions have shape \(\)'),
])  # fmt: skip
def test_invalid_arguments_raise(as_used, kwargs, message):
    arguments = {'x': np.zeros((1, 3, 1, 4), 'f'), 'positions': np.arange(3)} | kwargs
    with pytest.raises(ValueError, match=message):
        rotary_encoding(**arguments)


def test_lists_and_numpy_arrays_are_accepted(as_used):
    x = random_array(1, 2, 1, 4)
    same(rotary_encoding(x.tolist(), [3, 4]), rotary_encoding(x, np.array([3, 4])))
    np.testing.assert_allclose(rotary_encoding(x, np.array([3, 4])), rotate(x, [3, 4]), atol=4 * EPS)


@pytest.mark.parametrize(('call', 'message'), [
    (lambda: LinearScaling(0.5), 'factor is 0.5; expected a finite number >= 1'),
    (lambda: NTKScaling(math.inf), 'factor is inf; expected a finite number >= 1'),
    (lambda: YaRNScaling(math.nan, 8), 'factor is nan; expected a finite number >= 1'),
    (lambda: YaRNScaling(2.0, 0), 'original_length is 0; expected a positive number'),
    (lambda: YaRNScaling(2.0, 8, 1.0, 32.0), 'beta_slow is 32.0, beta_fast 1.0; expected 0 < beta_slow < beta_fast'),
    (lambda: rotary_frequencies(-2), 'width is -2; expected a number of channels'),
    (lambda: rotary_encoding_2d(jnp.zeros((12, 1, 6)), 3, 4), 'x has heads of width 6; expected a multiple of 4'),
    (lambda: rotary_encoding_2d(jnp.zeros((13, 1, 8)), 3, 4), r'expected .* with T = 12, 3 rows of 4 tokens'),
    (lambda: rotary_encoding_2d(jnp.zeros((12, 8)), 3, 4), r'x has shape \(12, 8\)'),
])  # fmt: skip
def test_invalid_scalings_and_grids_raise(as_used, call, message):
    with pytest.raises(ValueError, match=message):
        call()
