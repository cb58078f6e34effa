"""Attention of arrays that a mesh divides: explicit axes, and inside `jax.shard_map` with its checks."""

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
RULES = {'is_causal': True, 'local_window_size': (5, 2)}


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


VALUES = pytest.mark.parametrize('values', [False, pytest.param(True, marks=pytest.mark.slow)], ids=['types', 'values'])
"""Types fail while tracing, in a moment; compiling for several devices takes seconds."""

CALLS = {
    'blockwise': lambda q, k, n, s: dot_product_attention(q, k, k, **BLOCKS),
    'blockwise, rules': lambda q, k, n, s: dot_product_attention(q, k, k, **RULES, key_value_seq_lengths=n, **BLOCKS),
    'blockwise, all floats': lambda q, k, n, s: dot_product_attention(
        q, k, k, s[None, :, None, None], sinks=s, alibi_slopes=s, logits_soft_cap=3.0, dropout_rate=0.3,
        dropout_rng=jax.random.key(0), **BLOCKS
    ),
    'dense': lambda q, k, n, s: dot_product_attention(
        q, k, k, alibi_slopes=s, key_value_seq_lengths=n, is_causal=True, implementation='dense'
    ),
    'additive': lambda q, k, n, s: additive_attention(q, k, k, jnp.outer(s, jnp.ones(H)), key_value_seq_lengths=n),
    'linear': lambda q, k, n, s: linear_attention(q, k, k, key_value_seq_lengths=n, is_causal=True, chunk=4),
}  # fmt: skip
PARTS = {
    'rows': PartitionSpec('data'),
    'heads': PartitionSpec(None, None, 'data'),
    'tokens': PartitionSpec(None, 'data'),
}


@VALUES
@pytest.mark.parametrize('part', PARTS.values(), ids=PARTS)
@pytest.mark.parametrize('name', CALLS)
def test_arrays_divided_over_explicit_axes_give_what_whole_ones_give(name, part, values):
    attend, mesh = CALLS[name], jax.make_mesh((2,), ('data',))
    assert mesh.axis_types == (AxisType.Explicit,)
    given = drawn(B, T, N, H), drawn(B, T, K, H), jnp.array([T, 3]), jnp.arange(4.0) / 4

    def graded(*given):
        return jax.value_and_grad(lambda q, k: jnp.sum(jnp.sin(attend(q, k, *given[2:]))), (0, 1))(*given[:2])

    with jax.set_mesh(mesh):
        divided = [jax.device_put(x, NamedSharding(mesh, part)) for x in given[:2]]
        output = jax.eval_shape(attend, *divided, *given[2:])
        assert output.sharding.spec[:3] == jax.typeof(divided[0]).sharding.spec[:3]
        if not values:
            jax.eval_shape(graded, *divided, *given[2:])
            return
        got = jax.jit(graded, compiler_options=QUICK)(*divided, *given[2:])
    expected = jax.jit(graded, compiler_options=QUICK)(*given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-5), got, expected)


def test_256_tokens_divided_over_an_explicit_axis_need_no_mesh_in_context():
    mesh, x = jax.make_mesh((2,), ('data',)), drawn(2, 256, 4, 8)
    assert implementations_by_speed(AttentionCall(x, x, x, Mask(), 1.0), 'cpu')[0] == 'blockwise'
    divided = jax.device_put(x, NamedSharding(mesh, PartitionSpec('data')))
    attend = jax.jit(lambda x: dot_product_attention(x, x, x), compiler_options=QUICK)
    np.testing.assert_allclose(attend(divided), jax.nn.dot_product_attention(x, x, x), atol=2e-6)


@VALUES
@pytest.mark.parametrize('together', [False, True], ids=['row by row', 'all rows'])
@pytest.mark.parametrize('shared', [False, True], ids=['own keys', 'shared keys'])
@pytest.mark.parametrize('name', CALLS)
def test_attention_inside_shard_map_gives_what_a_loop_over_parts_gives(monkeypatch, name, shared, together, values):
    if together and 'blockwise' not in name:
        pytest.skip('only blockwise has two ways over the batch')
    if together:
        monkeypatch.setattr(blockwise.jax, 'default_backend', lambda: 'gpu')
    attend, mesh = CALLS[name], jax.make_mesh((2,), ('data',), axis_types=(AxisType.Auto,))
    lengths, slopes = jnp.array([T, 3, 0, 5]), jnp.arange(4.0) / 4
    given = drawn(4, T, N, H), drawn(2 if shared else 4, T, K, H), slopes
    rows, keys, whole = PartitionSpec('data'), PartitionSpec() if shared else PartitionSpec('data'), PartitionSpec()

    def parallel(q, k, s):
        part = lambda q, k, n, s: attend(q, k, n, s)
        return jax.shard_map(part, mesh=mesh, in_specs=(rows, keys, rows, whole), out_specs=rows)(q, k, lengths, s)

    def looped(q, k, s):
        halves = np.s_[:2], np.s_[2:]
        return jnp.concatenate([attend(q[at], k if shared else k[at], lengths[at], s) for at in halves])

    graded = lambda f: jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1, 2))
    if not values:
        jax.eval_shape(graded(parallel), *given)
        return
    both = [jax.jit(graded(f), compiler_options=QUICK)(*given) for f in (parallel, looped)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-5), *both)
