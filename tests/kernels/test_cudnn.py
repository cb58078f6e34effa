"""`cudnn`: the calls that it refuses, its arguments for cuDNN, and on an NVIDIA GPU (`-m gpu`) its results.

Without a GPU, a fake replaces cuDNN: it checks its arguments as strictly as cuDNN does, and returns NaN wherever cuDNN
gives no guarantee.  The program that JAX makes for a GPU is tested too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import dot_product_attention
from attnlab.kernels import cudnn
from attnlab.kernels.implementations import implementations_by_speed
from tests.kernels import fused
from tests.kernels.fused import B, K, N, array_shapes, attention_of, check_against_oracle, gradient_of, random_inputs

TARGETS = [f'__cudnn$fmha{bias}Softmax{way}' for bias in ('', 'ScaleBias') for way in ('', 'Backward')]


@pytest.fixture
def hopper(monkeypatch):
    """Make the checks before a call pass, as if this process ran on a GPU."""
    monkeypatch.setattr(cudnn, 'compute_capability', lambda: (9, 0))
    monkeypatch.setattr('jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version', lambda: 91200)


# Unsupported calls


HALF = {name: jnp.ones((1, 4, 2, 8), 'bfloat16') for name in ('query', 'key', 'value')}
IDS, POSITIONS = jnp.zeros((1, 4), int), jnp.arange(4)[None]
PAIRS = {'mask': jnp.ones((1, 1, 4, 4), bool), 'bias': jnp.ones((1, 2, 4, 4), 'bfloat16')}

UNSUPPORTED = {
    'query: cuDNN takes bfloat16 and float16, not float32': {'query': jnp.ones((1, 4, 2, 8))},
    'query: on this GPU cuDNN has a gradient for heads of width up to 256': {
        name: jnp.ones((1, 4, 2, 264), 'bfloat16') for name in HALF
    },
    'query: cuDNN is not reliable for one query row': {'query': HALF['query'][:, :1]},
    'key: its dtype float16': {'key': HALF['key'].astype('float16')},
    'value: its dtype float32': {'value': HALF['value'].astype('float32')},
    'scale: cuDNN takes a number': {'scale': jnp.array(0.5)},
    'logits_soft_cap': {'logits_soft_cap': 2.0},
    'sinks': {'sinks': jnp.ones(2)},
    'alibi_slopes': {'alibi_slopes': jnp.ones(2)},
    'dropout_rate': {'dropout_rate': 0.5, 'dropout_rng': jax.random.key(0)},
    'block_sizes': {'block_sizes': (64, 64)},
    'return_weights': {'return_weights': True},
    'return_residual': {'return_residual': True},
    'prefix_lengths': {'mask': cudnn.Mask(prefix_lengths=jnp.ones(1, int), is_causal=True)},
    'query_segment_ids': {'query_segment_ids': IDS, 'key_segment_ids': IDS},
    'query_positions': {'query_positions': POSITIONS, 'is_causal': True},
    'key_positions': {'key_positions': POSITIONS, 'local_window_size': 1},
    r'local_window_size: .* not \(1, 2\)': {'local_window_size': (1, 2)},
    r'local_window_size: .* not \(9, 2\)': {'local_window_size': (9, 2)},
    r'local_window_size: .* not \(1, 9\)': {'local_window_size': (1, 9)},
    'bias: its dtype float32': {'bias': PAIRS['bias'].astype('float32')},
    r'mask: cuDNN needs it broadcast from \(1, 1, 1, 4\) to \(1, 1, 4, 4\)': {'mask': PAIRS['mask'][:, :, :1]},
    r'bias: cuDNN needs it broadcast from \(1, 2, 4, 1\) to \(1, 2, 4, 4\)': {'bias': PAIRS['bias'][..., :1]},
    r'mask: .* from \(2, 1, 4, 4\) and \(1, 2, 4, 4\) to \(2, 2, 4, 4\)': {
        **{name: jnp.tile(x, (2, 1, 1, 1)) for name, x in HALF.items()},
        'mask': jnp.tile(PAIRS['mask'], (2, 1, 1, 1)), 'bias': PAIRS['bias'],
    },
    'bias: with it cuDNN needs even lengths, not 3 and 4': {
        'query': HALF['query'][:, :3], 'bias': PAIRS['bias'][:, :, :3],
    },
    'mask: cuDNN adds it in float16': {
        **{name: x.astype('float16') for name, x in HALF.items()}, 'mask': PAIRS['mask'],
    },
}  # fmt: skip


@pytest.mark.parametrize('message, arguments', UNSUPPORTED.items())
def test_unsupported_arguments_raise(hopper, message, arguments):
    with pytest.raises(NotImplementedError, match=f'cudnn: {message}'):
        dot_product_attention(**HALF | arguments, implementation='cudnn')


@pytest.mark.parametrize(
    'capability, message', [((7, 5), 'platform: cuDNN needs'), ((10, 0), 'heads of width up to 128')]
)
def test_unsupported_gpus_raise(monkeypatch, capability, message):
    monkeypatch.setattr(cudnn, 'compute_capability', lambda: capability)
    with pytest.raises(NotImplementedError, match=message):
        wide = {name: jnp.ones((1, 4, 2, 136), 'bfloat16') for name in HALF}
        dot_product_attention(**wide, implementation='cudnn')


def test_without_nvidia_gpu_raises():
    with pytest.raises(NotImplementedError, match='cudnn needs an NVIDIA GPU; this process runs on cpu'):
        dot_product_attention(**HALF, implementation='cudnn')


def test_list_is_tried_in_order_and_error_has_every_reason():
    options = {'implementation': ['cudnn', 'splash', 'blockwise'], 'return_weights': True}
    message = r'cudnn: platform: .* on cpu; splash: platform: .* on cpu; blockwise: return_weights'
    with pytest.raises(NotImplementedError, match=message):
        dot_product_attention(**HALF, **options)
    output, _ = dot_product_attention(**HALF, **options | {'implementation': ['cudnn', 'splash', 'dense']})
    assert jnp.all(output == 1)


def test_each_platform_prefers_its_own_implementation(hopper):
    call = cudnn.AttentionCall(*HALF.values(), cudnn.Mask(), 1.0)
    assert [implementations_by_speed(call, platform)[0] for platform in ('cpu', 'gpu')] == ['dense', 'cudnn']
    assert all(
        {'dense', 'blockwise'} <= {*implementations_by_speed(call, platform)} for platform in ('cpu', 'gpu', 'tpu')
    )


def test_keys_of_length_zero(hopper):
    empty = HALF | {'key': jnp.ones((1, 0, 2, 8), 'bfloat16'), 'value': jnp.ones((1, 0, 2, 8), 'bfloat16')}
    assert not jnp.any(dot_product_attention(**empty, implementation='cudnn'))


# Against the oracle


def random_mask(*shape, seed=0):
    """Return a mask that allows half of the pairs, and none in its second row."""
    mask = np.random.default_rng(seed).random(shape) < 0.5
    mask[..., 1, :] = False
    return mask


LENGTHS = {'query_seq_lengths': np.array([0, 29]), 'key_value_seq_lengths': np.array([33, 0])}
CASES = {
    'plain': (128, 128, {}),
    'odd lengths': (5, 7, {'scale': 0.3}),
    'causal': (6, 9, {'is_causal': True}),
    'causal, more queries than keys': (9, 6, {'is_causal': True}),
    'lengths': (32, 40, {**LENGTHS}),
    'key lengths': (32, 40, {'key_value_seq_lengths': np.array([40, 3])}),
    'lengths and causality': (32, 40, {**LENGTHS, 'is_causal': True}),
    'window': (40, 24, {'local_window_size': (5, 0)}),
    'window, queries after the last block of keys': (150, 128, {'local_window_size': (5, 0)}),
    'window of only the query position': (8, 8, {'local_window_size': (0, 0)}),
    'window wider than the sequence': (8, 12, {'local_window_size': (7, 0)}),
    'two-sided window and causality': (24, 128, {'local_window_size': (4, 9), 'is_causal': True}),
    'window and lengths': (32, 40, {'key_value_seq_lengths': np.array([9, 0]), 'local_window_size': (3, 0)}),
    'mask': (8, 10, {'mask': random_mask(B, 1, 8, 10)}),
    'mask for each head, causality': (8, 10, {'mask': random_mask(B, N, 8, 10), 'is_causal': True}),
    'shared mask, lengths': (32, 40, {'mask': random_mask(1, 1, 32, 40), **LENGTHS}),
    'bias': (8, 10, {'bias': (B, N, 8, 10)}),
    'bias for each head, causality, lengths': (32, 40, {'bias': (1, N, 32, 40), 'is_causal': True, **LENGTHS}),
    'shared bias, two-sided window': (8, 10, {'bias': (1, 1, 8, 10), 'local_window_size': (2, 3)}),
    'bias and mask': (8, 10, {'bias': (B, N, 8, 10), 'mask': random_mask(1, 1, 8, 10), 'local_window_size': (6, 0)}),
}  # fmt: skip


def check_case(case, dtype):
    T, S, kwargs = case
    arrays = random_inputs(T, S, **{'bias': kwargs['bias']} if 'bias' in kwargs else {})
    if 'bias' in arrays:
        arrays['bias'][random_mask(*arrays['bias'].shape, seed=1)] = -np.inf
    return check_against_oracle('cudnn', arrays, {name: x for name, x in kwargs.items() if name != 'bias'}, dtype)


def fake_cudnn(
    query, key, value, bias=None, *, scale, is_causal, local_window_size, implementation,
    query_seq_lengths=None, key_value_seq_lengths=None,
):  # fmt: skip
    """Compute attention as cuDNN does, with NaN in rows that are after a length or empty, and in gradients there."""
    (T, width), S = query.shape[1::2], key.shape[1]
    arrays = [x for x in (query, key, value, bias) if x is not None]
    assert implementation == 'cudnn' and isinstance(scale, float)
    assert {x.dtype for x in arrays} in ({jnp.dtype('bfloat16')}, {jnp.dtype('float16')})
    assert width == key.shape[3] == value.shape[3] and width % 8 == 0
    assert local_window_size is None or (is_causal and local_window_size[1] == 0)
    lengths = query_seq_lengths, key_value_seq_lengths
    assert all(x is None for x in lengths) or all(x.dtype == 'int32' for x in lengths)
    assert lengths[0] is not None or (S % 128 == 0 and (local_window_size is None or T <= S))
    assert bias is None or (bias.shape[2:] == (T, S) and local_window_size is None)
    rows, columns = jnp.arange(T)[None, :, None, None], jnp.arange(S)[None, :, None, None]
    inside_T, inside_S = (
        jnp.array(True) if length is None else index < length[:, None, None, None]
        for index, length in zip((rows, columns), lengths, strict=True)
    )
    query, key, value = (
        _with_nan_gradient_outside(query, inside_T),
        _with_nan_gradient_outside(key, inside_S),
        _with_nan_gradient_outside(value, inside_S),
    )
    key, value = (jnp.repeat(x, N // K, axis=2) for x in (key, value))
    logits = scale * jnp.einsum('btnh,bsnh->bnts', query, key, preferred_element_type='float32')
    logits = logits if bias is None else logits + bias.astype('float32')
    visible = jnp.broadcast_to(inside_S, (B, S, 1, 1)).transpose(0, 2, 3, 1)
    if is_causal:
        visible &= jnp.tri(T, S, dtype=bool)[None, None]
    if local_window_size is not None:
        visible &= ~jnp.tri(T, S, -local_window_size[0] - 1, dtype=bool)[None, None]
    # Rows outside attend to all keys, so that only empty rows inside are NaN.
    visible |= ~jnp.broadcast_to(inside_T, (B, T, 1, 1)).transpose(0, 2, 1, 3)
    output = jnp.einsum('bnts,bsnh->btnh', jax.nn.softmax(jnp.where(visible, logits, -jnp.inf)), value)
    # cuDNN guarantees nothing for length 0.
    has_valid_lengths = jnp.all(jnp.array([jnp.all(x > 0) for x in lengths if x is not None]))
    return jnp.where(inside_T & has_valid_lengths, output, jnp.nan).astype(query.dtype)


@jax.custom_vjp
def _with_nan_gradient_outside(x, inside):
    """Return x, with a gradient of NaN outside."""
    return x


_with_nan_gradient_outside.defvjp(
    lambda x, inside: (x, inside), lambda inside, d_out: (jnp.where(inside, d_out, jnp.nan), None)
)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_contract_holds_around_fake_cudnn(hopper, monkeypatch, case):
    monkeypatch.setattr(jax.nn, 'dot_product_attention', fake_cudnn)
    check_case(case, 'bfloat16')


def test_float16_case_with_empty_rows(hopper, monkeypatch):
    monkeypatch.setattr(jax.nn, 'dot_product_attention', fake_cudnn)
    assert check_case(CASES['window'], 'float16').any()


# The program for a GPU


def gpu_program(function, *args):
    return fused.exported_program(function, 'cuda', *args, targets=TARGETS)


PROGRAMS = {
    'plain': ('NO_MASK', 0, {}),
    'causal': ('CAUSAL', 0, {'is_causal': True}),
    'lengths': ('PADDING', 0, {'key_value_seq_lengths': jnp.array([256, 9])}),
    'lengths and causality': ('PADDING_CAUSAL', 0, {'query_seq_lengths': jnp.array([256, 9]), 'is_causal': True}),
    'window': ('CAUSAL', 32, {'local_window_size': (31, 0)}),
    'two-sided window and causality': ('CAUSAL', 32, {'local_window_size': (31, 7), 'is_causal': True}),
}


@pytest.mark.parametrize('mask_type, window, kwargs', PROGRAMS.values(), ids=PROGRAMS)
def test_program_calls_cudnn_once_each_way_and_forms_no_matrix(hopper, mask_type, window, kwargs):
    T, S = 256, 384
    attend = attention_of('cudnn', **kwargs)
    for function, targets in ((attend, TARGETS[:1]), (gradient_of(attend), TARGETS[:2])):
        program = gpu_program(function, *array_shapes(T, S, 'bfloat16'))
        assert fused.custom_calls(program) == targets
        assert program.count(f'\\22mask_type\\22: \\22{mask_type}\\22') == len(targets)
        assert program.count(f'\\22sliding_window_length\\22: {window},') == len(targets)
        assert (B, T, N, 24) in fused.value_shapes(program)  # heads of 12 and 20, padded to 24
        assert not [shape for shape in fused.value_shapes(program) if {T, S} <= {*shape}]


def test_bias_gradient_has_shape_of_bias(hopper):
    bias = jax.ShapeDtypeStruct((1, N, 256, 384), 'bfloat16')
    attend = lambda bias, *arrays: jnp.sum(attention_of('cudnn', bias=bias)(*arrays).astype('float32'))
    program = gpu_program(jax.grad(attend), bias, *array_shapes(256, 384, 'bfloat16'))
    assert fused.custom_calls(program) == TARGETS[2:]
    # Boolean values have more shapes, but each of them is read once for a sum.
    numbers = fused.value_shapes(program, '(?:bf16|f32)')
    assert {shape for shape in numbers if {256, 384} <= {*shape}} == {(1, N, 256, 384), (N, 256, 384)}


@pytest.mark.parametrize('mapped', [(0, None, None), (None, None, 0), (0, 0, 0)], ids=str)
def test_vmap_over_some_or_all_arrays(hopper, mapped):
    add_axis = lambda x, axis: x if axis is None else jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
    inputs = [add_axis(x, axis) for x, axis in zip(array_shapes(64, 64, 'bfloat16'), mapped, strict=True)]
    attend = attention_of('cudnn', key_value_seq_lengths=jnp.array([64, 9]))
    program = gpu_program(jax.vmap(gradient_of(attend), mapped), *inputs)
    assert fused.custom_calls(program) == TARGETS[:2] and (3 * B, 64, N, 24) in fused.value_shapes(program)


def test_vmap_with_shared_bias_raises(hopper):
    attend = lambda bias, *arrays: jnp.sum(attention_of('cudnn', bias=bias)(*arrays).astype('float32'))
    inputs = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in array_shapes(64, 64, 'bfloat16')]
    with pytest.raises(TypeError, match='reshape'):
        gpu_program(
            jax.vmap(jax.grad(attend), (None, 0, 0, 0)), jax.ShapeDtypeStruct((1, N, 64, 64), 'bfloat16'), *inputs
        )


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_gpu_matches_oracle(case):
    check_case(case, 'bfloat16')


@pytest.mark.gpu
@pytest.mark.parametrize('T, S', [(1024, 1024), (1000, 520), (192, 192)])
@pytest.mark.parametrize('kwargs', [{}, {'is_causal': True}, {'local_window_size': (100, 0)}], ids=str)
def test_gpu_matches_dense(T, S, kwargs):
    arrays = [jnp.asarray(x, 'bfloat16') for x in random_inputs(T, S).values()]
    agree = lambda a, b: np.testing.assert_allclose(*(np.asarray(x, 'float32') for x in (a, b)), atol=0.03, rtol=0.03)
    jax.tree.map(agree, *(jax.jit(gradient_of(attention_of(name, **kwargs)))(*arrays) for name in ('cudnn', 'dense')))
