"""The language model: parameter counts of published models, causality, variants of blocks, loops and scans."""

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
    'experts': dataclasses.replace(TODAY, experts=4, experts_per_token=2),
    'relative': dataclasses.replace(PLAIN, positions='relative'),
    'convolution': dataclasses.replace(PLAIN, mixer='convolution'),
    'gru': dataclasses.replace(PLAIN, mixer='gru'),
    'lstm': dataclasses.replace(PLAIN, mixer='lstm'),
}


def make_model(config=PLAIN, **changes):
    return LanguageModel(V, dataclasses.replace(config, **changes))


def random_tokens(B=2, T=T):
    return jnp.asarray(np.random.default_rng(0).integers(0, V, (B, T)))


def random_parameters(model):
    """Return initial parameters plus noise, so that none has a value such as zero that would hide its effect."""
    params = jax.jit(model.init, compiler_options=QUICK)(jax.random.key(0), random_tokens())
    leaves, tree = jax.tree.flatten(params)
    random = np.random.default_rng(1)
    return tree.unflatten([x + jnp.asarray(0.1 * random.normal(size=x.shape), x.dtype) for x in leaves])


def count_parameters(model):
    """Return the number of parameters, without allocating them."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes))


def gpt(width, layers, heads, context=1024):
    return LanguageModel(
        50257, LanguageModelConfig(width=width, layers=layers, heads=heads, context=context, scan=True)
    )


LLAMA = LanguageModelConfig(
    width=4096, layers=32, context=2048, heads=32, positions='rotary', norm='rms', mlp='swiglu', mlp_width=11008,
    use_bias=False, tied=False, scan=True,
)  # fmt: skip
MIXTRAL = dataclasses.replace(LLAMA, context=32768, kv_heads=8, mlp_width=14336, experts=8, experts_per_token=2)
PUBLISHED = {
    'GPT-2 small': (gpt(768, 12, 12), 124_439_808),
    'GPT-2 medium': (gpt(1024, 24, 16), 354_823_168),
    'GPT-2 large': (gpt(1280, 36, 20), 774_030_080),
    'GPT-2 XL': (gpt(1600, 48, 25), 1_557_611_200),
    'GPT-3 175B': (gpt(12288, 96, 96, 2048), 174_604_259_328),
    'LLaMA-7B': (LanguageModel(32000, LLAMA), 6_738_415_616),
    'Mixtral 8x7B': (LanguageModel(32000, MIXTRAL), 46_702_792_704),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize('model, count', PUBLISHED.values(), ids=PUBLISHED)
def test_parameter_counts_of_published_models(model, count):
    assert count_parameters(model) == count


@pytest.mark.slow
@pytest.mark.parametrize('name, changes', [(name, {}) for name in VARIANTS] + [
    ('plain', {'positions': 'sinusoidal'}), ('plain', {'positions': 'none'}),
])  # fmt: skip
def test_logits_depend_on_all_earlier_tokens_and_on_no_later_one(name, changes):
    model = make_model(VARIANTS[name], tied=False, **changes)
    params = random_parameters(model)['params']
    row = jnp.arange(T)[None]  # each token occurs once, so the gradient of its embedding belongs to one position

    @partial(jax.jit, compiler_options=QUICK)
    def dependence(table):
        """Return [T, T], the sizes of the derivatives of the logits at t by the embedding at s."""
        apply = lambda table: model.apply({'params': params | {'embedding': {'embedding': table}}}, row)[0][0]
        return jnp.abs(jax.jacobian(apply)(table)).sum((1, 3))[:, :T]

    sizes = dependence(params['embedding']['embedding'])
    assert jnp.all(jnp.triu(sizes, 1) == 0)
    if VARIANTS[name].window:  # two layers reach back twice as far as one
        assert sizes[-1, 0] == 0 < sizes[-1, 1]
    else:
        assert jnp.all(sizes[jnp.tril_indices(T)] > 0)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['plain', 'post', pytest.param('experts', marks=pytest.mark.slow)])
def test_scan_and_rematerialisation_change_no_loss_and_no_gradient(name):
    loop = make_model(VARIANTS[name])
    params = random_parameters(loop)['params']

    def stack_blocks(params):
        """Return the parameters, or gradients, of the loop in the form of the scan."""
        stack = dict(params['stack'])
        blocks = [stack.pop(f'block_{layer}') for layer in range(L)]
        return params | {'stack': stack | {'blocks': jax.tree.map(lambda *x: jnp.stack(x), *blocks)}}

    def loss_and_gradients(model, params):
        loss = lambda params: jnp.sum(jnp.sin(model.apply({'params': params}, random_tokens())[0]))
        return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(params)

    expected_loss, expected = loss_and_gradients(loop, params)
    for remat in ('none', 'full', 'dots'):
        scan = make_model(VARIANTS[name], scan=True, remat=remat)
        loss, gradients = loss_and_gradients(scan, stack_blocks(params))
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), gradients, stack_blocks(expected))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['plain', 'today', 'relative', 'convolution', 'gru', 'lstm'])
def test_packed_documents_have_the_logits_of_each_document_alone(name):
    model = make_model(VARIANTS[name])
    params, row = random_parameters(model), random_tokens(1)
    segments = jnp.array([[1, 1, 2, 2, 2, 0]])
    apply = jax.jit(model.apply, compiler_options=QUICK)
    logits = apply(params, row, segments)[0]
    for document in (slice(0, 2), slice(2, 5)):
        alone = apply(params, row[:, document])[0]
        np.testing.assert_allclose(logits[:, document], alone, atol=2e-6)


@pytest.mark.slow
def test_dropout_depends_on_the_key_and_is_off_if_deterministic():
    model = make_model(dataclasses.replace(PLAIN, dropout=0.3, attention_dropout=0.3))
    params, tokens = random_parameters(model), random_tokens()
    apply = jax.jit(model.apply, static_argnames='deterministic')
    drop = lambda seed: apply(params, tokens, deterministic=False, rngs={'dropout': jax.random.key(seed)})[0]
    np.testing.assert_array_equal(drop(0), drop(0))
    assert jnp.any(drop(0) != drop(1))
    np.testing.assert_array_equal(apply(params, tokens)[0], jax.jit(make_model().apply)(params, tokens)[0])


@pytest.mark.slow
def test_scaled_init_makes_the_last_kernel_of_a_branch_smaller():
    model = make_model(width=64, layers=8, init=0.02, scaled_init=True)
    block = jax.jit(model.init)(jax.random.key(0), random_tokens())['params']['stack']['block_3']
    attention, mlp = block['attention'], block['mlp']
    for last, first in ((attention['out'], attention['query']), (mlp['down'], mlp['up'])):
        np.testing.assert_allclose(jnp.std(last['kernel']), 0.02 / 4, rtol=0.1)
        np.testing.assert_allclose(jnp.std(first['kernel']), 0.02, rtol=0.1)


@pytest.mark.parametrize('order', ['pre', 'post'])
def test_a_plain_block_has_six_products_with_matrices_and_two_in_attention(order):
    block = TransformerBlock(dataclasses.replace(PLAIN, order=order), NoEncoding())
    x, mask = jnp.ones((2, T, D)), causal_mask()
    params = jax.eval_shape(lambda: block.init(jax.random.key(0), x, mask, None, True))
    jaxpr = jax.make_jaxpr(lambda params, x: block.apply(params, x, mask, None, True))(params, x)
    products = [equation for equation in all_equations(jaxpr.jaxpr) if equation.primitive.name == 'dot_general']
    matrices = [equation for equation in products if not equation.params['dimension_numbers'][1][0]]  # no batch axes
    assert (len(matrices), len(products)) == (6, 8)


def all_equations(jaxpr):
    """Yield the equations of a jaxpr and of the jaxprs in their parameters."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')):
            if hasattr(value, 'eqns'):
                yield from all_equations(getattr(value, 'jaxpr', value))


@pytest.mark.slow
def test_layer_drop_skips_a_block_or_rescales_its_output():
    stack = TransformerStack(dataclasses.replace(PLAIN, layers=1, layer_drop=0.5), NoEncoding())
    x, mask = jnp.asarray(np.random.default_rng(0).normal(size=(512, 2, D)), jnp.float32), causal_mask()
    params = stack.init(jax.random.key(0), x, mask)
    apply = jax.jit(lambda key: stack.apply(params, x, mask, deterministic=False, rngs={'dropout': key})[0])
    block = TransformerBlock(stack.config, NoEncoding())
    added = block.apply({'params': params['params']['block_0']}, x, mask, None, True)[0] - x
    norm = lambda x: nn.LayerNorm(epsilon=1e-5).apply({'params': params['params']['norm']}, x)
    output = apply(jax.random.key(1))
    skipped = jnp.all(jnp.abs(output - norm(x)) < 1e-5, axis=(1, 2))
    doubled = jnp.all(jnp.abs(output - norm(x + 2 * added)) < 1e-4, axis=(1, 2))
    assert jnp.all(skipped ^ doubled) and abs(float(jnp.mean(skipped)) - 0.5) < 5 * 0.5 / 512**0.5
    np.testing.assert_allclose(stack.apply(params, x, mask)[0], norm(x + added), atol=1e-5)


def test_invalid_configs_and_long_rows_raise(as_used):
    shapes = lambda model, tokens: jax.eval_shape(model.init, jax.random.key(0), tokens)
    with pytest.raises(ValueError, match="parallel blocks need order 'pre' and no cross-attention; order is 'post'"):
        shapes(make_model(order='post', parallel=True), random_tokens())
    with pytest.raises(ValueError, match="positions is 'all'; expected 'learned', 'sinusoidal', 'rotary', 'alibi'"):
        shapes(make_model(positions='all'), random_tokens())
    with pytest.raises(ValueError, match="positions is 'alibi', which acts in attention, but mixer is 'gru'"):
        shapes(make_model(positions='alibi', mixer='gru'), random_tokens())
    with pytest.raises(ValueError, match=f'{T}'):
        shapes(make_model(), random_tokens(T=T + 1))
