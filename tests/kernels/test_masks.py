"""Visibility as an array, against the oracle's definition of who sees whom."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import dot_product_attention
from attnlab.kernels.masks import (
    Visibility,
    as_array,
    causal,
    length_mask,
    packed,
    padding,
    prefix,
    restarting,
    segments,
    window,
)  # fmt: skip
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


# The rules combined

IDS = jnp.array([[0, 0, 3, 3, 3], [1, 2, 2, 2, 7]])
MASK = jnp.asarray(np.random.default_rng(0).random((2, 1, 5, 5)) < 0.7)
PLACES = jnp.array([[4, 3, 2, 1, 0]])
RULES = {
    'causal': causal(),
    'causal by positions': causal(PLACES, PLACES),
    'window': window(2, 1),
    'narrower window': window(1, 3),
    'prefix': prefix(jnp.array([2, 0])),
    'longer prefix': prefix(jnp.array([1, 4])),
    'lengths': padding(jnp.array([3, 5]), jnp.array([4, 2])),
    'other lengths': padding(keys=jnp.array([1, 5])),
    'segments': segments(IDS),
    'mask': Visibility(MASK),
    'other mask': Visibility(MASK[:1].swapaxes(2, 3)),
}
PLACED = {'causal', 'window', 'narrower window', 'prefix', 'longer prefix'}  # what positions would change


@pytest.mark.parametrize('first', RULES)
def test_rules_combined_allow_what_each_allows(first):
    whole = lambda rules: jnp.broadcast_to(as_array(rules, 5, 5), (2, 1, 5, 5))
    for second in RULES:
        if 'causal by positions' in (first, second) and PLACED & {first, second}:
            continue  # positions say for both where tokens stand
        both = whole(RULES[first] & RULES[second])
        np.testing.assert_array_equal(both, whole(RULES[first]) & whole(RULES[second]), err_msg=second)
        assert RULES[first] & Visibility() == Visibility() & RULES[first] == RULES[first]


def test_a_prefix_is_seen_by_all_and_the_rest_is_causal():
    seen = as_array(prefix(jnp.array([2, 0])), 3, 4)[:, 0]
    np.testing.assert_array_equal(seen[0], [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]])
    np.testing.assert_array_equal(seen[1], [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]])


def test_packed_documents_are_causal_each_on_its_own():
    np.testing.assert_array_equal(restarting(IDS), [[0, 1, 0, 1, 2], [0, 0, 1, 2, 0]])
    assert restarting(jnp.zeros((0, 3), int)).shape == (0, 3) and restarting(jnp.zeros((1, 0), int)).shape == (1, 0)
    same, past = IDS[:, :, None] == IDS[:, None, :], np.tri(5, dtype=bool)[None]
    np.testing.assert_array_equal(as_array(packed(IDS), 5, 5)[:, 0], same & past)


def test_what_cannot_be_both_is_refused():
    with pytest.raises(ValueError, match='query_segment_ids is given twice; expected it in one'):
        segments(IDS) & segments(IDS + 1)
    with pytest.raises(ValueError, match='query_positions is given twice'):
        causal(PLACES, PLACES) & packed(IDS)
    with pytest.raises(ValueError, match=r'the window is \(1, -1\); expected'):
        window(1, -1)
    with pytest.raises(ValueError, match='prefix_lengths spares keys from causality; expected is_causal'):
        x = jnp.ones((2, 5, 1, 1))
        dot_product_attention(x, x, x, mask=Visibility(prefix_lengths=jnp.array([1, 2])))


@pytest.mark.parametrize('implementation', ['dense', 'blockwise'])
def test_attention_takes_rules_for_a_mask_beside_its_other_arguments(implementation):
    random = np.random.default_rng(0)
    query, key, value = (jnp.asarray(random.normal(size=(2, 5, 1, 3)), jnp.float32) for _ in range(3))
    rules = causal() & padding(keys=jnp.array([4, 3])) & segments(IDS)
    attend = lambda **kwargs: dot_product_attention(query, key, value, implementation=implementation, **kwargs)
    expected = attend(mask=as_array(rules & window(1, 0), 5, 5))
    np.testing.assert_allclose(attend(mask=rules, local_window_size=(1, 0)), expected, atol=1e-6)
    np.testing.assert_allclose(attend(mask=rules & window(1, 0), is_causal=True), expected, atol=1e-6)


def test_rules_pass_through_transformations_and_stay_symbolic():
    rules = causal() & window(2, 0) & padding(keys=jnp.array([4, 3]))
    through = jax.jit(lambda rules: rules)(rules)
    assert through.is_causal is True and through.window == (2, 0) and through.mask is None
    array = jax.jit(lambda rules: as_array(rules, 5, 5))(rules)
    np.testing.assert_array_equal(array, as_array(rules, 5, 5))
    doubled = jax.vmap(lambda rules: as_array(rules, 5, 5))(jax.tree.map(lambda x: jnp.stack([x, x - 1]), rules))
    np.testing.assert_array_equal(doubled[0], array)
    assert [str(path[0]) for path, _ in jax.tree_util.tree_leaves_with_path(rules)] == ['.key_value_seq_lengths']
