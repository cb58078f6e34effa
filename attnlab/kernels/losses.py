"""Losses as sums, for averages over any split of the data."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int


class LossSums(NamedTuple):
    """A loss not yet divided: `total` over `weight` things (tokens, examples), `extras` over the same things."""

    total: Array
    weight: Array
    extras: dict[str, Array]


def cross_entropy(
    logits: Float[Array, '*B V'],
    labels: Int[Array, '*B'],
    smoothing: float = 0.0,
    padding: int = 0,
    shares: Float[Array, '*B'] | None = None,
) -> LossSums:
    """Label-smoothed cross-entropy in nats, summed over the labels that are not `padding`.

    The target is (1 - smoothing) on the label plus smoothing / V on every class (Szegedy et al. 2016, section 7).
    `extras['nll']` is the sum without smoothing, whose mean's exponential is the perplexity.

    Args:
      logits: [*B, V], any float; the sums are float32.
      labels: [*B] int, each a class from 0 to V - 1 or `padding`.  The logits of a padding label never matter, NaN and
        infinity included.
      shares: [*B], how much each label counts, in the sums and in their weight; 1 if None.

    Raises:
      ValueError: for labels of another shape than [*B], and for a label that is neither a class nor `padding`.  In a
        compiled program, where label values are not known, such a label makes the sums NaN.
    """
    V = logits.shape[-1]
    _check_labels(logits, labels, padding)
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32)).reshape(-1)
    counted = labels != padding
    rows = jnp.where(counted[:, None], logits.reshape(-1, V).astype(jnp.float32), 0.0)
    normaliser = jax.nn.logsumexp(rows, axis=-1)
    # Indices below 0 would count from the end; V is outside, and gives NaN.
    at = jnp.where(counted, jnp.where(labels < 0, V, labels), 0)
    gold = jnp.take_along_axis(rows, at[:, None], axis=-1, mode='fill', fill_value=jnp.nan)[:, 0]
    summed = lambda x: jnp.sum(jnp.where(counted, x if shares is None else shares.reshape(-1) * x, 0.0))
    nll = summed(normaliser - gold)
    uniform = summed(normaliser - jnp.mean(rows, axis=-1)) if smoothing else 0.0
    total = (1.0 - smoothing) * nll + smoothing * uniform
    weight = jnp.sum(counted) if shares is None else summed(jnp.ones(len(rows)))
    return LossSums(total, weight, {'nll': nll})


def _check_labels(logits: Array, labels: Array, padding: int) -> None:
    """Raise ValueError for labels that do not fit the logits; values are checked where they are concrete."""
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f'labels have shape {labels.shape}; expected {logits.shape[:-1]}, as logits {logits.shape}')
    if isinstance(labels, Tracer):
        return
    values, V = np.asarray(labels), logits.shape[-1]
    wrong = values[((values < 0) | (values >= V)) & (values != padding)]
    if wrong.size:
        raise ValueError(f'a label is {wrong[0]}; expected 0 to {V - 1}, or {padding} for padding')
