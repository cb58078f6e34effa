"""A trained model in use: forced and free decoding of many sentences, in few shapes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.data.batches import Rows, pad, plan
from attnlab.data.vocabulary import BOS, EOS, PAD
from attnlab.decode.greedy import Decoded, greedy
from attnlab.kernels.losses import cross_entropy
from attnlab.models.recurrent import RecurrentSeq2Seq
from attnlab.tasks.task import Params


class Translation(NamedTuple):
    """target: ids with their EOS (without, if the length limit came first).  weights: [len(target), len(source)]."""

    target: list[int]
    weights: np.ndarray


class Translator(NamedTuple):
    """Compiled once a shape: `force(params, source [B, S], labels [B, T])` and `free(params, source [B, S])`."""

    force: Callable[..., tuple[Any, jax.Array]]
    free: Callable[..., Decoded]
    widths: tuple[int, ...]
    batch_size: int


def shift(labels: jax.Array) -> jax.Array:
    """Decoder inputs of labels [B, T]: BOS and all labels but the last; padding where the label is padding."""
    moved = jnp.concatenate([jnp.full_like(labels[:, :1], BOS), labels[:, :-1]], axis=1)
    return jnp.where(labels == PAD, PAD, moved)


def make(model: RecurrentSeq2Seq, widths: Sequence[int], batch_size: int) -> Translator:
    """The translator of a model; sentences are padded to `widths` and run `batch_size` at a time."""

    @jax.jit
    def force(params: Params, source: jax.Array, labels: jax.Array):
        logits, weights = model.apply({'params': params}, source, shift(labels))
        return cross_entropy(logits, labels, padding=PAD), weights

    @jax.jit
    def free(params: Params, source: jax.Array) -> Decoded:
        state, memory = model.apply({'params': params}, source, method='encode')

        def step(state: Any, tokens: jax.Array) -> Any:
            return model.apply({'params': params}, state, memory, tokens, method='decode')

        # Twice the source and some: far more than French needs, and one shape for each width.
        return greedy(step, state, source.shape[0], bos=BOS, eos=EOS, limit=2 * source.shape[1] + 8)

    return Translator(force, free, tuple(widths), batch_size)


def _batches(translator: Translator, lengths: Sequence[int], batch_size: int | None = None) -> list[Rows]:
    return plan(np.array(lengths), np.arange(len(lengths)), translator.widths, batch_size or translator.batch_size)


def translate(
    translator: Translator, params: Params, source: Sequence[list[int]], batch_size: int | None = None
) -> list[Translation]:
    """Greedy translations of sentences of ids (with EOS), in their order; `batch_size` instead of the translator's."""
    out: list[Any] = [None] * len(source)
    for width, rows in _batches(translator, [len(ids) for ids in source], batch_size):
        tokens, weights = jax.device_get(translator.free(params, pad(source, rows, width)))
        for slot, row in enumerate(rows):
            if row >= 0:
                ids = tokens[slot].tolist()
                ids = ids[: ids.index(EOS) + 1] if EOS in ids else ids
                out[row] = Translation(ids, weights[slot, : len(ids), : len(source[row])])
    return out


def force(
    translator: Translator, params: Params, source: Sequence[list[int]], target: Sequence[list[int]]
) -> tuple[float, int, list[np.ndarray]]:
    """Reads given translations: their negative log-likelihood (nats), its tokens, and each one's weights [T, S]."""
    nll, count, out = 0.0, 0, [np.zeros((0, 0), np.float32)] * len(source)
    lengths = [max(len(a), len(b)) for a, b in zip(source, target, strict=True)]
    for width, rows in _batches(translator, lengths):
        sums, weights = jax.device_get(translator.force(params, pad(source, rows, width), pad(target, rows, width)))
        nll, count = nll + float(sums.extras['nll']), count + int(sums.weight)
        for slot, row in enumerate(rows):
            if row >= 0:
                out[row] = weights[slot, : len(target[row]), : len(source[row])]
    return nll, count, out
