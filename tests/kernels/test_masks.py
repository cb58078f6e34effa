"""Visibility as an array, against the oracle's definition of who sees whom."""

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.kernels.masks import Visibility, as_array, length_mask
from tests.kernels import oracle


@pytest.mark.parametrize('seed', range(60))
def test_every_rule_given_must_allow(seed):
    B, T, S, N, *_ = oracle.SHAPES[seed % len(oracle.SHAPES)]
    _, kwargs, _ = oracle.draw(seed, additive=True)
    expected = [oracle.visible(*index, **kwargs) for index in np.ndindex(B, N, T, S)]
    window = kwargs.pop('local_window_size', None)
    window = (window, window) if isinstance(window, int) else window
    given = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in kwargs.items()}
    array = as_array(Visibility(**given, window=window), T, S)
    if array is None:
        assert all(expected)
    else:
        np.testing.assert_array_equal(jnp.broadcast_to(array, (B, N, T, S)).ravel(), expected)


NEEDED = {
    'nothing': (Visibility(), None),
    'positions': (Visibility(query_positions=jnp.zeros((2, 3), int)), None),
    'mask': (Visibility(mask=jnp.ones((1, 4, 1, 5), bool)), (1, 4, 1, 5)),
    'lengths of queries': (Visibility(query_seq_lengths=jnp.array([1, 2])), (2, 1, 3, 1)),
    'lengths of keys': (Visibility(key_value_seq_lengths=jnp.array([1, 2])), (2, 1, 1, 5)),
    'causality': (Visibility(is_causal=True), (1, 1, 3, 5)),
    'a window': (Visibility(window=(1, 1)), (1, 1, 3, 5)),
    'segments': (Visibility(query_segment_ids=jnp.zeros((2, 3), int), key_segment_ids=jnp.zeros((1, 5), int)),
                 (2, 1, 3, 5)),
}  # fmt: skip


@pytest.mark.parametrize('rules, shape', NEEDED.values(), ids=NEEDED)
def test_the_array_is_as_small_as_its_rules(rules, shape):
    array = as_array(rules, 3, 5)
    assert (None if array is None else array.shape) == shape
    assert array is None or array.dtype == bool


def test_length_mask_is_true_on_the_first():
    mask = length_mask(jnp.array([0, 2, 3, 9]), 3)
    np.testing.assert_array_equal(mask, [[0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]])
    assert mask.dtype == bool and length_mask(jnp.zeros(0, int), 0).shape == (0, 0)
