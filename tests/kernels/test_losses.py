"""Cross-entropy against optax and known numbers, and means over tokens that do not depend on padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attnlab.kernels import losses
from tests.quick import QUICK

V = 11
cross_entropy = jax.jit(losses.cross_entropy, static_argnums=(2, 3))


def random_batch(*shape, seed=0):
    """Return logits [*shape, V] and labels [*shape], of which about a fifth is padding."""
    random = np.random.default_rng(seed)
    labels = random.integers(1, V, shape) * (random.random(shape) < 0.8)
    return jnp.asarray(3 * random.normal(size=(*shape, V)), jnp.float32), jnp.asarray(labels, jnp.int32)


@functools.partial(jax.jit, static_argnames='smoothing')
def gradient_of(logits, labels, smoothing=0.0):
    return jax.grad(lambda x: cross_entropy(x, labels, smoothing).total)(logits)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize('shape, smoothing', [((7,), 0.1), ((3, 5), 0.0), ((3, 5), 0.9), ((2, 3, 4), 0.1)])
def test_matches_optax_over_labels_that_are_not_padding(shape, smoothing):
    logits, labels = random_batch(*shape)
    target = optax.smooth_labels(jax.nn.one_hot(labels, V), smoothing)
    expected = jax.jit(lambda x: jnp.sum(jnp.where(labels != 0, optax.softmax_cross_entropy(x, target), 0)))
    sums = cross_entropy(logits, labels, smoothing)
    np.testing.assert_allclose(sums.total, expected(logits), rtol=1e-6)
    np.testing.assert_allclose(gradient_of(logits, labels, smoothing=smoothing), jax.grad(expected)(logits), atol=1e-6)
    plain = jax.jit(optax.softmax_cross_entropy_with_integer_labels)(logits, labels)
    np.testing.assert_allclose(sums.extras['nll'], np.sum(plain, where=np.asarray(labels) != 0), rtol=1e-6)
    assert sums.weight == np.count_nonzero(labels)


@pytest.mark.parametrize('smoothing', [0.0, 0.1, 0.5])
def test_loss_of_equal_logits_is_log_of_class_count(smoothing):
    total, weight, _ = cross_entropy(jnp.full((4, 10), 3.0), jnp.array([1, 2, 9, 3]), smoothing)
    np.testing.assert_allclose(total / weight, 2.302585, atol=1e-6)


@pytest.mark.parametrize('smoothing, value', [(0.0, 0.432653), (0.1, 0.592653)])
def test_smoothing_is_spread_over_all_classes(smoothing, value):
    sums = cross_entropy(jnp.array([[2.0, 0, 0, 0, 0]]), jnp.array([0]), smoothing, -1)
    np.testing.assert_allclose(sums.total, value, atol=1e-6)
    np.testing.assert_allclose(sums.extras['nll'], 0.432653, atol=1e-6)


def test_perplexity_uses_mean_over_tokens_not_batches():
    """10 tokens with a loss of 1.0 nats and 2 with 3.0."""

    def batch_with_loss(nats, count):  # two classes; the logit of the label is log(e^nats - 1) below the other
        return jnp.stack([jnp.full(count, np.log(np.exp(nats) - 1)), jnp.zeros(count)], axis=-1), jnp.ones(count, int)

    parts = [cross_entropy(*batch_with_loss(1.0, 10)), cross_entropy(*batch_with_loss(3.0, 2))]
    total, weight, extras = jax.tree.map(lambda *x: sum(x), *parts)
    np.testing.assert_allclose(jnp.exp(extras['nll'] / weight), 3.7937, atol=1e-4)
    np.testing.assert_allclose(total / weight, 16 / 12, rtol=1e-6)


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_amount_of_padding_does_not_change_loss(smoothing):
    logits, labels = random_batch(3, 8)
    other_logits, _ = random_batch(3, 8, seed=1)
    wide, padded = jnp.concatenate([logits, 9 * other_logits], axis=1), jnp.pad(labels, ((0, 0), (0, 8)))
    unpadded, padded_sums = (cross_entropy(*x, smoothing) for x in ((logits, labels), (wide, padded)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7), unpadded, padded_sums)
    gradient = gradient_of(wide, padded, smoothing=smoothing)
    np.testing.assert_array_equal(gradient[:, :8], gradient_of(logits, labels, smoothing=smoothing))
    assert jnp.all(gradient[:, 8:] == 0)


def test_sums_over_parts_add_up():
    logits, labels = random_batch(4, 6)
    whole = cross_entropy(logits, labels, 0.1)
    parts = jax.tree.map(lambda *x: sum(x), *(cross_entropy(*x, 0.1) for x in zip(logits, labels, strict=True)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), whole, parts)


@pytest.mark.parametrize('shape', [(2, 3), (0, 3), (0,)])
def test_batch_without_labels_has_zero_sums(shape):
    logits, labels = random_batch(*shape)[0], jnp.zeros(shape, int)
    assert all(x == 0 for x in jax.tree.leaves(cross_entropy(logits, labels, 0.1)))
    assert jnp.all(gradient_of(logits, labels, smoothing=0.1) == 0)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_half_precision_sums_are_float32(dtype):
    logits, labels = random_batch(40, 30)
    rounded = logits.astype(dtype)
    sums = cross_entropy(rounded, labels, 0.1)
    assert sums.total.dtype == sums.extras['nll'].dtype == jnp.float32
    same = cross_entropy(rounded.astype(jnp.float32), labels, 0.1)
    jax.tree.map(np.testing.assert_array_equal, sums, same)
    assert gradient_of(rounded, labels).dtype == dtype


def test_large_logits_do_not_overflow():
    total, _, _ = cross_entropy(jnp.array([[0.0, 1e4, -1e4]]), jnp.array([1]))
    assert total == 0
    total, _, _ = cross_entropy(jnp.array([[0.0, 1e4, -1e4]]), jnp.array([2]))
    assert total == 2e4


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_label_weights_multiply_all_sums(smoothing):
    logits, labels = random_batch(3, 4)
    label_weights = jnp.asarray(np.random.default_rng(1).random((3, 4)), jnp.float32)
    sums = cross_entropy(logits, labels, smoothing, 0, label_weights)
    total = weight = nll = 0.0
    for i in np.ndindex(3, 4):
        alone = cross_entropy(logits[i][None], labels[i][None], smoothing)
        total, weight = total + float(label_weights[i] * alone.total), weight + float(label_weights[i] * alone.weight)
        nll += float(label_weights[i] * alone.extras['nll'])
    np.testing.assert_allclose([sums.total, sums.weight, sums.extras['nll']], [total, weight, nll], rtol=1e-5)
    ones = cross_entropy(logits, labels, smoothing, 0, jnp.ones((3, 4)))
    np.testing.assert_allclose(ones.total, cross_entropy(logits, labels, smoothing).total, rtol=1e-6)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize('smoothing', [0.0, 0.1])
@pytest.mark.parametrize('padding', [0, -1])
def test_logits_of_padding_labels_are_ignored(smoothing, padding):
    logits, labels = random_batch(3, 4)
    labels = jnp.where(jnp.arange(4)[None] == 1, padding, jnp.maximum(labels, 1))
    spoiled = logits.at[:, 1].set(jnp.array([[np.nan], [np.inf], [-np.inf]]))
    label_weights = jnp.full((3, 4), 0.5)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def sums_and_gradients(logits, label_weights):
        sums = lambda logits, label_weights: losses.cross_entropy(logits, labels, smoothing, padding, label_weights)
        return sums(logits, label_weights), jax.grad(lambda *x: sums(*x).total, (0, 1))(logits, label_weights)

    jax.tree.map(
        np.testing.assert_array_equal,
        sums_and_gradients(spoiled, label_weights),
        sums_and_gradients(logits, label_weights),
    )
    assert np.all(sums_and_gradients(spoiled, label_weights)[1][0][labels == padding] == 0)


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
@pytest.mark.parametrize(('label', 'padding'), [(-1, 0), (V, 0), (V, -1), (-2, -1), (255, -1)])
def test_invalid_label_raises_and_gives_nan_when_compiled(label, padding, smoothing):
    logits, labels = random_batch(5)
    labels = labels.at[2].set(label)
    with pytest.raises(ValueError, match=f'a label is {label}; expected 0 to 10, or {padding} for padding'):
        losses.cross_entropy(logits, labels, smoothing, padding)
    sums = cross_entropy(logits, labels, smoothing, padding)
    assert np.isnan(sums.total) and np.isnan(sums.extras['nll'])


def test_int8_labels_with_more_classes_than_int8_holds():
    """int8 labels of 200 classes; a negative label must not wrap around to a class."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 200)), jnp.float32)
    labels = np.array([3, 100, 127, 7])
    expected = np.sum([np.log(np.sum(np.exp(row))) - row[k] for row, k in zip(np.float64(logits), labels, strict=True)])
    np.testing.assert_allclose(cross_entropy(logits, jnp.asarray(labels, jnp.int8)).total, expected, rtol=1e-6)
    assert np.isnan(cross_entropy(logits, jnp.array([3, -2, 127, 7], jnp.int8)).total)


def test_labels_of_wrong_shape_raise(as_used):
    with pytest.raises(ValueError, match=r'labels have shape \(3, 2\); expected \(2, 3\), as logits \(2, 3, 11\)'):
        losses.cross_entropy(jnp.zeros((2, 3, V)), jnp.ones((3, 2), int))
