"""Attention in NumPy float64, computed by the formula for one batch row and head at a time.

Every implementation is tested against it.  It imports nothing from the package, except JAX where it runs a function.
"""

import math
from typing import NamedTuple

import numpy as np

EPSILON = 1e-6
"""`qk_norm` adds it to a mean square ('rms'), or uses it as the smallest length ('l2')."""


class Reference(NamedTuple):
    """The expected results of a call, in float64.

    output [B, T, N, Hv], weights [B, N, T, S], residual [B, T, N] (-inf for an empty row), gradients by name.
    largest_distance: between positions that may attend to each other, at least one.
    """

    output: np.ndarray
    weights: np.ndarray
    residual: np.ndarray
    gradients: dict[str, np.ndarray]
    largest_distance: float


def broadcast_entry(x, *indices):
    """Return x[indices]; an axis of size one is broadcast."""
    return np.asarray(x)[tuple(i if size > 1 else 0 for i, size in zip(indices, np.shape(x), strict=True))]


def position_offsets(b, t, s, *, query_positions=None, key_positions=None, **_):
    """Return the position of query t of row b minus the position of key s."""
    query = t if query_positions is None else broadcast_entry(query_positions, b, t)
    key = s if key_positions is None else broadcast_entry(key_positions, b, s)
    return query - key


def is_visible(
    b, n, t, s, *, mask=None, is_causal=False, query_seq_lengths=None, key_value_seq_lengths=None,
    local_window_size=None, query_segment_ids=None, key_segment_ids=None, prefix_lengths=None, **positions,
):  # fmt: skip
    """Return whether query t of row b and head n may attend to key s; t and s are numbers, or arrays that broadcast."""
    offsets = position_offsets(b, t, s, **positions)
    visible = np.ones(np.broadcast_shapes(np.shape(t), np.shape(s)), bool)
    if mask is not None:
        visible = visible & broadcast_entry(mask, b, n, t, s)
    if query_seq_lengths is not None:
        visible = visible & (t < query_seq_lengths[b])
    if key_value_seq_lengths is not None:
        visible = visible & (s < key_value_seq_lengths[b])
    if query_segment_ids is not None:
        visible = visible & (broadcast_entry(query_segment_ids, b, t) == broadcast_entry(key_segment_ids, b, s))
    if is_causal:
        visible = visible & (offsets >= 0)
    if prefix_lengths is not None:
        visible = visible & ((offsets >= 0) | (s < prefix_lengths[b]))
    if local_window_size is not None:
        left, right = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
        visible = visible & (-right <= offsets) & (offsets <= left)
    return visible


def normalised(x, kind):
    """Return x with length one ('l2') or mean square one ('rms') over its last axis, and its vjp function."""
    if kind is None:
        return x, lambda d_out: d_out
    if kind == 'l2':
        length = np.sqrt(np.sum(x**2, axis=-1, keepdims=True))
        divisor, factor = np.maximum(length, EPSILON), np.where(length > EPSILON, 1.0, 0.0)
    else:
        divisor, factor = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPSILON), 1 / x.shape[-1]
    unit = x / divisor
    return unit, lambda d_out: (d_out - factor * unit * np.sum(unit * d_out, axis=-1, keepdims=True)) / divisor


def attention(
    query, key, value, bias=None, score=None, *, sinks=None, alibi_slopes=None, qk_norm=None,
    scale=None, logits_soft_cap=None, factors=None, cotangent=None, **mask_arguments,
) -> Reference:  # fmt: skip
    """Return dot-product attention, or additive attention if a `score` vector [N, H] is given.

    factors: [B, N, T, S], the factors of the weights under dropout.
    cotangent: [B, T, N, Hv]; gradients are of sum(cotangent * output).
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    (query, query_vjp), (key, key_vjp) = normalised(query, qk_norm), normalised(key, qk_norm)
    B, T, N, H = query.shape
    S, K, Hv = value.shape[1:]
    scale = 1 / math.sqrt(H) if scale is None else scale
    full_bias = np.zeros((B, N, T, S)) + (0 if bias is None else np.asarray(bias, np.float64))
    slopes = np.zeros(N) if alibi_slopes is None else np.asarray(alibi_slopes, np.float64)
    sink = np.full(N, -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    factors = np.ones((B, N, T, S)) if factors is None else np.asarray(factors, np.float64)
    cotangent = np.zeros((B, T, N, Hv)) if cotangent is None else np.asarray(cotangent, np.float64)
    score_vector = None if score is None else np.asarray(score, np.float64)
    output, weights, residual = np.zeros((B, T, N, Hv)), np.zeros((B, N, T, S)), np.zeros((B, T, N))
    dq, dk, dv, dbias = (np.zeros_like(x) for x in (query, key, value, full_bias))
    dsinks, dslopes, dscore, largest_distance = np.zeros(N), np.zeros(N), np.zeros((N, H)), 1.0
    t, s = np.arange(T)[:, None], np.arange(S)[None, :]
    for b, n in np.ndindex(B, N):
        k = n // (N // K)  # heads in groups: 0, 0, 1, 1
        q, keys, values = query[b, :, n], key[b, :, k], value[b, :, k]
        distance = np.abs(position_offsets(b, t, s, **mask_arguments))
        tanh = None if score_vector is None else np.tanh(q[:, None, :] + keys[None, :, :])
        raw_logits = scale * q @ keys.T if score_vector is None else tanh @ score_vector[n]
        capped = raw_logits if logits_soft_cap is None else logits_soft_cap * np.tanh(raw_logits / logits_soft_cap)
        visible = is_visible(b, n, t, s, **mask_arguments)
        largest_distance = np.max(distance * visible, initial=largest_distance)
        logits = np.where(visible, capped + full_bias[b, n] - slopes[n] * distance, -np.inf)
        # The sink is one more logit of the sum; it has no value.
        lse = np.logaddexp.reduce(np.concatenate([logits, np.full((T, 1), sink[n])], axis=1), axis=1)
        residual[b, :, n] = lse
        lse = np.where(lse == -np.inf, 0, lse)[:, None]  # the weights of an empty row are exp(-inf)
        w = weights[b, n] = np.exp(logits - lse)
        f, d_out = factors[b, n], cotangent[b, :, n]
        output[b, :, n] = (f * w) @ values
        dw = f * (d_out @ values.T)
        mean = np.sum(w * dw, axis=1, keepdims=True)
        dlogits = w * (dw - mean)
        dbias[b, n] = dlogits
        dslopes[n] -= np.sum(dlogits * distance)
        dsinks[n] -= np.sum(np.exp(sink[n] - lse) * mean)
        d_before_cap = dlogits if logits_soft_cap is None else dlogits * (1 - (capped / logits_soft_cap) ** 2)
        dv[b, :, k] += (f * w).T @ d_out
        if score_vector is None:
            dq[b, :, n] += scale * d_before_cap @ keys
            dk[b, :, k] += scale * d_before_cap.T @ q
        else:
            inner = d_before_cap[:, :, None] * score_vector[n] * (1 - tanh**2)
            dq[b, :, n] += inner.sum(1)
            dk[b, :, k] += inner.sum(0)
            dscore[n] += np.einsum('ts,tsh->h', d_before_cap, tanh)
    gradients = {'query': query_vjp(dq), 'key': key_vjp(dk), 'value': dv}
    if bias is not None:
        broadcast_axes = tuple(axis for axis in range(4) if np.shape(bias)[axis] == 1)
        gradients['bias'] = dbias.sum(broadcast_axes, keepdims=True)
    optional = {'score': (score, dscore), 'sinks': (sinks, dsinks), 'alibi_slopes': (alibi_slopes, dslopes)}
    gradients |= {name: gradient for name, (argument, gradient) in optional.items() if argument is not None}
    return Reference(output, weights, residual, gradients, largest_distance)


TOLERANCE = {
    'float64': (1e-12, 1e-11),
    'float32': (5e-6, 2e-5),
    'float16': (2**-10, 2**-9),
    'bfloat16': (2**-7, 2**-6),
}
"""Largest errors of output and gradients, relative to the largest value, or to one if all are smaller.

For half precisions these are their eps and twice their eps, because results are rounded; the oracle gets the rounded
inputs."""


def check_function(attend, call: tuple[dict, dict, np.ndarray], dtype: str = 'float32') -> Reference:
    """Compare `attend(**arrays, **kwargs)` and its gradients in all arrays with the oracle; return the reference.

    call: arrays, kwargs and cotangent, as `combinations.make_arguments` returns them.
    """
    import jax
    import jax.numpy as jnp

    arrays, kwargs, cotangent = call
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    cotangent = jnp.asarray(cotangent, dtype)
    kwargs_arrays = {name: jnp.asarray(x) for name, x in kwargs.items() if isinstance(x, np.ndarray)}

    def call_attend(arrays):
        output, *optional = attend(**arrays, **kwargs | kwargs_arrays, return_residual=True, return_weights=True)
        return output, optional

    def with_gradients(arrays, cotangent):
        output, vjp, optional = jax.vjp(call_attend, arrays, has_aux=True)
        return output, *optional, vjp(cotangent)[0]

    # The many calls in float32 share compiled operations; for the few other calls one program is faster.
    run = with_gradients if dtype == 'float32' else jax.jit(with_gradients)
    results = run(arrays, cotangent)
    reference = attention(**arrays, **kwargs, cotangent=cotangent)
    check_results(*results, reference, arrays)
    return reference


def check_results(output, residual, weights, gradients, reference: Reference, arrays) -> None:
    """Assert that the results of a call on `arrays` match the reference; residual and weights may be None."""
    dtype = arrays['query'].dtype
    forward, backward = TOLERANCE[dtype.name]
    has_keys = reference.residual > -np.inf
    near(output, reference.output, forward, 'output')
    if weights is not None:
        near(weights, reference.weights, forward, 'weights')
    if residual is not None:
        lowest = np.finfo(residual.dtype).min
        near(np.where(has_keys, residual, 0), np.where(has_keys, reference.residual, 0), forward, 'residual')
        assert np.all(np.where(has_keys, lowest, residual) == lowest), 'residual of an empty row'
    assert output.dtype == dtype
    assert gradients.keys() == reference.gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == arrays[name].dtype, name
        # The gradient of a slope is a sum of terms times the distance, and so are its errors.
        unit = reference.largest_distance if name == 'alibi_slopes' else 1.0
        if name == 'bias':  # rounding of a sum of n numbers grows as the root of n, over the axes that are broadcast
            unit = max(1.0, np.sqrt(reference.weights.size / max(gradient.size, 1) / 1024))
        near(gradient / unit, reference.gradients[name] / unit, backward, f'gradient of {name}')


def dropout_factors(seed, rate: float, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Return the factors of the weights [B, N, T, S]: 0 where a random 32-bit number is below the rate, else
    1 / (1 - rate).

    The number for weight (b, n, t, s) is the word s % 2 of threefry 2x32 with 20 rounds (Salmon et al. 2011), for the
    key `seed` and the counter ((b N + n) T + t, s // 2).
    """
    B, N, T, S = shape
    row, pair = np.broadcast_arrays(np.arange(B * N * T)[:, None], np.arange((S + 1) // 2)[None])
    bits = np.stack(threefry(seed, row, pair), axis=-1).reshape(B, N, T, -1)[..., :S]
    return np.where(bits >= round(rate * 2**32), 1 / (1 - rate), 0)


def threefry(key, first, second) -> tuple[np.ndarray, np.ndarray]:
    """Return two 32-bit words for each counter (first, second); the constants are from the paper's tables 2 and 3."""
    key_1, key_2 = (int(word) for word in key)
    keys = key_1, key_2, key_1 ^ key_2 ^ 0x1BD11BDA
    x, y = np.asarray(first, np.uint32) + np.uint32(keys[0]), np.asarray(second, np.uint32) + np.uint32(keys[1])
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = (y << np.uint32(rotation) | y >> np.uint32(32 - rotation)) ^ x
        x = x + np.uint32(keys[(group + 1) % 3])
        y = y + np.uint32((keys[(group + 2) % 3] + group + 1) % 2**32)
    return x, y


def near(have, want, tolerance: float, what: str) -> None:
    """Assert that `have` equals `want` up to `tolerance` times the largest value, or times one if all are smaller."""
    have, want = np.asarray(have, np.float64), np.asarray(want, np.float64)
    assert have.shape == want.shape, f'{what}: {have.shape}, expected {want.shape}'
    bound = tolerance * max(1.0, np.abs(want).max(initial=0))
    assert np.all(np.abs(have - want) <= bound), f'{what} is off by {np.abs(have - want).max()}, allowed {bound}'
