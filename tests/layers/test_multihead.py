"""The module of multi-head attention against NumPy, and the effect of each of its fields."""

import functools
import logging
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.kernels.masks import Mask, causal_mask, padding_mask
from attnlab.kernels.rotary import LinearScaling, YaRNScaling, rotary_frequencies
from attnlab.layers import MultiHeadAttention, RotaryEncoding, attention_fn, multihead
from attnlab.layers.positions import AlibiEncoding, RelativeEncoding, RelativePositionBias
from tests.kernels import oracle
from tests.kernels.calls import finite, same
from tests.kernels.oracle import near
from tests.layers.calls import (
    CROSS_INPUTS,
    CROSS_MASK,
    KEYS,
    QUERIES,
    SELF_INPUTS,
    SELF_MASK,
    assert_close,
    make_attention,
    random_variables,
    run,
    run_with_gradients,
)

(B, N, T, S), D, C = CROSS_MASK.shape, QUERIES.shape[-1], KEYS.shape[-1]


def rotate(x, positions, width, layout='half', base=10000.0, scaling=None):
    """Return x [B, T, N, H] in float64 with pairs of its first `width` channels, as complex numbers, multiplied by
    exp(i position frequency)."""
    half = width // 2
    first, second = np.s_[:half, half:width] if layout == 'half' else np.s_[:width:2, 1:width:2]
    pairs = x[..., first] + 1j * x[..., second]
    pairs = pairs * np.exp(1j * np.asarray(positions)[..., None, None] * rotary_frequencies(width, base, scaling))
    pairs = pairs * (scaling.magnitude if isinstance(scaling, YaRNScaling) else 1.0)
    x = x.copy()
    x[..., first], x[..., second] = pairs.real, pairs.imag
    return x


POSITIONS = np.array([[0, 1, 2, 3], [5, 5, 6, 9]])
BIAS, CROSS_BIAS = (jnp.cos(1.0 * mask) for mask in (SELF_MASK, CROSS_MASK))
VARIANTS = {
    'plain': (dict(), dict(), dict(mask=CROSS_MASK)),
    'grouped': (
        dict(kv_heads=2, head_width=3, out_features=5), dict(), dict(mask=padding_mask(keys=jnp.array([5, 2]))),
    ),
    'one key head, ALiBi': (
        dict(kv_heads=1, encoding=AlibiEncoding(), use_bias=False), dict(), dict(bias=CROSS_BIAS),
    ),
    'rms, half': (dict(qk_norm='rms', encoding=RotaryEncoding(), head_width=4), dict(width=4), dict()),
    'l2, sinks, interleaved': (
        dict(
            qk_norm='l2', sinks=True, kv_heads=2, head_width=4,
            encoding=RotaryEncoding(100.0, 'interleaved', 0.5, LinearScaling(2.0)),
        ),
        dict(width=2, base=100.0, layout='interleaved', scaling=LinearScaling(2.0)),
        dict(positions=POSITIONS, mask=causal_mask()),
    ),
    'all': (
        dict(qk_norm='rms', sinks=True, kv_heads=2, head_width=6, encoding=RotaryEncoding(scaling=YaRNScaling(4.0, 8))),
        dict(width=6, scaling=YaRNScaling(4.0, 8)),
        dict(positions=POSITIONS, mask=causal_mask(), bias=BIAS),
    ),
}  # fmt: skip
"""Fields of the module, arguments of `rotate`, arguments of the call."""


@pytest.mark.parametrize('variant', VARIANTS)
def test_the_output_is_that_of_the_formula(variant):
    fields, rotary, call = VARIANTS[variant]
    inputs = SELF_INPUTS if 'positions' in call else CROSS_INPUTS
    module = make_attention(**fields)
    variables = random_variables(module, *inputs)
    output = run(module, variables, *inputs, **call)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), variables['params'])
    queries, keys = np.asarray(inputs[0], np.float64), np.asarray(inputs[-1], np.float64)
    query, key, value = (
        np.einsum('btd,dnh->btnh', x, params[name]['kernel']) + params[name].get('bias', 0)
        for name, x in (('query', queries), ('key', keys), ('value', keys))
    )
    scale = None
    if module.qk_norm is not None:
        query, key = (oracle.normalised(x, module.qk_norm)[0] for x in (query, key))
    if module.qk_norm == 'rms':
        query, key = query * params['query_norm']['scale'], key * params['key_norm']['scale']
    if module.qk_norm == 'l2':
        scale = params['qk_scale']
    mask_arguments = {}
    if 'positions' in call:
        mask_arguments = {'query_positions': POSITIONS, 'key_positions': POSITIONS, 'is_causal': True}
    if rotary:
        has_positions = bool(mask_arguments)
        query_positions, key_positions = (POSITIONS if has_positions else np.arange(n)[None] for n in (T, S))
        query, key = rotate(query, query_positions, **rotary), rotate(key, key_positions, **rotary)
    if variant == 'plain':
        mask_arguments = {'mask': CROSS_MASK}
    if variant == 'grouped':
        mask_arguments = {'key_value_seq_lengths': [5, 2]}
    attended = oracle.attention(
        query, key, value, call.get('bias'), scale=scale, sinks=params.get('sinks'),
        alibi_slopes=module.encoding.alibi_slopes(N), **mask_arguments,
    ).output  # fmt: skip
    want = np.einsum('btnh,nho->bto', attended, params['out']['kernel']) + params['out'].get('bias', 0)
    near(output, want, 5e-6, 'output')


def test_a_given_bias_replaces_the_learned_bias_of_the_encoding():
    module = make_attention(encoding=RelativeEncoding())
    variables, mask = random_variables(module, QUERIES), causal_mask()
    table = variables['params'].pop('relative_bias')
    bias = RelativePositionBias(N, bidirectional=False).apply({'params': table}, jnp.arange(T), jnp.arange(T))
    want = run(make_attention(), variables, QUERIES, mask=mask, bias=bias)
    near(run(module, variables, QUERIES, mask=mask, bias=bias), want, 1e-6, 'given bias')
    near(run(module, {'params': variables['params'] | {'relative_bias': table}}, QUERIES, mask=mask), want, 1e-6, 'own')


def test_parameter_names_and_shapes():
    def shapes(*inputs, **fields):
        return jax.tree.map(jnp.shape, random_variables(make_attention(**fields), *inputs)['params'])

    plain = {name: {'kernel': (D, N, 2), 'bias': (N, 2)} for name in ('query', 'key', 'value')}
    plain['out'] = {'kernel': (N, 2, D), 'bias': (D,)}
    assert shapes(QUERIES) == plain
    for encoding in (AlibiEncoding(), RotaryEncoding()):
        assert shapes(QUERIES, dropout_rate=0.5, encoding=encoding) == plain
    assert shapes(QUERIES, qk_norm='rms') == plain | {'query_norm': {'scale': (2,)}, 'key_norm': {'scale': (2,)}}
    assert shapes(QUERIES, qk_norm='l2', sinks=True) == plain | {'qk_scale': (), 'sinks': (N,)}
    grouped = shapes(*CROSS_INPUTS, kv_heads=2, head_width=3, out_features=7, use_bias=False)
    assert grouped == {
        'query': {'kernel': (D, N, 3)}, 'key': {'kernel': (C, 2, 3)}, 'value': {'kernel': (C, 2, 3)},
        'out': {'kernel': (N, 3, 7)},
    }  # fmt: skip


def test_initial_norms_and_sinks():
    """Sinks start at zero, the scales of rms at one, and the scale of l2 at a value with the logits of rms."""
    rms, l2 = make_attention(qk_norm='rms', sinks=True), make_attention(qk_norm='l2', sinks=True)
    init = lambda module: jax.jit(module.clone(kernel_init=nn.initializers.zeros).init)(jax.random.key(0), QUERIES)
    initial_params = [init(module)['params'] for module in (rms, l2)]
    rms_scales, l2_scale = ({name: x for name, x in params.items() if '_' in name} for params in initial_params)
    assert all(jnp.all(params['sinks'] == 0) for params in initial_params)
    same(rms_scales, {'query_norm': {'scale': jnp.ones(2)}, 'key_norm': {'scale': jnp.ones(2)}})
    near(l2_scale['qk_scale'], math.sqrt(2), 1e-6, 'qk_scale')
    params = random_variables(make_attention(sinks=True), QUERIES)['params']
    l2_output = run(l2, {'params': params | l2_scale}, QUERIES)
    assert_close(l2_output, run(rms, {'params': params | rms_scales}, QUERIES), 1e-5)


def test_dtypes_of_computation_and_parameters():
    module = make_attention(dtype=jnp.bfloat16, qk_norm='l2', sinks=True, encoding=RotaryEncoding())
    variables = random_variables(module, QUERIES)
    assert {x.dtype.name for x in jax.tree.leaves(variables)} == {'float32'}
    output, weights = run(module, variables, QUERIES, return_weights=True)
    assert output.dtype == jnp.bfloat16 and weights.dtype == jnp.float32
    near(output, run(module.clone(dtype=None), variables, QUERIES), 2**-6, 'output')
    bfloat16 = random_variables(module.clone(param_dtype=jnp.bfloat16, qk_norm='rms'), QUERIES)
    assert {x.dtype.name for x in jax.tree.leaves(bfloat16)} == {'bfloat16'}


@pytest.mark.parametrize('qk_norm', [None, 'rms', 'l2'])
def test_query_key_and_value_have_one_dtype(qk_norm, monkeypatch):
    """Fused implementations need this."""
    arguments = []
    monkeypatch.setattr(multihead, 'dot_product_attention', lambda *x, **_: arguments.extend(x[:3]) or x[2])
    module = make_attention(dtype=jnp.bfloat16, qk_norm=qk_norm, encoding=RotaryEncoding())
    jax.eval_shape(module.init, jax.random.key(0), QUERIES)
    assert [x.dtype for x in arguments] == [jnp.bfloat16] * 3


def test_initialisers_are_used():
    module = make_attention(kernel_init=nn.initializers.constant(2.0), bias_init=nn.initializers.constant(3.0))
    params = jax.jit(module.init)(jax.random.key(0), QUERIES)['params']
    assert all(jnp.all(part['kernel'] == 2) and jnp.all(part['bias'] == 3) for part in params.values())


# Positions and groups


def test_rotary_attention_depends_on_relative_positions_only():
    module = make_attention(head_width=4, encoding=RotaryEncoding())
    variables, indices = random_variables(module, QUERIES), jnp.arange(T)[None]

    @jax.jit
    def attend(query_positions, key_positions):
        mask = Mask(query_positions=query_positions, key_positions=key_positions)
        return module.apply(variables, QUERIES, mask=mask)

    output = attend(indices, indices)
    near(attend(indices + 1000, indices + 1000), output, 1e-4, 'shifted')
    assert jnp.max(jnp.abs(attend(indices + 3, indices) - output)) > 1e-2
    assert_close(run(module, variables, QUERIES), output)
    assert_close(run(module, variables, QUERIES, positions=indices + 7), attend(indices + 7, indices + 7))


def test_rotary_layouts_differ_by_a_permutation_of_channels():
    make = lambda layout: make_attention(head_width=4, kv_heads=2, encoding=RotaryEncoding(layout=layout))
    half, interleaved = make('half'), make('interleaved')
    params = random_variables(half, QUERIES)['params']
    order = np.array([0, 2, 1, 3])
    permuted = {name: jax.tree.map(lambda x: x[..., order], params[name]) for name in ('query', 'key')}
    output = run(half, {'params': params}, QUERIES)
    assert_close(run(interleaved, {'params': params | permuted}, QUERIES), output)
    assert jnp.max(jnp.abs(run(interleaved, {'params': params}, QUERIES) - output)) > 1e-3


def test_causality_compares_positions():
    """With positions in reverse order, the first token attends to all tokens, the last one to itself."""
    module = make_attention()
    variables, positions = random_variables(module, QUERIES), jnp.arange(T)[::-1][None]
    _, weights = run(module, variables, QUERIES, mask=causal_mask(), positions=positions, return_weights=True)
    assert jnp.all((weights > 0) == np.broadcast_to(np.triu(np.ones((T, T), bool)), (B, N, T, T)))
    with pytest.raises(ValueError, match='query_positions is given twice'):
        module.apply(variables, QUERIES, mask=causal_mask(positions, positions), positions=jnp.arange(T)[None])


def test_grouped_heads_equal_full_heads_with_repeated_kernels():
    K, G = 2, N // 2
    grouped, full = make_attention(kv_heads=K), make_attention()
    params = random_variables(grouped, *CROSS_INPUTS)['params']
    repeated = {name: jax.tree.map(lambda x: jnp.repeat(x, G, axis=-2), params[name]) for name in ('key', 'value')}
    output, (gradients, d_inputs) = run_with_gradients(grouped, {'params': params}, *CROSS_INPUTS)
    full_output, (full_gradients, full_d_inputs) = run_with_gradients(
        full, {'params': params | repeated}, *CROSS_INPUTS
    )
    assert_close((output, d_inputs), (full_output, full_d_inputs), 5e-6)
    expected = full_gradients['params']
    sum_group = lambda x: x.reshape(*x.shape[:-2], K, G, x.shape[-1]).sum(-2)
    expected = expected | {name: jax.tree.map(sum_group, expected[name]) for name in ('key', 'value')}
    assert_close(gradients['params'], expected, 5e-6)


def test_blockwise_equals_dense():
    """Gradients of implementations are compared in the tests of the kernels."""
    fields = dict(kv_heads=2, head_width=4, qk_norm='rms', encoding=RotaryEncoding(), sinks=True, dropout_rate=0.3)
    module = make_attention(**fields)
    variables = random_variables(module, QUERIES)
    call = dict(
        mask=causal_mask() & padding_mask(keys=jnp.array([4, 2])), bias=jnp.cos(1.0 * SELF_MASK), deterministic=False
    )
    call |= dict(rngs={'dropout': jax.random.key(3)})
    dense, blockwise = (module.clone(implementation=name) for name in ('dense', 'blockwise'))
    want = run(dense, variables, QUERIES, **call)
    assert_close(run(blockwise, variables, QUERIES, **call), want, 5e-6)
    assert_close(run(module.clone(implementation=('blockwise', 'dense')), variables, QUERIES, **call), want, 5e-6)


# Fully masked rows, weights, dropout, zeros


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(('implementation', 'dtype'), [
    ('dense', 'float32'), ('dense', 'float16'), ('blockwise', 'bfloat16'),
])  # fmt: skip
def test_a_fully_masked_query_gives_the_bias_of_the_output(implementation, dtype):
    module = make_attention(dtype=dtype, implementation=implementation)
    inputs, mask = (QUERIES[:1, :3], KEYS[:1, :3]), jnp.ones((1, 1, 3, 3), bool).at[:, :, 2].set(False)
    variables, rows = random_variables(module, *inputs), jnp.array([1.0, 1.0, 0.0])[None, :, None]

    def loss(variables, inputs):
        output = module.apply(variables, *inputs, mask=mask).astype(jnp.float32)
        return jnp.sum(output * rows), output

    (value, output), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(variables, inputs)
    assert finite((value, output, gradients))
    same(output[0, 2], variables['params']['out']['bias'].astype(dtype).astype(jnp.float32))
    d_queries = gradients[1][0][0]
    assert jnp.all(d_queries[2] == 0) and jnp.all(jnp.any(d_queries[:2] != 0, axis=-1))
    float32_output = run(make_attention(), variables, *inputs, mask=mask)
    near(output, float32_output, oracle.TOLERANCE[dtype][1], 'output')


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(('implementation', 'rate'), [(None, 0.0), (None, 0.5), ('blockwise', 0.0)])
def test_returned_weights_are_those_before_dropout(implementation, rate, caplog):
    module = make_attention(dropout_rate=rate, implementation=implementation, use_bias=False)
    variables = random_variables(module, QUERIES)
    call = dict(mask=padding_mask(keys=jnp.array([T, T - 1])), deterministic=False, rngs={'dropout': jax.random.key(0)})
    with caplog.at_level(logging.INFO):
        output, weights = run(module, variables, QUERIES, **call, return_weights=True)
    assert ("the implementation is 'dense' in place of blockwise" in caplog.text) == (implementation == 'blockwise')
    assert_close(output, run(module, variables, QUERIES, **call))
    assert weights.shape == (B, N, T, T) and jnp.all(weights[1, ..., -1] == 0) and jnp.all(weights[0] > 0)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    value = jnp.einsum('bsd,dnh->bsnh', QUERIES, variables['params']['value']['kernel'])
    without_dropout = jnp.einsum('bnts,bsnh,nho->bto', weights, value, variables['params']['out']['kernel'])
    assert bool(jnp.allclose(without_dropout, output, atol=1e-5)) == (rate == 0.0)


@pytest.mark.slow
def test_dropout_depends_on_its_stream_and_keeps_the_mean():
    module = make_attention(dropout_rate=0.5, use_bias=False)
    equal_rows = jnp.stack([QUERIES[0]] * 2)
    variables = random_variables(module, equal_rows)
    apply = lambda key: module.apply(variables, equal_rows, deterministic=False, rngs={'dropout': key})
    keys = jax.random.split(jax.random.key(2), 4000)
    draws = jax.jit(jax.vmap(apply))(keys.at[1].set(keys[0]))
    same(draws[0], draws[1])
    assert jnp.any(draws[0] != draws[2]) and jnp.any(draws[0, 0] != draws[0, 1])
    without_dropout = module.clone(dropout_rate=0.0)
    output = run(without_dropout, variables, equal_rows)
    assert jnp.all(jnp.abs(draws.mean(0) - output) < 5 * draws.std(0) / math.sqrt(4000))
    same(output, run(module, variables, equal_rows))  # deterministic: no stream is needed
    same(output, run(without_dropout, variables, equal_rows, deterministic=False))


def test_dropout_without_its_stream_raises():
    module = make_attention(dropout_rate=0.5)
    jax.eval_shape(functools.partial(module.init, deterministic=False), jax.random.key(0), QUERIES)
    for rngs in ({}, {'params': jax.random.key(0)}):
        with pytest.raises(ValueError, match=r"dropout_rate is 0\.5, .* \(in Flax: rngs=\{'dropout': key\}\)"):
            module.apply(random_variables(module, QUERIES), QUERIES, deterministic=False, rngs=rngs)


@pytest.mark.parametrize('deterministic', [True, False])
@pytest.mark.parametrize('rate', [-0.5, math.nan, 1.0, 1.5])
def test_a_dropout_rate_out_of_range_raises(rate, deterministic):
    with pytest.raises(ValueError, match=f'dropout_rate is {rate}; expected 0 <= rate < 1'):
        make_attention(dropout_rate=rate).init(jax.random.key(0), QUERIES, deterministic=deterministic)
    with pytest.raises(ValueError, match=f'dropout_rate is {rate}; expected 0 <= rate < 1'):
        attention_fn(*3 * [QUERIES[:, :, None]], dropout_rate=rate, deterministic=deterministic)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('qk_norm', ['rms', 'l2'])
def test_query_and_key_norms_of_zero_tokens_are_finite(qk_norm):
    """Without biases, a token of zeros has a query and a key of zeros."""
    module = make_attention(qk_norm=qk_norm, encoding=RotaryEncoding(), sinks=True, use_bias=False)
    queries = 4 * QUERIES.at[1, 2:].set(0.0)  # the heads of the other tokens are far above the epsilon of rms
    variables, mask = random_variables(module, queries), padding_mask(keys=jnp.array([4, 3]))
    with jax.debug_nans(True):
        output, gradients = run_with_gradients(module, variables, queries, mask=mask)
    assert finite((output, gradients)) and jnp.all(gradients[0]['params']['sinks'] != 0)
    scaled = {name: jax.tree.map(lambda x: 1000 * x, variables['params'][name]) for name in ('query', 'key')}
    assert_close(run(module, {'params': variables['params'] | scaled}, queries, mask=mask), output, 1e-5)


@pytest.mark.parametrize(('fields', 'inputs', 'call', 'message'), [
    (dict(heads=3), SELF_INPUTS, {}, 'queries have width 8; expected a multiple of 3 heads, or head_width'),
    (dict(heads=0), SELF_INPUTS, {}, 'heads is 0; expected a positive number'),
    (dict(head_width=0), SELF_INPUTS, {}, 'head_width is 0; expected a positive number'),
    (dict(kv_heads=3), SELF_INPUTS, {}, 'kv_heads is 3; expected a divisor of heads, 4'),
    (dict(qk_norm='layer'), SELF_INPUTS, {}, "qk_norm is 'layer'; expected 'l2', 'rms' or None"),
    (dict(implementation='fast'), SELF_INPUTS, {}, "implementation is 'fast'; expected 'ring' "),
    (dict(encoding=RotaryEncoding(), head_width=3), SELF_INPUTS, {}, 'x has heads of width 3; expected an even number'),
    ({}, (QUERIES[0],), {}, r'queries have shape \(4, 8\); expected \[B, T, D\]'),
    ({}, (QUERIES, KEYS[:1]), {}, r'keys have shape \(1, 5, 6\); expected \[B, S, C\] with B = 2'),
    ({}, CROSS_INPUTS, dict(positions=np.arange(T)[None]), 'positions apply to self-attention only; with keys'),
    ({}, SELF_INPUTS, dict(mask=np.ones((T, T), bool)), r'mask has shape \(4, 4\); expected 4 axes'),
    ({}, SELF_INPUTS, dict(mask=np.ones((1, 1, T, T), np.float32)), 'mask has dtype float32; expected boolean'),
])  # fmt: skip
def test_wrong_fields_and_inputs_raise(as_used, fields, inputs, call, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**{'heads': N} | fields).init(jax.random.key(0), *inputs, **call)


@pytest.mark.slow
def test_a_cache_accepts_positions_of_a_dtype_narrower_than_its_length():
    """A token at position -1 is not written: its index becomes 300, the length of the cache, which int8 cannot hold."""
    module, x = MultiHeadAttention(2, cache_length=300), jnp.cos(jnp.arange(24.0)).reshape(1, 3, 8)
    key_positions = jnp.arange(300)[None]
    params = module.init(jax.random.key(0), x, mask=causal_mask(jnp.array([[0, 1, 2]]), key_positions))['params']

    def attend(dtype):
        mask = causal_mask(jnp.array([[100, -1, 120]], dtype), key_positions)
        return module.apply({'params': params}, x, mask=mask, mutable=['cache'])

    jax.tree.map(np.testing.assert_array_equal, attend('int8'), attend('int32'))
