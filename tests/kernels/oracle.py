"""Attention in NumPy float64, read off the formula one batch row and head at a time: the judge of every implementation.

Nothing here comes from the package.
"""

import math
from typing import NamedTuple

import numpy as np

EPSILON = 1e-6
"""What `qk_norm` adds to a mean square ('rms') or holds a length up to ('l2')."""


class Judged(NamedTuple):
    """output [B, T, N, Hv], weights [B, N, T, S], residual [B, T, N] (-inf for an empty row), gradients by name.

    farthest: the largest distance between positions that see each other, at least one.
    """

    output: np.ndarray
    weights: np.ndarray
    residual: np.ndarray
    gradients: dict[str, np.ndarray]
    farthest: float


def at(x, *where):
    """x[where]; an axis of size one holds the entry of all."""
    return np.asarray(x)[tuple(i if size > 1 else 0 for i, size in zip(where, np.shape(x), strict=True))]


def ahead(b, t, s, *, query_positions=None, key_positions=None, **_):
    """How far query t of row b stands after key s."""
    here = t if query_positions is None else at(query_positions, b, t)
    there = s if key_positions is None else at(key_positions, b, s)
    return here - there


def visible(
    b, n, t, s, *, mask=None, is_causal=False, query_seq_lengths=None, key_value_seq_lengths=None,
    local_window_size=None, query_segment_ids=None, key_segment_ids=None, prefix_lengths=None, **positions,
):  # fmt: skip
    """Whether query t of row b and head n may look at key s; t and s are numbers, or arrays of them as in `t < s`."""
    steps = ahead(b, t, s, **positions)
    seen = np.ones(np.broadcast_shapes(np.shape(t), np.shape(s)), bool)
    if mask is not None:
        seen = seen & at(mask, b, n, t, s)
    if query_seq_lengths is not None:
        seen = seen & (t < query_seq_lengths[b])
    if key_value_seq_lengths is not None:
        seen = seen & (s < key_value_seq_lengths[b])
    if query_segment_ids is not None:
        seen = seen & (at(query_segment_ids, b, t) == at(key_segment_ids, b, s))
    if is_causal:
        seen = seen & (steps >= 0)
    if prefix_lengths is not None:
        seen = seen & ((steps >= 0) | (s < prefix_lengths[b]))
    if local_window_size is not None:
        left, right = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
        seen = seen & (-right <= steps) & (steps <= left)
    return seen


def normalised(x, kind):
    """x of length one ('l2') or mean square one ('rms') over its last axis, and what takes slopes back to x."""
    if kind is None:
        return x, lambda slope: slope
    if kind == 'l2':
        length = np.sqrt(np.sum(x**2, axis=-1, keepdims=True))
        size, share = np.maximum(length, EPSILON), np.where(length > EPSILON, 1.0, 0.0)
    else:
        size, share = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPSILON), 1 / x.shape[-1]
    unit = x / size
    return unit, lambda slope: (slope - share * unit * np.sum(unit * slope, axis=-1, keepdims=True)) / size


def attention(
    query, key, value, bias=None, score=None, *, sinks=None, alibi_slopes=None, qk_norm=None,
    scale=None, logits_soft_cap=None, factor=None, cotangent=None, **rules,
) -> Judged:  # fmt: skip
    """The dot product's attention, or with a `score` vector [N, H] the additive one.

    factor: [B, N, T, S], what dropout multiplied the weights by.
    cotangent: [B, T, N, Hv]; gradients are of sum(cotangent * output).
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    (query, query_back), (key, key_back) = normalised(query, qk_norm), normalised(key, qk_norm)
    B, T, N, H = query.shape
    S, K, Hv = value.shape[1:]
    scale = 1 / math.sqrt(H) if scale is None else scale
    added = np.zeros((B, N, T, S)) + (0 if bias is None else np.asarray(bias, np.float64))
    slopes = np.zeros(N) if alibi_slopes is None else np.asarray(alibi_slopes, np.float64)
    sink = np.full(N, -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    factor = np.ones((B, N, T, S)) if factor is None else np.asarray(factor, np.float64)
    cotangent = np.zeros((B, T, N, Hv)) if cotangent is None else np.asarray(cotangent, np.float64)
    vector = None if score is None else np.asarray(score, np.float64)
    output, weights, residual = np.zeros((B, T, N, Hv)), np.zeros((B, N, T, S)), np.zeros((B, T, N))
    dq, dk, dv, dbias = (np.zeros_like(x) for x in (query, key, value, added))
    dsinks, dslopes, dscore, farthest = np.zeros(N), np.zeros(N), np.zeros((N, H)), 1.0
    t, s = np.arange(T)[:, None], np.arange(S)[None, :]
    for b, n in np.ndindex(B, N):
        k = n // (N // K)  # heads in groups: 0, 0, 1, 1
        q, keys, values = query[b, :, n], key[b, :, k], value[b, :, k]
        distance = np.abs(ahead(b, t, s, **rules))
        hidden = None if vector is None else np.tanh(q[:, None, :] + keys[None, :, :])
        raw = scale * q @ keys.T if vector is None else hidden @ vector[n]
        capped = raw if logits_soft_cap is None else logits_soft_cap * np.tanh(raw / logits_soft_cap)
        seen = visible(b, n, t, s, **rules)
        farthest = np.max(distance * seen, initial=farthest)
        logits = np.where(seen, capped + added[b, n] - slopes[n] * distance, -np.inf)
        # The sink is one more logit of the sum, whose weight goes nowhere.
        total = np.logaddexp.reduce(np.concatenate([logits, np.full((T, 1), sink[n])], axis=1), axis=1)
        residual[b, :, n] = total
        total = np.where(total == -np.inf, 0, total)[:, None]  # a row that sees nothing has weights of exp(-inf)
        w = weights[b, n] = np.exp(logits - total)
        f, g = factor[b, n], cotangent[b, :, n]
        output[b, :, n] = (f * w) @ values
        dw = f * (g @ values.T)
        mean = np.sum(w * dw, axis=1, keepdims=True)
        dlogits = w * (dw - mean)
        dbias[b, n] = dlogits
        dslopes[n] -= np.sum(dlogits * distance)
        dsinks[n] -= np.sum(np.exp(sink[n] - total) * mean)
        draw = dlogits if logits_soft_cap is None else dlogits * (1 - (capped / logits_soft_cap) ** 2)
        dv[b, :, k] += (f * w).T @ g
        if vector is None:
            dq[b, :, n] += scale * draw @ keys
            dk[b, :, k] += scale * draw.T @ q
        else:
            inner = draw[:, :, None] * vector[n] * (1 - hidden**2)
            dq[b, :, n] += inner.sum(1)
            dk[b, :, k] += inner.sum(0)
            dscore[n] += np.einsum('ts,tsh->h', draw, hidden)
    gradients = {'query': query_back(dq), 'key': key_back(dk), 'value': dv}
    if bias is not None:
        small = tuple(axis for axis in range(4) if np.shape(bias)[axis] == 1)
        gradients['bias'] = dbias.sum(small, keepdims=True)
    more = {'score': (score, dscore), 'sinks': (sinks, dsinks), 'alibi_slopes': (alibi_slopes, dslopes)}
    gradients |= {name: slope for name, (given, slope) in more.items() if given is not None}
    return Judged(output, weights, residual, gradients, farthest)


TOLERANCE = {
    'float64': (1e-12, 1e-11),
    'float32': (5e-6, 2e-5),
    'float16': (2**-10, 2**-9),
    'bfloat16': (2**-7, 2**-6),
}
"""How far output and gradients may be off, as a part of the largest value or of one: for half precisions, their
eps and twice their eps, as inputs and results are rounded; the oracle sees the rounded inputs."""


def compare(attend, call: tuple[dict, dict, np.ndarray], dtype: str = 'float32') -> Judged:
    """Holds `attend(**arrays, **kwargs)` and its gradients in all arrays against the oracle, which it returns."""
    import jax
    import jax.numpy as jnp

    arrays, kwargs, cotangent = call
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    cotangent = jnp.asarray(cotangent, dtype)
    given = {name: jnp.asarray(x) for name, x in kwargs.items() if isinstance(x, np.ndarray)}

    def traced(arrays):
        output, *more = attend(**arrays, **kwargs | given, return_residual=True, return_weights=True)
        return output, more

    def graded(arrays, cotangent):
        output, vjp, more = jax.vjp(traced, arrays, has_aux=True)
        return output, *more, vjp(cotangent)[0]

    # The many calls in float32 have their operations compiled once; for the few others, one program is quicker.
    made = graded if dtype == 'float32' else jax.jit(graded)
    results = made(arrays, cotangent)
    judged = attention(**arrays, **kwargs, cotangent=cotangent)
    hold(*results, judged, arrays)
    return judged


def hold(output, residual, weights, gradients, judged: Judged, arrays) -> None:
    """Asserts that the results of a call on `arrays` are what was judged; residual and weights may be None."""
    dtype = arrays['query'].dtype
    forward, backward = TOLERANCE[dtype.name]
    full = judged.residual > -np.inf
    near(output, judged.output, forward, 'output')
    if weights is not None:
        near(weights, judged.weights, forward, 'weights')
    if residual is not None:
        lowest = np.finfo(residual.dtype).min
        near(np.where(full, residual, 0), np.where(full, judged.residual, 0), forward, 'residual')
        assert np.all(np.where(full, lowest, residual) == lowest), 'residual of an empty row'
    assert output.dtype == dtype
    assert gradients.keys() == judged.gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == arrays[name].dtype, name
        # What reaches a slope is times the distance, and so are the errors: they count in units of the farthest.
        unit = judged.farthest if name == 'alibi_slopes' else 1.0
        if name == 'bias':  # rounding of a sum of n numbers grows as the root of n, over the axes that are broadcast
            unit = max(1.0, np.sqrt(judged.weights.size / max(gradient.size, 1) / 1024))
        near(gradient / unit, judged.gradients[name] / unit, backward, f'gradient of {name}')


def dropout(words, rate: float, shape: tuple[int, int, int, int]) -> np.ndarray:
    """[B, N, T, S], what the weights are multiplied by: 1 / (1 - rate), or 0 where a draw of 32 bits falls below rate.

    Weight (b, n, t, s) takes the word s % 2 of what threefry 2x32 with 20 rounds (Salmon et al. 2011) makes of the key
    `words` and the counter ((b N + n) T + t, s // 2).
    """
    B, N, T, S = shape
    row, pair = np.broadcast_arrays(np.arange(B * N * T)[:, None], np.arange((S + 1) // 2)[None])
    drawn = np.stack(threefry(words, row, pair), axis=-1).reshape(B, N, T, -1)[..., :S]
    return np.where(drawn >= round(rate * 2**32), 1 / (1 - rate), 0)


def threefry(key, first, second) -> tuple[np.ndarray, np.ndarray]:
    """Two words of 32 bits for two; the constants are those of the paper's tables 2 and 3."""
    one, two = (int(word) for word in key)
    keys = one, two, one ^ two ^ 0x1BD11BDA
    x, y = np.asarray(first, np.uint32) + np.uint32(keys[0]), np.asarray(second, np.uint32) + np.uint32(keys[1])
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = (y << np.uint32(turn) | y >> np.uint32(32 - turn)) ^ x
        x = x + np.uint32(keys[(group + 1) % 3])
        y = y + np.uint32((keys[(group + 2) % 3] + group + 1) % 2**32)
    return x, y


def near(have, want, tolerance: float, what: str) -> None:
    """have == want up to a part of the largest value, or of one where all are smaller."""
    have, want = np.asarray(have, np.float64), np.asarray(want, np.float64)
    assert have.shape == want.shape, f'{what}: {have.shape}, expected {want.shape}'
    bound = tolerance * max(1.0, np.abs(want).max(initial=0))
    assert np.all(np.abs(have - want) <= bound), f'{what} is off by {np.abs(have - want).max()}, allowed {bound}'
