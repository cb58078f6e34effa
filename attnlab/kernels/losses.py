"""Losses as sums, for averages over any split of the data."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int


class LossSums(NamedTuple):
    """Sums over examples or tokens, from which the caller computes means.

    total: the sum of the loss.
    weight: the number of examples or tokens, or the sum of their weights; total / weight is the mean loss.
    extras: other sums over the same examples or tokens, by name.
    """

    total: Array
    weight: Array
    extras: dict[str, Array]


def cross_entropy(
    logits: Float[Array, '*B V'],
    labels: Int[Array, '*B'],
    smoothing: float = 0.0,
    padding: int = 0,
    label_weights: Float[Array, '*B'] | None = None,
) -> LossSums:
    """Return the label-smoothed cross-entropy in nats, summed over the labels that are not `padding`.

    The target is (1 - smoothing) on the label plus smoothing / V on every class (Szegedy et al. 2016, section 7).
    `extras['nll']` is the sum without smoothing; the exponential of its mean is the perplexity.

    Args:
      logits: [*B, V], any float; the sums are float32.
      labels: [*B] int, each a class from 0 to V - 1 or `padding`.  The logits of a padding label never change the
        result, even if they are NaN or infinity.
      smoothing: the probability that the target spreads evenly over all classes.
      padding: the label that is not counted.
      label_weights: [*B], the weight of each label in all sums; 1 if None.

    Raises:
      ValueError: if the labels do not have the shape [*B], or a label is neither a class nor `padding`.  In a compiled
        program, where label values are not known, such a label makes the sums NaN.
    """
    V = logits.shape[-1]
    _check_labels(logits, labels, padding)
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32)).reshape(-1)
    is_counted = labels != padding
    rows = jnp.where(is_counted[:, None], logits.reshape(-1, V).astype(jnp.float32), 0.0)
    lse = jax.nn.logsumexp(rows, axis=-1)
    # An index below 0 would count from the end; V is out of range, and gives NaN.
    indices = jnp.where(is_counted, jnp.where(labels < 0, V, labels), 0)
    label_logits = jnp.take_along_axis(rows, indices[:, None], axis=-1, mode='fill', fill_value=jnp.nan)[:, 0]

    def weighted_sum(x: Array) -> Array:
        return jnp.sum(jnp.where(is_counted, x if label_weights is None else label_weights.reshape(-1) * x, 0.0))

    nll = weighted_sum(lse - label_logits)
    uniform = weighted_sum(lse - jnp.mean(rows, axis=-1)) if smoothing else 0.0
    total = (1.0 - smoothing) * nll + smoothing * uniform
    weight = jnp.sum(is_counted) if label_weights is None else weighted_sum(jnp.ones(len(rows)))
    return LossSums(total, weight, {'nll': nll})


def _check_labels(logits: Array, labels: Array, padding: int) -> None:
    """Raise ValueError for labels that do not fit the logits; label values are checked only if they are concrete."""
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f'labels have shape {labels.shape}; expected {logits.shape[:-1]}, as logits {logits.shape}')
    if isinstance(labels, Tracer):
        return
    values, V = np.asarray(labels), logits.shape[-1]
    wrong = values[((values < 0) | (values >= V)) & (values != padding)]
    if wrong.size:
        raise ValueError(f'a label is {wrong[0]}; expected 0 to {V - 1}, or {padding} for padding')
