"""What stands in the place of attention, against loops in NumPy: packed, padded, and going on with a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.layers.mixers import CausalConvolution, RecurrentMixer
from tests.layers.calls import drawn
from tests.quick import QUICK

B, T, D, TAPS = 2, 7, 4, 3
X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
IDS = np.array([[1, 1, 2, 2, 2, 3, 0], [4, 4, 4, 4, 4, 1, 1]], np.int32)
REAL = np.array([[0, 1, 1, 0, 1, 0, 0], [1, 0, 1, 1, 1, 0, 1]], bool)  # 3 and 5; the others are 4 and 2
KINDS = {
    'convolution': functools.partial(CausalConvolution, TAPS),
    'gru': functools.partial(RecurrentMixer, 'gru'),
    'lstm': functools.partial(RecurrentMixer, 'lstm'),
}


def parameters(module):
    return jax.device_get(drawn(module, X)['params'])


@functools.cache
def program(module):
    """(params, x, ids or cache, real) -> the output, and the cache after it, of NumPy."""
    if module.cache:
        apply = lambda params, x, cache, real: module.apply(
            {'params': params} | ({} if cache is None else {'cache': cache}), x, None, real, mutable=['cache']
        )
    else:
        apply = lambda params, x, ids, real: (module.apply({'params': params}, x, ids, real), {'cache': None})
    compiled = jax.jit(apply, compiler_options=QUICK)

    def run(params, x, second=None, real=None):
        output, changed = jax.device_get(compiled(params, x, second, real))
        return output, changed['cache']

    return run


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def convolution(params, x):
    """One row [T, D], in float64: each token's taps, the last of them on itself."""
    kernel, output = params['kernel'].astype(np.float64), np.zeros(x.shape)
    for t, w in np.ndindex(len(x), TAPS):
        if (s := t + w - TAPS + 1) >= 0:
            output[t] += x[s] @ kernel[w]
    return output + params['bias']


def gru(params, x):
    """Cho et al. 2014, the reset gate behind the product."""
    params = jax.tree.map(np.float64, params['layer']['cell']['gru'])
    h, output = np.zeros(D), []
    for each in x:
        (xr, xz, xn), (hr, hz, hn) = (
            np.split(value @ params[name]['kernel'] + params[name]['bias'], 3)
            for name, value in (('input', each), ('hidden', h))
        )
        z = sigmoid(xz + hz)
        h = (1 - z) * np.tanh(xn + sigmoid(xr + hr) * hn) + z * h
        output.append(h)
    return np.array(output)


def lstm(params, x):
    """Hochreiter and Schmidhuber 1997, with a forget gate."""
    params = jax.tree.map(np.float64, params['layer']['cell']['lstm'])
    into = lambda name, x: x @ params[name]['kernel'] + params[name].get('bias', 0)
    gate = lambda name, x, h: into(f'i{name}', x) + into(f'h{name}', h)
    c, h, output = np.zeros(D), np.zeros(D), []
    for each in x:
        i, f, o = (sigmoid(gate(name, each, h)) for name in 'ifo')
        c = f * c + i * np.tanh(gate('g', each, h))
        h = o * np.tanh(c)
        output.append(h)
    return np.array(output)


LOOPS = {'convolution': convolution, 'gru': gru, 'lstm': lstm}


def setting(kind):
    """The layer without a cache, that with one, its parameters, and what it says of a row alone."""
    module = KINDS[kind]()
    params = parameters(module)
    return program(module), program(KINDS[kind](cache=True)), params, functools.partial(LOOPS[kind], params)


@pytest.mark.parametrize('kind', KINDS)
def test_the_layer_is_its_loop_and_so_is_each_segment(kind):
    run, _, params, alone = setting(kind)
    np.testing.assert_allclose(run(params, X)[0], np.stack([alone(x) for x in X]), atol=1e-5)
    packed = run(params, X, IDS, IDS != 0)[0]
    for b in range(B):
        for one in set(IDS[b]) - {0}:
            at = IDS[b] == one
            np.testing.assert_allclose(packed[b, at], alone(X[b, at]), atol=1e-5)


@pytest.mark.parametrize('kind', KINDS)
def test_no_gradient_comes_over_the_border_of_a_segment(kind):
    module = KINDS[kind]()
    params = parameters(module)
    ids = jnp.asarray(IDS)
    loss = lambda x: jnp.sum(jnp.sin(module.apply({'params': params}, x, ids, ids != 0)[0, 2:5]))
    slopes = jax.jit(jax.grad(loss), compiler_options=QUICK)(X)
    within = np.zeros((B, T), bool)
    within[0, 2:5] = True
    np.testing.assert_array_equal(np.any(slopes != 0, axis=-1), within)


@pytest.mark.parametrize('kind', KINDS)
def test_a_cache_goes_on_over_padding(kind):
    """In two calls and in steps of one token: real tokens as if alone, whatever stands between them, NaN included."""
    _, run, params, alone = setting(kind)
    x, y, cache = np.full_like(X, np.nan), np.full_like(X, np.nan), {}
    for b, n in enumerate(REAL.sum(1)):
        x[b, REAL[b]], y[b, ~REAL[b]] = X[b, :n], X[b, n:]
    first, cache = run(params, x, None, REAL)
    second, _ = run(params, y, cache, ~REAL)
    for b in range(B):
        found = np.concatenate([first[b, REAL[b]], second[b, ~REAL[b]]])
        np.testing.assert_allclose(found, alone(X[b]), atol=1e-5)
    kept = run(params, y, cache, np.zeros_like(REAL))[1]
    jax.tree.map(np.testing.assert_array_equal, kept, cache)
    cache, found = None, []
    for t in range(T):
        output, cache = run(params, X[:, t : t + 1], cache)
        found.append(output)
    np.testing.assert_allclose(np.concatenate(found, axis=1), np.stack([alone(x) for x in X]), atol=1e-5)


def test_a_cache_keeps_no_more_than_it_needs():
    shapes = lambda kind, **fields: jax.tree.map(
        lambda x: x.shape,
        jax.eval_shape(KINDS[kind](cache=True, **fields).init, jax.random.key(0), X)['cache'],
    )
    assert shapes('convolution') == {'past': (B, TAPS - 1, D)}
    assert shapes('gru') == {'state': (B, D)} and shapes('lstm') == {'state': ((B, D), (B, D))}


def test_one_tap_is_a_dense_layer_with_or_without_a_cache():
    module = CausalConvolution(1)
    params = parameters(module)
    want = X @ params['kernel'][0] + params['bias']
    np.testing.assert_allclose(program(module)(params, X)[0], want, atol=1e-5)
    output, cache = program(CausalConvolution(1, cache=True))(params, X)
    np.testing.assert_allclose(output, want, atol=1e-5)
    assert cache['past'].shape == (B, 0, D)


def test_parameters_and_dtype_of_a_convolution():
    sizes = lambda module: jax.tree.map(lambda x: x.shape, jax.eval_shape(module.init, jax.random.key(0), X)['params'])
    assert sizes(CausalConvolution(4)) == {'kernel': (4, D, D), 'bias': (D,)}
    assert sizes(CausalConvolution(2, use_bias=False)) == {'kernel': (2, D, D)}
    half = CausalConvolution(TAPS, dtype=jnp.bfloat16)
    assert jax.eval_shape(lambda x: half.apply({'params': parameters(half)}, x), X).dtype == jnp.bfloat16


def test_errors_name_what_came_and_what_was_expected(as_used):
    with pytest.raises(ValueError, match='kernel_size is 0; expected a positive number'):
        jax.eval_shape(CausalConvolution(0).init, jax.random.key(0), X)
    with pytest.raises(ValueError, match="cell is 'rnn'; expected 'gru' or 'lstm'"):
        jax.eval_shape(RecurrentMixer('rnn').init, jax.random.key(0), X)
