"""Layers and decoders with loops in `jax.shard_map`, with its default checks, compared with the same without it."""

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
TOKEN_MASK = jnp.arange(T)[None] < jnp.array([[5], [3], [4], [1]])
SOURCE = jnp.where(TOKEN_MASK, TOKENS, 0)


def language_case(**fields):
    """Return a language model, a function of (params, tokens) that gives its logits, and the inputs."""
    config = LanguageModelConfig(layers=2, width=D, heads=2, context=16, mlp='swiglu', mlp_width=8, scan=True, **fields)
    model = LanguageModel(7, config)
    return model, lambda params, tokens: model.apply({'params': params}, tokens)[0], (TOKENS,)


def layer_case(module, *inputs):
    """Return the module, a function of (params, *inputs) that gives its first output, and the inputs."""
    return module, lambda params, *inputs: module.apply({'params': params}, *inputs)[0], inputs


CASES = {
    'experts': layer_case(MixtureOfExperts(4, 2, 'swiglu', 8), X, TOKEN_MASK),
    'gru': layer_case(RecurrentLayer('gru', D), X, TOKEN_MASK),
    'lstm with starts': layer_case(RecurrentLayer('lstm', D), X, TOKEN_MASK, None, TOKEN_MASK),
    'language, gru': language_case(mixer='gru'),
    'language, experts': language_case(experts=2, experts_per_token=1),
    'translation': layer_case(RecurrentSeq2Seq(7, 7, RecurrentConfig(embedding=4, hidden=6)), SOURCE, TOKENS),
}


def compiled_shard_map(function, in_specs, out_specs):
    """Return the function as a compiled `jax.shard_map` over two devices."""
    mesh = jax.make_mesh((2,), ('data',), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(mapped, compiler_options=QUICK)


SLOW = ('language, experts', 'translation')


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('name', [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_output_and_gradients_in_shard_map_equal_those_without(name):
    """Rows are divided over devices, parameters are not: the devices sum their parts of the gradients."""
    module, apply, inputs = CASES[name]
    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)['params']
    random = np.random.default_rng(2)
    params = jax.tree.map(lambda x: jnp.asarray(0.5 * random.normal(size=x.shape), x.dtype), shapes)

    def output_and_gradients(params, *inputs):
        def loss(params):
            output = apply(params, *inputs)
            return jnp.sum(output.astype(jnp.float32) ** 2), output

        return jax.grad(loss, has_aux=True)(params)[::-1]

    specs = (P(), *[None if x is None else P('data') for x in inputs])
    expected = jax.jit(output_and_gradients, compiler_options=QUICK)(params, *inputs)
    actual = compiled_shard_map(output_and_gradients, specs, (P('data'), P()))(params, *inputs)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), actual, expected)


def table_step(state, previous):
    """A decoding step for a state [B, V, V], the logits by the previous token."""
    logits = state[jnp.arange(previous.shape[0]), previous]
    return state, logits, logits


LOGITS = jnp.asarray(np.random.default_rng(3).normal(size=(B, 6, 6)), jnp.float32)
KEYS = jax.vmap(jax.random.key)(jnp.arange(B))
FIRST = jnp.full((B,), 2)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('decode', [
    lambda state, keys: sample_tokens(
        table_step, state, jnp.full(len(state), 2), rng=keys, max_tokens=4, eos_id=3, top_k=3, top_p=0.9
    ),
    lambda state, keys: greedy_search(table_step, state, len(state), bos_id=2, eos_id=3, max_tokens=4),
    lambda state, keys: beam_search(table_step, state, jnp.full(len(state), 2), beams=2, max_tokens=4, eos_id=3),
], ids=['sample', 'greedy', 'beam search'])  # fmt: skip
def test_decoding_in_shard_map_gives_the_same_tokens(decode):
    expected = jax.jit(decode, compiler_options=QUICK)(LOGITS, KEYS)
    actual = compiled_shard_map(decode, (P('data'), P('data')), P('data'))(LOGITS, KEYS)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.slow
def test_decoding_with_different_parameters_on_each_device():
    """Only the parameters that the step closes over vary over devices, as for the members of an ensemble."""
    model = language_case()[0]
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)['params']
    random = np.random.default_rng(2)
    members = jax.tree.map(lambda x: jnp.asarray(0.5 * random.normal(size=(2, *x.shape)), x.dtype), shapes)

    def decode(params):
        params = jax.tree.map(lambda x: x[0], params)
        cache = init_cache(model, params, 2, 9)
        step, rng = make_decode_step(model, params), jax.random.key(0)
        return sample_tokens(step, cache, FIRST[:2], rng=rng, max_tokens=4, temperature=0).tokens[None]

    decode_member = jax.jit(decode, compiler_options=QUICK)
    expected = [decode_member(jax.tree.map(lambda x, i=i: x[i : i + 1], members))[0] for i in range(2)]
    actual = compiled_shard_map(decode, P('data'), P('data'))(members)
    np.testing.assert_array_equal(actual, expected)
    assert np.any(np.asarray(expected[0]) != expected[1])
