"""Mixture of experts over a mesh: the same results as one device, and each device computes only its own experts."""

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
    'biases, capacity and dropout': dict(kind='gelu', bias=True, capacity=3, dropout_rate=0.4),
    'rows that the mesh does not divide': dict(kind='gelu', bias=True, shape=(3, 5), dropout_rate=0.4),
    'experts and activations that the mesh does not divide': dict(
        kind='gelu', bias=True, sizes=(7, 3), dropout_rate=0.4
    ),
}


def random_inputs(kind, bias=False, shape=(B, T), sizes=(F, E)):
    """Return random x, logits of the router and expert weights."""
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(scale=0.5, size=shape).astype(np.float32)  # sines of large sums lose precision
    hidden_width, experts = sizes
    projection = lambda rows, columns: (draw(experts, rows, columns), draw(experts, columns) if bias else None)
    expert_weights = {name: projection(D, hidden_width) for name in input_kernel_names(kind)} | {
        'down': projection(hidden_width, D)
    }
    return draw(*shape, D), draw(*shape, experts), expert_weights


def loss_and_output(x, logits, expert_weights, *, kind, capacity=None, dropout_rate=0.0):
    """Return a loss that depends on all of the output, and the output."""
    routing = route_tokens(logits, A, capacity=capacity)
    dropout_mask = None
    if dropout_rate:
        hidden_width = expert_weights['down'][0].shape[1]
        dropout_mask = jax.random.bernoulli(jax.random.key(0), 1 - dropout_rate, (*x.shape[:2], A, hidden_width))
    y = mixture_of_experts(
        x,
        routing,
        expert_weights,
        partial(hidden_activations, kind),
        dropout_mask=dropout_mask,
        dropout_rate=dropout_rate,
    )
    return jnp.sum(jnp.sin(3.0 * y)), y


def gradients_and_output(mesh, *, kind, capacity=None, dropout_rate=0.0, **changes):
    """Return gradients and output, computed on the devices of a mesh."""
    gradients = jax.grad(
        partial(loss_and_output, kind=kind, capacity=capacity, dropout_rate=dropout_rate), (0, 1, 2), has_aux=True
    )
    program = jax.jit(gradients, compiler_options=QUICK)
    with jax.set_mesh(make_mesh(mesh, 8)):
        return program(*random_inputs(kind, **changes))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('mesh', MESHES)
def test_mesh_matches_one_device(mesh, case):
    expected, actual = (gradients_and_output(name, **CASES[case]) for name in ('data=1', mesh))
    jax.tree.map(partial(near, tolerance=1e-5, what=mesh), actual, expected)
    assert all(np.any(np.asarray(gradient) != 0) for gradient in jax.tree.leaves(expected[0]))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(('mesh', 'copies'), [
    ('data=8', 1), ('data=2,expert=4', 1), ('data=2,expert=2,tensor=2', 2), ('data=2,sequence=4', 1),
])  # fmt: skip
def test_each_token_is_multiplied_only_on_devices_of_its_experts(monkeypatch, mesh, copies):
    """`copies`: the number of devices that multiply the same tokens, each with a part of the hidden activations."""
    row_counts, block_matmul = [], module.block_matmul

    def counting_matmul(x, kernel, experts, used):
        jax.debug.callback(lambda count: row_counts.append(int(count)), jnp.sum(jnp.any(x != 0, axis=-1)))
        return block_matmul(x, kernel, experts, used)

    monkeypatch.setattr(module, 'block_matmul', counting_matmul)
    x, logits, expert_weights = random_inputs('relu')
    expert_weights = {
        'up': (np.ones_like(expert_weights['up'][0]), None),
        'down': (np.zeros_like(expert_weights['down'][0]), None),
    }
    x = np.abs(x)  # so that no row that is multiplied by `down` is zero
    with jax.set_mesh(make_mesh(mesh, 8)):
        jax.block_until_ready(jax.jit(partial(loss_and_output, kind='relu'))(x, logits, expert_weights))
    jax.effects_barrier()
    assert len(row_counts) == 2 * 8 and sum(row_counts) == 2 * copies * B * T * A  # `up` and `down` on each device


def test_forward_mode_derivative_raises():
    x, logits, expert_weights = jax.tree.map(jnp.asarray, random_inputs('gelu'))
    tangent = lambda x: jax.jvp(lambda x: loss_and_output(x, logits, expert_weights, kind='gelu')[0], (x,), (x,))
    with pytest.raises(NotImplementedError, match='jax.jvp: the mixture of experts has no forward-mode derivative'):
        jax.jit(tangent).lower(x)
