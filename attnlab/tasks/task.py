"""What the training loop asks of a task, whatever the task."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from attnlab.kernels.losses import Sums

Params = Any
"""A tree of arrays."""

Batch = Any
"""A tree of NumPy arrays with the batch first."""


@dataclass(frozen=True)
class Task:
    """Data and model of an experiment, as functions.

    save: writes into a run's directory what its parameters need to be used later, such as a vocabulary.
    examples: size of the training split, which gives durations in epochs their meaning.
    init: a key gives the parameters.
    batch: the training batch of step i (from 0), whole or a slice of its `rows`; a pure function of these, so that
      resuming needs the step alone, and each of several processes its own rows.
    loss: (parameters, batch, key) -> Sums, pure and jit-compiled by the loop.
    evaluate: parameters -> scores on the whole validation split; rows divided over the mesh in context, if there is
      one (`attnlab.kernels.axes`).
    best: (name among the scores, 'max' or 'min'): which parameters to keep.
    """

    save: Callable[[Path], None]
    examples: int
    init: Callable[[jax.Array], Params]
    batch: Callable[..., Batch]
    loss: Callable[[Params, Batch, jax.Array], Sums]
    evaluate: Callable[[Params], dict[str, float]]
    best: tuple[str, Literal['max', 'min']]


class Outline(NamedTuple):
    """A model and one row of its batch as shapes, for counting.

    what: the row, in words.  tokens: that go through a layer of it.
    params: a tree of shapes.  batch: the shapes that `forward` takes after them.
    forward: (params, *batch) -> the model's output.
    cache: what decoding keeps of a full row, as shapes; None where that does not grow with the row.
    """

    what: str
    tokens: int
    params: Any
    batch: tuple[Any, ...]
    forward: Callable[..., Any]
    cache: Any = None


def perplexity(loss: float) -> float:
    """exp(loss); infinity for the loss of a diverged run, where `math.exp` raises OverflowError."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
