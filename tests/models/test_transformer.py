"""The encoder-decoder: its published sizes, what may depend on what, decoding with a cache, and its attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.configs import TranslatorConfig
from attnlab.models.maps import attention_maps
from attnlab.models.transformer import TransformerSeq2Seq
from tests.layers.calls import drawn
from tests.quick import QUICK

V, D, L, N, S, T, CONTEXT = 11, 8, 2, 2, 5, 4, 12
PAPER = TranslatorConfig(
    layers=L, width=D, heads=N, context=CONTEXT, positions='sinusoidal', order='post', mlp='relu',
    shared_embedding=True, scan=True, init=0.0, scaled_init=False,
)  # fmt: skip
TODAY = dataclasses.replace(
    PAPER, heads=4, kv_heads=2, qk_norm='rms', positions='rotary', norm='rms', order='pre', mlp='swiglu', experts=4,
    experts_per_token=2, use_bias=False, shared_embedding=False,
)  # fmt: skip
MODELS = {'paper': TransformerSeq2Seq(V, V, PAPER), 'today': TransformerSeq2Seq(V, V + 2, TODAY)}


def changed(name, **changes):
    return MODELS[name].clone(config=dataclasses.replace(MODELS[name].config, **changes))


SOURCE = jnp.array([[4, 7, 9, 1, 3], [8, 2, 3, 0, 0]])
INPUTS = jnp.array([[2, 5, 10, 6], [2, 9, 9, 0]])
LENGTHS = [(5, 4), (3, 3)]


@functools.cache
def params(name):
    return drawn(MODELS[name], SOURCE, INPUTS)['params']


def program(model, **kwargs):
    """model.apply as a compiled function of parameters and arguments."""
    apply = lambda params, *args: model.apply({'params': params}, *args, **kwargs)
    return jax.jit(apply, compiler_options=QUICK)


@functools.cache
def logits(name):
    """Of all tokens, by teacher forcing."""
    return np.asarray(program(MODELS[name])(params(name), SOURCE, INPUTS)[0])


def sizes(model):
    tokens = jax.ShapeDtypeStruct((1, 3), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)['params']


@pytest.mark.parametrize('width, heads, count', [(512, 8, 63_082_496), (1024, 16, 214_245_376)], ids=['base', 'big'])
def test_published_models_have_the_parameters_of_the_paper(width, heads, count):
    """Base and big, of table 3 in Vaswani et al. 2017, who round to 65 and 213 million."""
    made = TransformerSeq2Seq(37_000, 37_000, dataclasses.replace(PAPER, layers=6, width=width, heads=heads))
    assert sum(int(np.prod(x.shape)) for x in jax.tree.leaves(sizes(made))) == count


def test_a_shared_embedding_is_one_table_for_vocabularies_of_one_size():
    assert 'embed_source' not in sizes(MODELS['paper'])
    apart = sizes(MODELS['today'])
    assert [apart[f'embed_{side}']['embedding'].shape for side in ('source', 'target')] == [(V, D), (V + 2, D)]
    assert logits('today').shape == (2, T, V + 2)
    with pytest.raises(ValueError, match='vocabularies have 11 and 13 tokens; expected one size for a shared'):
        sizes(changed('today', shared_embedding=True))


@pytest.mark.parametrize('name', MODELS)
def test_a_state_depends_on_its_past_and_on_all_of_the_source(name):
    """By gradient; tokens stand once each, so that a row of a table is a place."""
    model = changed(name, shared_embedding=False, experts=0)  # the slopes of experts take long to compile
    source, inputs = jnp.array([[3, 1, 2, 0, 0]]), jnp.arange(1, T + 1)[None]
    held = drawn(model, source, inputs)['params']

    @functools.partial(jax.jit, compiler_options=QUICK)
    @functools.partial(jax.jacobian, argnums=(0, 1))
    def slopes(source_table, target_table):
        tables = {'embed_source': {'embedding': source_table}, 'embed_target': {'embedding': target_table}}
        variables = {'params': held | tables}
        memory, _ = model.apply(variables, source, method='encode')
        return model.apply(variables, source, memory, inputs, method='decode')[0][0]

    found = slopes(held['embed_source']['embedding'], held['embed_target']['embedding'])  # [T, D, V, D]
    by_source, by_input = (np.abs(x).sum((1, 3)) for x in found)
    assert np.all(by_source[:, 1:4] > 0) and np.all(by_source[:, 0] == 0)  # of padding
    by_input = by_input[:, 1 : T + 1]
    assert np.all(np.triu(by_input, 1) == 0) and np.all(by_input[np.tril_indices(T)] > 0)


ALONE = tuple(x[1:, :3] for x in (SOURCE, INPUTS))
AMONG = tuple(jnp.stack([jnp.arange(1, 9), jnp.arange(8, 0, -1), jnp.pad(x[0], (0, 5))]) for x in ALONE)


@pytest.mark.parametrize('name', MODELS)
def test_padding_and_neighbours_change_no_logits(name):
    run = program(MODELS[name])
    alone = run(params(name), *ALONE)[0][0]
    np.testing.assert_allclose(logits(name)[1, :3], alone, atol=1e-5)
    np.testing.assert_allclose(run(params(name), *AMONG)[0][2, :3], alone, atol=1e-5)


def test_padding_and_neighbours_change_no_gradients():
    model, held = MODELS['paper'], params('paper')

    @functools.partial(jax.jit, compiler_options=QUICK)
    @jax.grad
    def slopes(params, source, inputs):
        each = jnp.sum(jnp.sin(model.apply({'params': params}, source, inputs)[0]), axis=-1)
        return jnp.sum(jnp.where(inputs != 0, each, 0.0)[-1])

    alone, among = (slopes(held, *tokens) for tokens in (ALONE, AMONG))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-4), among, alone)
    said = np.asarray(alone['embed_target']['embedding'])  # of both languages
    assert np.all(np.any(said[np.concatenate([x[0] for x in ALONE])] != 0, axis=-1))


@pytest.mark.parametrize('name', MODELS)
def test_steps_with_a_cache_are_teacher_forcing_and_project_the_source_once(name):
    """After the first call the states of the source are not read: here they are NaN."""
    model = MODELS[name]
    cached = model.clone(cache_length=T)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def begun(params):
        memory, _ = model.apply({'params': params}, SOURCE, method='encode')
        empty = jnp.zeros((len(SOURCE), 0), jnp.int32)
        return cached.apply({'params': params}, SOURCE, memory, empty, method='decode', mutable=['cache'])[1]['cache']

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(params, cache, tokens):
        variables, memory = {'params': params, 'cache': cache}, jnp.full((*SOURCE.shape, D), jnp.nan)
        decode = functools.partial(cached.apply, method='decode', mutable=['cache'])
        (x, _), changed = decode(variables, SOURCE, memory, tokens[:, None])
        return model.apply({'params': params}, x, method='logits')[:, 0], changed['cache']

    cache, found = begun(params(name)), []
    for t in range(T):
        each, cache = step(params(name), cache, INPUTS[:, t])
        found.append(each)
    for b, (_, n) in enumerate(LENGTHS):
        np.testing.assert_allclose(np.stack(found, axis=1)[b, :n], logits(name)[b, :n], atol=1e-5)
    kept = [x for path, x in jax.tree.leaves_with_path(cache) if 'cached_memory' in jax.tree_util.keystr(path)]
    heads = model.config.kv_heads or model.config.heads
    each = (2, *(L,) * model.config.scan, S, heads, D // model.config.heads)
    assert [x.shape for x in kept] == [each] * (2 if model.config.scan else 2 * L)  # keys and values


def unstacked(params):
    """The parameters of a scan as those of a loop."""
    block = lambda side, layer: jax.tree.map(lambda x: x[layer], params[side]['blocks'])
    blocks = lambda side: {f'block_{layer}': block(side, layer) for layer in range(L)}
    return params | {side: blocks(side) for side in ('encoder', 'decoder')}


def test_a_scan_is_its_loop_and_so_are_the_maps_which_change_no_logits():
    scan = MODELS['paper']
    runs = {}
    for model, held in ((scan, params('paper')), (changed('paper', scan=False), unstacked(params('paper')))):
        (found, _), sown = program(model, mutable=['intermediates'])(held, SOURCE, INPUTS)
        np.testing.assert_allclose(found, logits('paper'), atol=1e-6 if model.config.scan else 1e-5)
        runs[model.config.scan] = jax.device_get(attention_maps(sown['intermediates']))
    maps = runs[False]
    assert {name: x.shape for name, x in maps.items()} == {
        'decoder/attention': (2, L, N, T, T), 'decoder/cross_attention': (2, L, N, T, S),
        'encoder/attention': (2, L, N, S, S),
    }  # fmt: skip
    for name, weights in maps.items():
        np.testing.assert_allclose(weights, runs[True][name], atol=1e-6)
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
        if name == 'decoder/attention':
            assert np.all(np.triu(weights, 1) == 0)
        else:
            assert np.all(weights[1, ..., LENGTHS[1][0] :] == 0)
        assert np.all(np.abs(weights[:, 0] - weights[:, 1]).max((1, 2, 3)) > 1e-3)  # layers have their own


def test_maps_are_in_the_order_of_the_layers():
    sown = lambda layer: {'attention': {'attention_weights': (jnp.full((1, 1, 2, 2), float(layer)),)}}
    found = attention_maps({'stack': {f'block_{layer}': sown(layer) for layer in (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)}})
    assert list(found) == ['attention'] and found['attention'][0, :, 0, 0, 0].tolist() == [*range(11)]
    assert attention_maps({}) == {}
