"""`splash`: unsupported calls, its results in Pallas's interpreter and on a TPU (`-m tpu`), its program for a TPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from attnlab import dot_product_attention
from attnlab.kernels import splash
from attnlab.kernels.call import AttentionCall
from attnlab.kernels.implementations import implementations_by_speed
from attnlab.kernels.masks import Mask
from tests.kernels import fused
from tests.kernels.fused import B, N, array_shapes, attention_of, check_against_oracle, gradient_of, random_inputs


@pytest.fixture
def tpu(monkeypatch):
    """Make the checks before a call pass, as if this process ran on a TPU."""
    monkeypatch.setattr(splash, 'check_tpu', lambda: None)


# Unsupported calls


ONES = {name: jnp.ones((1, 4, 2, 8)) for name in ('query', 'key', 'value')}
IDS, POSITIONS = jnp.zeros((1, 4), int), jnp.arange(4)[None]

UNSUPPORTED = {
    'query: .* heads of width up to 256': {name: jnp.ones((1, 4, 2, 257)) for name in ONES},
    'bias': {'bias': jnp.ones((1, 1, 1, 4))},
    'mask': {'mask': jnp.ones((1, 1, 1, 4), bool)},
    'alibi_slopes': {'alibi_slopes': jnp.ones(2)},
    'dropout_rate': {'dropout_rate': 0.5, 'dropout_rng': jax.random.key(0)},
    'return_weights': {'return_weights': True},
    'return_residual': {'return_residual': True},
    'prefix_lengths': {'mask': Mask(prefix_lengths=jnp.ones(1, int), is_causal=True)},
    'query_positions': {'query_positions': POSITIONS, 'local_window_size': 1},
    'key_positions': {'key_positions': POSITIONS, 'is_causal': True},
    r'block_sizes: splash needs multiples of 128, not \(128, 64\)': {'block_sizes': (128, 64)},
}  # fmt: skip


@pytest.mark.parametrize('message, arguments', UNSUPPORTED.items())
def test_unsupported_arguments_raise(tpu, message, arguments):
    with pytest.raises(NotImplementedError, match=f'splash: {message}'):
        dot_product_attention(**ONES | arguments, implementation='splash')


def test_64_bit_arrays_raise(tpu):
    with jax.enable_x64(True):
        for name, arguments in (
            ('query', {'query': ONES['query'].astype('float64')}),
            ('query_segment_ids', {'query_segment_ids': IDS.astype('int64'), 'key_segment_ids': IDS}),
        ):
            with pytest.raises(NotImplementedError, match=f'splash: {name}'):
                dot_product_attention(**ONES | arguments, implementation='splash')


def test_without_tpu_raises():
    with pytest.raises(NotImplementedError, match='splash needs a TPU; this process runs on cpu'):
        dot_product_attention(**ONES, implementation='splash')


def test_preferred_on_tpu_if_program_runs_on_one_device(monkeypatch):
    call = AttentionCall(*ONES.values(), Mask(), 1.0)
    assert jax.device_count() > 1 and implementations_by_speed(call, 'tpu') == implementations_by_speed(call, 'cpu')
    preferred_inside = []

    def body(x):
        preferred_inside.append(implementations_by_speed(call, 'tpu')[0])
        return x

    mesh = jax.make_mesh((jax.device_count(),), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec('data')
    jax.make_jaxpr(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.zeros(jax.device_count()))
    monkeypatch.setattr(jax, 'device_count', lambda: 1)
    assert [*preferred_inside, implementations_by_speed(call, 'tpu')[0]] == ['splash', 'splash']


def test_keys_of_length_zero(tpu):
    empty = ONES | {'key': jnp.ones((1, 0, 2, 8)), 'value': jnp.ones((1, 0, 2, 8))}
    assert not jnp.any(dot_product_attention(**empty, implementation='splash', block_sizes=(128, 128)))


# Against the oracle


def sorted_ids(size, parts, seed):
    return np.sort(np.random.default_rng(seed).integers(0, parts, (B, size)))


ENDS = np.array([2**31 - 1, -1], np.int32)
CASES = {
    'plain, padded': (100, 130, 'float32', {}),
    'causal, more queries than keys, lengths': (
        150, 140, 'bfloat16',
        {'is_causal': True, 'query_seq_lengths': np.array([0, 120]), 'key_value_seq_lengths': np.array([7, 131])},
    ),
    'window, queries after the last key, cap': (
        300, 100, 'float32', {'local_window_size': (5, 2**30), 'logits_soft_cap': 2.0, 'block_sizes': (128, 128)},
    ),
    'segments, some without keys, sinks': (
        140, 120, 'bfloat16',
        {'query_segment_ids': sorted_ids(140, 6, 0) * 3, 'key_segment_ids': sorted_ids(120, 9, 1) * 2,
         'is_causal': True},
    ),
    'shared segments, largest id, length zero': (
        130, 130, 'float16',
        {'query_segment_ids': ENDS[sorted_ids(130, 2, 0)[:1]], 'key_segment_ids': ENDS[sorted_ids(130, 2, 1)[:1]],
         'key_value_seq_lengths': np.array([100, 0]), 'local_window_size': (40, 9)},
    ),
}  # fmt: skip


def check_case(name):
    T, S, dtype, kwargs = CASES[name]
    shapes = {'sinks': (N,)} if 'sinks' in name else {}
    return check_against_oracle('splash', random_inputs(T, S, **shapes), kwargs, dtype, float32_names=('sinks',))


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_interpreter_matches_oracle(monkeypatch, name):
    monkeypatch.setattr(splash, 'dot_product', partial(splash.dot_product, interpret=True))
    assert check_case(name).any() == (name != 'plain, padded')


# The program for a TPU


PROGRAMS = {
    'plain': {},
    'causality, cap': {'is_causal': True, 'logits_soft_cap': 30.0},
    'lengths': {'key_value_seq_lengths': jnp.array([700, 9])},
    'window, sinks, scale': {'local_window_size': (31, 7), 'sinks': jnp.zeros(N), 'scale': jnp.array(0.3)},
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('kwargs', PROGRAMS.values(), ids=PROGRAMS)
def test_program_calls_kernel_and_forms_no_matrix(tpu, kwargs, dtype):
    T, S = 800, 1400  # two and three blocks of 512
    attend = attention_of('splash', **kwargs)
    for function, count in ((attend, 1), (gradient_of(attend), 3)):
        program = fused.exported_program(function, 'tpu', *array_shapes(T, S, dtype))
        assert fused.custom_calls(program) == ['tpu_custom_call'] * count
        assert (B, N, 1024, 128) in fused.value_shapes(program)
        assert not [shape for shape in fused.value_shapes(program) if {*shape} & {T, 1024} and {*shape} & {S, 1536}]


@pytest.mark.slow
def test_composes_with_vmap_and_remat(tpu):
    attend = attention_of('splash', is_causal=True, key_value_seq_lengths=jnp.array([100, 9]))
    query, key, value = array_shapes(100, 100, 'bfloat16')
    query = jax.ShapeDtypeStruct((3, *query.shape), query.dtype)
    program = fused.exported_program(
        jax.vmap(gradient_of(jax.checkpoint(attend)), (0, None, None)), 'tpu', query, key, value
    )
    assert set(fused.custom_calls(program)) == {'tpu_custom_call'}


# On a TPU


@pytest.mark.tpu
@pytest.mark.parametrize('name', CASES)
def test_tpu_matches_oracle(name):
    with jax.default_matmul_precision('highest'):
        check_case(name)


@pytest.mark.tpu
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('kwargs', [{}, {'is_causal': True}, {'local_window_size': (100, 3)}], ids=str)
def test_tpu_matches_dense(kwargs, dtype):
    arrays = [jnp.asarray(x, dtype) for x in random_inputs(1024, 800).values()]
    agree = lambda a, b: np.testing.assert_allclose(*(np.asarray(x, 'float32') for x in (a, b)), atol=0.03, rtol=0.03)
    jax.tree.map(agree, *(jax.jit(gradient_of(attention_of(name, **kwargs)))(*arrays) for name in ('splash', 'dense')))
