"""Token mixers other than attention against NumPy loops: with packed rows, with padding, and with a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.layers.mixers import CausalConvolution, RecurrentMixer
from tests.layers.calls import random_variables
from tests.quick import QUICK

B, T, D, KERNEL_SIZE = 2, 7, 4, 3
X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
SEGMENTS = np.array([[1, 1, 2, 2, 2, 3, 0], [4, 4, 4, 4, 4, 1, 1]], np.int32)
TOKEN_MASK = np.array([[0, 1, 1, 0, 1, 0, 0], [1, 0, 1, 1, 1, 0, 1]], bool)  # 3 and 5 real tokens, 4 and 2 others
KINDS = {
    'convolution': functools.partial(CausalConvolution, KERNEL_SIZE),
    'gru': functools.partial(RecurrentMixer, 'gru'),
    'lstm': functools.partial(RecurrentMixer, 'lstm'),
}


def parameters(module):
    return jax.device_get(random_variables(module, X)['params'])


@functools.cache
def compiled_apply(module):
    """Return a function (params, x, segments, token_mask) -> output [B, T, D] as a NumPy array."""
    apply = lambda params, x, segments, mask: module.apply({'params': params}, x, segments, mask)
    compiled = jax.jit(apply, compiler_options=QUICK)
    return lambda params, x, segments=None, token_mask=None: jax.device_get(compiled(params, x, segments, token_mask))


@functools.cache
def compiled_apply_with_cache(module):
    """Return a function (params, x, cache, token_mask) -> (output, next cache) on NumPy arrays."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def compiled(params, x, cache, token_mask):
        variables = {'params': params} if cache is None else {'params': params, 'cache': cache}
        output, changed = module.apply(variables, x, None, token_mask, mutable=['cache'])
        return output, changed['cache']

    return lambda params, x, cache=None, token_mask=None: jax.device_get(compiled(params, x, cache, token_mask))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def convolution(params, x):
    """Convolve one row [T, D] in float64; the last kernel entry applies to the token itself."""
    kernel, output = params['kernel'].astype(np.float64), np.zeros(x.shape)
    for t, k in np.ndindex(len(x), KERNEL_SIZE):
        if (s := t + k - KERNEL_SIZE + 1) >= 0:
            output[t] += x[s] @ kernel[k]
    return output + params['bias']


def gru(params, x):
    """Run the GRU of Cho et al. 2014 over one row [T, D], with the reset gate after the matrix product."""
    params = jax.tree.map(np.float64, params['layer']['cell']['gru'])
    h, output = np.zeros(D), []
    for token in x:
        (xr, xz, xn), (hr, hz, hn) = (
            np.split(value @ params[name]['kernel'] + params[name]['bias'], 3)
            for name, value in (('input', token), ('hidden', h))
        )
        z = sigmoid(xz + hz)
        h = (1 - z) * np.tanh(xn + sigmoid(xr + hr) * hn) + z * h
        output.append(h)
    return np.array(output)


def lstm(params, x):
    """Run the LSTM of Hochreiter and Schmidhuber 1997, with a forget gate, over one row [T, D]."""
    params = jax.tree.map(np.float64, params['layer']['cell']['lstm'])
    dense = lambda name, x: x @ params[name]['kernel'] + params[name].get('bias', 0)
    gate = lambda name, x, h: dense(f'i{name}', x) + dense(f'h{name}', h)
    c, h, output = np.zeros(D), np.zeros(D), []
    for token in x:
        i, f, o = (sigmoid(gate(name, token, h)) for name in 'ifo')
        c = f * c + i * np.tanh(gate('g', token, h))
        h = o * np.tanh(c)
        output.append(h)
    return np.array(output)


LOOPS = {'convolution': convolution, 'gru': gru, 'lstm': lstm}


def make_loop(kind):
    """Return random parameters of a layer, and its NumPy loop over one row with these parameters."""
    params = parameters(KINDS[kind]())
    return params, functools.partial(LOOPS[kind], params)


@pytest.mark.parametrize('kind', KINDS)
def test_the_output_of_each_row_and_each_segment_is_that_of_the_loop(kind):
    run = compiled_apply(KINDS[kind]())
    params, loop = make_loop(kind)
    np.testing.assert_allclose(run(params, X), np.stack([loop(x) for x in X]), atol=1e-5)
    packed = run(params, X, SEGMENTS, SEGMENTS != 0)
    for b in range(B):
        for segment in set(SEGMENTS[b]) - {0}:
            tokens = SEGMENTS[b] == segment
            np.testing.assert_allclose(packed[b, tokens], loop(X[b, tokens]), atol=1e-5)


@pytest.mark.parametrize('kind', KINDS)
def test_no_gradient_crosses_the_boundary_of_a_segment(kind):
    module = KINDS[kind]()
    params = parameters(module)
    segments = jnp.asarray(SEGMENTS)
    loss = lambda x: jnp.sum(jnp.sin(module.apply({'params': params}, x, segments, segments != 0)[0, 2:5]))
    gradient = jax.jit(jax.grad(loss), compiler_options=QUICK)(X)
    in_segment = np.zeros((B, T), bool)
    in_segment[0, 2:5] = True
    np.testing.assert_array_equal(np.any(gradient != 0, axis=-1), in_segment)


@pytest.mark.parametrize('kind', KINDS)
def test_calls_with_a_cache_continue_the_row_and_ignore_padding(kind):
    """Two calls with NaN as padding, then calls of one token."""
    run = compiled_apply_with_cache(KINDS[kind](cache=True))
    params, loop = make_loop(kind)
    x, y = np.full_like(X, np.nan), np.full_like(X, np.nan)
    for b, n in enumerate(TOKEN_MASK.sum(1)):
        x[b, TOKEN_MASK[b]], y[b, ~TOKEN_MASK[b]] = X[b, :n], X[b, n:]
    first, cache = run(params, x, None, TOKEN_MASK)
    second, _ = run(params, y, cache, ~TOKEN_MASK)
    for b in range(B):
        row = np.concatenate([first[b, TOKEN_MASK[b]], second[b, ~TOKEN_MASK[b]]])
        np.testing.assert_allclose(row, loop(X[b]), atol=1e-5)
    _, unchanged_cache = run(params, y, cache, np.zeros_like(TOKEN_MASK))
    jax.tree.map(np.testing.assert_array_equal, unchanged_cache, cache)
    cache, outputs = None, []
    for t in range(T):
        output, cache = run(params, X[:, t : t + 1], cache)
        outputs.append(output)
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), np.stack([loop(x) for x in X]), atol=1e-5)


def test_shapes_of_the_cache():
    shapes = lambda kind, **fields: jax.tree.map(
        lambda x: x.shape,
        jax.eval_shape(KINDS[kind](cache=True, **fields).init, jax.random.key(0), X)['cache'],
    )
    assert shapes('convolution') == {'past': (B, KERNEL_SIZE - 1, D)}
    assert shapes('gru') == {'state': (B, D)} and shapes('lstm') == {'state': ((B, D), (B, D))}


def test_kernel_size_one_is_a_dense_layer_with_or_without_a_cache():
    module = CausalConvolution(1)
    params = parameters(module)
    want = X @ params['kernel'][0] + params['bias']
    np.testing.assert_allclose(compiled_apply(module)(params, X), want, atol=1e-5)
    output, cache = compiled_apply_with_cache(CausalConvolution(1, cache=True))(params, X)
    np.testing.assert_allclose(output, want, atol=1e-5)
    assert cache['past'].shape == (B, 0, D)


def test_parameters_and_dtype_of_a_convolution():
    shapes = lambda module: jax.tree.map(jnp.shape, jax.eval_shape(module.init, jax.random.key(0), X)['params'])
    assert shapes(CausalConvolution(4)) == {'kernel': (4, D, D), 'bias': (D,)}
    assert shapes(CausalConvolution(2, use_bias=False)) == {'kernel': (2, D, D)}
    bfloat16 = CausalConvolution(KERNEL_SIZE, dtype=jnp.bfloat16)
    assert jax.eval_shape(lambda x: bfloat16.apply({'params': parameters(bfloat16)}, x), X).dtype == jnp.bfloat16


def test_a_wrong_kernel_size_or_kind_raises(as_used):
    with pytest.raises(ValueError, match='kernel_size is 0; expected a positive number'):
        jax.eval_shape(CausalConvolution(0).init, jax.random.key(0), X)
    with pytest.raises(ValueError, match="cell is 'rnn'; expected 'gru' or 'lstm'"):
        jax.eval_shape(RecurrentMixer('rnn').init, jax.random.key(0), X)
