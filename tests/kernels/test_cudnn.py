"""`cudnn`: what it refuses, what it hands to cuDNN, and on an NVIDIA GPU (`-m gpu`) what comes back.

Without a GPU, a stand-in takes cuDNN's place that is as strict as cuDNN with its arguments and leaves NaN wherever
cuDNN promises nothing; and the program that JAX makes for a GPU is read.
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
    """As if this process ran on a GPU, as far as can be told before anything runs."""
    monkeypatch.setattr(cudnn, 'compute_capability', lambda: (9, 0))
    monkeypatch.setattr('jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version', lambda: 91200)


# Refusals


HALF = {name: jnp.ones((1, 4, 2, 8), 'bfloat16') for name in ('query', 'key', 'value')}
IDS, PLACES = jnp.zeros((1, 4), int), jnp.arange(4)[None]
PAIRS = {'mask': jnp.ones((1, 1, 4, 4), bool), 'bias': jnp.ones((1, 2, 4, 4), 'bfloat16')}

REFUSED = {
    'query: cuDNN takes bfloat16 and float16, not float32': {'query': jnp.ones((1, 4, 2, 8))},
    'query: cuDNN has a gradient for heads of 256': {name: jnp.ones((1, 4, 2, 264), 'bfloat16') for name in HALF},
    'query: for one row': {'query': HALF['query'][:, :1]},
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
    'query_positions': {'query_positions': PLACES, 'is_causal': True},
    'key_positions': {'key_positions': PLACES, 'local_window_size': 1},
    r'local_window_size: .* not \(1, 2\)': {'local_window_size': (1, 2)},
    r'local_window_size: .* not \(9, 2\)': {'local_window_size': (9, 2)},
    r'local_window_size: .* not \(1, 9\)': {'local_window_size': (1, 9)},
    'bias: its dtype float32': {'bias': PAIRS['bias'].astype('float32')},
    r'mask: cuDNN wants it spread out from \(1, 1, 1, 4\) to \(1, 1, 4, 4\)': {'mask': PAIRS['mask'][:, :, :1]},
    r'bias: cuDNN wants it spread out from \(1, 2, 4, 1\) to \(1, 2, 4, 4\)': {'bias': PAIRS['bias'][..., :1]},
    r'mask: .* from \(2, 1, 4, 4\) and \(1, 2, 4, 4\) to \(2, 2, 4, 4\)': {
        **{name: jnp.tile(x, (2, 1, 1, 1)) for name, x in HALF.items()},
        'mask': jnp.tile(PAIRS['mask'], (2, 1, 1, 1)), 'bias': PAIRS['bias'],
    },
    'bias: beside it cuDNN wants even lengths, not 3 and 4': {
        'query': HALF['query'][:, :3], 'bias': PAIRS['bias'][:, :, :3],
    },
    'mask: cuDNN adds it in float16': {
        **{name: x.astype('float16') for name, x in HALF.items()}, 'mask': PAIRS['mask'],
    },
}  # fmt: skip


@pytest.mark.parametrize('message, given', REFUSED.items())
def test_what_cudnn_cannot_do_it_refuses(hopper, message, given):
    with pytest.raises(NotImplementedError, match=f'cudnn: {message}'):
        dot_product_attention(**HALF | given, implementation='cudnn')


@pytest.mark.parametrize('capability, message', [((7, 5), 'platform: cuDNN wants'), ((10, 0), 'heads of 128 numbers')])
def test_what_some_gpus_cannot_do_it_refuses(monkeypatch, capability, message):
    monkeypatch.setattr(cudnn, 'compute_capability', lambda: capability)
    with pytest.raises(NotImplementedError, match=message):
        wide = {name: jnp.ones((1, 4, 2, 136), 'bfloat16') for name in HALF}
        dot_product_attention(**wide, implementation='cudnn')


def test_without_an_nvidia_gpu_it_says_so():
    with pytest.raises(NotImplementedError, match='cudnn needs an NVIDIA GPU; this process runs on cpu'):
        dot_product_attention(**HALF, implementation='cudnn')


def test_a_list_is_tried_in_order_and_fails_with_every_reason():
    asked = {'implementation': ['cudnn', 'splash', 'blockwise'], 'return_weights': True}
    message = r'cudnn: platform: .* on cpu; splash: platform: .* on cpu; blockwise: return_weights'
    with pytest.raises(NotImplementedError, match=message):
        dot_product_attention(**HALF, **asked)
    output, _ = dot_product_attention(**HALF, **asked | {'implementation': ['cudnn', 'splash', 'dense']})
    assert jnp.all(output == 1)


def test_each_platform_has_its_own_first(hopper):
    call = cudnn.AttentionCall(*HALF.values(), cudnn.Mask(), 1.0)
    assert [implementations_by_speed(call, platform)[0] for platform in ('cpu', 'gpu')] == ['dense', 'cudnn']
    assert all(
        {'dense', 'blockwise'} <= {*implementations_by_speed(call, platform)} for platform in ('cpu', 'gpu', 'tpu')
    )


def test_sizes_of_zero(hopper):
    empty = HALF | {'key': jnp.ones((1, 0, 2, 8), 'bfloat16'), 'value': jnp.ones((1, 0, 2, 8), 'bfloat16')}
    assert not jnp.any(dot_product_attention(**empty, implementation='cudnn'))


# Against the oracle


def hidden(*shape, seed=0):
    """A mask with half of its pairs, and of its second row none."""
    mask = np.random.default_rng(seed).random(shape) < 0.5
    mask[..., 1, :] = False
    return mask


LENGTHS = {'query_seq_lengths': np.array([0, 29]), 'key_value_seq_lengths': np.array([33, 0])}
CASES = {
    'nothing': (128, 128, {}),
    'odd lengths': (5, 7, {'scale': 0.3}),
    'causal': (6, 9, {'is_causal': True}),
    'causal, past the last key': (9, 6, {'is_causal': True}),
    'lengths': (32, 40, {**LENGTHS}),
    'lengths of one side': (32, 40, {'key_value_seq_lengths': np.array([40, 3])}),
    'lengths and causality': (32, 40, {**LENGTHS, 'is_causal': True}),
    'window': (40, 24, {'local_window_size': (5, 0)}),
    'window past the last block of keys': (150, 128, {'local_window_size': (5, 0)}),
    'window of the query alone': (8, 8, {'local_window_size': (0, 0)}),
    'window wider than all': (8, 12, {'local_window_size': (7, 0)}),
    'window of two sides and causality': (24, 128, {'local_window_size': (4, 9), 'is_causal': True}),
    'window and lengths': (32, 40, {'key_value_seq_lengths': np.array([9, 0]), 'local_window_size': (3, 0)}),
    'mask': (8, 10, {'mask': hidden(B, 1, 8, 10)}),
    'mask of each head, causality': (8, 10, {'mask': hidden(B, N, 8, 10), 'is_causal': True}),
    'mask of all, lengths': (32, 40, {'mask': hidden(1, 1, 32, 40), **LENGTHS}),
    'bias': (8, 10, {'bias': (B, N, 8, 10)}),
    'bias of each head, causality, lengths': (32, 40, {'bias': (1, N, 32, 40), 'is_causal': True, **LENGTHS}),
    'bias of all, window of two sides': (8, 10, {'bias': (1, 1, 8, 10), 'local_window_size': (2, 3)}),
    'bias and mask': (8, 10, {'bias': (B, N, 8, 10), 'mask': hidden(1, 1, 8, 10), 'local_window_size': (6, 0)}),
}  # fmt: skip


def judged(case, dtype):
    T, S, kwargs = case
    arrays = random_inputs(T, S, **{'bias': kwargs['bias']} if 'bias' in kwargs else {})
    if 'bias' in arrays:
        arrays['bias'][hidden(*arrays['bias'].shape, seed=1)] = -np.inf
    return check_against_oracle('cudnn', arrays, {name: x for name, x in kwargs.items() if name != 'bias'}, dtype)


def stand_in(
    query, key, value, bias=None, *, scale, is_causal, local_window_size, implementation,
    query_seq_lengths=None, key_value_seq_lengths=None,
):  # fmt: skip
    """cuDNN, with NaN in rows after a length or with nothing to see, and in gradients of what is after a length."""
    (T, width), S = query.shape[1::2], key.shape[1]
    given = [x for x in (query, key, value, bias) if x is not None]
    assert implementation == 'cudnn' and isinstance(scale, float)
    assert {x.dtype for x in given} in ({jnp.dtype('bfloat16')}, {jnp.dtype('float16')})
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
    query, key, value = _after(query, inside_T), _after(key, inside_S), _after(value, inside_S)
    key, value = (jnp.repeat(x, N // K, axis=2) for x in (key, value))
    logits = scale * jnp.einsum('btnh,bsnh->bnts', query, key, preferred_element_type='float32')
    logits = logits if bias is None else logits + bias.astype('float32')
    seen = jnp.broadcast_to(inside_S, (B, S, 1, 1)).transpose(0, 2, 3, 1)
    if is_causal:
        seen &= jnp.tri(T, S, dtype=bool)[None, None]
    if local_window_size is not None:
        seen &= ~jnp.tri(T, S, -local_window_size[0] - 1, dtype=bool)[None, None]
    seen |= ~jnp.broadcast_to(inside_T, (B, T, 1, 1)).transpose(0, 2, 1, 3)  # inside, a row may be -inf and so NaN
    output = jnp.einsum('bnts,bsnh->btnh', jax.nn.softmax(jnp.where(seen, logits, -jnp.inf)), value)
    works = jnp.all(jnp.array([jnp.all(x > 0) for x in lengths if x is not None]))  # of nothing, nothing is promised
    return jnp.where(inside_T & works, output, jnp.nan).astype(query.dtype)


@jax.custom_vjp
def _after(x, inside):
    """x, with a gradient of NaN outside."""
    return x


_after.defvjp(lambda x, inside: (x, inside), lambda inside, slope: (jnp.where(inside, slope, jnp.nan), None))


@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_around_a_stand_in_the_contract_holds(hopper, monkeypatch, case):
    monkeypatch.setattr(jax.nn, 'dot_product_attention', stand_in)
    judged(case, 'bfloat16')


def test_the_cases_have_rows_that_see_nothing_and_float16(hopper, monkeypatch):
    monkeypatch.setattr(jax.nn, 'dot_product_attention', stand_in)
    assert judged(CASES['window'], 'float16').any()


# The program for a GPU


def text(function, *args):
    return fused.exported_program(function, 'cuda', *args, targets=TARGETS)


PROGRAMS = {
    'nothing': ('NO_MASK', 0, {}),
    'causal': ('CAUSAL', 0, {'is_causal': True}),
    'lengths': ('PADDING', 0, {'key_value_seq_lengths': jnp.array([256, 9])}),
    'lengths and causality': ('PADDING_CAUSAL', 0, {'query_seq_lengths': jnp.array([256, 9]), 'is_causal': True}),
    'window': ('CAUSAL', 32, {'local_window_size': (31, 0)}),
    'window of two sides and causality': ('CAUSAL', 32, {'local_window_size': (31, 7), 'is_causal': True}),
}


@pytest.mark.parametrize('mask_type, window, kwargs', PROGRAMS.values(), ids=PROGRAMS)
def test_cudnn_is_called_once_each_way_and_nothing_has_the_size_of_the_matrix(hopper, mask_type, window, kwargs):
    T, S = 256, 384
    attend = attention_of('cudnn', **kwargs)
    for function, targets in ((attend, TARGETS[:1]), (gradient_of(attend), TARGETS[:2])):
        program = text(function, *array_shapes(T, S, 'bfloat16'))
        assert fused.custom_calls(program) == targets
        assert program.count(f'\\22mask_type\\22: \\22{mask_type}\\22') == len(targets)
        assert program.count(f'\\22sliding_window_length\\22: {window},') == len(targets)
        assert (B, T, N, 24) in fused.value_shapes(program)  # heads of 12 and 20, filled up
        assert not [shape for shape in fused.value_shapes(program) if {T, S} <= {*shape}]


def test_a_bias_comes_back_in_its_own_shape(hopper):
    bias = jax.ShapeDtypeStruct((1, N, 256, 384), 'bfloat16')
    attend = lambda bias, *arrays: jnp.sum(attention_of('cudnn', bias=bias)(*arrays).astype('float32'))
    program = text(jax.grad(attend), bias, *array_shapes(256, 384, 'bfloat16'))
    assert fused.custom_calls(program) == TARGETS[2:]
    numbers = fused.value_shapes(program, '(?:bf16|f32)')  # of truth values there are more, each read once for a sum
    assert {shape for shape in numbers if {256, 384} <= {*shape}} == {(1, N, 256, 384), (N, 256, 384)}


@pytest.mark.parametrize('mapped', [(0, None, None), (None, None, 0), (0, 0, 0)], ids=str)
def test_maps_over_some_arrays_or_all(hopper, mapped):
    add = lambda x, axis: x if axis is None else jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
    given = [add(x, axis) for x, axis in zip(array_shapes(64, 64, 'bfloat16'), mapped, strict=True)]
    attend = attention_of('cudnn', key_value_seq_lengths=jnp.array([64, 9]))
    program = text(jax.vmap(gradient_of(attend), mapped), *given)
    assert fused.custom_calls(program) == TARGETS[:2] and (3 * B, 64, N, 24) in fused.value_shapes(program)


def test_under_a_map_a_bias_for_all_is_an_error_and_never_a_wrong_gradient(hopper):
    attend = lambda bias, *arrays: jnp.sum(attention_of('cudnn', bias=bias)(*arrays).astype('float32'))
    given = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in array_shapes(64, 64, 'bfloat16')]
    with pytest.raises(TypeError, match='reshape'):
        text(jax.vmap(jax.grad(attend), (None, 0, 0, 0)), jax.ShapeDtypeStruct((1, N, 64, 64), 'bfloat16'), *given)


# The device


@pytest.mark.gpu
@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_a_gpu_gives_what_the_formula_says(case):
    judged(case, 'bfloat16')


@pytest.mark.gpu
@pytest.mark.parametrize('T, S', [(1024, 1024), (1000, 520), (192, 192)])
@pytest.mark.parametrize('kwargs', [{}, {'is_causal': True}, {'local_window_size': (100, 0)}], ids=str)
def test_a_gpu_agrees_with_dense(T, S, kwargs):
    arrays = [jnp.asarray(x, 'bfloat16') for x in random_inputs(T, S).values()]
    agree = lambda a, b: np.testing.assert_allclose(*(np.asarray(x, 'float32') for x in (a, b)), atol=0.03, rtol=0.03)
    jax.tree.map(agree, *(jax.jit(gradient_of(attention_of(name, **kwargs)))(*arrays) for name in ('cudnn', 'dense')))
