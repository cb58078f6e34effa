"""The mixture of experts against a loop over experts; its capacity, its router, and its errors."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.kernels.routing import expert_capacity, route_tokens
from attnlab.layers.experts import MixtureOfExperts
from attnlab.layers.mlp import MLP
from tests.kernels.calls import QUICK, finite, same
from tests.kernels.oracle import near
from tests.layers.calls import assert_close, random_variables

B, T, D, F, E, A = 2, 8, 4, 6, 4, 2
X = np.random.default_rng(1).normal(size=(B, T, D)).astype('float32')
MASK = np.array([[1] * T, [1, 0, 1, 1, 0, 1, 0, 0]], bool)
make_experts = functools.partial(MixtureOfExperts, E, A, 'swiglu', F)


def compiled(function):
    return jax.jit(function, compiler_options=QUICK)


@functools.cache
def _gradient_program(apply, kwargs):
    def loss(variables, x, mask):
        output, aux = apply(variables, x, mask, **dict(kwargs))
        return jnp.sum(jnp.sin(3.0 * output)) + aux['load_balance'] + 0.1 * aux['z'], (output, aux)

    return compiled(jax.grad(loss, (0, 1), has_aux=True))


def run(apply, variables, x=X, mask=None, **kwargs):
    """Return ((output, aux), gradients).

    The gradients, with respect to (variables, x), are those of a function of the output and the auxiliary losses.
    """
    gradients, results = to_numpy(_gradient_program(apply, tuple(kwargs.items()))(variables, x, mask))
    return results, gradients


@functools.cache
def _forward(apply):
    return compiled(apply)


def forward(apply, variables, x=X, mask=None):
    """Return (output, aux)."""
    return to_numpy(_forward(apply)(variables, x, mask))


def to_numpy(tree):
    return jax.tree.map(np.asarray, tree)


@functools.cache
def make_apply(**fields):
    """Return `apply` of a module with these fields, and random variables; both are cached."""
    module = make_experts(**fields)
    return module.apply, random_variables(module, X, seed=2)


def loop_over_experts(variables, x, mask, *, kind, factor=None, shared=False, order='choice', renormalised=True):
    """Apply every expert to every token and sum the chosen ones.  Routing is tested elsewhere, so it is used here."""
    params = variables['params']
    token_mask = jnp.ones(x.shape[:2], bool) if mask is None else mask
    x = jnp.where(token_mask[..., None], x, 0.0)
    tokens = x.shape[1] * jnp.ones(len(x)) if mask is None else jnp.sum(token_mask, axis=1)
    capacity = None if factor is None else jnp.minimum(tokens, jnp.ceil(tokens / E * factor * A)).astype(int)
    routing = route_tokens(
        x @ params['router']['kernel'], A, mask, capacity=capacity, order=order, renormalised=renormalised
    )
    output = 0.0
    for e in range(E):
        names = [name for name in ('up', 'gate', 'down') if name in params]
        expert_params = {name: {part: leaf[e] for part, leaf in params[name].items()} for name in names}
        weight = jnp.sum(jnp.where(routing.kept & (routing.experts == e), routing.weights, 0.0), axis=-1)
        mlp = MLP(kind, F, 'bias' in expert_params['up'])
        output = output + weight[..., None] * mlp.apply({'params': expert_params}, x)
    if shared:
        output = output + MLP(kind, F).apply({'params': params['shared_expert']}, x)
    dropped = routing.dropped / (A * jnp.sum(token_mask))
    aux = {'load_balance': routing.load_balance, 'z': routing.z, 'dropped': dropped}
    return jnp.where(token_mask[..., None], output, 0.0), aux


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(('fields', 'mask'), [
    (dict(kind='swiglu'), None),
    (dict(kind='gelu', shared=True, capacity_factor=0.75, order='token'), MASK),
    (dict(kind='reglu', use_bias=True, capacity_factor=1.0, renormalised=False), None),
])  # fmt: skip
def test_output_and_gradients_equal_a_loop_over_experts(fields, mask):
    module = MixtureOfExperts(E, A, **fields, features=F)
    variables = random_variables(module, X, seed=2)
    settings = dict(kind=module.kind, factor=module.capacity_factor, shared=module.shared)
    settings |= dict(order=module.order, renormalised=module.renormalised)
    (output, aux), gradients = run(module.apply, variables, mask=mask)
    assert_close(((output, aux), gradients), run(loop_over_experts, variables, mask=mask, **settings), 2e-6)
    assert (aux['dropped'] > 0) == (module.capacity_factor is not None)
    assert all(np.any(gradient != 0) for gradient in jax.tree.leaves(gradients))


def test_parameter_names_and_shapes():
    shapes = lambda **fields: jax.tree.map(jnp.shape, random_variables(MixtureOfExperts(E, A, **fields), X)['params'])
    gated = {'up': {'kernel': (E, D, 16)}, 'gate': {'kernel': (E, D, 16)}, 'down': {'kernel': (E, 16, D)}}
    assert shapes(kind='swiglu') == {'router': {'kernel': (D, E)}} | gated
    plain = {'up': {'kernel': (E, D, F), 'bias': (E, F)}, 'down': {'kernel': (E, F, D), 'bias': (E, D)}}
    shared = {'up': {'kernel': (D, F), 'bias': (F,)}, 'down': {'kernel': (F, D), 'bias': (D,)}}
    assert shapes(kind='gelu', features=F, shared=True) == {
        'router': {'kernel': (D, E)}, 'shared_expert': shared,
    } | plain  # fmt: skip


def test_each_expert_is_initialised_independently():
    """With the standard deviation of one layer of its width, and values that differ between experts."""
    module = MixtureOfExperts(8, 1, 'relu', 256, out_init=nn.initializers.constant(2.0))
    params = to_numpy(compiled(module.init)(jax.random.key(0), np.zeros((1, 1, 64), 'float32'))['params'])
    scaled_std = np.std(params['up']['kernel'], axis=(1, 2)) * math.sqrt(64)
    assert np.all(np.abs(scaled_std - 1) < 0.05) and len(np.unique(params['up']['kernel'][:, 0, 0])) == 8
    assert np.all(params['down']['kernel'] == 2) and np.all(params['up']['bias'] == 0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('kind', ['gelu', 'swiglu'])
def test_one_expert_equals_an_mlp(kind):
    module, mlp = MixtureOfExperts(1, 1, kind, F), MLP(kind, F)
    variables = random_variables(module, X)
    expert_params = {name: leaves for name, leaves in to_numpy(variables)['params'].items() if name != 'router'}
    params = jax.tree.map(lambda x: x[0], expert_params)
    output, aux = forward(module.apply, variables)
    near(output, compiled(mlp.apply)({'params': params}, X), 1e-6, kind)
    near(aux['load_balance'], 1.0, 1e-6, 'load_balance')
    assert aux['dropped'] == 0


# Capacity


@pytest.mark.slow
def test_tokens_beyond_the_capacity_of_an_expert_give_zero():
    """Eight tokens of each row go to expert 0 of four, whose capacity is two."""
    module = MixtureOfExperts(E, 1, 'gelu', F, capacity_factor=1.0)
    variables = random_variables(module, X)
    variables['params']['router']['kernel'] = np.float32(5.0) * (np.arange(D * E) == 0).reshape(D, E)
    x = np.where(np.arange(D) == 0, np.float32(1.0), X)
    assert expert_capacity(T, E, 1, 1.0) == 2
    output, aux = forward(module.apply, variables, x)
    assert aux['dropped'] == 0.75 and np.all(output[:, 2:] == 0)
    unlimited, _ = forward(module.clone(capacity_factor=None).apply, variables, x)
    assert_close(output[:, :2], unlimited[:, :2])
    assert np.all(np.any(unlimited != 0, -1))


@pytest.mark.slow
def test_a_capacity_above_the_number_of_tokens_drops_none():
    apply, variables = make_apply()
    plain = forward(apply, variables, mask=MASK)
    assert_close(forward(make_apply(capacity_factor=9.0)[0], variables, mask=MASK), plain)
    assert plain[1]['dropped'] == 0


@pytest.mark.slow
def test_padding_has_no_effect():
    """At any place and with any value, including NaN; its output is zero, and it takes no capacity."""
    apply, variables = make_apply(capacity_factor=0.75, shared=True)
    columns = np.array([0, 2, 3, 5, 6, 8, 9, 10])
    padded, mask = np.full((B, 12, D), np.nan, 'float32'), np.zeros((B, 12), bool)
    padded[:, columns], mask[:, columns] = X, True
    (output, aux), (d_variables, d_x) = run(apply, variables, padded, mask)
    assert_close(((output[:, columns], aux), (d_variables, d_x[:, columns])), run(apply, variables))
    assert aux['dropped'] > 0
    same((output[~mask], d_x[~mask]), (np.zeros((8, D)),) * 2)


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_rest_of_the_batch():
    apply, variables = make_apply(capacity_factor=0.75)
    output, _ = forward(apply, variables)
    reversed_output, _ = forward(apply, variables, X[::-1])
    assert_close(reversed_output[::-1], output)
    x_with_nan = X.copy()
    x_with_nan[1, 3] = np.nan
    output_with_nan, aux = forward(apply, variables, x_with_nan)
    assert_close(output_with_nan[0], output[0])
    assert np.all(np.isnan(output_with_nan[1, 3])) and np.isnan(aux['z']), 'NaN in a real token is not hidden'


@pytest.mark.slow
def test_in_the_order_of_tokens_an_output_does_not_depend_on_later_tokens():
    """A causal model needs this.  In the order of choices, a token can take the place of an earlier second choice."""
    other_x = np.where(np.arange(T)[:, None] < 5, X, 1 - 3 * X)
    for order, causal in (('token', True), ('choice', False)):
        apply, variables = make_apply(capacity_factor=0.75, order=order)
        first, second = (forward(apply, variables, x)[0][:, :5] for x in (X, other_x))
        assert np.all(np.abs(first - second) < 1e-6) == causal


# The router


@pytest.mark.slow
def test_the_router_computes_in_float32():
    """Logits [0, 0.002] with bfloat16 inputs and parameters, and router weights that are equal in bfloat16."""
    for param_dtype, weights in ((jnp.bfloat16, [0.0, 0.002]), (jnp.float32, [1.0, 1.0 + 2**-9])):
        module = MixtureOfExperts(2, 1, 'relu', F, dtype=jnp.bfloat16, param_dtype=param_dtype, use_bias=False)
        variables = random_variables(module, X)
        params = variables['params']
        assert {name: x['kernel'].dtype for name, x in params.items()} == {
            'router': jnp.float32, 'up': param_dtype, 'down': param_dtype,
        }  # fmt: skip
        params['router']['kernel'] = jnp.float32(np.outer(np.arange(D) == 0, weights))
        params['down']['kernel'] *= np.arange(2).reshape(2, 1, 1)  # the output of expert 0 is zero
        output, aux = forward(module.apply, variables, jnp.ones((1, 1, D), jnp.bfloat16))
        assert output.dtype == jnp.bfloat16 and np.any(output != 0)
        assert {value.dtype.name for value in aux.values()} == {'float32'}


@pytest.mark.slow
def test_bfloat16_is_close_to_float32():
    apply, variables = make_apply()
    output, _ = forward(make_apply(dtype=jnp.bfloat16)[0], variables)
    assert output.dtype == jnp.bfloat16
    near(output, forward(apply, variables)[0], 2**-6, 'output')


@pytest.mark.slow
def test_two_evaluations_are_bit_equal():
    """Also with a dropout rate, because dropout is off."""
    apply, variables = make_apply(dropout_rate=0.5)
    same(forward(apply, variables), forward(apply, variables))
    same(forward(apply, variables), forward(make_apply()[0], variables))


@pytest.mark.slow
def test_dropout_depends_on_the_key():
    apply, variables = make_apply(dropout_rate=0.5)
    draw = compiled(lambda key: apply(variables, X, deterministic=False, rngs={'dropout': key})[0])
    first, second = (np.asarray(draw(jax.random.key(seed))) for seed in (0, 1))
    assert np.any(first != second) and np.any(first != forward(make_apply()[0], variables)[0])
    same(draw(jax.random.key(0)), first)


@pytest.mark.slow
def test_inputs_without_real_tokens():
    apply, variables = make_apply(capacity_factor=1.0, shared=True)
    zeros = dict.fromkeys(('dropped', 'load_balance', 'z'), np.float32(0))
    results, gradients = run(apply, variables, mask=np.zeros((B, T), bool))
    same(results, (np.zeros_like(X), zeros))
    assert finite(gradients)
    for x in (X[:0], X[:, :0]):
        same(forward(apply, variables, x), (x, zeros))


@pytest.mark.parametrize(('fields', 'inputs', 'message'), [
    (dict(kind='moe'), (X,), "kind is 'moe'; expected one of"),
    (dict(experts=0), (X,), 'experts is 0; expected a positive'),
    (dict(experts_per_token=5), (X,), 'experts_per_token is 5; expected 1 to 4'),
    (dict(features=0), (X,), 'features is 0'),
    (dict(capacity_factor=0.0), (X,), 'the capacity factor is 0.0; expected a positive'),
    (dict(order='last'), (X,), "order is 'last'"),
    (dict(dropout_rate=1.5), (X,), 'dropout_rate is 1.5'),
    (dict(), (X[0],), r'x has shape \(8, 4\); expected \[B, T, D\]'),
    (dict(), (X, MASK[:, :3]), r'token_mask has shape \(2, 3\) .* expected \[B, T\] = \(2, 8\)'),
    (dict(), (X, MASK.astype(int)), 'token_mask has shape .* dtype int32'),
])  # fmt: skip
def test_wrong_fields_and_inputs_raise(fields, inputs, message, as_used):
    module = MixtureOfExperts(**dict(experts=E, experts_per_token=A, kind='gelu', features=F) | fields)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(module.init, jax.random.key(0), *inputs)
