"""Losses as sums, for averages over any split of the data."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Sums(NamedTuple):
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
) -> Sums:
    """Label-smoothed cross-entropy in nats, summed over the labels that are not `padding`.

    The target is (1 - smoothing) on the label plus smoothing / V on every class (Szegedy et al. 2016, section 7).
    `extras['nll']` is the sum without smoothing, whose mean's exponential is the perplexity.

    Args:
      logits: [*B, V], any float; the sums are float32.
      labels: [*B] int.
      shares: [*B], how much each label counts, in the sums and in their weight; 1 if None.
    """
    V = logits.shape[-1]
    rows, labels = logits.reshape(-1, V).astype(jnp.float32), labels.reshape(-1)
    counted = labels != padding
    normaliser = jax.nn.logsumexp(rows, axis=-1)
    gold = jnp.take_along_axis(rows, labels[:, None], axis=-1)[:, 0]
    summed = lambda x: jnp.sum(jnp.where(counted, x if shares is None else shares.reshape(-1) * x, 0.0))
    nll = summed(normaliser - gold)
    uniform = summed(normaliser - jnp.mean(rows, axis=-1)) if smoothing else 0.0
    total = (1.0 - smoothing) * nll + smoothing * uniform
    weight = jnp.sum(counted) if shares is None else summed(jnp.ones(len(rows)))
    return Sums(total, weight, {'nll': nll})
