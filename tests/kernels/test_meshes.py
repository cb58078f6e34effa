"""Attention on arrays that are divided over a mesh: with explicit axes, and inside `jax.shard_map` with its checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attnlab import additive_attention, dot_product_attention
from attnlab.kernels import blockwise
from attnlab.kernels.call import AttentionCall
from attnlab.kernels.implementations import implementations_by_speed
from attnlab.kernels.linear import linear_attention
from attnlab.kernels.masks import Mask
from tests.quick import QUICK

B, T, N, K, H = 2, 8, 4, 2, 4
BLOCKS = {'implementation': 'blockwise', 'block_sizes': (4, 4)}
MASK_ARGUMENTS = {'is_causal': True, 'local_window_size': (5, 2)}


def random_array(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


VALUES = pytest.mark.parametrize('values', [False, pytest.param(True, marks=pytest.mark.slow)], ids=['types', 'values'])
"""Wrong types fail quickly, while tracing; a comparison of values compiles for several devices, which takes seconds."""

CALLS = {
    'blockwise': lambda q, k, n, s: dot_product_attention(q, k, k, **BLOCKS),
    'blockwise, mask': lambda q, k, n, s: dot_product_attention(
        q, k, k, **MASK_ARGUMENTS, key_value_seq_lengths=n, **BLOCKS
    ),
    'blockwise, all floats': lambda q, k, n, s: dot_product_attention(
        q, k, k, s[None, :, None, None], sinks=s, alibi_slopes=s, logits_soft_cap=3.0, dropout_rate=0.3,
        dropout_rng=jax.random.key(0), **BLOCKS
    ),
    'dense': lambda q, k, n, s: dot_product_attention(
        q, k, k, alibi_slopes=s, key_value_seq_lengths=n, is_causal=True, implementation='dense'
    ),
    'additive': lambda q, k, n, s: additive_attention(q, k, k, jnp.outer(s, jnp.ones(H)), key_value_seq_lengths=n),
    'linear': lambda q, k, n, s: linear_attention(q, k, k, key_value_seq_lengths=n, is_causal=True, chunk_size=4),
}  # fmt: skip
SPECS = {
    'rows': PartitionSpec('data'),
    'heads': PartitionSpec(None, None, 'data'),
    'tokens': PartitionSpec(None, 'data'),
}


@pytest.mark.quick_cases(6)
@VALUES
@pytest.mark.parametrize('spec', SPECS.values(), ids=SPECS)
@pytest.mark.parametrize('name', CALLS)
def test_arrays_divided_over_explicit_axes_equal_undivided(name, spec, values):
    attend, mesh = CALLS[name], jax.make_mesh((2,), ('data',))
    assert mesh.axis_types == (AxisType.Explicit,)
    arrays = random_array(B, T, N, H), random_array(B, T, K, H), jnp.array([T, 3]), jnp.arange(4.0) / 4

    def with_gradients(*arrays):
        return jax.value_and_grad(lambda q, k: jnp.sum(jnp.sin(attend(q, k, *arrays[2:]))), (0, 1))(*arrays[:2])

    with jax.set_mesh(mesh):
        divided = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays[:2]]
        output = jax.eval_shape(attend, *divided, *arrays[2:])
        assert output.sharding.spec[:3] == jax.typeof(divided[0]).sharding.spec[:3]
        if not values:
            jax.eval_shape(with_gradients, *divided, *arrays[2:])
            return
        output_and_gradients = jax.jit(with_gradients, compiler_options=QUICK)(*divided, *arrays[2:])
    expected = jax.jit(with_gradients, compiler_options=QUICK)(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-5), output_and_gradients, expected)


def test_explicitly_divided_arrays_need_no_mesh_in_context():
    mesh, x = jax.make_mesh((2,), ('data',)), random_array(2, 256, 4, 8)
    assert implementations_by_speed(AttentionCall(x, x, x, Mask(), 1.0), 'cpu')[0] == 'blockwise'
    divided = jax.device_put(x, NamedSharding(mesh, PartitionSpec('data')))
    attend = jax.jit(lambda x: dot_product_attention(x, x, x), compiler_options=QUICK)
    np.testing.assert_allclose(attend(divided), jax.nn.dot_product_attention(x, x, x), atol=2e-6)


@pytest.mark.quick_cases(11)
@VALUES
@pytest.mark.parametrize('vmap_rows', [False, True], ids=['row by row', 'all rows'])
@pytest.mark.parametrize('shared', [False, True], ids=['own keys', 'shared keys'])
@pytest.mark.parametrize('name', CALLS)
def test_attention_inside_shard_map_equals_loop_over_parts(monkeypatch, name, shared, vmap_rows, values):
    if vmap_rows and 'blockwise' not in name:
        pytest.skip('only blockwise has two ways to compute batch rows')
    if vmap_rows:
        monkeypatch.setattr(blockwise.jax, 'default_backend', lambda: 'gpu')
    attend, mesh = CALLS[name], jax.make_mesh((2,), ('data',), axis_types=(AxisType.Auto,))
    lengths, slopes = jnp.array([T, 3, 0, 5]), jnp.arange(4.0) / 4
    arrays = random_array(4, T, N, H), random_array(2 if shared else 4, T, K, H), slopes
    rows, replicated = PartitionSpec('data'), PartitionSpec()
    keys = replicated if shared else rows

    def parallel(q, k, s):
        part = lambda q, k, n, s: attend(q, k, n, s)
        return jax.shard_map(part, mesh=mesh, in_specs=(rows, keys, rows, replicated), out_specs=rows)(q, k, lengths, s)

    def looped(q, k, s):
        halves = np.s_[:2], np.s_[2:]
        return jnp.concatenate([attend(q[at], k if shared else k[at], lengths[at], s) for at in halves])

    with_gradients = lambda f: jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1, 2))
    if not values:
        jax.eval_shape(with_gradients(parallel), *arrays)
        return
    results = [jax.jit(with_gradients(f), compiler_options=QUICK)(*arrays) for f in (parallel, looped)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-5), *results)
