"""Exchange of parameters with Flax's multi-head attention, and `attention_fn` in Flax's module."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import dot_product_attention
from attnlab.layers import attention_fn
from tests.kernels.calls import same
from tests.kernels.oracle import near
from tests.layers.calls import (
    CROSS_INPUTS,
    CROSS_MASK,
    KEYS,
    QUERIES,
    SELF_INPUTS,
    SELF_MASK,
    assert_close,
    compiled_apply,
    make_attention,
    make_flax_attention,
    random_variables,
    run,
    run_with_gradients,
)

B, N, T, S = CROSS_MASK.shape

PAIRS = {
    'self': (SELF_INPUTS, dict(), dict(), dict()),
    'self, masked, no bias': (SELF_INPUTS, dict(use_bias=False), dict(use_bias=False), dict(mask=SELF_MASK)),
    'across, other widths': (
        CROSS_INPUTS, dict(head_width=3, out_features=5), dict(qkv_features=12, out_features=5), dict(mask=CROSS_MASK),
    ),
    'across, one mask for all': (CROSS_INPUTS, dict(), dict(), dict(mask=CROSS_MASK[:1, :1])),
}  # fmt: skip


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('pair', PAIRS)
def test_parameters_of_either_module_work_in_the_other(pair):
    inputs, fields, flax_fields, call = PAIRS[pair]
    module, flax_module = make_attention(**fields), make_flax_attention(**flax_fields)
    ours, flax = compiled_apply(module, **call), compiled_apply(flax_module, **call)
    for variables in (random_variables(flax_module, *inputs), random_variables(module, *inputs, seed=1)):
        assert_close(ours(variables, *inputs), flax(variables, *inputs))


@pytest.mark.slow
def test_parameters_are_initialised_as_in_flax():
    _, fields, flax_fields, _ = PAIRS['across, other widths']
    modules = make_attention(**fields), make_flax_attention(**flax_fields)
    same(*(jax.jit(module.init)(jax.random.key(5), *CROSS_INPUTS) for module in modules))


CALLS = {
    'no mask': (CROSS_INPUTS, dict(), run),
    'a boolean mask': (CROSS_INPUTS, dict(mask=CROSS_MASK), run_with_gradients),
    "flax's own mask, of numbers": (SELF_INPUTS, dict(mask=nn.make_causal_mask(QUERIES[..., 0])), run),
    'two batch axes': ((jnp.stack([QUERIES, -QUERIES, 2 * QUERIES]),), dict(mask=SELF_MASK[None]), run),
    'no batch axis': ((QUERIES[0],), dict(mask=SELF_MASK[0]), run),
}


@pytest.mark.slow
@pytest.mark.parametrize('call', CALLS)
def test_attention_fn_gives_the_results_of_flax(call):
    inputs, kwargs, run_module = CALLS[call]
    flax_module = make_flax_attention(qkv_features=12)
    variables = random_variables(flax_module, *inputs)
    ours = run_module(flax_module.clone(attention_fn=attention_fn), variables, *inputs, **kwargs)
    assert_close(ours, run_module(flax_module, variables, *inputs, **kwargs))


@pytest.mark.slow
def test_a_bias_and_its_gradient_are_as_in_flax():
    random = np.random.default_rng(1)
    query, key = (jnp.asarray(random.normal(size=(3, B, size, N, 4)), jnp.float32) for size in (T, S))
    bias = jnp.asarray(random.normal(size=(3, 1, N, 1, S)), jnp.float32)
    loss = lambda bias, attend: jnp.sum(jnp.sin(attend(query, key, key, bias)))
    value_and_gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    assert_close(value_and_gradient(bias, attention_fn), value_and_gradient(bias, nn.dot_product_attention))
    bias = jnp.zeros((1, 1, 1, T, S)).at[..., 1].set(2.0)
    # Flax would promote the rank of a bias with fewer axes, which raises an error in these tests.
    same(jax.jit(attention_fn)(query, key, key, bias[0, 0, 0]), jax.jit(attention_fn)(query, key, key, bias))


@pytest.mark.slow
def test_decoding_in_flax_works_with_attention_fn():
    flax_module = make_flax_attention(decode=True)
    variables = jax.jit(flax_module.init)(jax.random.key(0), QUERIES)
    params, caches = variables['params'], [variables['cache']] * 2
    steps = [
        jax.jit(lambda cache, x, m=module: m.apply({'params': params, 'cache': cache}, x, mutable=['cache']))
        for module in (flax_module, flax_module.clone(attention_fn=attention_fn))
    ]
    for t in range(T):
        results = [step(cache, QUERIES[:, t : t + 1]) for step, cache in zip(steps, caches, strict=True)]
        caches = [updated['cache'] for _, updated in results]
        assert_close(*(output for output, _ in results))


@pytest.mark.slow
def test_weights_are_sown_if_flax_passes_its_module():
    flax_module = make_flax_attention()
    ours = flax_module.clone(attention_fn=functools.partial(attention_fn, implementation='blockwise'))
    variables = random_variables(flax_module, *CROSS_INPUTS)
    call = dict(mask=CROSS_MASK, sow_weights=True, mutable=['intermediates'])
    actual, expected = (run(module, variables, *CROSS_INPUTS, **call) for module in (ours, flax_module))
    assert_close(actual, expected)
    assert jnp.all(actual[1]['intermediates']['attention_weights'][0][~CROSS_MASK] == 0)
    assert 'intermediates' not in run(ours, variables, *CROSS_INPUTS, mutable=['intermediates'])[1]


def test_a_row_that_is_masked_everywhere_is_zero_and_in_flax_the_mean():
    mask = jnp.ones((1, 1, T, S), bool).at[:, :, 1].set(False)
    value = KEYS[:, :, None]
    ours, flax = (
        jax.jit(attend)(QUERIES[:, :, None, : KEYS.shape[-1]], value, value, mask=mask)
        for attend in (attention_fn, nn.dot_product_attention)
    )
    assert jnp.all(ours[:, 1] == 0)
    ours, flax = np.asarray(ours), np.asarray(flax)
    assert_close(flax[:, 1], np.asarray(value).mean(1))
    assert_close(np.delete(ours, 1, 1), np.delete(flax, 1, 1))


def test_dropout_in_flax_is_independent_for_each_row():
    """Although `broadcast_dropout` is True by default in Flax."""
    equal_rows, rng = jnp.stack([QUERIES[0]] * 2), jax.random.key(4)
    flax_module = make_flax_attention(dropout_rate=0.5, attention_fn=attention_fn, deterministic=False)
    variables = random_variables(flax_module, equal_rows)
    output = run(flax_module, variables, equal_rows, dropout_rng=rng)
    assert jnp.any(output[0] != output[1])
    without_dropout = run(flax_module.clone(dropout_rate=0.0), variables, equal_rows)
    same(run(flax_module.clone(deterministic=True), variables, equal_rows), without_dropout)
    heads = jnp.stack([QUERIES] * N, axis=2)
    same(*(
        jax.jit(lambda x, attend=attend: attend(x, x, x, dropout_rng=rng, dropout_rate=0.5))(heads)
        for attend in (attention_fn, dot_product_attention)
    ))  # fmt: skip
    with pytest.raises(ValueError, match='dropout_rate is 0.5, dropout_rng is None'):
        attention_fn(heads, heads, heads, dropout_rate=0.5)


@pytest.mark.parametrize('dtype', [None, jnp.bfloat16])
def test_dtypes_are_promoted_as_in_flax(dtype):
    heads = QUERIES[:, :, None]
    outputs = [
        jax.jit(functools.partial(attend, dtype=dtype))(heads.astype('bfloat16'), heads, heads)
        for attend in (attention_fn, nn.dot_product_attention)
    ]
    assert [x.dtype for x in outputs] == [jnp.float32 if dtype is None else dtype] * 2
    near(*outputs, 1e-6 if dtype is None else 2**-6, 'output')


def test_every_argument_of_flax_is_used_or_raises():
    """Flax passes only the arguments in the signature of `attention_fn`, and drops the others without an error."""
    flax, ours = (inspect.signature(attend).parameters for attend in (nn.dot_product_attention, attention_fn))
    assert list(ours)[: len(flax)] == list(flax)
    assert all(ours[name].default == flax[name].default for name in flax)
    with pytest.raises(NotImplementedError, match="precision is 'highest'"):
        module = make_flax_attention(precision='highest', attention_fn=attention_fn)
        jax.eval_shape(module.init, jax.random.key(0), QUERIES)
    for name in ('precision', 'einsum_dot_general', 'qk_attn_weights_einsum', 'attn_weights_value_einsum'):
        with pytest.raises(NotImplementedError, match=f'^{name} is .*; expected None'):
            attention_fn(*3 * [QUERIES[:, :, None]], **{name: jnp.einsum})


@pytest.mark.parametrize(('name', 'shape'), [
    ('bias', (1, 1, 1, 1, T, T)), ('mask', (2, B, 1, T, T)), ('mask', (3, B, 1, 3, T)),
])  # fmt: skip
def test_a_mask_or_bias_that_does_not_broadcast_raises(as_used, name, shape):
    x, pairs = jnp.ones((3, B, T, 1, 4)), jnp.ones(shape, bool if name == 'mask' else jnp.float32)
    with pytest.raises(ValueError, match=rf'{name} has shape \(.*{shape[-2]}, {T}\); expected'):
        attention_fn(x, x, x, **{name: pairs})


def test_an_unknown_implementation_raises():
    with pytest.raises(ValueError, match="implementation is 'fast'; expected 'ring' "):
        attention_fn(*3 * [QUERIES[:, :, None]], implementation='fast')


def test_different_batch_axes_raise(as_used):
    x = jnp.ones((2, 3, T, 1, 4))
    with pytest.raises(ValueError, match='query, key, value have shapes .* the same'):
        attention_fn(x, x.swapaxes(0, 1), x.swapaxes(0, 1))
