"""Layers and decoders with loops inside of `jax.shard_map` with its default checks, against the same without."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attnlab.configs import LanguageModelConfig, RecurrentConfig
from attnlab.decode.beam import beam_search
from attnlab.decode.cache import init_cache, make_decode_step
from attnlab.decode.greedy import greedy_search
from attnlab.decode.sampling import sample_tokens
from attnlab.layers.experts import MixtureOfExperts
from attnlab.layers.recurrent import RecurrentLayer
from attnlab.models.language import LanguageModel
from attnlab.models.recurrent import RecurrentSeq2Seq
from tests.quick import QUICK

B, T, D = 4, 5, 8
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)
TOKENS = jnp.asarray(np.random.default_rng(1).integers(1, 7, (B, T)), jnp.int32)
REAL = jnp.arange(T)[None] < jnp.array([[5], [3], [4], [1]])
BOTH = jnp.where(REAL, TOKENS, 0)


def language(**fields):
    config = LanguageModelConfig(layers=2, width=D, heads=2, context=16, mlp='swiglu', mlp_width=8, scan=True, **fields)
    model = LanguageModel(7, config)
    return model, lambda params, tokens: model.apply({'params': params}, tokens)[0], (TOKENS,)


def layer(module, *inputs):
    return module, lambda params, *inputs: module.apply({'params': params}, *inputs)[0], inputs


CASES = {
    'experts': layer(MixtureOfExperts(4, 2, 'swiglu', 8), X, REAL),
    'gru': layer(RecurrentLayer('gru', D), X, REAL),
    'lstm with starts': layer(RecurrentLayer('lstm', D), X, REAL, None, REAL),
    'language, gru': language(mixer='gru'),
    'language, experts': language(experts=2, active=1),
    'translation': layer(RecurrentSeq2Seq(7, 7, RecurrentConfig(embedding=4, hidden=6)), BOTH, TOKENS),
}


def devices():
    return jax.make_mesh((2,), ('data',), axis_types=(AxisType.Auto,))


def sharded(f, specs, out):
    return jax.jit(jax.shard_map(f, mesh=devices(), in_specs=specs, out_specs=out), compiler_options=QUICK)


SLOW = ('language, experts', 'translation')


@pytest.mark.parametrize('name', [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_a_layer_and_its_gradient_are_those_without(name):
    """Rows are divided, parameters are not: each device adds its part of their gradient."""
    module, apply, inputs = CASES[name]
    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)['params']
    random = np.random.default_rng(2)
    params = jax.tree.map(lambda x: jnp.asarray(0.5 * random.normal(size=x.shape), x.dtype), shapes)

    def both(params, *inputs):
        def loss(params):
            output = apply(params, *inputs)
            return jnp.sum(output.astype(jnp.float32) ** 2), output

        return jax.grad(loss, has_aux=True)(params)[::-1]

    specs = (P(), *[None if x is None else P('data') for x in inputs])
    expected = jax.jit(both, compiler_options=QUICK)(params, *inputs)
    found = sharded(both, specs, (P('data'), P()))(params, *inputs)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), found, expected)


def table(state, previous):
    logits = state[jnp.arange(previous.shape[0]), previous]
    return state, logits, logits


LOGITS = jnp.asarray(np.random.default_rng(3).normal(size=(B, 6, 6)), jnp.float32)
KEYS = jax.vmap(jax.random.key)(jnp.arange(B))
FIRST = jnp.full((B,), 2)


@pytest.mark.parametrize('decode', [
    lambda state, keys: sample_tokens(table, state, jnp.full(len(state), 2), rng=keys, max_tokens=4, eos_id=3, top_k=3, top_p=0.9),
    lambda state, keys: greedy_search(table, state, len(state), bos_id=2, eos_id=3, max_tokens=4),
    lambda state, keys: beam_search(table, state, jnp.full(len(state), 2), beams=2, max_tokens=4, eos_id=3),
], ids=['sample', 'greedy', 'beam search'])  # fmt: skip
def test_decoding_divided_rows_is_as_without(decode):
    expected = jax.jit(decode, compiler_options=QUICK)(LOGITS, KEYS)
    found = sharded(decode, (P('data'), P('data')), P('data'))(LOGITS, KEYS)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_decoding_with_parameters_that_vary_from_device_to_device():
    """Nothing but what the step closes over tells the devices apart, as for the members of an ensemble."""
    model = language()[0]
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)['params']
    random = np.random.default_rng(2)
    members = jax.tree.map(lambda x: jnp.asarray(0.5 * random.normal(size=(2, *x.shape)), x.dtype), shapes)

    def decode(params):
        params = jax.tree.map(lambda x: x[0], params)
        cache = init_cache(model, params, 2, 9)
        tokens = sample_tokens(
            make_decode_step(model, params), cache, FIRST[:2], rng=jax.random.key(0), max_tokens=4, temperature=0
        ).tokens
        return tokens[None]

    one = jax.jit(decode, compiler_options=QUICK)
    expected = [one(jax.tree.map(lambda x, i=i: x[i : i + 1], members))[0] for i in range(2)]
    found = sharded(decode, P('data'), P('data'))(members)
    np.testing.assert_array_equal(found, expected)
    assert np.any(np.asarray(expected[0]) != expected[1])
