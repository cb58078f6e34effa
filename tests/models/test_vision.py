"""The Vision Transformer: patch embedding, positions, pooling, the tokenizer, published sizes; the ResNet."""

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
ROTARY = RotaryEncoding(100.0, grid=(ROWS, COLUMNS))
PLAIN = VitConfig(image=IMAGE, patch=PATCH, width=D, layers=2, heads=2, init=0.0, scaled_init=False)


def make_model(**changes):
    return VisionTransformer(CLASSES, dataclasses.replace(PLAIN, **changes))


def random_images(B=2, shape=IMAGE, C=3):
    return jnp.asarray(np.random.default_rng(0).normal(size=(B, *shape, C)), jnp.float32)


def random_parameters(model, images=None):
    """Return initial parameters plus noise, so that none has a value such as zero that would hide its effect."""
    images = random_images(shape=model.config.image) if images is None else images
    params = quick(model.init)(jax.random.key(0), images)['params']
    leaves, tree = jax.tree.flatten(params)
    random = np.random.default_rng(1)
    return tree.unflatten([x + jnp.asarray(0.3 * random.normal(size=x.shape), x.dtype) for x in leaves])


def logits(model, params, images, **kwargs):
    apply = lambda params, images: model.apply({'params': params}, images, **kwargs)[0]
    return quick(apply)(params, images)


def test_both_forms_of_patch_embedding_equal_a_convolution():
    images = random_images()
    layers = {form: PatchEmbedding(D, (4, 2), form) for form in ('product', 'convolution')}
    params = quick(layers['product'].init)(jax.random.key(0), images)
    shapes = jax.tree.map(jnp.shape, params['params'])
    assert shapes == {'kernel': (4, 2, 3, D), 'bias': (D,)}
    product, convolution = (quick(layer.apply)(params, images) for layer in layers.values())
    np.testing.assert_allclose(product, convolution, atol=1e-5)
    flax_layer = nn.Conv(D, (4, 2), (4, 2), padding='VALID')
    np.testing.assert_allclose(flax_layer.apply(params, images).reshape(2, -1, D), convolution, atol=1e-5)
    loss = lambda layer: lambda params: jnp.sum(jnp.sin(layer.apply(params, images)))
    gradients = [quick(jax.grad(loss(layer)))(params) for layer in layers.values()]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *gradients)


def permute_patches(images, order):
    """Return the images with their patches in another order."""
    return unpatchify(patchify(images, PATCH)[:, jnp.asarray(order)], PATCH, IMAGE)


ORDER = [3, 0, 7, 1, 6, 2, 5, 4]


@pytest.mark.slow
@pytest.mark.parametrize('pool', ['mean', 'class', 'attention'])
@pytest.mark.parametrize('registers', [0, 2])
def test_without_positions_logits_do_not_depend_on_the_order_of_patches(pool, registers):
    model = make_model(positions='none', pool=pool, registers=registers)
    params, images = random_parameters(model), random_images()
    permuted_logits = logits(model, params, permute_patches(images, ORDER))
    np.testing.assert_allclose(logits(model, params, images), permuted_logits, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('positions', ['learned', 'sinusoidal', 'rotary'])
@pytest.mark.parametrize('pool', ['mean', 'class'])
def test_with_positions_logits_depend_on_the_order_of_patches(positions, pool):
    model = make_model(positions=positions, pool=pool, registers=1)
    params, images = random_parameters(model), random_images()
    permuted_logits = logits(model, params, permute_patches(images, ORDER))
    assert float(jnp.max(jnp.abs(logits(model, params, images) - permuted_logits))) > 1e-3


def swap_halves(x):
    """Swap the two halves of the last axis."""
    half = x.shape[-1] // 2
    return jnp.concatenate([x[..., half:], x[..., :half]], axis=-1)


@pytest.mark.slow
def test_transposing_an_image_equals_swapping_the_halves_of_its_position_codes():
    """On a square grid, with the pixels of each patch transposed too.  The next test has a grid that is not square."""
    model, images = make_model(image=(8, 8)), random_images(shape=(8, 8))
    params, codes = random_parameters(model), sinusoidal_encoding_2d(2, 2, D)
    transposed_kernel = {'kernel': params['embedding']['kernel'].swapaxes(0, 1)}
    transposed = {'embedding': params['embedding'] | transposed_kernel, 'positions': {'table': codes}}
    transposed_logits = logits(model, params | transposed, images.swapaxes(1, 2))
    swapped_logits = logits(model, params | {'positions': {'table': swap_halves(codes)}}, images)
    np.testing.assert_allclose(transposed_logits, swapped_logits, atol=1e-5)
    plain_logits = logits(model, params | {'positions': {'table': codes}}, images)
    assert float(jnp.max(jnp.abs(plain_logits - swapped_logits))) > 1e-3
    sinusoidal = make_model(image=(8, 8), positions='sinusoidal')
    sinusoidal_params = {name: x for name, x in params.items() if name != 'positions'}
    np.testing.assert_allclose(logits(sinusoidal, sinusoidal_params, images), plain_logits, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('positions', ['sinusoidal', 'rotary'])
def test_one_half_of_the_codes_depends_on_the_row_and_one_on_the_column(positions):
    """An 8 x 16 image has 2 rows of 4 tokens."""
    H = 8
    if positions == 'sinusoidal':
        model = make_model(positions='sinusoidal')
        variables, method = {'params': random_parameters(model)}, '_add_positions_and_prefix'
        codes = model.apply(variables, jnp.zeros((1, 8, D)), method=method)[0]
    else:
        codes = ROTARY.rotate(jnp.ones((1, 8, 1, H)))[0, :, 0]
        np.testing.assert_allclose(codes, rotary_encoding_2d(jnp.ones((8, 1, H)), ROWS, COLUMNS)[:, 0], atol=1e-6)
    half = codes.shape[-1] // 2
    row, column = codes[:, :half].reshape(ROWS, COLUMNS, half), codes[:, half:].reshape(ROWS, COLUMNS, half)
    np.testing.assert_allclose(row, jnp.broadcast_to(row[:, :1], row.shape), atol=1e-6)
    np.testing.assert_allclose(column, jnp.broadcast_to(column[:1], column.shape), atol=1e-6)
    assert float(jnp.max(jnp.abs(row[0] - row[1]))) > 0.1
    assert float(jnp.max(jnp.abs(column[:, 0] - column[:, 1]))) > 0.1


def test_rotary_does_not_rotate_tokens_before_the_grid():
    x = random_images(1, (10, 1), 8).swapaxes(2, 3).reshape(1, 10, 1, 8)
    rotated = ROTARY.rotate(x)
    np.testing.assert_array_equal(rotated[:, :2], x[:, :2])
    np.testing.assert_allclose(rotated[:, 2:], ROTARY.rotate(x[:, 2:]), atol=1e-6)


def test_parameters_of_each_pooling():
    shapes = lambda **kwargs: jax.eval_shape(make_model(**kwargs).init, jax.random.key(0), random_images())['params']
    mean, class_token, attention = (shapes(pool=pool) for pool in ('mean', 'class', 'attention'))
    assert 'class' not in mean and mean['positions']['table'].shape == (8, D)
    assert class_token['class'].shape == (D,) and class_token['positions']['table'].shape == (9, D)
    assert attention['pool']['score']['kernel'].shape == (D, 1) and 'class' not in attention
    assert shapes(registers=3)['registers'].shape == (3 * D,) and 'registers' not in mean
    square = jax.eval_shape(make_model(image=(32, 32)).init, jax.random.key(0), random_images(shape=(32, 32)))['params']
    assert square['positions']['table'].shape == (64, D)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('pool', ['mean', 'class', 'attention'])
def test_the_input_of_the_head_is_that_of_the_pooling(pool):
    model = make_model(pool=pool, registers=2)
    params, images = random_parameters(model), random_images()
    is_stack = lambda module, name: (module.name, name) == ('stack', '__call__')
    apply = quick(partial(model.apply, capture_intermediates=is_stack))
    (output, _), captured = apply({'params': params}, images)
    x = np.asarray(captured['intermediates']['stack']['__call__'][0][0], np.float64)
    assert x.shape == (2, 8 + model.num_prefix_tokens, D)
    if pool == 'mean':
        pooled = x[:, 2:].mean(axis=1)
    elif pool == 'class':
        pooled = x[:, 2]
    else:
        score = x[:, 2:] @ np.asarray(params['pool']['score']['kernel'], np.float64)
        weights = np.exp(score) / np.exp(score).sum(axis=1, keepdims=True)
        pooled = (weights * x[:, 2:]).sum(axis=1)
    expected = pooled @ np.asarray(params['head']['kernel'], np.float64) + np.asarray(params['head']['bias'])
    np.testing.assert_allclose(output, expected, atol=1e-5)


@pytest.mark.slow
def test_every_register_and_every_pixel_gets_a_gradient():
    model = make_model(registers=2, pool='class')
    params, images = random_parameters(model), random_images()
    loss = lambda params, images: jnp.sum(jnp.sin(model.apply({'params': params}, images)[0]))
    d_params, d_images = quick(jax.grad(loss, argnums=(0, 1)))(params, images)
    assert all(float(jnp.max(jnp.abs(x))) > 0 for x in jax.tree.leaves(d_params) if x.size > 2 * 8)
    assert float(jnp.min(jnp.max(jnp.abs(d_images), axis=(0, 3)))) > 0


@pytest.mark.slow
def test_the_tokenizer_halves_the_grid_and_uses_the_whole_image():
    model = make_model(embedding='tokenizer', convolutions=2, channels=6, image=(9, 16), pool='attention')
    assert model.grid == tokenizer_grid((9, 16), 2) == (3, 4)
    images = random_images(shape=(9, 16))
    layer = ConvolutionalTokenizer((6,), D)
    params = quick(layer.init)(jax.random.key(0), images)
    tokens = quick(layer.apply)(params, images)
    assert tokens.shape == (2, 12, D) and 'bias' not in params['params']['convolution_0']
    assert make_model(image=(32, 32), embedding='tokenizer').grid == (8, 8)
    d_images = quick(jax.grad(lambda x: jnp.sum(jnp.sin(layer.apply(params, x)))))(images)
    assert float(jnp.mean(jnp.any(d_images != 0, axis=(0, 3)))) > 0.9
    assert logits(model, random_parameters(model, images), images).shape == (2, CLASSES)


def test_parameter_count_of_the_published_compact_transformer():
    model = VisionTransformer(
        10, VitConfig(width=128, layers=2, heads=2, mlp_width=128, embedding='tokenizer', pool='attention')
    )
    shapes = jax.eval_shape(model.init, jax.random.key(0), random_images(shape=(32, 32)))
    assert round(sum(x.size for x in jax.tree.leaves(shapes)) / 1e6, 2) == 0.28  # Hassani et al. 2021, table 2


@pytest.mark.slow
@pytest.mark.parametrize('changes', [
    {'experts': 2, 'experts_per_token': 2}, {'order': 'post', 'norm': 'rms'},
    {'parallel': True, 'qk_norm': 'rms'},
    {'mlp': 'swiglu', 'kv_heads': 1, 'sinks': True},
], ids=str)  # fmt: skip
def test_variants_of_blocks_give_the_same_logits_in_a_loop_and_a_scan(changes):
    changes = dict(positions='rotary', pool='class', registers=1) | changes
    loop, scan = make_model(**changes), make_model(scan=True, remat='full', **changes)
    params, images = random_parameters(loop), random_images()
    aux = jax.eval_shape(loop.apply, {'params': params}, images)[1]
    assert bool(aux) == ('experts' in changes)
    stack = params['stack']
    blocks = jax.tree.map(lambda *x: jnp.stack(x), stack['block_0'], stack['block_1'])
    other = {name: x for name, x in stack.items() if 'block_' not in name}
    scan_params = params | {'stack': {'blocks': blocks, **other}}
    np.testing.assert_allclose(logits(loop, params, images), logits(scan, scan_params, images), atol=1e-5)


@pytest.mark.slow
def test_bfloat16_models_give_float32_logits():
    model = make_model(dtype='bfloat16', registers=1, pool='class')
    params, images = random_parameters(model), random_images()
    expected = logits(make_model(registers=1, pool='class'), params, images)
    actual = logits(model, params, images)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, atol=0.06 * float(jnp.max(jnp.abs(expected))))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(('changes', 'message'), [
    (dict(image=(33, 33), patch=(4, 4)), 'patches of height 4 do not divide images of height 33'),
    (dict(positions='2d'), "positions is '2d'; expected 'learned', 'sinusoidal', 'rotary', 'none'"),
    (dict(positions='alibi'), "positions is 'alibi'; expected 'learned', 'sinusoidal', 'rotary', 'none' for the"),
    (dict(positions='relative'), "positions is 'relative'; expected 'learned', 'sinusoidal', 'rotary', 'none' for"),
    (dict(positions='rotary', width=12), 'a multiple of 4'),
])  # fmt: skip
def test_invalid_configs_raise(changes, message, as_used):
    model = make_model(**changes)
    with pytest.raises(ValueError, match=message):
        model.init(jax.random.key(0), random_images(shape=model.config.image))


def test_an_image_of_another_size_raises():
    with pytest.raises(ValueError, match=r'images have height and width \(16, 8\); expected \(8, 16\)'):
        make_model().init(jax.random.key(0), random_images(shape=(16, 8)))


def test_attention_pooling_of_equal_scores_is_the_mean():
    x = random_images(2, (4, 1), D).reshape(2, 4, D)
    params = {'params': {'score': {'kernel': jnp.zeros((D, 1)), 'bias': jnp.zeros(1)}}}
    np.testing.assert_allclose(AttentionPooling().apply(params, x), x.mean(axis=1), atol=1e-6)


@pytest.mark.slow
def test_the_residual_network_has_its_layers_and_treats_images_independently():
    model, images = ResNet(CLASSES, ResNetConfig(width=8, blocks=2)), random_images(shape=(16, 16))
    params = quick(model.init)(jax.random.key(0), images)['params']
    alone = logits(model, params, images[:1])
    np.testing.assert_allclose(logits(model, params, images)[:1], alone, atol=1e-5)
    convolutions = [name for name in params if 'norm' not in name and name not in ('head', 'stage_1_block_0_shortcut',
                    'stage_2_block_0_shortcut')]  # fmt: skip
    assert len(convolutions) == 1 + 3 * 2 * 2
