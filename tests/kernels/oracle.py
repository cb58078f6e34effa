"""Attention in NumPy float64, read off the formula one query row at a time: the judge of every implementation.

Nothing here comes from the package.  `draw` makes the calls that are judged.
"""

import math
from typing import NamedTuple

import numpy as np


class Judged(NamedTuple):
    """output [B, T, N, Hv], weights [B, N, T, S], residual [B, T, N] (-inf for an empty row), gradients by name."""

    output: np.ndarray
    weights: np.ndarray
    residual: np.ndarray
    gradients: dict[str, np.ndarray]


def visible(
    b, n, t, s, *, mask=None, is_causal=False, query_seq_lengths=None, key_value_seq_lengths=None,
    local_window_size=None, query_positions=None, key_positions=None, query_segment_ids=None, key_segment_ids=None,
):  # fmt: skip
    """Whether query t of row b and head n may look at key s."""

    def at(x, *where):  # an axis of size one holds the entry of all
        return np.asarray(x)[tuple(i if size > 1 else 0 for i, size in zip(where, np.shape(x), strict=True))]

    here = t if query_positions is None else at(query_positions, b, t)
    there = s if key_positions is None else at(key_positions, b, s)
    if mask is not None and not at(mask, b, n, t, s):
        return False
    if query_seq_lengths is not None and t >= query_seq_lengths[b]:
        return False
    if key_value_seq_lengths is not None and s >= key_value_seq_lengths[b]:
        return False
    if query_segment_ids is not None and at(query_segment_ids, b, t) != at(key_segment_ids, b, s):
        return False
    if is_causal and there > here:
        return False
    if local_window_size is not None:
        left, right = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
        return here - left <= there <= here + right
    return True


def attention(
    query, key, value, bias=None, score=None, *, scale=None, logits_soft_cap=None, factor=None, cotangent=None, **rules
) -> Judged:
    """The dot product's attention, or with a `score` vector [N, H] the additive one.

    factor: [B, N, T, S], what dropout multiplied the weights by.
    cotangent: [B, T, N, Hv]; gradients are of sum(cotangent * output).
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    B, T, N, H = query.shape
    S, K, Hv = value.shape[1:]
    scale = 1 / math.sqrt(H) if scale is None else scale
    added = np.zeros((B, N, T, S)) + (0 if bias is None else np.asarray(bias, np.float64))
    factor = np.ones((B, N, T, S)) if factor is None else factor
    cotangent = np.zeros((B, T, N, Hv)) if cotangent is None else np.asarray(cotangent, np.float64)
    vector = None if score is None else np.asarray(score, np.float64)
    output, weights, residual = np.zeros((B, T, N, Hv)), np.zeros((B, N, T, S)), np.full((B, T, N), -np.inf)
    dq, dk, dv, dbias = (np.zeros_like(x) for x in (query, key, value, added))
    dscore = np.zeros((N, H))
    for b, n, t in np.ndindex(B, N, T):
        k = n // (N // K)  # heads in groups: 0, 0, 1, 1
        seen = [s for s in range(S) if visible(b, n, t, s, **rules) and added[b, n, t, s] != -np.inf]
        if not seen:
            continue
        q, keys, values = query[b, t, n], key[b, seen, k], value[b, seen, k]
        hidden = np.tanh(q + keys)
        raw = scale * keys @ q if vector is None else hidden @ vector[n]
        capped = raw if logits_soft_cap is None else logits_soft_cap * np.tanh(raw / logits_soft_cap)
        logits = capped + added[b, n, t, seen]
        residual[b, t, n] = np.log(np.sum(np.exp(logits - logits.max()))) + logits.max()
        w = np.exp(logits - residual[b, t, n])
        weights[b, n, t, seen] = w
        f, g = factor[b, n, t, seen], cotangent[b, t, n]
        output[b, t, n] = (f * w) @ values
        dw = f * (values @ g)
        dlogits = w * (dw - w @ dw)
        dbias[b, n, t, seen] = dlogits
        draw = dlogits if logits_soft_cap is None else dlogits * (1 - (capped / logits_soft_cap) ** 2)
        dv[b, seen, k] += np.outer(f * w, g)
        if vector is None:
            dq[b, t, n] += scale * draw @ keys
            dk[b, seen, k] += scale * np.outer(draw, q)
        else:
            inner = np.outer(draw, vector[n]) * (1 - hidden**2)
            dq[b, t, n] += inner.sum(0)
            dk[b, seen, k] += inner
            dscore[n] += draw @ hidden
    gradients = {'query': dq, 'key': dk, 'value': dv}
    if bias is not None:
        small = tuple(axis for axis in range(4) if np.shape(bias)[axis] == 1)
        gradients['bias'] = dbias.sum(small, keepdims=True)
    if vector is not None:
        gradients['score'] = dscore
    return Judged(output, weights, residual, gradients)


SHAPES = ((2, 5, 5, 4, 2, 3, 4), (2, 3, 6, 4, 1, 3, 4), (1, 1, 4, 2, 2, 3, 2))
"""B, T, S, N, K, H, Hv: square with groups, across with one key head, one row.  Few, as each is compiled."""


def draw(seed: int, additive: bool = False) -> tuple[dict[str, np.ndarray], dict, np.ndarray]:
    """A call: arrays that have gradients, other arguments, and a cotangent.  About a third of the rules each time."""
    random = np.random.default_rng(seed)
    B, T, S, N, K, H, Hv = SHAPES[seed % len(SHAPES)]
    arrays = {name: random.normal(size=size) for name, size in
              {'query': (B, T, N, H), 'key': (B, S, K, H), 'value': (B, S, K, Hv)}.items()}  # fmt: skip
    sizes = [(B, N, T, S), (1, N, 1, S), (B, 1, T, 1), (1, 1, T, S)]
    rules = {
        'mask': lambda: random.random(sizes[random.integers(4)]) < 0.7,
        'query_seq_lengths': lambda: random.integers(0, T + 1, B),
        'key_value_seq_lengths': lambda: random.integers(0, S + 1, B),
        'is_causal': lambda: True,
        'local_window_size': lambda: [1, (0, 2), (2, 0)][random.integers(3)],
        'query_positions': lambda: random.integers(-2, 7, ([1, B][random.integers(2)], T)),
        'key_positions': lambda: random.integers(-2, 7, ([1, B][random.integers(2)], S)),
        'segments': lambda: {'query_segment_ids': random.integers(0, 2, (B, T)),
                             'key_segment_ids': random.integers(0, 2, (1, S))},
    }  # fmt: skip
    kwargs = {name: make() for name, make in rules.items() if random.random() < 0.35}
    kwargs |= kwargs.pop('segments', {})
    if random.random() < 0.5:
        arrays['bias'] = random.normal(size=sizes[random.integers(4)])
    if additive:
        arrays['score'] = random.normal(size=(N, H))
    else:
        kwargs |= {'logits_soft_cap': 1.5} if random.random() < 0.3 else {}
        kwargs |= {'scale': 0.7} if random.random() < 0.3 else {}
    return arrays, kwargs, random.normal(size=(B, T, N, Hv))


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
    output, residual, weights, gradients = made(arrays, cotangent)
    judged = attention(**arrays, **kwargs, cotangent=cotangent)
    forward, backward = TOLERANCE[dtype]
    full = judged.residual > -np.inf
    lowest = np.finfo(residual.dtype).min
    near(output, judged.output, forward, 'output')
    near(weights, judged.weights, forward, 'weights')
    near(np.where(full, residual, 0), np.where(full, judged.residual, 0), forward, 'residual')
    assert np.all(np.where(full, lowest, residual) == lowest), 'residual of an empty row'
    assert output.dtype == dtype
    for name, gradient in gradients.items():
        assert gradient.dtype == dtype
        near(gradient, judged.gradients[name], backward, f'gradient of {name}')
    return judged


def near(have, want, tolerance: float, what: str) -> None:
    """have == want up to a part of the largest value, or of one where all are smaller."""
    have, want = np.asarray(have, np.float64), np.asarray(want, np.float64)
    assert have.shape == want.shape, f'{what}: {have.shape}, expected {want.shape}'
    bound = tolerance * max(1.0, np.abs(want).max(initial=0))
    assert np.all(np.abs(have - want) <= bound), f'{what} is off by {np.abs(have - want).max()}, allowed {bound}'
