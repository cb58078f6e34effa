import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.configs import OptimizerConfig, ResNetConfig
from attnlab.models.resnet import ResNet
from attnlab.train import optimizer


def config(**changes):
    return OptimizerConfig(**dict(name='sgd', learning_rate=1.0, schedule='constant', clip=0.0) | changes)


def rates(config, total, warmup, upto):
    rate = optimizer.make_schedule(config, total, warmup)
    return np.array([float(rate(i)) for i in range(upto)])


def test_warmup_rises_linearly_from_zero():
    np.testing.assert_allclose(rates(config(), 100, 5, 7), [0, 0.2, 0.4, 0.6, 0.8, 1, 1], rtol=1e-6)


def test_without_warmup_the_first_step_has_the_peak_rate():
    assert rates(config(), 100, 0, 1) == [1.0]


@pytest.mark.parametrize(
    'shape, formula',
    [
        ('linear', lambda i: 1 - i / 20),
        ('cosine', lambda i: 0.5 * (1 + np.cos(np.pi * i / 20))),
        ('rsqrt', lambda i: (4 / (4 + i)) ** 0.5),
    ],
)
def test_schedule_shapes_after_the_warmup(shape, formula):
    np.testing.assert_allclose(
        rates(config(schedule=shape), 24, 4, 25)[4:], formula(np.arange(21)), rtol=1e-5, atol=1e-7
    )


def test_weight_decay_applies_to_matrices_only():
    chain = optimizer.make_optimizer_factory(config(weight_decay=0.5))(1.0, 0.5)
    params = {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}
    updates, _ = chain.update({'kernel': jnp.zeros((2, 2)), 'bias': jnp.zeros(2)}, chain.init(params), params)
    np.testing.assert_array_equal(updates['kernel'], -0.5)
    np.testing.assert_array_equal(updates['bias'], 0.0)


@pytest.mark.parametrize('clip, expected', [(1.0, [0.6, 0.8]), (10.0, [3.0, 4.0]), (0.0, [3.0, 4.0])])
def test_gradients_are_clipped_by_the_global_norm(clip, expected):
    chain = optimizer.make_optimizer_factory(config(clip=clip))(1.0, 0.0)
    gradient = {'a': jnp.array([3.0]), 'b': jnp.array([4.0])}
    updates, _ = chain.update(gradient, chain.init(gradient), gradient)
    np.testing.assert_allclose([-updates['a'][0], -updates['b'][0]], expected, rtol=1e-6)


@pytest.mark.slow
def test_layer_decay_in_a_residual_network(quickly):
    params = ResNet(3, ResNetConfig(width=8, blocks=2)).init(jax.random.key(0), jnp.ones((1, 8, 8, 1)))['params']
    scaled = optimizer.scale_by_depth(jax.tree.map(jnp.ones_like, params), 0.5)
    expected = {'stem': 7, 'stem_norm': 7, 'stage_0_block_0_first': 6, 'stage_1_block_0_shortcut': 4,
                'stage_1_block_1_second_norm': 3, 'stage_2_block_1_second': 1, 'head': 0}  # fmt: skip
    for name, times in expected.items():
        for x in jax.tree.leaves(scaled[name]):
            np.testing.assert_array_equal(x, 0.5**times)


@pytest.mark.parametrize('scan', [False, True])
def test_layer_decay_in_a_transformer(scan):
    one = {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}
    stacked = {name: jnp.ones((3, *x.shape)) for name, x in one.items()}
    blocks = {'blocks': stacked} if scan else {f'block_{i}': one for i in range(3)}
    params = {'embedding': one, 'stack': {**blocks, 'norm': one}, 'head': one}
    chain = optimizer.make_optimizer_factory(config(layer_decay=0.5))(1.0, 0.0)
    updates, _ = chain.update(params, chain.init(params), params)
    by_layer = {'first': updates['embedding'], 'last': updates['head'], 'norm': updates['stack']['norm']}
    for i in range(3):
        inner = updates['stack']['blocks' if scan else f'block_{i}']
        by_layer[i] = {name: x[i] for name, x in inner.items()} if scan else inner
    for name, rate in (('first', 1 / 16), (0, 1 / 8), (1, 1 / 4), (2, 1 / 2), ('norm', 1.0), ('last', 1.0)):
        for x in by_layer[name].values():
            np.testing.assert_array_equal(x, -rate)
