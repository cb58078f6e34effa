"""The feed-forward layer against NumPy, and its sizes."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.layers.mlp import GATED_ACTIVATIONS, MLP, PLAIN_ACTIVATIONS, default_mlp_width
from tests.kernels.calls import QUICK, same
from tests.kernels.oracle import near
from tests.layers.calls import QUERIES, D, random_variables, run

F = 6
ERF, TANH = np.vectorize(math.erf), np.tanh
ACTIVATIONS = {
    'relu': lambda x: np.maximum(x, 0),
    'gelu': lambda x: x * (1 + ERF(x / math.sqrt(2))) / 2,
    'gelu_tanh': lambda x: x * (1 + TANH(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    'swiglu': lambda x: x / (1 + np.exp(-x)),
}
ACTIVATIONS |= {'reglu': ACTIVATIONS['relu'], 'geglu': ACTIVATIONS['gelu']}


def mlp_in_numpy(params, kind, x):
    """Return the output of the layer in float64, with the biases that the parameters have."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    affine = lambda name, x: x @ params[name]['kernel'] + params[name].get('bias', 0)
    x = np.asarray(x, np.float64)
    activation = ACTIVATIONS[kind]
    if kind in GATED_ACTIVATIONS:
        hidden = activation(affine('gate', x)) * affine('up', x)
    else:
        hidden = activation(affine('up', x))
    return affine('down', hidden)


@pytest.mark.parametrize('kind', ACTIVATIONS)
def test_the_output_is_that_of_the_formula(kind):
    module = MLP(kind, F, use_bias=kind != 'reglu')
    variables = random_variables(module, QUERIES)
    assert ('gate' in variables['params']) == kind.endswith('glu')
    near(run(module, variables, QUERIES), mlp_in_numpy(variables['params'], kind, QUERIES), 1e-6, kind)
    assert ACTIVATIONS.keys() == PLAIN_ACTIVATIONS.keys() | GATED_ACTIVATIONS.keys()


def parameter_shapes(kind, D, **fields):
    x = jax.ShapeDtypeStruct((1, D), jnp.float32)
    return jax.tree.map(lambda x: x.shape, jax.eval_shape(MLP(kind, **fields).init, jax.random.key(0), x)['params'])


def test_parameter_names_and_shapes():
    assert parameter_shapes('gelu', 8) == {
        'up': {'kernel': (8, 32), 'bias': (32,)}, 'down': {'kernel': (32, 8), 'bias': (8,)},
    }  # fmt: skip
    assert parameter_shapes('relu', 8, use_bias=False) == {'up': {'kernel': (8, 32)}, 'down': {'kernel': (32, 8)}}
    gated = {'gate': {'kernel': (9, 24)}, 'up': {'kernel': (9, 24)}, 'down': {'kernel': (24, 9)}}
    assert all(parameter_shapes(kind, 9) == gated for kind in GATED_ACTIVATIONS)
    assert parameter_shapes('swiglu', 8, features=5, use_bias=True)['gate'] == {'kernel': (8, 5), 'bias': (5,)}


@pytest.mark.parametrize('D', [128, 144, 384, 512, 768, 1000, 4096, 12288])
def test_gated_kinds_have_about_as_many_parameters_as_the_others(D):
    def count(kind):
        shapes = jax.tree.leaves(parameter_shapes(kind, D), is_leaf=lambda x: type(x) is tuple)
        return sum(math.prod(shape) for shape in shapes)

    assert abs(count('swiglu') / count('gelu') - 1) < 0.01
    assert default_mlp_width('swiglu', D) % 8 == 0 and 0 <= default_mlp_width('swiglu', D) - 8 * D / 3 < 8


def test_parameter_counts_differ_by_less_than_one_percent_at_the_stated_widths():
    gated_to_plain = lambda D: 3 * D * default_mlp_width('geglu', D) / (8 * D * D + 5 * D)
    different = [D for D in range(1, 2000) if abs(gated_to_plain(D) - 1) >= 0.01]
    assert max(different) == 136 and max(D for D in different if D % 16 == 0) == 112


def test_dtypes_of_computation_and_parameters():
    module = MLP('swiglu', F, dtype=jnp.bfloat16)
    variables = random_variables(module, QUERIES)
    assert {x.dtype.name for x in jax.tree.leaves(variables)} == {'float32'}
    output = run(module, variables, QUERIES)
    assert output.dtype == jnp.bfloat16
    near(output, mlp_in_numpy(variables['params'], 'swiglu', QUERIES), 2**-6, 'output')
    bfloat16 = random_variables(module.clone(param_dtype=jnp.bfloat16), QUERIES)
    assert {x.dtype.name for x in jax.tree.leaves(bfloat16)} == {'bfloat16'}


def test_initialisers_are_used():
    kernel_init, out_init = (nn.initializers.constant(x) for x in (2.0, 3.0))
    module = MLP('geglu', F, kernel_init=kernel_init, out_init=out_init)
    params = jax.jit(module.init)(jax.random.key(0), QUERIES)['params']
    assert all(jnp.all(params[name]['kernel'] == x) for name, x in (('up', 2), ('gate', 2), ('down', 3)))


def test_dropout_applies_to_hidden_activations():
    """If W_down and all hidden activations are 1, an output is the number of kept activations divided by 1 - rate."""
    rate, keys = 0.25, jax.random.split(jax.random.key(0), 500)
    module = MLP('relu', 8, dropout_rate=rate)
    up, down = {'kernel': np.zeros((D, 8)), 'bias': np.ones(8)}, {'kernel': np.ones((8, D)), 'bias': np.zeros(D)}
    params = jax.tree.map(jnp.float32, {'up': up, 'down': down})
    apply = lambda key: module.apply({'params': params}, QUERIES, deterministic=False, rngs={'dropout': key})
    draw = jax.jit(jax.vmap(apply), compiler_options=QUICK)
    draws = np.asarray(draw(keys))
    assert np.all(draws == draws[..., :1]), 'all outputs have the same hidden activations'
    counts = draws[..., 0] * (1 - rate)
    near(counts, counts.round(), 1e-5, 'counts')
    standard_error = math.sqrt(8 * rate * (1 - rate) / counts.size)
    assert abs(counts.mean() - 8 * (1 - rate)) < 5 * standard_error and len(np.unique(counts.round()[0])) > 1
    near(run(module, {'params': params}, QUERIES), np.full(QUERIES.shape, 8.0), 1e-6, 'without dropout')
    same(np.asarray(draw(keys)), draws)


@pytest.mark.parametrize(('fields', 'message'), [
    (dict(kind='gleu'), "kind is 'gleu'; expected one of 'relu', 'gelu', 'gelu_tanh', 'swiglu', 'geglu', 'reglu'"),
    (dict(kind='gelu', features=0), 'features is 0; expected a positive'),
    (dict(kind='gelu', dropout_rate=1.0), r'dropout_rate is 1.0; expected 0 <= rate < 1'),
    (dict(kind='gelu', dropout_rate=-0.5), 'dropout_rate is -0.5'),
    (dict(kind='gelu', dropout_rate=math.nan), 'dropout_rate is nan'),
])  # fmt: skip
def test_wrong_fields_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(MLP(**fields).init, jax.random.key(0), QUERIES)


def test_dropout_without_a_key_raises_with_the_name_of_the_stream():
    module = MLP('gelu', F, dropout_rate=0.5)
    with pytest.raises(Exception, match='dropout'):
        module.apply(random_variables(module, QUERIES), QUERIES, deterministic=False)
