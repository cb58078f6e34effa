"""Who sees how many keys, against every pair looked at; and junk kept away from a kernel that cannot stand it."""

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.kernels import dense, sanitize
from attnlab.kernels.call import AttentionCall
from attnlab.kernels.masks import Mask
from tests.kernels import oracle

B, T, S, N, K, H = 2, 7, 9, 4, 2, 3

IDS = np.array([[3, 3, -1, 3, 5, 5, -1, 3, 9], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
RULES = {
    'causal': {'is_causal': True},
    'window': {'local_window_size': (1, 2)},
    'left window': {'local_window_size': (2, 2**30), 'is_causal': True},
    'lengths': {'query_seq_lengths': np.array([7, 3]), 'key_value_seq_lengths': np.array([0, 5])},
    'lengths of other sizes': {'query_seq_lengths': np.array([-1, 80]), 'key_value_seq_lengths': np.array([100, 4])},
    'segments': {'query_segment_ids': IDS[:, :T], 'key_segment_ids': IDS},
    'segments of one row': {'query_segment_ids': IDS[:1, 1 : T + 1], 'key_segment_ids': IDS[:1], 'is_causal': True},
    'all': {'query_segment_ids': IDS[:, ::-1][:, :T] // 2, 'key_segment_ids': IDS // 2, 'local_window_size': (4, 1),
            'query_seq_lengths': np.array([6, 7]), 'key_value_seq_lengths': np.array([8, 6])},
}  # fmt: skip


def both(kwargs):
    """The rules as the package takes them, and the pairs [B, T, S] as the oracle sees them."""
    arrays = {name: jnp.asarray(x) for name, x in kwargs.items() if isinstance(x, np.ndarray)}
    rules = Mask(window=kwargs.get('local_window_size'), is_causal=kwargs.get('is_causal', False), **arrays)
    return rules, np.stack([oracle.is_visible(b, 0, *np.ogrid[:T, :S], **kwargs) for b in range(B)])


@pytest.mark.parametrize('kwargs', RULES.values(), ids=RULES)
def test_counts_are_those_of_all_pairs(kwargs):
    rules, seen = both(kwargs)
    marks = np.random.default_rng(0).random((B, 3, S)) < 0.5
    counted = sanitize.count_visible_keys(rules, jnp.asarray(marks), T)
    np.testing.assert_array_equal(counted, np.einsum('bts,bms->bmt', seen.astype(int), marks.astype(int)))
    marks = np.random.default_rng(1).random((B, 2, T)) < 0.5
    counted = sanitize.count_visible_keys(sanitize.transpose_mask(rules), jnp.asarray(marks), S)
    np.testing.assert_array_equal(counted, np.einsum('bts,bmt->bms', seen.astype(int), marks.astype(int)))


def test_lengths_of_few_bits_are_compared_with_sizes_of_many():
    np.testing.assert_array_equal(sanitize.clip_lengths(jnp.array([-3, 127], 'int8'), 300), [0, 127])


MASKED = [(name, None) for name in RULES]
MASKED += [('all', (1, 1)), ('causal', (1, 1)), ('causal', (B, 1)), ('causal', (1, N)), ('lengths', (B, N))]


@pytest.mark.parametrize('name, axes', MASKED)
def test_cleaned_calls_are_finite_and_settled_as_dense_has_them(name, axes):
    random = np.random.default_rng(2)
    rules, seen = both(RULES[name])
    seen = seen[:, None]
    if axes:
        mask = random.random((*axes, T, S)) < 0.4
        rules, seen = rules.replace(mask=jnp.asarray(mask)), seen & mask
    query, key, value = (random.normal(size=size) for size in ((B, T, N, H), (B, S, K, H), (B, S, K, H)))
    query[0, 4, 1, 0], key[1, 5, 0, 2], value[0, 3, 1] = np.nan, np.inf, -np.inf
    call = AttentionCall(*(jnp.asarray(x, 'float32') for x in (query, key, value)), rules, 0.5)
    cleaned = sanitize.sanitize_call(call)
    assert all(jnp.all(jnp.isfinite(x)) for x in cleaned.call[:3])
    nobody = ~seen.any((1, 2))
    assert not np.any(np.asarray(cleaned.call.key)[nobody]) and not np.any(np.asarray(cleaned.call.value)[nobody])
    assert not np.any(np.asarray(cleaned.call.query)[~seen.any((1, 3))])
    garbage = lambda x: jnp.where(cleaned.empty.swapaxes(1, 2)[..., None], jnp.nan, x)
    settled = sanitize.restore_masked_rows(garbage(dense.dot_product(cleaned.call).output), cleaned)
    expected = dense.dot_product(call).output
    assert jnp.any(jnp.isnan(expected)) == jnp.any(cleaned.spoilt)
    np.testing.assert_allclose(settled, expected, atol=1e-6)  # NaN equals NaN here
