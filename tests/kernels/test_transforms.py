"""Combinations of two JAX transformations, and gradients against finite differences in float64."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import dot_product_attention
from attnlab.kernels.call import AttentionCall
from attnlab.kernels.implementations import implementations_by_speed
from attnlab.kernels.masks import Mask, padding_mask, segment_mask
from tests.quick import QUICK

T, S, N, K, H, DEVICES = 5, 6, 4, 2, 3, 2
BLOCK_SIZES = {'dense': None, 'blockwise': (2, 4)}  # by implementation


def attention_function(implementation):
    """Return a function from (query, key, value) to [T, N, H]: a call that has tiles of every kind."""

    def attend(arrays):
        return dot_product_attention(
            *arrays, is_causal=True, key_value_seq_lengths=jnp.array([S - 1]), logits_soft_cap=2.0,
            implementation=implementation, block_sizes=BLOCK_SIZES[implementation],
        )  # fmt: skip

    return attend


def random_arrays(*leading):
    random = np.random.default_rng(0)
    shapes = (T, N, H), (S, K, H), (S, K, H)
    return tuple(jnp.asarray(random.normal(size=leading + shape), jnp.float32) for shape in shapes)


def gradient_of(f):
    return jax.grad(lambda arrays: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(f(arrays))))


def python_loop(f):
    """Return a Python loop over axis 0, the expected result of every mapping transformation."""
    row = lambda arrays, i: f(jax.tree.map(lambda x: x[i], arrays))
    return lambda arrays: jax.tree.map(lambda *x: jnp.stack(x), *(row(arrays, i) for i in range(DEVICES)))


TRANSFORMS = {
    'jit': (jax.jit, lambda f: f),
    'remat': (jax.remat, lambda f: f),
    'grad': (gradient_of, gradient_of),
    'vmap': (jax.vmap, python_loop),
    'scan': (lambda f: lambda arrays: jax.lax.scan(lambda _, x: (None, f(x)), None, arrays)[1], python_loop),
    'pmap': (jax.pmap, python_loop),
}


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings('ignore:The jitted function .* includes a pmap')  # slow, but intended here
@pytest.mark.parametrize('implementation', BLOCK_SIZES)
@pytest.mark.parametrize('outer, inner', list(itertools.permutations(TRANSFORMS, 2)))
def test_transformations_compose(implementation, outer, inner):
    transformed = TRANSFORMS[outer][0](TRANSFORMS[inner][0](attention_function(implementation)))
    if 'pmap' not in (outer, inner):  # without jit each operation would be compiled on its own
        transformed = jax.jit(transformed, compiler_options=QUICK)
    expected = TRANSFORMS[outer][1](TRANSFORMS[inner][1](attention_function('dense')))
    arrays = random_arrays(
        *[DEVICES] * (outer in ('vmap', 'scan', 'pmap')), *[DEVICES] * (inner in ('vmap', 'scan', 'pmap'))
    )
    expected = jax.jit(expected, compiler_options=QUICK)(arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), transformed(arrays), expected)


def test_second_derivatives_of_blockwise_raise():
    with pytest.raises(NotImplementedError, match="second derivatives: blockwise has none; .*'dense'"):
        jax.eval_shape(gradient_of(gradient_of(attention_function('blockwise'))), random_arrays())
    assert all(
        bool(jnp.all(jnp.isfinite(x)))
        for x in jax.jit(gradient_of(gradient_of(attention_function('dense'))))(random_arrays())
    )


@pytest.mark.parametrize('transform', [jax.jit, lambda f: f], ids=['jit', 'no jit'])
def test_forward_mode_of_blockwise_raises(transform):
    arrays, message = random_arrays(), "jax.jvp: blockwise has no forward-mode derivative; implementation='dense' has"
    attend = lambda x: jnp.sum(transform(attention_function('blockwise'))(x)[0, 0])
    with pytest.raises(NotImplementedError, match=message):
        transform(lambda: jax.jvp(attend, (arrays,), (arrays,)))()
    with pytest.raises(NotImplementedError, match=f'{message}|second derivatives: blockwise has none'):
        transform(lambda: jax.hessian(attend)(arrays))()


def test_forward_mode_with_default_implementation_uses_dense():
    x = jnp.ones((1, 257, 1, 2))
    assert implementations_by_speed(AttentionCall(x, x, x, Mask(), 1.0), 'cpu')[0] == 'blockwise'
    _, tangent = jax.jvp(lambda v: dot_product_attention(x, x, v), (x,), (2 * x,))
    np.testing.assert_allclose(tangent, 2.0, rtol=1e-5)


def options(random):
    """Return calls that together use every argument, by name: (arrays with gradients, other arguments)."""
    array = lambda *shape: jnp.asarray(random.normal(size=shape))
    ids = jnp.asarray(np.sort(random.integers(0, 3, (2, 6))))
    return {
        'shared bias, soft cap': ({'bias': array(1, N, 1, 6)}, {'logits_soft_cap': 1.5}),
        'bias for each batch row, mask': ({'bias': array(2, 1, 5, 6)}, {'mask': array(2, N, 5, 6) > -1}),
        'sinks, slopes, positions': (
            {'sinks': array(N), 'alibi_slopes': jnp.abs(array(N))},
            {'query_positions': jnp.arange(5)[None] + 2, 'key_positions': jnp.arange(6)[None] * 2, 'is_causal': True},
        ),
        'dropout, window': (
            {}, {'dropout_rate': 0.3, 'dropout_rng': jax.random.key(1), 'local_window_size': (2, 1)}
        ),
        'lengths, l2': (
            {}, {'mask': padding_mask(jnp.array([5, 2]), jnp.array([4, 0])), 'qk_norm': 'l2', 'scale': 3.0}
        ),
        'segments, rms, bias for each key': (
            {'bias': array(1, 1, 1, 6)}, {'mask': segment_mask(ids[:, :5], ids), 'qk_norm': 'rms'}
        ),
    }  # fmt: skip


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize('implementation', BLOCK_SIZES)
@pytest.mark.parametrize('name', options(np.random.default_rng(0)))
def test_gradients_match_finite_differences_in_float64(implementation, name):
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        option_arrays, static = options(random)[name]
        shapes = {'query': (2, 5, N, H), 'key': (2, 6, K, H), 'value': (2, 6, K, 2)}
        arrays = {key: jnp.asarray(random.normal(size=shape)) for key, shape in shapes.items()} | option_arrays
        arrays = jax.tree.map(lambda x: x.astype('float64'), arrays)
        cotangent = jnp.asarray(random.normal(size=(2, 5, N, 2)))
        blocks = BLOCK_SIZES[implementation]

        @partial(jax.jit, compiler_options=QUICK)
        @jax.value_and_grad
        def loss(arrays):
            output = dot_product_attention(**arrays, **static, implementation=implementation, block_sizes=blocks)
            return jnp.sum(output * cotangent)

        gradients = loss(arrays)[1]
        for key, x in arrays.items():
            direction, step = jnp.asarray(random.normal(size=x.shape)), 1e-5
            up, down = (loss(arrays | {key: x + sign * step * direction})[0] for sign in (1, -1))
            derivative = (up - down) / (2 * step)
            np.testing.assert_allclose(
                jnp.sum(gradients[key] * direction), derivative, rtol=1e-7, atol=1e-9, err_msg=key
            )
            assert gradients[key].dtype == 'float64' and gradients[key].shape == x.shape
