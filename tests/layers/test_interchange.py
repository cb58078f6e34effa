"""Parameters that flax's multi-head attention and ours exchange, and our attention inside flax's module."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import dot_product_attention
from attnlab.layers import attention_fn
from tests.kernels.calls import same
from tests.kernels.oracle import near
from tests.layers.calls import ACROSS, FLAX, KEYS, OURS, QUERIES, SELF, SQUARE, WIDE, close, drawn, program, run, sloped

B, N, T, S = WIDE.shape

PAIRS = {
    'self': (SELF, dict(), dict(), dict()),
    'self, masked, no bias': (SELF, dict(use_bias=False), dict(use_bias=False), dict(mask=SQUARE)),
    'across, other widths': (
        ACROSS, dict(head_width=3, out_features=5), dict(qkv_features=12, out_features=5), dict(mask=WIDE),
    ),
    'across, one mask for all': (ACROSS, dict(), dict(), dict(mask=WIDE[:1, :1])),
}  # fmt: skip


@pytest.mark.parametrize('pair', PAIRS)
def test_parameters_are_exchanged_with_flax(pair):
    inputs, fields, theirs, call = PAIRS[pair]
    module, peer = OURS(**fields), FLAX(**theirs)
    ours, flax = program(module, **call), program(peer, **call)
    for variables in (drawn(peer, *inputs), drawn(module, *inputs, seed=1)):
        close(ours(variables, *inputs), flax(variables, *inputs))


def test_parameters_start_as_in_flax():
    _, fields, theirs, _ = PAIRS['across, other widths']
    same(*(jax.jit(module.init)(jax.random.key(5), *ACROSS) for module in (OURS(**fields), FLAX(**theirs))))


CALLS = {
    'no mask': (ACROSS, dict(), run),
    'a boolean mask': (ACROSS, dict(mask=WIDE), sloped),
    "flax's own mask, of numbers": (SELF, dict(mask=nn.make_causal_mask(QUERIES[..., 0])), run),
    'two batch axes': ((jnp.stack([QUERIES, -QUERIES, 2 * QUERIES]),), dict(mask=SQUARE[None]), run),
    'no batch axis': ((QUERIES[0],), dict(mask=SQUARE[0]), run),
}


@pytest.mark.parametrize('call', CALLS)
def test_attention_inside_flax_is_that_of_flax(call):
    inputs, kwargs, make = CALLS[call]
    peer = FLAX(qkv_features=12)
    variables = drawn(peer, *inputs)
    ours = make(peer.clone(attention_fn=attention_fn), variables, *inputs, **kwargs)
    close(ours, make(peer, variables, *inputs, **kwargs))


def test_a_bias_inside_flax_is_that_of_flax():
    random = np.random.default_rng(1)
    query, key = (jnp.asarray(random.normal(size=(3, B, size, N, 4)), jnp.float32) for size in (T, S))
    bias = jnp.asarray(random.normal(size=(3, 1, N, 1, S)), jnp.float32)
    loss = lambda bias, attend: jnp.sum(jnp.sin(attend(query, key, key, bias)))
    slopes = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    close(slopes(bias, attention_fn), slopes(bias, nn.dot_product_attention))
    bias = jnp.zeros((1, 1, 1, T, S)).at[..., 1].set(2.0)
    # flax leaves fewer axes to the promotion of ranks, which the tests forbid.
    same(jax.jit(attention_fn)(query, key, key, bias[0, 0, 0]), jax.jit(attention_fn)(query, key, key, bias))


def test_flax_decodes_with_it():
    peer = FLAX(decode=True)
    variables = jax.jit(peer.init)(jax.random.key(0), QUERIES)
    params, caches = variables['params'], [variables['cache']] * 2
    steps = [
        jax.jit(lambda cache, x, m=module: m.apply({'params': params, 'cache': cache}, x, mutable=['cache']))
        for module in (peer, peer.clone(attention_fn=attention_fn))
    ]
    for t in range(T):
        made = [step(cache, QUERIES[:, t : t + 1]) for step, cache in zip(steps, caches, strict=True)]
        caches = [updated['cache'] for _, updated in made]
        close(*(output for output, _ in made))


def test_weights_are_sown_where_flax_asks():
    peer = FLAX()
    ours = peer.clone(attention_fn=functools.partial(attention_fn, implementation='blockwise'))
    variables = drawn(peer, *ACROSS)
    call = dict(mask=WIDE, sow_weights=True, mutable=['intermediates'])
    made, want = (run(module, variables, *ACROSS, **call) for module in (ours, peer))
    close(made, want)
    assert jnp.all(made[1]['intermediates']['attention_weights'][0][~WIDE] == 0)
    assert 'intermediates' not in run(ours, variables, *ACROSS, mutable=['intermediates'])[1]


def test_a_row_under_a_mask_all_over_is_zero_and_in_flax_the_mean():
    mask = jnp.ones((1, 1, T, S), bool).at[:, :, 1].set(False)
    value = KEYS[:, :, None]
    ours, flax = (
        jax.jit(attend)(QUERIES[:, :, None, : KEYS.shape[-1]], value, value, mask=mask)
        for attend in (attention_fn, nn.dot_product_attention)
    )
    assert jnp.all(ours[:, 1] == 0)
    ours, flax = np.asarray(ours), np.asarray(flax)
    close(flax[:, 1], np.asarray(value).mean(1))
    close(np.delete(ours, 1, 1), np.delete(flax, 1, 1))


def test_dropout_inside_flax_is_ours():
    """Independent for each row, though flax says `broadcast_dropout` unless told otherwise."""
    twins, rng = jnp.stack([QUERIES[0]] * 2), jax.random.key(4)
    peer = FLAX(dropout_rate=0.5, attention_fn=attention_fn, deterministic=False)
    variables = drawn(peer, twins)
    output = run(peer, variables, twins, dropout_rng=rng)
    assert jnp.any(output[0] != output[1])
    plain = run(peer.clone(dropout_rate=0.0), variables, twins)
    same(run(peer.clone(deterministic=True), variables, twins), plain)
    heads = jnp.stack([QUERIES] * N, axis=2)
    same(*(
        jax.jit(lambda x, attend=attend: attend(x, x, x, dropout_rng=rng, dropout_rate=0.5))(heads)
        for attend in (attention_fn, dot_product_attention)
    ))  # fmt: skip
    with pytest.raises(ValueError, match='dropout_rate is 0.5, dropout_rng is None'):
        attention_fn(heads, heads, heads, dropout_rate=0.5)


@pytest.mark.parametrize('dtype', [None, jnp.bfloat16])
def test_dtypes_are_promoted_as_in_flax(dtype):
    heads = QUERIES[:, :, None]
    calls = [
        jax.jit(functools.partial(attend, dtype=dtype))(heads.astype('bfloat16'), heads, heads)
        for attend in (attention_fn, nn.dot_product_attention)
    ]
    assert [x.dtype for x in calls] == [jnp.float32 if dtype is None else dtype] * 2
    near(*calls, 1e-6 if dtype is None else 2**-6, 'output')


def test_nothing_that_flax_passes_is_dropped():
    """Flax passes what the function's signature has, and leaves out the rest in silence."""
    theirs, ours = (inspect.signature(attend).parameters for attend in (nn.dot_product_attention, attention_fn))
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == theirs[name].default for name in theirs)
    with pytest.raises(NotImplementedError, match="precision is 'highest'"):
        jax.eval_shape(FLAX(precision='highest', attention_fn=attention_fn).init, jax.random.key(0), QUERIES)
    for name in ('precision', 'einsum_dot_general', 'qk_attn_weights_einsum', 'attn_weights_value_einsum'):
        with pytest.raises(NotImplementedError, match=f'^{name} is .*; expected None'):
            attention_fn(*3 * [QUERIES[:, :, None]], **{name: jnp.einsum})


@pytest.mark.parametrize(('name', 'shape'), [
    ('bias', (1, 1, 1, 1, T, T)), ('mask', (2, B, 1, T, T)), ('mask', (3, B, 1, 3, T)),
])  # fmt: skip
def test_pairs_that_do_not_broadcast_are_named(as_used, name, shape):
    x, pairs = jnp.ones((3, B, T, 1, 4)), jnp.ones(shape, bool if name == 'mask' else jnp.float32)
    with pytest.raises(ValueError, match=rf'{name} has shape \(.*{shape[-2]}, {T}\); expected'):
        attention_fn(x, x, x, **{name: pairs})


def test_the_implementation_is_that_asked_for():
    with pytest.raises(ValueError, match="implementation is 'fast'; expected 'ring' "):
        attention_fn(*3 * [QUERIES[:, :, None]], implementation='fast')


def test_batch_axes_that_differ_are_named(as_used):
    x = jnp.ones((2, 3, T, 1, 4))
    with pytest.raises(ValueError, match='query, key, value have shapes .* the same'):
        attention_fn(x, x.swapaxes(0, 1), x.swapaxes(0, 1))
