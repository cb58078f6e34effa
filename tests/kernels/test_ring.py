"""Attention over tokens divided over devices: against the formula, by what it holds and sends, and by who works."""

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


def devices(shape):
    return math.prod(shape.values())


def mesh_of(shape):
    return jax.make_mesh(
        tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape),
        devices=jax.devices()[: devices(shape)],
    )  # fmt: skip


def drawn(T=T, S=T, seed=0, **more):
    """The oracle's arrays, and a cotangent."""
    random = np.random.default_rng(seed)
    return calls.random_arrays((B, T, S, N, K, H, H + 1), random, **more), random.normal(size=(B, T, N, H + 1))


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
"""Arrays beside query, key and value (and S, the keys), and other arguments; `all` and `across` have empty rows."""

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
"""Axes and sizes, and the cases that are run by default; the others are slow."""
QUICKEST = [(name, case) for name, (_, cases) in MESHES.items() for case in cases]


def judged(case, dtype='float32'):
    """The arrays that a call is given, its other arguments, cotangent and judgement; junk where nobody looks."""
    more, kwargs = CASES[case]
    arrays, cotangent = drawn(**more)
    kwargs = dict(kwargs)
    rate = kwargs.pop('dropout_rate', 0.0)
    given, cotangent = calls.cast_arrays(poison_masked_entries(arrays, kwargs), dtype), jnp.asarray(cotangent, dtype)
    arrays = calls.cast_arrays(arrays, dtype)
    shape = B, N, T, arrays['key'].shape[1]
    factor = oracle.dropout_factors(dropout.dropout_seed(jax.random.key(7)), rate, shape) if rate else None
    result = oracle.attention(**arrays, **kwargs, factor=factor, cotangent=cotangent)
    empty = np.all(result.weights == 0.0, axis=-1).swapaxes(1, 2)[..., None]
    cotangent = jnp.where(empty, jnp.nan, cotangent)
    return given, kwargs | ({'dropout_rate': rate, 'dropout_rng': jax.random.key(7)} if rate else {}), cotangent, result


def program(kwargs, **options):
    """Of arrays, those of kwargs that are arrays, which come back beside it, and cotangent."""
    moving, fixed = calls.split_arrays(kwargs)
    return jax.jit(functools.partial(calls.attention_with_gradients, **fixed, return_residual=True), **options), moving


@pytest.mark.parametrize('name, case', [
    pytest.param(name, case, id=f'{name}-{case}', marks=() if (name, case) in QUICKEST else pytest.mark.slow)
    for name in MESHES for case in CASES
])  # fmt: skip
def test_equals_the_formula_forward_and_backward(name, case):
    given, kwargs, cotangent, result = judged(case)
    with jax.set_mesh(mesh_of(MESHES[name][0])):
        function, moving = program(kwargs | {'implementation': 'ring', 'block_sizes': (4, 2)}, compiler_options=QUICK)
        oracle.check_results(*function(given, moving, cotangent), result, given)


def test_sums_over_the_devices_are_wide():
    """Parts of a gradient that were rounded one by one would be off by more than one rounding of their sum."""
    given, kwargs, cotangent, result = judged('causal', 'bfloat16')
    with jax.set_mesh(mesh_of({'sequence': 4})):
        function, moving = program(kwargs, compiler_options=QUICK)
        made = function(given, moving, cotangent)
    oracle.check_results(*made, result, given)
    for gradient, exact in [(made[3][name], result.gradients[name]) for name in given]:
        off = np.abs(np.asarray(gradient, np.float64) - exact)
        assert np.all(off <= 2**-8 * np.abs(exact) + 1e-5 * np.abs(exact).max())


@pytest.mark.parametrize('case, sizes', [('causal', (1, 4, 1)), ('plain', (2, 2, 1)), ('causal', (1, 2, 2))])
def test_divided_arrays_stay_divided_and_only_go_round(case, sizes):
    mesh = mesh_of(dict(zip(('data', 'sequence', 'tensor'), sizes, strict=True)))
    divided = NamedSharding(mesh, P('data', 'sequence', 'tensor'))
    given, kwargs, cotangent, result = judged(case)
    given, cotangent = jax.device_put((given, cotangent), divided)
    with jax.set_mesh(mesh):
        compiled = program(kwargs)[0].lower(given, {}, cotangent).compile()
        sent = re.findall(r'(all-\w+|reduce-scatter|collective-\w+|ragged-\w+)(?:-start)?\(', compiled.as_text())
        made = compiled(given, {}, cotangent)
    assert set(sent) == {'collective-permute'}
    oracle.check_results(*made, result, given)
    assert all(x.sharding.is_equivalent_to(divided, x.ndim) for x in (made[0], *made[3].values()))


def on_each(jaxpr):
    """The programs that run on each device."""
    for equation in jaxpr.eqns:
        for inner in inner_jaxprs(equation):
            yield from [inner] if equation.primitive.name == 'shard_map' else on_each(inner)


def held(size, T, kwargs):
    """Elements of the largest value on one of so many devices, forward and backward."""
    arrays = {name: jax.ShapeDtypeStruct((1, T, 2, 16), 'float32') for name in ('query', 'key', 'value')}
    with jax.sharding.use_abstract_mesh(AbstractMesh((size,), ('sequence',), axis_types=(AxisType.Auto,))):
        function, moving = program(kwargs | {'block_sizes': (64, 64)})
        program_of_all = jax.make_jaxpr(function)(arrays, moving, arrays['query']).jaxpr
    sizes = [max(x.size for x in abstract_values(part) if hasattr(x, 'size')) for part in on_each(program_of_all)]
    assert len(sizes) == 2
    return np.array(sizes)


@pytest.mark.parametrize('options', ['plain', 'causal', 'segments', 'positions', 'alibi', 'sinks', 'dropout'])
def test_a_device_holds_its_part_of_the_tokens(options):
    few, more = 8192, 16384
    of = lambda T: {name: np.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
                    for name, x in OPTIONS[options](T).items()}  # fmt: skip
    two, four, eight = (held(size, few, of(few)) for size in (2, 4, 8))
    twice = held(4, more, of(more))
    np.testing.assert_array_less(np.abs(np.array([two / four, four / eight, twice / four]) - 2.0), 0.1)


def work(size, folded, T=64, blocks=(4, 2), **kwargs):
    """[devices, turns], how many tiles a device forms, and how many pairs of query and key are seen in them."""
    mesh = AbstractMesh((size,), ('sequence',))
    array = jax.ShapeDtypeStruct((1, T, 1, 1), 'float32')
    call = AttentionCall(array, array, array, Mask(is_causal=True, **kwargs), 1.0, block_sizes=blocks)
    how = ring.ring_config(call, mesh, 'cpu')
    assert how.folded
    how = how._replace(folded=folded)
    formed, seen = np.zeros((2, size, size), int)
    for device, turn in np.ndindex(size, size):
        begin = ring.ring_block_starts(how, jnp.int32(device), jnp.int32((device - turn) % size))
        grid = how.plan.grid
        queries, keys = (
            np.add.outer(np.asarray(starts), np.arange(block)).reshape(-1)
            for starts, block in zip(begin, (grid.queries, grid.keys), strict=True)
        )
        kinds = tiles.MaskTiles(grid, call.mask, begin).table().kinds
        formed[device, turn] = np.sum(np.asarray(kinds) != tiles.HIDDEN)
        seen[device, turn] = np.sum(queries[:, None] >= keys[None])
    return formed, seen


@pytest.mark.parametrize('size', [2, 4, 8])
def test_every_device_has_equal_work_in_every_turn(size):
    T = 64
    formed, seen = work(size, folded=True)
    assert np.all(formed == formed[:1]) and np.all(seen == seen[:1])
    assert seen.sum() == T * (T + 1) // 2
    assert np.all(formed[:, 1:] * 2 == T // size // 4 * T // size // 2)  # half of the tiles
    unfolded, same = work(size, folded=False)
    assert same.sum() == seen.sum()
    assert np.all(unfolded[:, 1:].max(0) == 2 * formed[:, 1:].max(0)) and np.any(unfolded[:, 1:] == 0)


def simple(**kwargs):
    arrays, _ = drawn()
    return dot_product_attention(**{name: jnp.asarray(x, 'float32') for name, x in arrays.items()}, **kwargs)


def test_none_takes_ring_where_tokens_are_divided():
    call = AttentionCall(*(jnp.zeros((1, 4, 1, 1)),) * 3, Mask(), 1.0)
    assert 'ring' not in implementations_by_speed(call, 'cpu')
    with jax.set_mesh(mesh_of({'sequence': 1, 'data': 2})):
        assert 'ring' not in implementations_by_speed(call, 'cpu')
    with jax.set_mesh(mesh_of({'data': 2, 'sequence': 2})):
        for platform in ('cpu', 'gpu', 'tpu'):
            assert implementations_by_speed(call, platform)[0] == 'ring'
        assert 'ppermute' in str(jax.make_jaxpr(simple)())
        assert 'ppermute' not in str(jax.make_jaxpr(lambda: simple(return_weights=True))())  # by another


@pytest.mark.parametrize('message, changed', {
    'query: its 31 tokens do not divide over 2 devices': {'query': jnp.zeros((B, 31, N, H))},
    'key: its 3 tokens do not': {'key': jnp.zeros((B, 3, K, H)), 'value': jnp.zeros((B, 3, K, H))},
    'bias: ring adds none': {'bias': jnp.zeros((1, 1, 1, T))},
    'mask: ring takes no array': {'mask': jnp.ones((1, 1, T, T), bool)},
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
def test_what_it_cannot_serve_it_refuses(message, changed):
    arrays, _ = drawn()
    arrays = {name: jnp.asarray(x, 'float32') for name, x in arrays.items()}
    with jax.set_mesh(mesh_of({'sequence': 2})), pytest.raises(NotImplementedError, match=f'ring: {message}'):
        dot_product_attention(**{**arrays, **changed}, implementation='ring')


def test_it_needs_a_mesh_with_tokens_that_it_may_divide():
    with pytest.raises(NotImplementedError, match="ring: mesh: .* an axis 'sequence' in context"):
        simple(implementation='ring')
    mesh = mesh_of({'data': 2})
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="ring: mesh: .* an axis 'sequence'"):
        simple(implementation='ring')
    inside = lambda: simple(implementation='ring')
    with jax.set_mesh(mesh_of({'sequence': 2})), pytest.raises(NotImplementedError, match='ring: mesh: .*Manual'):
        jax.shard_map(inside, in_specs=(), out_specs=P(), check_vma=False)()


def test_nothing_in_nothing_out():
    with jax.set_mesh(mesh_of({'sequence': 2})):
        empty = {name: jnp.zeros(size) for name, size in
                 {'query': (1, 2, 2, 3), 'key': (1, 0, 1, 3), 'value': (1, 0, 1, 4)}.items()}  # fmt: skip
        np.testing.assert_array_equal(dot_product_attention(**empty, implementation='ring'), jnp.zeros((1, 2, 2, 4)))


def test_second_derivatives_are_refused():
    slope = jax.grad(lambda scale: jnp.sum(simple(implementation='ring', scale=scale)))
    with jax.set_mesh(mesh_of({'sequence': 2})), pytest.raises(NotImplementedError, match='derivatives: ring has none'):
        jax.eval_shape(jax.grad(slope), 1.0)


TRANSFORMS = {
    'vmap': jax.vmap,
    'scan of remat': lambda f: lambda x: jax.lax.scan(lambda _, x: (None, jax.remat(f)(x)), None, x)[1],
}


@pytest.mark.parametrize('name', TRANSFORMS)
def test_transformations_compose(name):
    arrays = jax.tree.map(lambda x: jnp.asarray(np.stack([x, x[::-1] + 1]), 'float32'), drawn()[0])

    def slopes(implementation):
        one = lambda x: dot_product_attention(**x, is_causal=True, implementation=implementation)
        loss = lambda x: jnp.sum(jnp.sin(TRANSFORMS[name](one)(x)))
        return jax.jit(jax.grad(loss), compiler_options=QUICK)(arrays)

    with jax.set_mesh(mesh_of({'data': 2, 'sequence': 2})):
        made = slopes('ring')
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), made, slopes('dense'))


def test_the_gradient_finds_the_mesh_of_its_forward():
    query = jnp.ones((1, 2, 1, 1))
    with jax.set_mesh(mesh_of({'sequence': 2})):
        _, back = jax.vjp(lambda x: dot_product_attention(x, query, query, implementation='ring'), query)
    assert jax.jit(lambda back, slope: back(slope))(back, query)[0].shape == query.shape


@pytest.mark.parametrize('T, causal, rate, blocks, expected', [
    (64, True, 0.0, (64, 64), (8, 8)),  # a chunk of a device
    (64, False, 0.0, (64, 64), (16, 16)),
    (60, True, 0.0, (64, 64), (15, 15)),  # where no two chunks are to be had
    (4 * 780, False, 0.0, (512, 512), (390, 390)),
    (64, True, 0.5, (1, 1), (1, 2)),
    (4 * 90, False, 0.5, (45, 45), (45, 30)),
])  # fmt: skip
def test_tiles_divide_chunks(T, causal, rate, blocks, expected):
    mesh = AbstractMesh((4,), ('sequence',))
    array = jax.ShapeDtypeStruct((1, T, 1, 1), 'float32')
    call = AttentionCall(array, array, array, Mask(is_causal=causal), 1.0, dropout_rate=rate, block_sizes=blocks)
    grid = ring.ring_config(call, mesh, 'cpu').plan.grid
    assert (grid.queries, grid.keys) == expected


def test_a_lone_row_skips_tiles_on_every_platform():
    """Several rows at once would have one branch for all: none."""
    mesh = AbstractMesh((4, 2), ('data', 'sequence'))
    array = lambda B: jax.ShapeDtypeStruct((B, 4, 1, 1), 'float32')
    together = lambda B: ring.ring_config(AttentionCall(*(array(B),) * 3, Mask(), 1.0), mesh, 'gpu').plan.together
    assert [together(B) for B in (1, 4, 8)] == [False, False, True]


def test_rows_take_the_axes_that_divide_them():
    mesh = AbstractMesh((2, 2, 3, 2), ('data', 'sequence', 'fsdp', 'expert'))
    array = lambda B: jax.ShapeDtypeStruct((B, 4, 1, 1), 'float32')
    rows = lambda B: ring.ring_config(AttentionCall(*(array(B),) * 3, Mask(), 1.0), mesh, 'cpu').rows
    assert [rows(B) for B in (1, 2, 3, 4, 6, 12)] == [
        (), ('data',), ('fsdp',), ('data', 'expert'), ('data', 'fsdp'), ('data', 'fsdp', 'expert')
    ]  # fmt: skip
    assert mesh_axes.BATCH_AXES == ('data', 'fsdp', 'expert')
