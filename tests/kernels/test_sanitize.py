"""Counts of visible keys against all pairs, and calls without non-finite numbers for kernels of other libraries."""

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.kernels import dense, sanitize
from attnlab.kernels.call import AttentionCall
from attnlab.kernels.masks import Mask
from tests.kernels import oracle

B, T, S, N, K, H = 2, 7, 9, 4, 2, 3

IDS = np.array([[3, 3, -1, 3, 5, 5, -1, 3, 9], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
MASKS = {
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


def mask_and_visible_pairs(kwargs):
    """Return the mask, and the visible pairs [B, T, S] by the oracle."""
    arrays = {name: jnp.asarray(x) for name, x in kwargs.items() if isinstance(x, np.ndarray)}
    mask = Mask(window=kwargs.get('local_window_size'), is_causal=kwargs.get('is_causal', False), **arrays)
    return mask, np.stack([oracle.is_visible(b, 0, *np.ogrid[:T, :S], **kwargs) for b in range(B)])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize('kwargs', MASKS.values(), ids=MASKS)
def test_counts_match_all_pairs(kwargs):
    mask, visible = mask_and_visible_pairs(kwargs)
    key_sets = np.random.default_rng(0).random((B, 3, S)) < 0.5
    counts = sanitize.count_visible_keys(mask, jnp.asarray(key_sets), T)
    np.testing.assert_array_equal(counts, np.einsum('bts,bms->bmt', visible.astype(int), key_sets.astype(int)))
    key_sets = np.random.default_rng(1).random((B, 2, T)) < 0.5
    counts = sanitize.count_visible_keys(sanitize.transpose_mask(mask), jnp.asarray(key_sets), S)
    np.testing.assert_array_equal(counts, np.einsum('bts,bmt->bms', visible.astype(int), key_sets.astype(int)))


def test_int8_lengths_are_clipped_to_larger_sizes():
    np.testing.assert_array_equal(sanitize.clip_lengths(jnp.array([-3, 127], 'int8'), 300), [0, 127])


CASES = [(name, None) for name in MASKS]
CASES += [('all', (1, 1)), ('causal', (1, 1)), ('causal', (B, 1)), ('causal', (1, N)), ('lengths', (B, N))]


@pytest.mark.slow
@pytest.mark.parametrize('name, axes', CASES)
def test_sanitized_call_is_finite_and_restored_output_matches_dense(name, axes):
    random = np.random.default_rng(2)
    mask, visible = mask_and_visible_pairs(MASKS[name])
    visible = visible[:, None]
    if axes:
        array = random.random((*axes, T, S)) < 0.4
        mask, visible = mask.replace(mask=jnp.asarray(array)), visible & array
    query, key, value = (random.normal(size=size) for size in ((B, T, N, H), (B, S, K, H), (B, S, K, H)))
    query[0, 4, 1, 0], key[1, 5, 0, 2], value[0, 3, 1] = np.nan, np.inf, -np.inf
    call = AttentionCall(*(jnp.asarray(x, 'float32') for x in (query, key, value)), mask, 0.5)
    sanitized = sanitize.sanitize_call(call)
    assert all(jnp.all(jnp.isfinite(x)) for x in sanitized.call[:3])
    key_unused = ~visible.any((1, 2))
    assert not np.any(np.asarray(sanitized.call.key)[key_unused]) and not np.any(
        np.asarray(sanitized.call.value)[key_unused]
    )
    assert not np.any(np.asarray(sanitized.call.query)[~visible.any((1, 3))])
    with_nan_in_empty_rows = lambda x: jnp.where(sanitized.is_empty.swapaxes(1, 2)[..., None], jnp.nan, x)
    output = sanitize.restore_masked_rows(with_nan_in_empty_rows(dense.dot_product(sanitized.call).output), sanitized)
    expected = dense.dot_product(call).output
    assert jnp.any(jnp.isnan(expected)) == jnp.any(sanitized.attends_to_nonfinite)
    np.testing.assert_allclose(output, expected, atol=1e-6)  # NaN equals NaN in this comparison
