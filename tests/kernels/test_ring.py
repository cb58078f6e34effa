"""Attention over tokens divided over devices: results, memory, communication and the balance of work."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnlab import dot_product_attention
from attnlab.kernels import dropout, masks, mesh_axes, ring, tiles
from attnlab.kernels.call import AttentionCall
from attnlab.kernels.implementations import implementations_by_speed
from attnlab.kernels.masks import Mask
from tests.kernels import calls, oracle
from tests.kernels.combinations import poison_masked_entries
from tests.kernels.programs import OPTIONS, abstract_values, inner_jaxprs
from tests.quick import QUICK

B, T, N, K, H = 2, 32, 4, 2, 3


def device_count(shape):
    return math.prod(shape.values())


def mesh_of(shape):
    return jax.make_mesh(
        tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape),
        devices=jax.devices()[: device_count(shape)],
    )  # fmt: skip


def random_inputs(T=T, S=T, seed=0, **shapes):
    """Return random arrays by name, and a cotangent."""
    random = np.random.default_rng(seed)
    return calls.random_arrays((B, T, S, N, K, H, H + 1), random, **shapes), random.normal(size=(B, T, N, H + 1))


IDS = np.sort(np.random.default_rng(3).integers(0, 4, (B, T)))
CASES = {
    'plain': ({}, {}),
    'causal': ({}, {'is_causal': True}),
    'all': (
        {'sinks': (N,), 'alibi_slopes': (N,)},
        {'is_causal': True, 'local_window_size': (11, 3), 'logits_soft_cap': 1.5, 'dropout_rate': 0.3,
         'query_seq_lengths': np.array([T, 21]), 'key_value_seq_lengths': np.array([T - 3, 9])},
    ),
    'packed': (
        {}, {'is_causal': True, 'query_segment_ids': IDS, 'key_segment_ids': IDS,
             'query_positions': np.asarray(masks.positions_in_segments(jnp.asarray(IDS))),
             'key_positions': np.asarray(masks.positions_in_segments(jnp.asarray(IDS)))},
    ),
    'across': (
        {'S': 48},
        {'local_window_size': (9, 4), 'query_positions': np.arange(T)[None, ::-1] + np.array([[3], [9]]),
         'query_segment_ids': np.arange(T)[None] % 3, 'key_segment_ids': np.arange(48)[None] % 2},
    ),
    'prefix': ({'S': 64}, {'is_causal': True, 'prefix_lengths': np.array([41, 0]), 'dropout_rate': 0.5}),
}  # fmt: skip
"""For each case, arguments of `random_inputs` and other arguments of the call; `all` and `across` have empty rows."""

MESHES = {
    '2-sequence': ({'sequence': 2}, ('causal',)),
    '4-sequence': ({'sequence': 4}, tuple(CASES)),
    '4-data': ({'data': 2, 'sequence': 2}, ('all', 'packed')),
    '4-tensor': ({'sequence': 2, 'tensor': 2}, ('all', 'across')),
    '8-sequence': ({'sequence': 8}, ('plain', 'causal', 'all')),
    '8-data': ({'data': 2, 'sequence': 4}, ('all', 'across')),
    '8-tensor': ({'sequence': 4, 'tensor': 2}, ('all',)),
    '8-five': ({'data': 2, 'fsdp': 1, 'sequence': 2, 'tensor': 2, 'expert': 1}, ('all', 'prefix')),
}
"""For each mesh, its axes with sizes, and the cases that run by default; the other cases are slow."""
DEFAULT_CASES = [(name, case) for name, (_, cases) in MESHES.items() for case in cases]


def inputs_and_reference(case, dtype='float32'):
    """Return the arrays of a call by name, its other arguments, the cotangent, and the oracle's results.

    Entries that are masked for all are NaN or infinity; the cotangent of empty rows is NaN.
    """
    shapes, kwargs = CASES[case]
    arrays, cotangent = random_inputs(**shapes)
    kwargs = dict(kwargs)
    rate = kwargs.pop('dropout_rate', 0.0)
    inputs = calls.cast_arrays(poison_masked_entries(arrays, kwargs), dtype)
    arrays, cotangent = calls.cast_arrays(arrays, dtype), jnp.asarray(cotangent, dtype)
    shape = B, N, T, arrays['key'].shape[1]
    factors = oracle.dropout_factors(dropout.dropout_seed(jax.random.key(7)), rate, shape) if rate else None
    reference = oracle.attention(**arrays, **kwargs, factors=factors, cotangent=cotangent)
    is_empty = np.all(reference.weights == 0.0, axis=-1).swapaxes(1, 2)[..., None]
    cotangent = jnp.where(is_empty, jnp.nan, cotangent)
    kwargs |= {'dropout_rate': rate, 'dropout_rng': jax.random.key(7)} if rate else {}
    return inputs, kwargs, cotangent, reference


def jit_call(kwargs, **options):
    """Return a compiled function of (arrays, traced arguments, cotangent), and the traced arguments of `kwargs`."""
    traced, static = calls.split_arrays(kwargs)
    return jax.jit(functools.partial(calls.attention_with_gradients, **static, return_residual=True), **options), traced


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('name, case', [
    pytest.param(name, case, id=f'{name}-{case}', marks=() if (name, case) in DEFAULT_CASES else pytest.mark.slow)
    for name in MESHES for case in CASES
])  # fmt: skip
def test_output_and_gradients_match_oracle(name, case):
    inputs, kwargs, cotangent, reference = inputs_and_reference(case)
    with jax.set_mesh(mesh_of(MESHES[name][0])):
        function, traced = jit_call(kwargs | {'implementation': 'ring', 'block_sizes': (4, 2)}, compiler_options=QUICK)
        oracle.check_results(*function(inputs, traced, cotangent), reference, inputs)


@pytest.mark.slow
def test_sums_over_devices_are_float32():
    """If each part of a gradient were rounded, the error would be larger than one rounding of the sum."""
    inputs, kwargs, cotangent, reference = inputs_and_reference('causal', 'bfloat16')
    with jax.set_mesh(mesh_of({'sequence': 4})):
        function, traced = jit_call(kwargs, compiler_options=QUICK)
        results = function(inputs, traced, cotangent)
    oracle.check_results(*results, reference, inputs)
    for gradient, exact in [(results[3][name], reference.gradients[name]) for name in inputs]:
        error = np.abs(np.asarray(gradient, np.float64) - exact)
        assert np.all(error <= 2**-8 * np.abs(exact) + 1e-5 * np.abs(exact).max())


@pytest.mark.slow
@pytest.mark.parametrize('case, sizes', [('causal', (1, 4, 1)), ('plain', (2, 2, 1)), ('causal', (1, 2, 2))])
def test_divided_arrays_stay_divided_and_are_only_permuted(case, sizes):
    mesh = mesh_of(dict(zip(('data', 'sequence', 'tensor'), sizes, strict=True)))
    divided = NamedSharding(mesh, P('data', 'sequence', 'tensor'))
    inputs, kwargs, cotangent, reference = inputs_and_reference(case)
    inputs, cotangent = jax.device_put((inputs, cotangent), divided)
    with jax.set_mesh(mesh):
        compiled = jit_call(kwargs)[0].lower(inputs, {}, cotangent).compile()
        collectives = re.findall(r'(all-\w+|reduce-scatter|collective-\w+|ragged-\w+)(?:-start)?\(', compiled.as_text())
        results = compiled(inputs, {}, cotangent)
    assert set(collectives) == {'collective-permute'}
    oracle.check_results(*results, reference, inputs)
    assert all(x.sharding.is_equivalent_to(divided, x.ndim) for x in (results[0], *results[3].values()))


def device_programs(jaxpr):
    """Yield the programs that run on each device."""
    for equation in jaxpr.eqns:
        for inner in inner_jaxprs(equation):
            yield from [inner] if equation.primitive.name == 'shard_map' else device_programs(inner)


def largest_values(size, T, kwargs):
    """Return the number of elements of the largest value on one of `size` devices, forward and backward."""
    arrays = {name: jax.ShapeDtypeStruct((1, T, 2, 16), 'float32') for name in ('query', 'key', 'value')}
    with jax.sharding.use_abstract_mesh(AbstractMesh((size,), ('sequence',), axis_types=(AxisType.Auto,))):
        function, traced = jit_call(kwargs | {'block_sizes': (64, 64)})
        program = jax.make_jaxpr(function)(arrays, traced, arrays['query']).jaxpr
    sizes = [max(x.size for x in abstract_values(part) if hasattr(x, 'size')) for part in device_programs(program)]
    assert len(sizes) == 2
    return np.array(sizes)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('options', ['plain', 'causal', 'segments', 'positions', 'alibi', 'sinks', 'dropout'])
def test_largest_value_of_a_device_is_inverse_to_device_count(options):
    short, long = 8192, 16384
    arguments = lambda T: {name: np.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
                           for name, x in OPTIONS[options](T).items()}  # fmt: skip
    two, four, eight = (largest_values(size, short, arguments(short)) for size in (2, 4, 8))
    four_long = largest_values(4, long, arguments(long))
    np.testing.assert_array_less(np.abs(np.array([two / four, four / eight, four_long / four]) - 2.0), 0.1)


def work_of_devices(size, is_folded, T=64, blocks=(4, 2), **kwargs):
    """Return two arrays [devices, steps]: the number of tiles that a device computes, and of visible pairs in them."""
    mesh = AbstractMesh((size,), ('sequence',))
    array = jax.ShapeDtypeStruct((1, T, 1, 1), 'float32')
    call = AttentionCall(array, array, array, Mask(is_causal=True, **kwargs), 1.0, block_sizes=blocks)
    config = ring.ring_config(call, mesh, 'cpu')
    assert config.is_folded
    config = config._replace(is_folded=is_folded)
    tile_counts, pair_counts = np.zeros((2, size, size), int)
    for device, step in np.ndindex(size, size):
        block_starts = ring.ring_block_starts(config, jnp.int32(device), jnp.int32((device - step) % size))
        grid = config.flash_config.grid
        queries, keys = (
            np.add.outer(np.asarray(starts), np.arange(block)).reshape(-1)
            for starts, block in zip(block_starts, (grid.queries, grid.keys), strict=True)
        )
        kinds = tiles.MaskTiles(grid, call.mask, block_starts).table().kinds
        tile_counts[device, step] = np.sum(np.asarray(kinds) != tiles.HIDDEN)
        pair_counts[device, step] = np.sum(queries[:, None] >= keys[None])
    return tile_counts, pair_counts


@pytest.mark.slow
@pytest.mark.parametrize('size', [2, 4, 8])
def test_folded_ring_balances_work_in_every_step(size):
    T = 64
    tile_counts, pair_counts = work_of_devices(size, is_folded=True)
    assert np.all(tile_counts == tile_counts[:1]) and np.all(pair_counts == pair_counts[:1])
    assert pair_counts.sum() == T * (T + 1) // 2
    assert np.all(tile_counts[:, 1:] * 2 == T // size // 4 * T // size // 2)  # half of the tiles
    unfolded, unfolded_pairs = work_of_devices(size, is_folded=False)
    assert unfolded_pairs.sum() == pair_counts.sum()
    assert np.all(unfolded[:, 1:].max(0) == 2 * tile_counts[:, 1:].max(0)) and np.any(unfolded[:, 1:] == 0)


def call_ring(**kwargs):
    arrays, _ = random_inputs()
    return dot_product_attention(**{name: jnp.asarray(x, 'float32') for name, x in arrays.items()}, **kwargs)


def test_default_implementation_is_ring_if_tokens_are_divided():
    call = AttentionCall(*(jnp.zeros((1, 4, 1, 1)),) * 3, Mask(), 1.0)
    assert 'ring' not in implementations_by_speed(call, 'cpu')
    with jax.set_mesh(mesh_of({'sequence': 1, 'data': 2})):
        assert 'ring' not in implementations_by_speed(call, 'cpu')
    with jax.set_mesh(mesh_of({'data': 2, 'sequence': 2})):
        for platform in ('cpu', 'gpu', 'tpu'):
            assert implementations_by_speed(call, platform)[0] == 'ring'
        assert 'ppermute' in str(jax.make_jaxpr(call_ring)())
        assert 'ppermute' not in str(jax.make_jaxpr(lambda: call_ring(return_weights=True))())  # another implementation


@pytest.mark.parametrize('message, changed', {
    'query: its 31 tokens do not divide over 2 devices': {'query': jnp.zeros((B, 31, N, H))},
    'key: its 3 tokens do not': {'key': jnp.zeros((B, 3, K, H)), 'value': jnp.zeros((B, 3, K, H))},
    'bias: ring takes no bias array': {'bias': jnp.zeros((1, 1, 1, T))},
    'mask: ring takes no mask array': {'mask': jnp.ones((1, 1, T, T), bool)},
    'return_weights: ring never forms them': {'return_weights': True},
    'dropout_rate: ring draws for pairs of keys, .* 1 in a row': {
        'query': jnp.zeros((B, 2, N, H)), 'key': jnp.zeros((B, 2, K, H)), 'value': jnp.zeros((B, 2, K, H)),
        'dropout_rate': 0.5, 'dropout_rng': jax.random.key(0),
    },
    'query: chunks of 1018 tokens do not divide into tiles of up to 256': {
        'query': jnp.zeros((1, 2036, N, H)), 'key': jnp.zeros((1, T, K, H)), 'value': jnp.zeros((1, T, K, H)),
        'block_sizes': (256, 16),
    },
}.items())  # fmt: skip
def test_unsupported_arguments_raise(message, changed):
    arrays, _ = random_inputs()
    arrays = {name: jnp.asarray(x, 'float32') for name, x in arrays.items()}
    with jax.set_mesh(mesh_of({'sequence': 2})), pytest.raises(NotImplementedError, match=f'ring: {message}'):
        dot_product_attention(**{**arrays, **changed}, implementation='ring')


def test_missing_sequence_axis_or_manual_mesh_raises():
    with pytest.raises(NotImplementedError, match="ring: mesh: .* an axis 'sequence' in context"):
        call_ring(implementation='ring')
    mesh = mesh_of({'data': 2})
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="ring: mesh: .* an axis 'sequence'"):
        call_ring(implementation='ring')
    inside = lambda: call_ring(implementation='ring')
    with jax.set_mesh(mesh_of({'sequence': 2})), pytest.raises(NotImplementedError, match='ring: mesh: .*Manual'):
        jax.shard_map(inside, in_specs=(), out_specs=P(), check_vma=False)()


@pytest.mark.slow
def test_keys_of_length_zero():
    with jax.set_mesh(mesh_of({'sequence': 2})):
        empty = {name: jnp.zeros(size) for name, size in
                 {'query': (1, 2, 2, 3), 'key': (1, 0, 1, 3), 'value': (1, 0, 1, 4)}.items()}  # fmt: skip
        np.testing.assert_array_equal(dot_product_attention(**empty, implementation='ring'), jnp.zeros((1, 2, 2, 4)))


def test_second_derivatives_raise():
    gradient = jax.grad(lambda scale: jnp.sum(call_ring(implementation='ring', scale=scale)))
    with jax.set_mesh(mesh_of({'sequence': 2})), pytest.raises(NotImplementedError, match='derivatives: ring has none'):
        jax.eval_shape(jax.grad(gradient), 1.0)


TRANSFORMS = {
    'vmap': jax.vmap,
    'scan of remat': lambda f: lambda x: jax.lax.scan(lambda _, x: (None, jax.remat(f)(x)), None, x)[1],
}


@pytest.mark.slow
@pytest.mark.parametrize('name', TRANSFORMS)
def test_transformations_compose(name):
    arrays = jax.tree.map(lambda x: jnp.asarray(np.stack([x, x[::-1] + 1]), 'float32'), random_inputs()[0])

    def gradients(implementation):
        attend = lambda x: dot_product_attention(**x, is_causal=True, implementation=implementation)
        loss = lambda x: jnp.sum(jnp.sin(TRANSFORMS[name](attend)(x)))
        return jax.jit(jax.grad(loss), compiler_options=QUICK)(arrays)

    with jax.set_mesh(mesh_of({'data': 2, 'sequence': 2})):
        results = gradients('ring')
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), results, gradients('dense'))


@pytest.mark.slow
def test_gradient_runs_outside_the_mesh_context():
    query = jnp.ones((1, 2, 1, 1))
    with jax.set_mesh(mesh_of({'sequence': 2})):
        _, vjp = jax.vjp(lambda x: dot_product_attention(x, query, query, implementation='ring'), query)
    assert jax.jit(lambda vjp, d_out: vjp(d_out))(vjp, query)[0].shape == query.shape


@pytest.mark.parametrize('T, causal, rate, blocks, expected', [
    (64, True, 0.0, (64, 64), (8, 8)),  # the length of a chunk
    (64, False, 0.0, (64, 64), (16, 16)),
    (60, True, 0.0, (64, 64), (15, 15)),  # a device has one chunk, because 8 does not divide 60
    (4 * 780, False, 0.0, (512, 512), (390, 390)),
    (64, True, 0.5, (1, 1), (1, 2)),
    (4 * 90, False, 0.5, (45, 45), (45, 30)),
])  # fmt: skip
def test_tile_sizes_divide_chunks(T, causal, rate, blocks, expected):
    mesh = AbstractMesh((4,), ('sequence',))
    array = jax.ShapeDtypeStruct((1, T, 1, 1), 'float32')
    call = AttentionCall(array, array, array, Mask(is_causal=causal), 1.0, dropout_rate=rate, block_sizes=blocks)
    grid = ring.ring_config(call, mesh, 'cpu').flash_config.grid
    assert (grid.queries, grid.keys) == expected


def test_single_batch_row_is_not_vmapped():
    """With `jax.vmap` over rows, all tiles would be computed, because rows may need different branches."""
    mesh = AbstractMesh((4, 2), ('data', 'sequence'))
    array = lambda B: jax.ShapeDtypeStruct((B, 4, 1, 1), 'float32')
    vmap_rows = lambda B: (
        ring.ring_config(AttentionCall(*(array(B),) * 3, Mask(), 1.0), mesh, 'gpu').flash_config.vmap_rows
    )
    assert [vmap_rows(B) for B in (1, 4, 8)] == [False, False, True]


def test_batch_axes_are_those_that_divide_the_rows():
    mesh = AbstractMesh((2, 2, 3, 2), ('data', 'sequence', 'fsdp', 'expert'))
    array = lambda B: jax.ShapeDtypeStruct((B, 4, 1, 1), 'float32')
    batch_axes = lambda B: ring.ring_config(AttentionCall(*(array(B),) * 3, Mask(), 1.0), mesh, 'cpu').batch_axes
    assert [batch_axes(B) for B in (1, 2, 3, 4, 6, 12)] == [
        (), ('data',), ('fsdp',), ('data', 'expert'), ('data', 'fsdp'), ('data', 'fsdp', 'expert')
    ]  # fmt: skip
    assert mesh_axes.BATCH_AXES == ('data', 'fsdp', 'expert')
