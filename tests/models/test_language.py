"""The language model: parameter counts of published models, causality, variants, and stacks as loops and scans."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.configs import LanguageModelConfig
from attnlab.kernels.masks import causal_mask
from attnlab.layers.block import TransformerBlock, TransformerStack
from attnlab.layers.positions import NoEncoding
from attnlab.models.language import LanguageModel
from tests.quick import QUICK

V, D, T, L = 11, 8, 6, 2
PLAIN = LanguageModelConfig(layers=L, width=D, heads=2, context=T, init=0.0, scaled_init=False)
TODAY = dataclasses.replace(
    PLAIN, heads=4, kv_heads=2, qk_norm='rms', positions='rotary', norm='rms', mlp='swiglu', use_bias=False,
    scaled_init=True, init=0.02,
)  # fmt: skip
VARIANTS = {
    'plain': PLAIN,
    'today': TODAY,
    'post': dataclasses.replace(PLAIN, order='post', mlp='relu'),
    'sandwich': dataclasses.replace(PLAIN, order='sandwich', qk_norm='l2'),
    'parallel': dataclasses.replace(PLAIN, parallel=True, positions='alibi', sinks=True),
    'window': dataclasses.replace(PLAIN, window=2),
    'experts': dataclasses.replace(TODAY, experts=4, active=2),
    'relative': dataclasses.replace(PLAIN, positions='relative'),
    'convolution': dataclasses.replace(PLAIN, mixer='convolution'),
    'gru': dataclasses.replace(PLAIN, mixer='gru'),
    'lstm': dataclasses.replace(PLAIN, mixer='lstm'),
}


def model(config=PLAIN, **changes):
    return LanguageModel(V, dataclasses.replace(config, **changes))


def tokens(B=2, T=T):
    return jnp.asarray(np.random.default_rng(0).integers(0, V, (B, T)))


def started(made, tokens=tokens()):  # noqa: B008
    """Parameters, none of them at a start that hides it, such as zero."""
    params = jax.jit(made.init, compiler_options=QUICK)(jax.random.key(0), tokens)
    leaves, tree = jax.tree.flatten(params)
    random = np.random.default_rng(1)
    return tree.unflatten([x + jnp.asarray(0.1 * random.normal(size=x.shape), x.dtype) for x in leaves])


def parameters(made):
    """Their number, with nothing made."""
    shapes = jax.eval_shape(made.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes))


def gpt(width, layers, heads, context=1024):
    return LanguageModel(
        50257, LanguageModelConfig(width=width, layers=layers, heads=heads, context=context, scan=True)
    )


LLAMA = LanguageModelConfig(
    width=4096, layers=32, context=2048, heads=32, positions='rotary', norm='rms', mlp='swiglu', mlp_width=11008,
    use_bias=False, tied=False, scan=True,
)  # fmt: skip
MIXTRAL = dataclasses.replace(LLAMA, context=32768, kv_heads=8, mlp_width=14336, experts=8, active=2)
PUBLISHED = {
    'GPT-2 small': (gpt(768, 12, 12), 124_439_808),
    'GPT-2 medium': (gpt(1024, 24, 16), 354_823_168),
    'GPT-2 large': (gpt(1280, 36, 20), 774_030_080),
    'GPT-2 XL': (gpt(1600, 48, 25), 1_557_611_200),
    'GPT-3 175B': (gpt(12288, 96, 96, 2048), 174_604_259_328),
    'LLaMA-7B': (LanguageModel(32000, LLAMA), 6_738_415_616),
    'Mixtral 8x7B': (LanguageModel(32000, MIXTRAL), 46_702_792_704),
}


@pytest.mark.parametrize('made, count', PUBLISHED.values(), ids=PUBLISHED)
def test_published_models_have_the_parameters_that_were_published(made, count):
    assert parameters(made) == count


@pytest.mark.parametrize('name, changed', [(name, {}) for name in VARIANTS] + [
    ('plain', {'positions': 'sinusoidal'}), ('plain', {'positions': 'none'}),
])  # fmt: skip
def test_no_logit_depends_on_what_comes_later(name, changed):
    made, row = model(VARIANTS[name], tied=False, **changed), jnp.arange(T)[None]  # each token once: its embedding
    params = started(made)['params']

    @partial(jax.jit, compiler_options=QUICK)
    def slopes(table):
        apply = lambda table: made.apply({'params': params | {'embedding': {'embedding': table}}}, row)[0][0]
        return jnp.abs(jax.jacobian(apply)(table)).sum((1, 3))[:, :T]

    found = slopes(params['embedding']['embedding'])  # [T, T], of the logits at t by the embedding at s
    assert jnp.all(jnp.triu(found, 1) == 0)
    if VARIANTS[name].window:  # two layers look back twice as far as one
        assert found[-1, 0] == 0 < found[-1, 1]
    else:
        assert jnp.all(found[jnp.tril_indices(T)] > 0)


@pytest.mark.parametrize('name', ['plain', 'post', pytest.param('experts', marks=pytest.mark.slow)])
def test_a_scan_over_blocks_is_their_loop_and_what_is_computed_again_is_the_same(name):
    loop = model(VARIANTS[name])
    params = started(loop)['params']
    stacked = {**params, 'stack': {**params['stack']}}
    each = [stacked['stack'].pop(f'block_{layer}') for layer in range(L)]
    stacked['stack']['blocks'] = jax.tree.map(lambda *x: jnp.stack(x), *each)

    def graded(made, params):
        loss = lambda params: jnp.sum(jnp.sin(made.apply({'params': params}, tokens())[0]))
        return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(params)

    value, slopes = graded(loop, params)
    slopes['stack']['blocks'] = jax.tree.map(
        lambda *x: jnp.stack(x), *(slopes['stack'].pop(f'block_{layer}') for layer in range(L))
    )
    for remat in ('none', 'full', 'dots'):
        other, expected = graded(model(VARIANTS[name], scan=True, remat=remat), stacked)
        np.testing.assert_allclose(other, value, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), expected, slopes)


@pytest.mark.parametrize('name', ['plain', 'today', 'relative', 'convolution', 'gru', 'lstm'])
def test_packed_documents_are_each_alone(name):
    made = model(VARIANTS[name])
    params, row = started(made), tokens(1)
    ids = jnp.array([[1, 1, 2, 2, 2, 0]])
    apply = jax.jit(made.apply, compiler_options=QUICK)
    logits = apply(params, row, ids)[0]
    for part in (slice(0, 2), slice(2, 5)):
        alone = apply(params, row[:, part])[0]
        np.testing.assert_allclose(logits[:, part], alone, atol=2e-6)


def test_dropout_draws_anew_for_each_key_and_none_when_told_not_to():
    made = model(dataclasses.replace(PLAIN, dropout=0.3, attention_dropout=0.3))
    params = started(made)
    apply = jax.jit(made.apply, static_argnames='deterministic')
    drawn = lambda seed: apply(params, tokens(), deterministic=False, rngs={'dropout': jax.random.key(seed)})[0]
    np.testing.assert_array_equal(drawn(0), drawn(0))
    assert jnp.any(drawn(0) != drawn(1))
    np.testing.assert_array_equal(apply(params, tokens())[0], jax.jit(model().apply)(params, tokens())[0])


def test_what_leads_out_of_a_branch_starts_smaller():
    made = model(width=64, layers=8, init=0.02, scaled_init=True)
    block = jax.jit(made.init)(jax.random.key(0), tokens())['params']['stack']['block_3']
    attention, mlp = block['attention'], block['mlp']
    for out, into in ((attention['out'], attention['query']), (mlp['down'], mlp['up'])):
        np.testing.assert_allclose(jnp.std(out['kernel']), 0.02 / 4, rtol=0.1)
        np.testing.assert_allclose(jnp.std(into['kernel']), 0.02, rtol=0.1)


@pytest.mark.parametrize('order', ['pre', 'post'])
def test_a_plain_block_has_six_products_with_matrices_and_two_of_attention(order):
    made = TransformerBlock(dataclasses.replace(PLAIN, order=order), NoEncoding())
    x, rules = jnp.ones((2, T, D)), causal_mask()
    params = jax.eval_shape(lambda: made.init(jax.random.key(0), x, rules, None, True))
    jaxpr = jax.make_jaxpr(lambda params, x: made.apply(params, x, rules, None, True))(params, x)
    products = [equation for equation in equations(jaxpr.jaxpr) if equation.primitive.name == 'dot_general']
    matrices = [equation for equation in products if not equation.params['dimension_numbers'][1][0]]  # no batch axes
    assert (len(matrices), len(products)) == (6, 8)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')):
            if hasattr(value, 'eqns'):
                yield from equations(getattr(value, 'jaxpr', value))


def test_layer_drop_passes_blocks_by_and_leaves_the_mean():
    made = TransformerStack(dataclasses.replace(PLAIN, layers=1, layer_drop=0.5), NoEncoding())
    x, rules = jnp.asarray(np.random.default_rng(0).normal(size=(512, 2, D)), jnp.float32), causal_mask()
    params = made.init(jax.random.key(0), x, rules)
    apply = jax.jit(lambda key: made.apply(params, x, rules, deterministic=False, rngs={'dropout': key})[0])
    block = TransformerBlock(made.config, NoEncoding())
    added = block.apply({'params': params['params']['block_0']}, x, rules, None, True)[0] - x
    norm = lambda x: nn.LayerNorm(epsilon=1e-5).apply({'params': params['params']['norm']}, x)
    drawn = apply(jax.random.key(1))
    skipped = jnp.all(jnp.abs(drawn - norm(x)) < 1e-5, axis=(1, 2))
    doubled = jnp.all(jnp.abs(drawn - norm(x + 2 * added)) < 1e-4, axis=(1, 2))
    assert jnp.all(skipped ^ doubled) and abs(float(jnp.mean(skipped)) - 0.5) < 5 * 0.5 / 512**0.5
    np.testing.assert_allclose(made.apply(params, x, rules)[0], norm(x + added), atol=1e-5)


def test_errors_name_what_came_and_what_was_expected(as_used):
    shapes = lambda made, tokens: jax.eval_shape(made.init, jax.random.key(0), tokens)
    with pytest.raises(ValueError, match="parallel blocks need order 'pre' and no cross-attention; order is 'post'"):
        shapes(model(order='post', parallel=True), tokens())
    with pytest.raises(ValueError, match="positions is 'all'; expected 'learned', 'sinusoidal', 'rotary', 'alibi'"):
        shapes(model(positions='all'), tokens())
    with pytest.raises(ValueError, match="positions is 'alibi', which acts in attention, but mixer is 'gru'"):
        shapes(model(positions='alibi', mixer='gru'), tokens())
    with pytest.raises(ValueError, match=f'{T}'):
        shapes(model(), tokens(T=T + 1))
