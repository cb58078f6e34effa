"""The Vision Transformer: forms of one layer, where tokens stand, what pooling reads, and published sizes."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.configs import ResNetConfig, VitConfig
from attnlab.kernels.patches import patchify, unpatchify
from attnlab.kernels.positions import sinusoidal_encoding_2d
from attnlab.kernels.rotary import rotary_encoding_2d
from attnlab.layers.patches import AttentionPooling, ConvolutionalTokenizer, PatchEmbedding, tokenizer_grid
from attnlab.layers.positions import RotaryEncoding
from attnlab.models.resnet import ResNet
from attnlab.models.vision import VisionTransformer
from tests.quick import QUICK

quick = partial(jax.jit, compiler_options=QUICK)

IMAGE, PATCH, CLASSES, D = (8, 16), (4, 4), 5, 16
ROWS, COLUMNS = 2, 4
TURN = RotaryEncoding(100.0, grid=(ROWS, COLUMNS))
PLAIN = VitConfig(image=IMAGE, patch=PATCH, width=D, layers=2, heads=2, init=0.0, scaled_init=False)


def model(**changes):
    return VisionTransformer(CLASSES, dataclasses.replace(PLAIN, **changes))


def pictures(B=2, shape=IMAGE, C=3):
    return jnp.asarray(np.random.default_rng(0).normal(size=(B, *shape, C)), jnp.float32)


def started(made, images=None):
    """Parameters, none of them at a start that hides it, such as zero."""
    images = pictures(shape=made.config.image) if images is None else images
    params = quick(made.init)(jax.random.key(0), images)['params']
    leaves, tree = jax.tree.flatten(params)
    random = np.random.default_rng(1)
    return tree.unflatten([x + jnp.asarray(0.3 * random.normal(size=x.shape), x.dtype) for x in leaves])


def logits(made, params, images, **kwargs):
    apply = lambda params, images: made.apply({'params': params}, images, **kwargs)[0]
    return quick(apply)(params, images)


def test_patchify_and_a_product_are_a_convolution():
    images = pictures()
    layers = {form: PatchEmbedding(D, (4, 2), form) for form in ('product', 'convolution')}
    params = quick(layers['product'].init)(jax.random.key(0), images)
    shapes = jax.tree.map(jnp.shape, params['params'])
    assert shapes == {'kernel': (4, 2, 3, D), 'bias': (D,)}
    both = [quick(layer.apply)(params, images) for layer in layers.values()]
    np.testing.assert_allclose(both[0], both[1], atol=1e-5)
    conv = nn.Conv(D, (4, 2), (4, 2), padding='VALID')
    np.testing.assert_allclose(conv.apply(params, images).reshape(2, -1, D), both[1], atol=1e-5)
    loss = lambda layer: lambda params: jnp.sum(jnp.sin(layer.apply(params, images)))
    gradients = [quick(jax.grad(loss(layer)))(params) for layer in layers.values()]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *gradients)


def permuted(images, order):
    """The images with their patches in another order."""
    return unpatchify(patchify(images, PATCH)[:, jnp.asarray(order)], PATCH, IMAGE)


ORDER = [3, 0, 7, 1, 6, 2, 5, 4]


@pytest.mark.parametrize('pool', ['mean', 'class', 'attention'])
@pytest.mark.parametrize('registers', [0, 2])
def test_without_positions_the_order_of_patches_says_nothing(pool, registers):
    made = model(positions='none', pool=pool, registers=registers)
    params, images = started(made), pictures()
    both = logits(made, params, images), logits(made, params, permuted(images, ORDER))
    np.testing.assert_allclose(*both, atol=1e-5)


@pytest.mark.parametrize('positions', ['learned', 'sinusoidal', 'rotary'])
@pytest.mark.parametrize('pool', ['mean', 'class'])
def test_with_positions_it_does(positions, pool):
    made = model(positions=positions, pool=pool, registers=1)
    params, images = started(made), pictures()
    both = logits(made, params, images), logits(made, params, permuted(images, ORDER))
    assert float(jnp.max(jnp.abs(both[0] - both[1]))) > 1e-3


def swapped(x):
    half = x.shape[-1] // 2
    return jnp.concatenate([x[..., half:], x[..., :half]], axis=-1)


def test_a_transposed_image_is_swapped_halves_of_the_codes():
    """On a square grid, with the pixels of a patch transposed too; what is not square is the next test's."""
    made, images = model(image=(8, 8)), pictures(shape=(8, 8))
    params, codes = started(made), sinusoidal_encoding_2d(2, 2, D)
    kernel = params['embedding']['kernel']
    turned = {'embedding': params['embedding'] | {'kernel': kernel.swapaxes(0, 1)}, 'positions': {'table': codes}}
    halves = {'positions': {'table': swapped(codes)}}
    both = logits(made, params | turned, images.swapaxes(1, 2)), logits(made, params | halves, images)
    np.testing.assert_allclose(*both, atol=1e-5)
    plain = logits(made, params | {'positions': {'table': codes}}, images)
    assert float(jnp.max(jnp.abs(plain - both[1]))) > 1e-3
    sinusoids = {name: x for name, x in params.items() if name != 'positions'}
    np.testing.assert_allclose(logits(model(image=(8, 8), positions='sinusoidal'), sinusoids, images), plain, atol=1e-6)


@pytest.mark.parametrize('positions', ['sinusoidal', 'rotary'])
def test_rows_and_columns_are_not_mixed_up(positions):
    """One 8 x 16 image is 2 rows of 4 tokens: the row's half is equal along a row, the column's down a column."""
    H = 8
    if positions == 'sinusoidal':
        made = model(positions='sinusoidal')
        codes = made.apply({'params': started(made)}, jnp.zeros((1, 8, D)), method='_add_positions_and_prefix')[0]
    else:
        codes = TURN.rotate(jnp.ones((1, 8, 1, H)))[0, :, 0]
        np.testing.assert_allclose(codes, rotary_encoding_2d(jnp.ones((8, 1, H)), ROWS, COLUMNS)[:, 0], atol=1e-6)
    half = codes.shape[-1] // 2
    row, column = codes[:, :half].reshape(ROWS, COLUMNS, half), codes[:, half:].reshape(ROWS, COLUMNS, half)
    np.testing.assert_allclose(row, jnp.broadcast_to(row[:, :1], row.shape), atol=1e-6)
    np.testing.assert_allclose(column, jnp.broadcast_to(column[:1], column.shape), atol=1e-6)
    assert float(jnp.max(jnp.abs(row[0] - row[1]))) > 0.1 and float(jnp.max(jnp.abs(column[:, 0] - column[:, 1]))) > 0.1


def test_rotary_leaves_what_stands_in_front():
    x = pictures(1, (10, 1), 8).swapaxes(2, 3).reshape(1, 10, 1, 8)
    turned = TURN.rotate(x)
    np.testing.assert_array_equal(turned[:, :2], x[:, :2])
    np.testing.assert_allclose(turned[:, 2:], TURN.rotate(x[:, 2:]), atol=1e-6)


def test_what_each_pooling_has():
    shapes = lambda **kwargs: jax.eval_shape(model(**kwargs).init, jax.random.key(0), pictures())['params']
    mean, classed, attended = (shapes(pool=pool) for pool in ('mean', 'class', 'attention'))
    assert 'class' not in mean and mean['positions']['table'].shape == (8, D)
    assert classed['class'].shape == (D,) and classed['positions']['table'].shape == (9, D)
    assert attended['pool']['score']['kernel'].shape == (D, 1) and 'class' not in attended
    assert shapes(registers=3)['registers'].shape == (3 * D,) and 'registers' not in mean
    square = jax.eval_shape(model(image=(32, 32)).init, jax.random.key(0), pictures(shape=(32, 32)))['params']
    assert square['positions']['table'].shape == (64, D)


@pytest.mark.parametrize('pool', ['mean', 'class', 'attention'])
def test_the_head_reads_what_the_pooling_says(pool):
    made = model(pool=pool, registers=2)
    params, images = started(made), pictures()
    called = lambda module, name: (module.name, name) == ('stack', '__call__')
    (found, _), kept = quick(partial(made.apply, capture_intermediates=called))({'params': params}, images)
    x = np.asarray(kept['intermediates']['stack']['__call__'][0][0], np.float64)
    assert x.shape == (2, 8 + made.num_prefix_tokens, D)
    if pool == 'mean':
        read = x[:, 2:].mean(axis=1)
    elif pool == 'class':
        read = x[:, 2]
    else:
        score = x[:, 2:] @ np.asarray(params['pool']['score']['kernel'], np.float64)
        weights = np.exp(score) / np.exp(score).sum(axis=1, keepdims=True)
        read = (weights * x[:, 2:]).sum(axis=1)
    expected = read @ np.asarray(params['head']['kernel'], np.float64) + np.asarray(params['head']['bias'])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_every_register_and_every_pixel_matters():
    made = model(registers=2, pool='class')
    params, images = started(made), pictures()
    loss = lambda params, images: jnp.sum(jnp.sin(made.apply({'params': params}, images)[0]))
    slopes = quick(jax.grad(loss, argnums=(0, 1)))(params, images)
    assert all(float(jnp.max(jnp.abs(x))) > 0 for x in jax.tree.leaves(slopes[0]) if x.size > 2 * 8)
    assert float(jnp.min(jnp.max(jnp.abs(slopes[1]), axis=(0, 3)))) > 0


def test_the_tokenizer_halves_the_grid_and_uses_all_of_the_image():
    made = model(embedding='tokenizer', convolutions=2, channels=6, image=(9, 16), pool='attention')
    assert made.grid == tokenizer_grid((9, 16), 2) == (3, 4)
    images = pictures(shape=(9, 16))
    layer = ConvolutionalTokenizer((6,), D)
    params = quick(layer.init)(jax.random.key(0), images)
    tokens = quick(layer.apply)(params, images)
    assert tokens.shape == (2, 12, D) and 'bias' not in params['params']['convolution_0']
    assert model(image=(32, 32), embedding='tokenizer').grid == (8, 8)
    slope = quick(jax.grad(lambda x: jnp.sum(jnp.sin(layer.apply(params, x)))))(images)
    assert float(jnp.mean(jnp.any(slope != 0, axis=(0, 3)))) > 0.9
    assert logits(made, started(made, images), images).shape == (2, CLASSES)


def test_the_compact_transformer_has_as_many_parameters_as_published():
    made = VisionTransformer(
        10, VitConfig(width=128, layers=2, heads=2, mlp_width=128, embedding='tokenizer', pool='attention')
    )
    shapes = jax.eval_shape(made.init, jax.random.key(0), pictures(shape=(32, 32)))
    assert round(sum(x.size for x in jax.tree.leaves(shapes)) / 1e6, 2) == 0.28  # Hassani et al. 2021, table 2


@pytest.mark.parametrize('change', [
    {'experts': 2, 'active': 2}, {'order': 'post', 'norm': 'rms'}, {'parallel': True, 'qk_norm': 'rms'},
    {'mlp': 'swiglu', 'kv_heads': 1, 'sinks': True},
], ids=str)  # fmt: skip
def test_variants_of_blocks(change):
    change = dict(positions='rotary', pool='class', registers=1) | change
    made, scanned = model(**change), model(scan=True, remat='full', **change)
    params, images = started(made), pictures()
    said = jax.eval_shape(made.apply, {'params': params}, images)[1]
    assert bool(said) == ('experts' in change)
    stack = params['stack']
    blocks = jax.tree.map(lambda *x: jnp.stack(x), stack['block_0'], stack['block_1'])
    both = params | {'stack': {'blocks': blocks, **{name: x for name, x in stack.items() if 'block_' not in name}}}
    np.testing.assert_allclose(logits(made, params, images), logits(scanned, both, images), atol=1e-5)


def test_half_precision_gives_whole_logits():
    made = model(dtype='bfloat16', registers=1, pool='class')
    params, images = started(made), pictures()
    half, whole = logits(made, params, images), logits(model(registers=1, pool='class'), params, images)
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, whole, atol=0.06 * float(jnp.max(jnp.abs(whole))))


@pytest.mark.parametrize(('changes', 'message'), [
    (dict(image=(33, 33), patch=(4, 4)), 'patches of height 4 do not divide images of height 33'),
    (dict(positions='2d'), "positions is '2d'; expected 'learned', 'sinusoidal', 'rotary', 'none'"),
    (dict(positions='alibi'), "positions is 'alibi'; expected 'learned', 'sinusoidal', 'rotary', 'none' for the"),
    (dict(positions='relative'), "positions is 'relative'; expected 'learned', 'sinusoidal', 'rotary', 'none' for"),
    (dict(positions='rotary', width=12), 'a multiple of 4'),
])  # fmt: skip
def test_what_makes_no_model_is_refused(changes, message, as_used):
    made = model(**changes)
    with pytest.raises(ValueError, match=message):
        made.init(jax.random.key(0), pictures(shape=made.config.image))


def test_an_image_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r'images have height and width \(16, 8\); expected \(8, 16\)'):
        model().init(jax.random.key(0), pictures(shape=(16, 8)))


def test_attention_pooling_of_equal_scores_is_the_mean():
    x = pictures(2, (4, 1), D).reshape(2, 4, D)
    params = {'params': {'score': {'kernel': jnp.zeros((D, 1)), 'bias': jnp.zeros(1)}}}
    np.testing.assert_allclose(AttentionPooling().apply(params, x), x.mean(axis=1), atol=1e-6)


def test_the_residual_network():
    made, images = ResNet(CLASSES, ResNetConfig(width=8, blocks=2)), pictures(shape=(16, 16))
    params = quick(made.init)(jax.random.key(0), images)['params']
    alone = logits(made, params, images[:1])
    np.testing.assert_allclose(logits(made, params, images)[:1], alone, atol=1e-5)  # neighbours say nothing
    convolutions = [name for name in params if 'norm' not in name and name not in ('head', 'stage_1_block_0_shortcut',
                    'stage_2_block_0_shortcut')]  # fmt: skip
    assert len(convolutions) == 1 + 3 * 2 * 2
