"""Decoding and scoring of many sentences by a trained model, in few shapes."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.configs.align import max_translation_tokens
from attnlab.data.batches import BatchIndices, pad_sequences, padded_width, plan_batches
from attnlab.data.vocabulary import BOS, EOS, PAD
from attnlab.decode.beam import Hypotheses, beam_search
from attnlab.decode.greedy import GreedyResult, greedy_search
from attnlab.decode.sampling import check_decoded_tokens
from attnlab.errors import UserError
from attnlab.kernels import mesh_axes
from attnlab.kernels.losses import LossSums, cross_entropy
from attnlab.models.sequence2sequence import Sequence2SequenceModel
from attnlab.tasks.task import Params

SentenceIds = Sequence[list[int]]
"""Ids of each sentence, with EOS."""


class Translation(NamedTuple):
    """target: ids with their EOS (without, if the length limit came first).  weights: [len(target), len(source)]."""

    target: list[int]
    weights: np.ndarray


def shift_right(labels: jax.Array) -> jax.Array:
    """Decoder inputs of labels [B, T]: BOS and all labels but the last; padding where the label is padding."""
    moved = jnp.concatenate([jnp.full_like(labels[:, :1], BOS), labels[:, :-1]], axis=1)
    return jnp.where(labels == PAD, PAD, moved)


class Translator:
    """A translation model whose functions are compiled once for each width of a batch.

    Sentences are padded to `widths`, and `batch_size` of them are decoded at a time. beams: 1 decodes greedily.
    """

    def __init__(
        self, model: Sequence2SequenceModel, widths: Sequence[int], batch_size: int, beams: int = 1,
        length_penalty: float = 0.0,
    ) -> None:
        self.model, self.widths, self.batch_size = model, tuple(widths), batch_size
        self.beams, self.length_penalty = beams, length_penalty
        self._force, self._greedy, self._search = map(jax.jit, (self._force_batch, self._greedy_batch, self._beams))

    def translate(self, params: Params, source: SentenceIds, batch_size: int | None = None) -> list[Translation]:
        """Translations in the order of the sentences; batch_size: in place of the translator's.

        Raises RunError if the model's logits are NaN or infinite.
        """
        if self.beams == 1:
            return self.greedy(params, source, batch_size)
        target: list[list[int]] = [[]] * len(source)
        for width, rows in self._batches([len(ids) for ids in source], batch_size):
            tokens = jax.device_get(self._search(params, pad_sequences(source, rows, width)).tokens)
            check_decoded_tokens(tokens[rows >= 0])
            for slot, row in _occupied(rows):
                target[row] = _ended(tokens[slot, 0])
        # Beam search keeps no attention: the best hypothesis is read once more.
        weights = self.force(params, source, target, batch_size)[2]
        layer = self.model.alignment_layer_index
        return [Translation(ids, one[layer]) for ids, one in zip(target, weights, strict=True)]

    def greedy(self, params: Params, source: SentenceIds, batch_size: int | None = None) -> list[Translation]:
        """`translate` with one beam."""
        out: list[Any] = [None] * len(source)
        for width, rows in self._batches([len(ids) for ids in source], batch_size):
            tokens, weights = jax.device_get(self._greedy(params, pad_sequences(source, rows, width)))
            check_decoded_tokens(tokens[rows >= 0])
            for slot, row in _occupied(rows):
                ids = _ended(tokens[slot])
                out[row] = Translation(ids, weights[slot, : len(ids), : len(source[row])])
        return out

    def force(
        self, params: Params, source: SentenceIds, target: SentenceIds, batch_size: int | None = None
    ) -> tuple[float, int, list[np.ndarray]]:
        """Score given translations: negative log-likelihood (nats), number of tokens, weights [L, T, S] of each."""
        nll, count, out = 0.0, 0, [np.zeros((1, 0, 0), np.float32)] * len(source)
        lengths = [max(len(a), len(b)) for a, b in zip(source, target, strict=True)]
        for width, rows in self._batches(lengths, batch_size):
            sums, weights = jax.device_get(
                self._force(params, pad_sequences(source, rows, width), pad_sequences(target, rows, width))
            )
            nll, count = nll + float(sums.extras['nll']), count + int(sums.weight)
            for slot, row in _occupied(rows):
                out[row] = weights[slot, :, : len(target[row]), : len(source[row])]
        return nll, count, out

    def _force_batch(self, params: Params, source: jax.Array, labels: jax.Array) -> tuple[LossSums, jax.Array]:
        source, labels = mesh_axes.shard_rows(source), mesh_axes.shard_rows(labels)
        logits, weights = self.model.forward_with_attention(params, source, shift_right(labels))
        return mesh_axes.replicate_arrays((cross_entropy(logits, labels, padding=PAD), weights))

    def _greedy_batch(self, params: Params, source: jax.Array) -> GreedyResult:
        limit, state, step = self._begin(params, source)
        result = greedy_search(step, state, source.shape[0], bos_id=BOS, eos_id=EOS, max_tokens=limit)
        return mesh_axes.replicate_arrays(result)

    def _beams(self, params: Params, source: jax.Array) -> Hypotheses:
        limit, state, step = self._begin(params, source)
        first = jnp.full(source.shape[:1], BOS)
        penalty = self.length_penalty
        return beam_search(step, state, first, beams=self.beams, max_tokens=limit, eos_id=EOS, length_penalty=penalty)

    def _begin(self, params: Params, source: jax.Array) -> tuple[int, Any, partial[Any]]:
        """Largest number of tokens, first state and step function of a decoding."""
        limit, source = max_translation_tokens(source.shape[1]), mesh_axes.shard_rows(source)
        return limit, self.model.init_state(params, source, limit), partial(self.model.decode_step, params, limit)

    def _batches(self, lengths: Sequence[int], batch_size: int | None) -> list[BatchIndices]:
        """Raises UserError for a sentence that has more tokens than the model has positions."""
        needed, positions = (
            max_translation_tokens(padded_width(max(lengths, default=1), self.widths)),
            self.model.max_length,
        )
        if positions is not None and needed > positions:
            came = f'a sentence of {max(lengths)} tokens needs room for {needed}'
            raise UserError(f'{came}; the model has {positions} learned positions')
        return plan_batches(np.array(lengths), np.arange(len(lengths)), self.widths, batch_size or self.batch_size)


def _occupied(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """(row of the batch, sentence) where the row is not empty."""
    return ((slot, int(row)) for slot, row in enumerate(rows) if row >= 0)


def _ended(tokens: np.ndarray) -> list[int]:
    """The ids up to EOS, or all if the length limit came first."""
    ids = tokens.tolist()
    return ids[: ids.index(EOS) + 1] if EOS in ids else ids
