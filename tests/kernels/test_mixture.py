"""Experts over the axes of a mesh: what one device computes, each token multiplied where its experts are."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.kernels import mixture as module
from attnlab.kernels.mixture import mixture_of_experts
from attnlab.kernels.routing import route_tokens
from attnlab.layers.mlp import hidden_activations, input_kernel_names
from attnlab.train.devices import make_mesh
from tests.kernels.calls import QUICK
from tests.kernels.oracle import near

B, T, D, F, E, A = 8, 8, 4, 8, 4, 2
MESHES = [
    'data=2,expert=4', 'fsdp=2,expert=2,tensor=2', 'data=2,sequence=2,tensor=2',
    *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ('data=8', 'expert=4', 'expert=8')),
]  # fmt: skip
CASES = {
    'gated': dict(kind='swiglu'),
    'biases, capacity and dropout': dict(kind='gelu', bias=True, capacity=3, rate=0.4),
    'rows that are not divided': dict(kind='gelu', bias=True, shape=(3, 5), rate=0.4),
    'experts and activations that are not divided': dict(kind='gelu', bias=True, sizes=(7, 3), rate=0.4),
}


def given(kind, bias=False, shape=(B, T), sizes=(F, E)):
    """x, logits and matrices, drawn."""
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(scale=0.5, size=shape).astype(np.float32)  # sines of large sums lose digits
    inside, count = sizes
    many = lambda rows, columns: (draw(count, rows, columns), draw(count, columns) if bias else None)
    matrices = {name: many(D, inside) for name in input_kernel_names(kind)} | {'down': many(inside, D)}
    return draw(*shape, D), draw(*shape, count), matrices


def value(x, logits, matrices, *, kind, capacity=None, rate=0.0):
    """A number that all of the output has a part in, and the output."""
    routing = route_tokens(logits, A, capacity=capacity)
    keep = None
    if rate:
        inside = matrices['down'][0].shape[1]
        keep = jax.random.bernoulli(jax.random.key(0), 1 - rate, (*x.shape[:2], A, inside))
    y = mixture_of_experts(x, routing, matrices, partial(hidden_activations, kind), keep=keep, rate=rate)
    return jnp.sum(jnp.sin(3.0 * y)), y


def results(mesh, *, kind, capacity=None, rate=0.0, **changes):
    """Output and gradients on the devices of a mesh."""
    slopes = jax.grad(partial(value, kind=kind, capacity=capacity, rate=rate), (0, 1, 2), has_aux=True)
    program = jax.jit(slopes, compiler_options=QUICK)
    with jax.set_mesh(make_mesh(mesh, 8)):
        return program(*given(kind, **changes))


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('mesh', MESHES)
def test_a_mesh_computes_what_one_device_does(mesh, case):
    one, several = (results(each, **CASES[case]) for each in ('data=1', mesh))
    jax.tree.map(partial(near, tolerance=1e-5, what=mesh), several, one)
    assert all(np.any(np.asarray(slope) != 0) for slope in jax.tree.leaves(one[0]))


@pytest.mark.parametrize(('mesh', 'copies'), [
    ('data=8', 1), ('data=2,expert=4', 1), ('data=2,expert=2,tensor=2', 2), ('data=2,sequence=4', 1),
])  # fmt: skip
def test_each_token_is_multiplied_by_the_device_of_its_experts_alone(monkeypatch, mesh, copies):
    """`copies`: the devices that share hidden activations multiply the same tokens, with parts of the matrices."""
    rows, product = [], module.block_matmul

    def counted(x, kernel, experts, used):
        jax.debug.callback(lambda places: rows.append(int(places)), jnp.sum(jnp.any(x != 0, axis=-1)))
        return product(x, kernel, experts, used)

    monkeypatch.setattr(module, 'block_matmul', counted)
    x, logits, matrices = given('relu')
    matrices = {'up': (np.ones_like(matrices['up'][0]), None), 'down': (np.zeros_like(matrices['down'][0]), None)}
    x = np.abs(x)  # so that what is multiplied with `down` is not zero either
    with jax.set_mesh(make_mesh(mesh, 8)):
        jax.block_until_ready(jax.jit(partial(value, kind='relu'))(x, logits, matrices))
    jax.effects_barrier()
    assert len(rows) == 2 * 8 and sum(rows) == 2 * copies * B * T * A  # `up` and `down` on each device


def test_forward_mode_of_a_mixture_is_refused_by_name():
    x, logits, matrices = jax.tree.map(jnp.asarray, given('gelu'))
    tangent = lambda x: jax.jvp(lambda x: value(x, logits, matrices, kind='gelu')[0], (x,), (x,))
    with pytest.raises(NotImplementedError, match='jax.jvp: the mixture of experts has no forward-mode derivative'):
        jax.jit(tangent).lower(x)
