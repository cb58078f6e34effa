"""A trained model in use: forced and free decoding of many sentences, in few shapes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.configs.align import max_tokens
from attnlab.data.batches import Rows, pad, plan, width_of
from attnlab.data.vocabulary import BOS, EOS, PAD
from attnlab.decode.beam import Beams, beam_search
from attnlab.decode.greedy import Decoded, greedy
from attnlab.decode.sampling import check_tokens
from attnlab.errors import UserError
from attnlab.kernels import axes
from attnlab.kernels.losses import cross_entropy
from attnlab.tasks.align.models import Model
from attnlab.tasks.task import Params


class Translation(NamedTuple):
    """target: ids with their EOS (without, if the length limit came first).  weights: [len(target), len(source)]."""

    target: list[int]
    weights: np.ndarray


class Translator(NamedTuple):
    """A model in use, its functions compiled once a shape.

    force: (params, source [B, S], labels [B, T]) -> (Sums, attention [B, L, T, S]).
    free: (params, source) -> Decoded, greedily, with the attention of `layer`.  layer, shift, longest: as in `Model`.
    search: (params, source) -> Beams; None where there is but one beam.
    """

    force: Callable[..., tuple[Any, jax.Array]]
    free: Callable[..., Decoded]
    search: Callable[..., Beams] | None
    layer: int
    shift: int
    longest: int | None
    widths: tuple[int, ...]
    batch_size: int


def shift(labels: jax.Array) -> jax.Array:
    """Decoder inputs of labels [B, T]: BOS and all labels but the last; padding where the label is padding."""
    moved = jnp.concatenate([jnp.full_like(labels[:, :1], BOS), labels[:, :-1]], axis=1)
    return jnp.where(labels == PAD, PAD, moved)


def make(
    model: Model, widths: Sequence[int], batch_size: int, beams: int = 1, length_penalty: float = 0.0
) -> Translator:
    """The translator of a model; sentences are padded to `widths` and run `batch_size` at a time."""

    @jax.jit
    def force(params: Params, source: jax.Array, labels: jax.Array):
        source, labels = axes.spread(source), axes.spread(labels)
        logits, weights = model.read(params, source, shift(labels))
        return axes.whole((cross_entropy(logits, labels, padding=PAD), weights))

    def begin(params: Params, source: jax.Array) -> tuple[int, Any, Any]:
        limit, source = max_tokens(source.shape[1]), axes.spread(source)
        return limit, model.start(params, source, limit), partial(model.step, params, limit)

    @jax.jit
    def free(params: Params, source: jax.Array) -> Decoded:
        limit, state, step = begin(params, source)
        return axes.whole(greedy(step, state, source.shape[0], bos=BOS, eos=EOS, limit=limit))

    @jax.jit
    def search(params: Params, source: jax.Array) -> Beams:
        limit, state, step = begin(params, source)
        first = jnp.full(source.shape[:1], BOS)
        return beam_search(step, state, first, beams=beams, limit=limit, end=EOS, length_penalty=length_penalty)

    return Translator(
        force, free, search if beams > 1 else None, model.layer, model.shift, model.longest, tuple(widths), batch_size
    )


def _batches(translator: Translator, lengths: Sequence[int], batch_size: int | None = None) -> list[Rows]:
    """UserError for a sentence that has more tokens than the model has positions."""
    widest = max_tokens(width_of(max(lengths, default=1), translator.widths))
    if translator.longest is not None and widest > translator.longest:
        came = f'a sentence of {max(lengths)} tokens needs room for {widest}'
        raise UserError(f'{came}; the model has {translator.longest} learned positions')
    return plan(np.array(lengths), np.arange(len(lengths)), translator.widths, batch_size or translator.batch_size)


def translate(
    translator: Translator, params: Params, source: Sequence[list[int]], batch_size: int | None = None
) -> list[Translation]:
    """Translations of sentences of ids (with EOS), in their order; `batch_size` instead of the translator's.

    Raises RunError if the model's logits are NaN or infinite.
    """
    if translator.search is not None:
        return _searched(translator, params, source, batch_size)
    out: list[Any] = [None] * len(source)
    for width, rows in _batches(translator, [len(ids) for ids in source], batch_size):
        tokens, weights = jax.device_get(translator.free(params, pad(source, rows, width)))
        check_tokens(tokens[rows >= 0])
        for slot, row in _real(rows):
            ids = _ended(tokens[slot])
            out[row] = Translation(ids, weights[slot, : len(ids), : len(source[row])])
    return out


def _searched(
    translator: Translator, params: Params, source: Sequence[list[int]], batch_size: int | None
) -> list[Translation]:
    """The best hypotheses, read once more for their attention: a beam forgets that of the others."""
    assert translator.search is not None
    target: list[list[int]] = [[]] * len(source)
    for width, rows in _batches(translator, [len(ids) for ids in source], batch_size):
        tokens = jax.device_get(translator.search(params, pad(source, rows, width)).tokens)
        check_tokens(tokens[rows >= 0])
        for slot, row in _real(rows):
            target[row] = _ended(tokens[slot, 0])
    weights = force(translator, params, source, target, batch_size)[2]
    return [Translation(ids, one[translator.layer]) for ids, one in zip(target, weights, strict=True)]


def _real(rows: np.ndarray) -> list[tuple[int, int]]:
    """(place in the batch, sentence) of the rows that hold one."""
    return [(slot, int(row)) for slot, row in enumerate(rows) if row >= 0]


def _ended(tokens: np.ndarray) -> list[int]:
    """The ids up to EOS, or all if the length limit came first."""
    ids = tokens.tolist()
    return ids[: ids.index(EOS) + 1] if EOS in ids else ids


def force(
    translator: Translator,
    params: Params,
    source: Sequence[list[int]],
    target: Sequence[list[int]],
    batch_size: int | None = None,
) -> tuple[float, int, list[np.ndarray]]:
    """Reads given translations: their negative log-likelihood (nats), its tokens, and each one's weights [L, T, S]."""
    nll, count, out = 0.0, 0, [np.zeros((1, 0, 0), np.float32)] * len(source)
    lengths = [max(len(a), len(b)) for a, b in zip(source, target, strict=True)]
    for width, rows in _batches(translator, lengths, batch_size):
        sums, weights = jax.device_get(translator.force(params, pad(source, rows, width), pad(target, rows, width)))
        nll, count = nll + float(sums.extras['nll']), count + int(sums.weight)
        for slot, row in _real(rows):
            out[row] = weights[slot, :, : len(target[row]), : len(source[row])]
    return nll, count, out
