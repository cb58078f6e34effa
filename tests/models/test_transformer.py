"""The encoder-decoder Transformer: published sizes, dependences, padding, decoding with a cache, attention maps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.configs import TranslatorConfig
from attnlab.models.maps import attention_maps
from attnlab.models.transformer import TransformerSeq2Seq
from tests.layers.calls import random_variables
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


def with_config(name, **changes):
    """Return a model with changed config fields."""
    return MODELS[name].clone(config=dataclasses.replace(MODELS[name].config, **changes))


SOURCE = jnp.array([[4, 7, 9, 1, 3], [8, 2, 3, 0, 0]])
INPUTS = jnp.array([[2, 5, 10, 6], [2, 9, 9, 0]])
LENGTHS = [(5, 4), (3, 3)]


@functools.cache
def random_params(name):
    return random_variables(MODELS[name], SOURCE, INPUTS)['params']


def compiled_apply(model, **kwargs):
    """Return `model.apply` as a compiled function of parameters and inputs."""
    apply = lambda params, *args: model.apply({'params': params}, *args, **kwargs)
    return jax.jit(apply, compiler_options=QUICK)


@functools.cache
def teacher_forced_logits(name):
    """Return the logits of all tokens by teacher forcing."""
    return np.asarray(compiled_apply(MODELS[name])(random_params(name), SOURCE, INPUTS)[0])


def parameter_shapes(model):
    tokens = jax.ShapeDtypeStruct((1, 3), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)['params']


@pytest.mark.parametrize('width, heads, count', [(512, 8, 63_082_496), (1024, 16, 214_245_376)], ids=['base', 'big'])
def test_parameter_counts_of_the_published_models(width, heads, count):
    """Base and big of table 3 in Vaswani et al. 2017, who round to 65 and 213 million."""
    model = TransformerSeq2Seq(37_000, 37_000, dataclasses.replace(PAPER, layers=6, width=width, heads=heads))
    assert sum(int(np.prod(x.shape)) for x in jax.tree.leaves(parameter_shapes(model))) == count


@pytest.mark.slow
def test_a_shared_embedding_is_one_table_and_needs_vocabularies_of_one_size():
    assert 'embed_source' not in parameter_shapes(MODELS['paper'])
    shapes = parameter_shapes(MODELS['today'])
    assert [shapes[f'embed_{side}']['embedding'].shape for side in ('source', 'target')] == [(V, D), (V + 2, D)]
    assert teacher_forced_logits('today').shape == (2, T, V + 2)
    with pytest.raises(ValueError, match='vocabularies have 11 and 13 tokens; expected one size for a shared'):
        parameter_shapes(with_config('today', shared_embedding=True))


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_a_decoder_state_depends_on_its_past_and_on_the_whole_source(name):
    """Each token occurs once, so the gradient of its embedding belongs to one position."""
    model = with_config(name, shared_embedding=False, experts=0)  # gradients of experts take long to compile
    source, inputs = jnp.array([[3, 1, 2, 0, 0]]), jnp.arange(1, T + 1)[None]
    params = random_variables(model, source, inputs)['params']

    @functools.partial(jax.jit, compiler_options=QUICK)
    @functools.partial(jax.jacobian, argnums=(0, 1))
    def jacobians(source_table, target_table):
        tables = {'embed_source': {'embedding': source_table}, 'embed_target': {'embedding': target_table}}
        variables = {'params': params | tables}
        memory, _ = model.apply(variables, source, method='encode')
        return model.apply(variables, source, memory, inputs, method='decode')[0][0]

    # Jacobians [T, D, V, D], reduced to sizes [T, V].
    tables = params['embed_source']['embedding'], params['embed_target']['embedding']
    by_source, by_input = (np.abs(x).sum((1, 3)) for x in jacobians(*tables))
    assert np.all(by_source[:, 1:4] > 0) and np.all(by_source[:, 0] == 0)  # token 0 is padding
    by_input = by_input[:, 1 : T + 1]
    assert np.all(np.triu(by_input, 1) == 0) and np.all(by_input[np.tril_indices(T)] > 0)


ALONE = tuple(x[1:, :3] for x in (SOURCE, INPUTS))
IN_BATCH = tuple(jnp.stack([jnp.arange(1, 9), jnp.arange(8, 0, -1), jnp.pad(x[0], (0, 5))]) for x in ALONE)


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_logits_do_not_depend_on_padding_or_other_rows(name):
    run = compiled_apply(MODELS[name])
    alone = run(random_params(name), *ALONE)[0][0]
    np.testing.assert_allclose(teacher_forced_logits(name)[1, :3], alone, atol=1e-5)
    np.testing.assert_allclose(run(random_params(name), *IN_BATCH)[0][2, :3], alone, atol=1e-5)


@pytest.mark.slow
def test_gradients_do_not_depend_on_padding_or_other_rows():
    model = MODELS['paper']

    @functools.partial(jax.jit, compiler_options=QUICK)
    @jax.grad
    def gradients(params, source, inputs):
        by_token = jnp.sum(jnp.sin(model.apply({'params': params}, source, inputs)[0]), axis=-1)
        return jnp.sum(jnp.where(inputs != 0, by_token, 0.0)[-1])

    alone, in_batch = (gradients(random_params('paper'), *tokens) for tokens in (ALONE, IN_BATCH))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-4), in_batch, alone)
    gradient = np.asarray(alone['embed_target']['embedding'])  # shared by source and target
    assert np.all(np.any(gradient[np.concatenate([x[0] for x in ALONE])] != 0, axis=-1))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('name', MODELS)
def test_steps_with_a_cache_equal_teacher_forcing_and_project_the_source_once(name):
    """After the first call the encoder states are not used: here they are NaN."""
    model = MODELS[name]
    cached = model.clone(cache_length=T)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def init_cache(params):
        memory, _ = model.apply({'params': params}, SOURCE, method='encode')
        empty = jnp.zeros((len(SOURCE), 0), jnp.int32)
        return cached.apply({'params': params}, SOURCE, memory, empty, method='decode', mutable=['cache'])[1]['cache']

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(params, cache, tokens):
        variables, memory = {'params': params, 'cache': cache}, jnp.full((*SOURCE.shape, D), jnp.nan)
        decode = functools.partial(cached.apply, method='decode', mutable=['cache'])
        (x, _), changed = decode(variables, SOURCE, memory, tokens[:, None])
        return model.apply({'params': params}, x, method='logits')[:, 0], changed['cache']

    cache, steps = init_cache(random_params(name)), []
    for t in range(T):
        step_logits, cache = step(random_params(name), cache, INPUTS[:, t])
        steps.append(step_logits)
    for b, (_, n) in enumerate(LENGTHS):
        np.testing.assert_allclose(np.stack(steps, axis=1)[b, :n], teacher_forced_logits(name)[b, :n], atol=1e-5)
    cached = [x for path, x in jax.tree.leaves_with_path(cache) if 'cached_memory' in jax.tree_util.keystr(path)]
    heads = model.config.kv_heads or model.config.heads
    shape = (2, *(L,) * model.config.scan, S, heads, D // model.config.heads)
    assert [x.shape for x in cached] == [shape] * (2 if model.config.scan else 2 * L)  # keys and values


def unstack_blocks(params):
    """Return the parameters of a scan in the form of the loop."""
    block = lambda side, layer: jax.tree.map(lambda x: x[layer], params[side]['blocks'])
    blocks = lambda side: {f'block_{layer}': block(side, layer) for layer in range(L)}
    return params | {side: blocks(side) for side in ('encoder', 'decoder')}


@pytest.mark.slow
def test_scan_and_loop_give_the_same_logits_and_attention_maps():
    scan = MODELS['paper']
    runs = {}
    scan_params = random_params('paper')
    for model, params in ((scan, scan_params), (with_config('paper', scan=False), unstack_blocks(scan_params))):
        (output, _), sown = compiled_apply(model, mutable=['intermediates'])(params, SOURCE, INPUTS)
        np.testing.assert_allclose(output, teacher_forced_logits('paper'), atol=1e-6 if model.config.scan else 1e-5)
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
        assert np.all(np.abs(weights[:, 0] - weights[:, 1]).max((1, 2, 3)) > 1e-3)  # the maps of the layers differ


def test_attention_maps_are_in_the_order_of_the_layers():
    sown = lambda layer: {'attention': {'attention_weights': (jnp.full((1, 1, 2, 2), float(layer)),)}}
    maps = attention_maps({'stack': {f'block_{layer}': sown(layer) for layer in (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)}})
    assert list(maps) == ['attention'] and maps['attention'][0, :, 0, 0, 0].tolist() == [*range(11)]
    assert attention_maps({}) == {}
