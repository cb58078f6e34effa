"""Multi-head attention as a module against NumPy, and what its fields do."""

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
from tests.layers.calls import ACROSS, KEYS, OURS, QUERIES, SELF, SQUARE, WIDE, close, drawn, run, sloped

(B, N, T, S), D, C = WIDE.shape, QUERIES.shape[-1], KEYS.shape[-1]


def turned(x, positions, width, layout='half', base=10000.0, scaling=None):
    """[B, T, N, H] in float64, the first `width` channels as complex numbers times exp(i position frequency)."""
    half = width // 2
    first, second = np.s_[:half, half:width] if layout == 'half' else np.s_[:width:2, 1:width:2]
    pairs = x[..., first] + 1j * x[..., second]
    pairs = pairs * np.exp(1j * np.asarray(positions)[..., None, None] * rotary_frequencies(width, base, scaling))
    pairs = pairs * (scaling.magnitude if isinstance(scaling, YaRNScaling) else 1.0)
    x = x.copy()
    x[..., first], x[..., second] = pairs.real, pairs.imag
    return x


POSITIONS = np.array([[0, 1, 2, 3], [5, 5, 6, 9]])
VARIANTS = {
    'plain': (dict(), dict(), dict(mask=WIDE)),
    'grouped': (dict(kv_heads=2, head_width=3, out_features=5), dict(), dict(mask=padding_mask(keys=jnp.array([5, 2])))),
    'one key head, ALiBi': (dict(kv_heads=1, encoding=AlibiEncoding(), use_bias=False), dict(), dict(bias=jnp.cos(1.0 * WIDE))),
    'rms, half': (dict(qk_norm='rms', encoding=RotaryEncoding(), head_width=4), dict(width=4), dict()),
    'l2, sinks, interleaved': (
        dict(
            qk_norm='l2', sinks=True, kv_heads=2, head_width=4,
            encoding=RotaryEncoding(100.0, 'interleaved', 0.5, LinearScaling(2.0)),
        ),
        dict(width=2, base=100.0, layout='interleaved', scaling=LinearScaling(2.0)), dict(positions=POSITIONS, mask=causal_mask()),
    ),
    'all': (
        dict(qk_norm='rms', sinks=True, kv_heads=2, head_width=6, encoding=RotaryEncoding(scaling=YaRNScaling(4.0, 8))),
        dict(width=6, scaling=YaRNScaling(4.0, 8)), dict(positions=POSITIONS, mask=causal_mask(), bias=jnp.cos(1.0 * SQUARE)),
    ),
}  # fmt: skip


@pytest.mark.parametrize('variant', VARIANTS)
def test_the_module_is_the_formula(variant):
    fields, turn, call = VARIANTS[variant]
    inputs = SELF if 'positions' in call else ACROSS
    module = OURS(**fields)
    variables = drawn(module, *inputs)
    output = run(module, variables, *inputs, **call)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), variables['params'])
    from_, to = np.asarray(inputs[0], np.float64), np.asarray(inputs[-1], np.float64)
    query, key, value = (
        np.einsum('btd,dnh->btnh', x, params[name]['kernel']) + params[name].get('bias', 0)
        for name, x in (('query', from_), ('key', to), ('value', to))
    )
    scale = None
    if module.qk_norm is not None:
        query, key = (oracle.normalised(x, module.qk_norm)[0] for x in (query, key))
    if module.qk_norm == 'rms':
        query, key = query * params['query_norm']['scale'], key * params['key_norm']['scale']
    if module.qk_norm == 'l2':
        scale = params['qk_scale']
    rules = {}
    if 'positions' in call:
        rules = {'query_positions': POSITIONS, 'key_positions': POSITIONS, 'is_causal': True}
    if turn:
        here, there = (POSITIONS,) * 2 if rules else (np.arange(T)[None], np.arange(S)[None])
        query, key = turned(query, here, **turn), turned(key, there, **turn)
    if variant == 'plain':
        rules = {'mask': WIDE}
    if variant == 'grouped':
        rules = {'key_value_seq_lengths': [5, 2]}
    attended = oracle.attention(
        query, key, value, call.get('bias'), scale=scale, sinks=params.get('sinks'),
        alibi_slopes=module.encoding.alibi_slopes(N), **rules,
    ).output  # fmt: skip
    want = np.einsum('btnh,nho->bto', attended, params['out']['kernel']) + params['out'].get('bias', 0)
    near(output, want, 5e-6, 'output')


def test_a_learned_bias_of_the_encoding_is_added_unless_one_is_given():
    module = OURS(encoding=RelativeEncoding())
    variables, mask = drawn(module, QUERIES), causal_mask()
    table = variables['params'].pop('relative_bias')
    bias = RelativePositionBias(N, bidirectional=False).apply({'params': table}, jnp.arange(T), jnp.arange(T))
    want = run(OURS(), variables, QUERIES, mask=mask, bias=bias)
    near(run(module, variables, QUERIES, mask=mask, bias=bias), want, 1e-6, 'given')
    near(run(module, {'params': variables['params'] | {'relative_bias': table}}, QUERIES, mask=mask), want, 1e-6, 'own')


def test_what_parameters_there_are():
    tree = lambda *inputs, **fields: jax.tree.map(jnp.shape, drawn(OURS(**fields), *inputs)['params'])
    plain = {name: {'kernel': (D, N, 2), 'bias': (N, 2)} for name in ('query', 'key', 'value')}
    plain['out'] = {'kernel': (N, 2, D), 'bias': (D,)}
    assert tree(QUERIES) == plain
    for encoding in (AlibiEncoding(), RotaryEncoding()):
        assert tree(QUERIES, dropout_rate=0.5, encoding=encoding) == plain
    assert tree(QUERIES, qk_norm='rms') == plain | {'query_norm': {'scale': (2,)}, 'key_norm': {'scale': (2,)}}
    assert tree(QUERIES, qk_norm='l2', sinks=True) == plain | {'qk_scale': (), 'sinks': (N,)}
    few = tree(*ACROSS, kv_heads=2, head_width=3, out_features=7, use_bias=False)
    assert few == {
        'query': {'kernel': (D, N, 3)}, 'key': {'kernel': (C, 2, 3)}, 'value': {'kernel': (C, 2, 3)},
        'out': {'kernel': (N, 3, 7)},
    }  # fmt: skip


def test_where_norms_and_sinks_start():
    """Sinks from zero, gains from one, and the scale of l2 so that its logits are those of rms."""
    rms, l2 = OURS(qk_norm='rms', sinks=True), OURS(qk_norm='l2', sinks=True)
    starts = [jax.jit(m.clone(kernel_init=nn.initializers.zeros).init)(jax.random.key(0), QUERIES) for m in (rms, l2)]
    gains, scale = ({name: x for name, x in start['params'].items() if '_' in name} for start in starts)
    assert all(jnp.all(start['params']['sinks'] == 0) for start in starts)
    same(gains, {'query_norm': {'scale': jnp.ones(2)}, 'key_norm': {'scale': jnp.ones(2)}})
    near(scale['qk_scale'], math.sqrt(2), 1e-6, 'qk_scale')
    params = drawn(OURS(sinks=True), QUERIES)['params']
    close(run(l2, {'params': params | scale}, QUERIES), run(rms, {'params': params | gains}, QUERIES), 1e-5)


def test_dtypes_of_computation_and_parameters():
    module = OURS(dtype=jnp.bfloat16, qk_norm='l2', sinks=True, encoding=RotaryEncoding())
    variables = drawn(module, QUERIES)
    assert {x.dtype.name for x in jax.tree.leaves(variables)} == {'float32'}
    output, weights = run(module, variables, QUERIES, return_weights=True)
    assert output.dtype == jnp.bfloat16 and weights.dtype == jnp.float32
    near(output, run(module.clone(dtype=None), variables, QUERIES), 2**-6, 'output')
    halves = drawn(module.clone(param_dtype=jnp.bfloat16, qk_norm='rms'), QUERIES)
    assert {x.dtype.name for x in jax.tree.leaves(halves)} == {'bfloat16'}


@pytest.mark.parametrize('qk_norm', [None, 'rms', 'l2'])
def test_queries_keys_and_values_come_in_one_dtype(qk_norm, monkeypatch):
    """As fused implementations want them."""
    seen = []
    monkeypatch.setattr(multihead, 'dot_product_attention', lambda *x, **_: seen.extend(x[:3]) or x[2])
    module = OURS(dtype=jnp.bfloat16, qk_norm=qk_norm, encoding=RotaryEncoding())
    jax.eval_shape(module.init, jax.random.key(0), QUERIES)
    assert [x.dtype for x in seen] == [jnp.bfloat16] * 3


def test_initialisers_are_used():
    module = OURS(kernel_init=nn.initializers.constant(2.0), bias_init=nn.initializers.constant(3.0))
    params = jax.jit(module.init)(jax.random.key(0), QUERIES)['params']
    assert all(jnp.all(part['kernel'] == 2) and jnp.all(part['bias'] == 3) for part in params.values())


# Positions and groups


def test_only_distances_matter_to_rotary():
    module = OURS(head_width=4, encoding=RotaryEncoding())
    variables, where = drawn(module, QUERIES), jnp.arange(T)[None]
    rules = lambda here, there: Mask(query_positions=here, key_positions=there)
    at = jax.jit(lambda here, there: module.apply(variables, QUERIES, mask=rules(here, there)))
    plain = at(where, where)
    near(at(where + 1000, where + 1000), plain, 1e-4, 'shifted')
    assert jnp.max(jnp.abs(at(where + 3, where) - plain)) > 1e-2
    close(run(module, variables, QUERIES), plain)
    close(run(module, variables, QUERIES, positions=where + 7), at(where + 7, where + 7))


def test_a_layout_is_the_other_on_permuted_channels():
    layouts = ('half', 'interleaved')
    half, interleaved = (OURS(head_width=4, kv_heads=2, encoding=RotaryEncoding(layout=layout)) for layout in layouts)
    params = drawn(half, QUERIES)['params']
    order = np.array([0, 2, 1, 3])
    moved = {name: jax.tree.map(lambda x: x[..., order], params[name]) for name in ('query', 'key')}
    output = run(half, {'params': params}, QUERIES)
    close(run(interleaved, {'params': params | moved}, QUERIES), output)
    assert jnp.max(jnp.abs(run(interleaved, {'params': params}, QUERIES) - output)) > 1e-3


def test_positions_are_those_of_causality_too():
    """Turned round, the first token sees all, and the last one itself."""
    module = OURS()
    variables, back = drawn(module, QUERIES), jnp.arange(T)[::-1][None]
    _, weights = run(module, variables, QUERIES, mask=causal_mask(), positions=back, return_weights=True)
    assert jnp.all((weights > 0) == np.broadcast_to(np.triu(np.ones((T, T), bool)), (B, N, T, T)))
    with pytest.raises(ValueError, match='query_positions is given twice'):
        module.apply(variables, QUERIES, mask=causal_mask(back, back), positions=jnp.arange(T)[None])


def test_grouped_heads_are_repeated_kernels():
    K, G = 2, N // 2
    few, many = OURS(kv_heads=K), OURS()
    params = drawn(few, *ACROSS)['params']
    repeated = {name: jax.tree.map(lambda x: jnp.repeat(x, G, axis=-2), params[name]) for name in ('key', 'value')}
    output, (slopes, inputs) = sloped(few, {'params': params}, *ACROSS)
    full, (each, same_inputs) = sloped(many, {'params': params | repeated}, *ACROSS)
    close((output, inputs), (full, same_inputs), 5e-6)
    slopes, each = slopes['params'], each['params']
    summed = lambda x: x.reshape(*x.shape[:-2], K, G, x.shape[-1]).sum(-2)
    close(slopes, each | {name: jax.tree.map(summed, each[name]) for name in ('key', 'value')}, 5e-6)


def test_blockwise_is_dense():
    """Gradients of implementations are compared with the kernels."""
    module = OURS(kv_heads=2, head_width=4, qk_norm='rms', encoding=RotaryEncoding(), sinks=True, dropout_rate=0.3)
    variables = drawn(module, QUERIES)
    call = dict(
        mask=causal_mask() & padding_mask(keys=jnp.array([4, 2])), bias=jnp.cos(1.0 * SQUARE), deterministic=False
    )
    call |= dict(rngs={'dropout': jax.random.key(3)})
    dense, blockwise = (module.clone(implementation=name) for name in ('dense', 'blockwise'))
    want = run(dense, variables, QUERIES, **call)
    close(run(blockwise, variables, QUERIES, **call), want, 5e-6)
    close(run(module.clone(implementation=('blockwise', 'dense')), variables, QUERIES, **call), want, 5e-6)


# Rows that see nothing, weights, dropout, zeros


@pytest.mark.parametrize(('implementation', 'dtype'), [
    ('dense', 'float32'), ('dense', 'float16'), ('blockwise', 'bfloat16'),
])  # fmt: skip
def test_a_query_that_may_see_nothing_gives_the_bias_alone(implementation, dtype):
    module = OURS(dtype=dtype, implementation=implementation)
    inputs, mask = (QUERIES[:1, :3], KEYS[:1, :3]), jnp.ones((1, 1, 3, 3), bool).at[:, :, 2].set(False)
    variables, rows = drawn(module, *inputs), jnp.array([1.0, 1.0, 0.0])[None, :, None]

    def loss(variables, inputs):
        output = module.apply(variables, *inputs, mask=mask).astype(jnp.float32)
        return jnp.sum(output * rows), output

    (value, output), slopes = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(variables, inputs)
    assert finite((value, output, slopes))
    same(output[0, 2], variables['params']['out']['bias'].astype(dtype).astype(jnp.float32))
    to_queries = slopes[1][0][0]
    assert jnp.all(to_queries[2] == 0) and jnp.all(jnp.any(to_queries[:2] != 0, axis=-1))
    full = run(OURS(), variables, *inputs, mask=mask)
    near(output, full, oracle.TOLERANCE[dtype][1], 'output')


@pytest.mark.parametrize(('implementation', 'rate'), [(None, 0.0), (None, 0.5), ('blockwise', 0.0)])
def test_weights(implementation, rate, caplog):
    module = OURS(dropout_rate=rate, implementation=implementation, use_bias=False)
    variables = drawn(module, QUERIES)
    call = dict(mask=padding_mask(keys=jnp.array([T, T - 1])), deterministic=False, rngs={'dropout': jax.random.key(0)})
    with caplog.at_level(logging.INFO):
        output, weights = run(module, variables, QUERIES, **call, return_weights=True)
    assert ("the implementation is 'dense' in place of blockwise" in caplog.text) == (implementation == 'blockwise')
    close(output, run(module, variables, QUERIES, **call))
    assert weights.shape == (B, N, T, T) and jnp.all(weights[1, ..., -1] == 0) and jnp.all(weights[0] > 0)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    value = jnp.einsum('bsd,dnh->bsnh', QUERIES, variables['params']['value']['kernel'])
    mean = jnp.einsum('bnts,bsnh,nho->bto', weights, value, variables['params']['out']['kernel'])
    assert bool(jnp.allclose(mean, output, atol=1e-5)) == (rate == 0.0)


def test_dropout_draws_from_its_stream():
    module = OURS(dropout_rate=0.5, use_bias=False)
    twins = jnp.stack([QUERIES[0]] * 2)
    variables = drawn(module, twins)
    drop = lambda key: module.apply(variables, twins, deterministic=False, rngs={'dropout': key})
    keys = jax.random.split(jax.random.key(2), 4000)
    draws = jax.jit(jax.vmap(drop))(keys.at[1].set(keys[0]))
    same(draws[0], draws[1])
    assert jnp.any(draws[0] != draws[2]) and jnp.any(draws[0, 0] != draws[0, 1])
    plain = module.clone(dropout_rate=0.0)
    output = run(plain, variables, twins)
    assert jnp.all(jnp.abs(draws.mean(0) - output) < 5 * draws.std(0) / math.sqrt(4000))
    same(output, run(module, variables, twins))  # needs no stream
    same(output, run(plain, variables, twins, deterministic=False))


def test_dropout_without_its_stream_says_so():
    module = OURS(dropout_rate=0.5)
    jax.eval_shape(functools.partial(module.init, deterministic=False), jax.random.key(0), QUERIES)
    for rngs in ({}, {'params': jax.random.key(0)}):
        with pytest.raises(ValueError, match=r"dropout_rate is 0\.5, .* \(in Flax: rngs=\{'dropout': key\}\)"):
            module.apply(drawn(module, QUERIES), QUERIES, deterministic=False, rngs=rngs)


@pytest.mark.parametrize('deterministic', [True, False])
@pytest.mark.parametrize('rate', [-0.5, math.nan, 1.0, 1.5])
def test_a_rate_out_of_range_is_named(rate, deterministic):
    with pytest.raises(ValueError, match=f'dropout_rate is {rate}; expected 0 <= rate < 1'):
        OURS(dropout_rate=rate).init(jax.random.key(0), QUERIES, deterministic=deterministic)
    with pytest.raises(ValueError, match=f'dropout_rate is {rate}; expected 0 <= rate < 1'):
        attention_fn(*3 * [QUERIES[:, :, None]], dropout_rate=rate, deterministic=deterministic)


@pytest.mark.parametrize('qk_norm', ['rms', 'l2'])
def test_norms_of_zero_tokens(qk_norm):
    """Without biases, as at the start, a token of zeros has a query and a key of zeros."""
    module = OURS(qk_norm=qk_norm, encoding=RotaryEncoding(), sinks=True, use_bias=False)
    queries = 4 * QUERIES.at[1, 2:].set(0.0)  # the others make heads far above the epsilon of rms
    variables, rules = drawn(module, queries), padding_mask(keys=jnp.array([4, 3]))
    with jax.debug_nans(True):
        output, slopes = sloped(module, variables, queries, mask=rules)
    assert finite((output, slopes)) and jnp.all(slopes[0]['params']['sinks'] != 0)
    louder = {name: jax.tree.map(lambda x: 1000 * x, variables['params'][name]) for name in ('query', 'key')}
    close(run(module, {'params': variables['params'] | louder}, queries, mask=rules), output, 1e-5)


@pytest.mark.parametrize(('fields', 'inputs', 'call', 'message'), [
    (dict(heads=3), SELF, {}, 'queries have width 8; expected a multiple of 3 heads, or head_width'),
    (dict(heads=0), SELF, {}, 'heads is 0; expected a positive number'),
    (dict(head_width=0), SELF, {}, 'head_width is 0; expected a positive number'),
    (dict(kv_heads=3), SELF, {}, 'kv_heads is 3; expected a divisor of heads, 4'),
    (dict(qk_norm='layer'), SELF, {}, "qk_norm is 'layer'; expected 'l2', 'rms' or None"),
    (dict(implementation='fast'), SELF, {}, "implementation is 'fast'; expected 'ring' "),
    (dict(encoding=RotaryEncoding(), head_width=3), SELF, {}, 'x has heads of width 3; expected an even number'),
    ({}, (QUERIES[0],), {}, r'queries have shape \(4, 8\); expected \[B, T, D\]'),
    ({}, (QUERIES, KEYS[:1]), {}, r'keys have shape \(1, 5, 6\); expected \[B, S, C\] with B = 2'),
    ({}, ACROSS, dict(positions=np.arange(T)[None]), 'positions apply to self-attention only; with keys'),
    ({}, SELF, dict(mask=np.ones((T, T), bool)), r'mask has shape \(4, 4\); expected 4 axes'),
    ({}, SELF, dict(mask=np.ones((1, 1, T, T), np.float32)), 'mask has dtype float32; expected boolean'),
])  # fmt: skip
def test_what_does_not_fit_is_named(as_used, fields, inputs, call, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**{'heads': N} | fields).init(jax.random.key(0), *inputs, **call)


def test_a_cache_longer_than_narrow_positions_reach_takes_them():
    """-1 marks a token that is not kept; its slot is one past the end of 300, which int8 cannot hold."""
    module, x = MultiHeadAttention(2, cache_length=300), jnp.cos(jnp.arange(24.0)).reshape(1, 3, 8)
    slots = jnp.arange(300)[None]
    parameters = module.init(jax.random.key(0), x, mask=causal_mask(jnp.array([[0, 1, 2]]), slots))['params']

    def attend(dtype):
        rules = causal_mask(jnp.array([[100, -1, 120]], dtype), slots)
        return module.apply({'params': parameters}, x, mask=rules, mutable=['cache'])

    jax.tree.map(np.testing.assert_array_equal, attend('int8'), attend('int32'))
