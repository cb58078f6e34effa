"""A mixture of experts against a plain loop over experts, and who is served."""

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
from tests.layers.calls import close, drawn

B, T, D, F, E, A = 2, 8, 4, 6, 4, 2
X = np.random.default_rng(1).normal(size=(B, T, D)).astype('float32')
MASK = np.array([[1] * T, [1, 0, 1, 1, 0, 1, 0, 0]], bool)
OURS = functools.partial(MixtureOfExperts, E, A, 'swiglu', F)


def compiled(function):
    return jax.jit(function, compiler_options=QUICK)


@functools.cache
def _program(apply, kwargs):
    def loss(variables, x, mask):
        output, stats = apply(variables, x, mask, **dict(kwargs))
        return jnp.sum(jnp.sin(3.0 * output)) + stats['load_balance'] + 0.1 * stats['z'], (output, stats)

    return compiled(jax.grad(loss, (0, 1), has_aux=True))


def run(apply, variables, x=X, mask=None, **kwargs):
    """(output, stats) and gradients, in variables and input, of a sum of the sines of the output and the losses."""
    slopes, results = host(_program(apply, tuple(kwargs.items()))(variables, x, mask))
    return results, slopes


@functools.cache
def _forward(apply):
    return compiled(apply)


def forward(apply, variables, x=X, mask=None):
    """(output, stats)."""
    return host(_forward(apply)(variables, x, mask))


def host(tree):
    return jax.tree.map(np.asarray, tree)


@functools.cache
def modules(**fields):
    """The module and variables drawn at random, one of each for the same fields."""
    module = OURS(**fields)
    return module.apply, drawn(module, X, seed=2)


def looped(variables, x, mask, *, kind, factor=None, shared=False, order='choice', renormalised=True):
    """Every expert on every token, then the sum of those that were chosen; `route` has a test of its own."""
    params = variables['params']
    real = jnp.ones(x.shape[:2], bool) if mask is None else mask
    x = jnp.where(real[..., None], x, 0.0)
    tokens = x.shape[1] * jnp.ones(len(x)) if mask is None else jnp.sum(real, axis=1)
    limit = None if factor is None else jnp.minimum(tokens, jnp.ceil(tokens / E * factor * A)).astype(int)
    routing = route_tokens(
        x @ params['router']['kernel'], A, mask, capacity=limit, order=order, renormalised=renormalised
    )
    output = 0.0
    for e in range(E):
        names = [name for name in ('up', 'gate', 'down') if name in params]
        one = {name: {part: leaf[e] for part, leaf in params[name].items()} for name in names}
        chosen = jnp.sum(jnp.where(routing.kept & (routing.experts == e), routing.weights, 0.0), axis=-1)
        output = output + chosen[..., None] * MLP(kind, F, 'bias' in one['up']).apply({'params': one}, x)
    if shared:
        output = output + MLP(kind, F).apply({'params': params['shared_expert']}, x)
    dropped = routing.dropped / (A * jnp.sum(real))
    stats = {'load_balance': routing.load_balance, 'z': routing.z, 'dropped': dropped}
    return jnp.where(real[..., None], output, 0.0), stats


@pytest.mark.parametrize(('fields', 'mask'), [
    (dict(kind='swiglu'), None),
    (dict(kind='gelu', shared=True, capacity_factor=0.75, order='token'), MASK),
    (dict(kind='reglu', use_bias=True, capacity_factor=1.0, renormalised=False), None),
])  # fmt: skip
def test_the_module_is_a_loop_over_experts(fields, mask):
    module = MixtureOfExperts(E, A, **fields, features=F)
    variables = drawn(module, X, seed=2)
    told = dict(kind=module.kind, factor=module.capacity_factor, shared=module.shared)
    told |= dict(order=module.order, renormalised=module.renormalised)
    have, want = run(module.apply, variables, mask=mask), run(looped, variables, mask=mask, **told)
    close(have, want, 2e-6)
    assert (have[0][1]['dropped'] > 0) == (module.capacity_factor is not None)
    assert all(np.any(slope != 0) for slope in jax.tree.leaves(have[1]))


def test_what_parameters_there_are():
    shapes = lambda **fields: jax.tree.map(jnp.shape, drawn(MixtureOfExperts(E, A, **fields), X)['params'])
    gated = {'up': {'kernel': (E, D, 16)}, 'gate': {'kernel': (E, D, 16)}, 'down': {'kernel': (E, 16, D)}}
    assert shapes(kind='swiglu') == {'router': {'kernel': (D, E)}} | gated
    plain = {'up': {'kernel': (E, D, F), 'bias': (E, F)}, 'down': {'kernel': (E, F, D), 'bias': (E, D)}}
    one = {'up': {'kernel': (D, F), 'bias': (F,)}, 'down': {'kernel': (F, D), 'bias': (D,)}}
    assert shapes(kind='gelu', features=F, shared=True) == {
        'router': {'kernel': (D, E)}, 'shared_expert': one,
    } | plain  # fmt: skip


def test_every_expert_starts_as_a_layer_of_its_own():
    """From other numbers than its mates, as spread as those of one layer of its width."""
    module = MixtureOfExperts(8, 1, 'relu', 256, out_init=nn.initializers.constant(2.0))
    params = host(compiled(module.init)(jax.random.key(0), np.zeros((1, 1, 64), 'float32'))['params'])
    spread = np.std(params['up']['kernel'], axis=(1, 2)) * math.sqrt(64)
    assert np.all(np.abs(spread - 1) < 0.05) and len(np.unique(params['up']['kernel'][:, 0, 0])) == 8
    assert np.all(params['down']['kernel'] == 2) and np.all(params['up']['bias'] == 0)


@pytest.mark.parametrize('kind', ['gelu', 'swiglu'])
def test_one_expert_is_the_plain_layer(kind):
    """Case 30."""
    module, plain = MixtureOfExperts(1, 1, kind, F), MLP(kind, F)
    variables = drawn(module, X)
    params = {name: jax.tree.map(lambda x: x[0], host(variables)['params'][name]) for name in drawn(plain, X)['params']}
    output, stats = forward(module.apply, variables)
    near(output, compiled(plain.apply)({'params': params}, X), 1e-6, kind)
    near(stats['load_balance'], 1.0, 1e-6, 'load_balance')
    assert stats['dropped'] == 0


# Capacity


def test_all_to_one_expert():
    """Case 30: eight tokens to expert 0 of four; it takes two of each row, and the others give exactly zero."""
    module = MixtureOfExperts(E, 1, 'gelu', F, capacity_factor=1.0)
    variables = drawn(module, X)
    variables['params']['router']['kernel'] = np.float32(5.0) * (np.arange(D * E) == 0).reshape(D, E)
    x = np.where(np.arange(D) == 0, np.float32(1.0), X)
    assert expert_capacity(T, E, 1, 1.0) == 2
    output, stats = forward(module.apply, variables, x)
    assert stats['dropped'] == 0.75 and np.all(output[:, 2:] == 0)
    every, _ = forward(module.clone(capacity_factor=None).apply, variables, x)
    close(output[:, :2], every[:, :2])
    assert np.all(np.any(every != 0, -1))


def test_room_for_all_is_no_capacity():
    """Case 30: a capacity above the number of tokens included."""
    apply, variables = modules()
    plain = forward(apply, variables, mask=MASK)
    close(forward(modules(capacity_factor=9.0)[0], variables, mask=MASK), plain)
    assert plain[1]['dropped'] == 0


def test_padding_changes_nothing():
    """Wherever it stands and whatever is in it, NaN included; it gives zero, and takes no place."""
    apply, variables = modules(capacity_factor=0.75, shared=True)
    where = np.array([0, 2, 3, 5, 6, 8, 9, 10])
    wide, mask = np.full((B, 12, D), np.nan, 'float32'), np.zeros((B, 12), bool)
    wide[:, where], mask[:, where] = X, True
    (output, stats), (to_variables, to_x) = run(apply, variables, wide, mask)
    want, slopes = run(apply, variables)
    close(((output[:, where], stats), (to_variables, to_x[:, where])), (want, slopes))
    assert stats['dropped'] > 0
    same((output[~mask], to_x[~mask]), (np.zeros((8, D)),) * 2)


def test_a_row_has_nothing_to_do_with_its_mates():
    apply, variables = modules(capacity_factor=0.75)
    output, _ = forward(apply, variables)
    turned, _ = forward(apply, variables, X[::-1])
    close(turned[::-1], output)
    bad = X.copy()
    bad[1, 3] = np.nan
    spoilt, stats = forward(apply, variables, bad)
    close(spoilt[0], output[0])
    assert np.all(np.isnan(spoilt[1, 3])) and np.isnan(stats['z']), 'case 32: it is seen'


def test_what_comes_later_changes_nothing_in_the_order_of_tokens():
    """Which a causal model needs; in the order of choices a token takes places from second choices before it."""
    other = np.where(np.arange(T)[:, None] < 5, X, 1 - 3 * X)
    for order, causal in (('token', True), ('choice', False)):
        apply, variables = modules(capacity_factor=0.75, order=order)
        first, second = (forward(apply, variables, x)[0][:, :5] for x in (X, other))
        assert np.all(np.abs(first - second) < 1e-6) == causal


# The router


def test_the_router_is_float32():
    """Case 32: logits [0, 0.002] under bfloat16, parameters and inputs too; and half a bit of bfloat16 apart."""
    for param_dtype, weights in ((jnp.bfloat16, [0.0, 0.002]), (jnp.float32, [1.0, 1.0 + 2**-9])):
        module = MixtureOfExperts(2, 1, 'relu', F, dtype=jnp.bfloat16, param_dtype=param_dtype, use_bias=False)
        variables = drawn(module, X)
        params = variables['params']
        assert {name: x['kernel'].dtype for name, x in params.items()} == {
            'router': jnp.float32, 'up': param_dtype, 'down': param_dtype,
        }  # fmt: skip
        params['router']['kernel'] = jnp.float32(np.outer(np.arange(D) == 0, weights))
        params['down']['kernel'] *= np.arange(2).reshape(2, 1, 1)  # so that expert 0 would give zero
        output, stats = forward(module.apply, variables, jnp.ones((1, 1, D), jnp.bfloat16))
        assert output.dtype == jnp.bfloat16 and np.any(output != 0)
        assert {stat.dtype.name for stat in stats.values()} == {'float32'}


def test_low_precision_is_near():
    apply, variables = modules()
    output, _ = forward(modules(dtype=jnp.bfloat16)[0], variables)
    assert output.dtype == jnp.bfloat16
    near(output, forward(apply, variables)[0], 2**-6, 'output')


def test_two_evaluations_are_bit_equal():
    """Case 32; dropout that is configured is off."""
    apply, variables = modules(dropout_rate=0.5)
    same(forward(apply, variables), forward(apply, variables))
    same(forward(apply, variables), forward(modules()[0], variables))


def test_dropout_draws():
    apply, variables = modules(dropout_rate=0.5)
    draw = compiled(lambda key: apply(variables, X, deterministic=False, rngs={'dropout': key})[0])
    one, two = (np.asarray(draw(jax.random.key(seed))) for seed in (0, 1))
    assert np.any(one != two) and np.any(one != forward(modules()[0], variables)[0])
    same(draw(jax.random.key(0)), one)


def test_no_tokens():
    apply, variables = modules(capacity_factor=1.0, shared=True)
    zeros = dict.fromkeys(('dropped', 'load_balance', 'z'), np.float32(0))
    results, slopes = run(apply, variables, mask=np.zeros((B, T), bool))
    same(results, (np.zeros_like(X), zeros))
    assert finite(slopes)
    for x in (X[:0], X[:, :0]):
        same(forward(apply, variables, x), (x, zeros))


@pytest.mark.parametrize(('fields', 'inputs', 'message'), [
    (dict(kind='moe'), (X,), "kind is 'moe'; expected one of"),
    (dict(experts=0), (X,), 'experts is 0; expected a positive'),
    (dict(experts_per_token=5), (X,), 'is 5; expected 1 to 4'),
    (dict(features=0), (X,), 'features is 0'),
    (dict(capacity_factor=0.0), (X,), 'the capacity factor is 0.0; expected a positive'),
    (dict(order='last'), (X,), "order is 'last'"),
    (dict(dropout_rate=1.5), (X,), 'dropout_rate is 1.5'),
    (dict(), (X[0],), r'x has shape \(8, 4\); expected \[B, T, D\]'),
    (dict(), (X, MASK[:, :3]), r'token_mask has shape \(2, 3\) .* expected \[B, T\] = \(2, 8\)'),
    (dict(), (X, MASK.astype(int)), 'token_mask has shape .* dtype int32'),
])  # fmt: skip
def test_what_does_not_fit(fields, inputs, message, as_used):
    module = MixtureOfExperts(**dict(experts=E, experts_per_token=A, kind='gelu', features=F) | fields)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(module.init, jax.random.key(0), *inputs)
