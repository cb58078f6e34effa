"""Translation and scoring of many sentences by a trained model, compiled for few shapes."""

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
"""Token ids of each sentence, with EOS."""


class Translation(NamedTuple):
    """A translation as token ids, and its attention to the source.

    target: T ids, the last one EOS unless the length limit was reached first.
    weights: [T, S] float32, for S source tokens.
    """

    target: list[int]
    weights: np.ndarray


def shift_right(labels: jax.Array) -> jax.Array:
    """Return decoder inputs for labels [B, T] int: BOS, then all labels but the last; PAD where the label is PAD."""
    shifted = jnp.concatenate([jnp.full_like(labels[:, :1], BOS), labels[:, :-1]], axis=1)
    return jnp.where(labels == PAD, PAD, shifted)


class Translator:
    """A translation model whose functions are compiled once for each width of a batch.

    widths: ascending lengths in tokens to which sentences are padded.
    batch_size: sentences decoded at a time.
    beams: 1 decodes greedily.
    length_penalty: exponent of the length by which beam search divides a log-probability.
    """

    def __init__(
        self,
        model: Sequence2SequenceModel,
        widths: Sequence[int],
        batch_size: int,
        beams: int = 1,
        length_penalty: float = 0.0,
    ) -> None:
        self.model, self.widths, self.batch_size = model, tuple(widths), batch_size
        self.beams, self.length_penalty = beams, length_penalty
        self._score, self._search_greedily, self._search_beams = map(
            jax.jit, (self._score_batch, self._greedy_batch, self._beam_batch)
        )

    def translate(self, params: Params, source: SentenceIds, batch_size: int | None = None) -> list[Translation]:
        """Translate sentences; return translations in their order.

        batch_size: sentences decoded at a time; None: the translator's.

        Raises RunError if the model's logits are NaN or infinite, UserError for a sentence that is longer than the
        model's learned positions allow.
        """
        if self.beams == 1:
            return self.translate_greedily(params, source, batch_size)
        target: list[list[int]] = [[]] * len(source)
        for width, rows in self._batches([len(ids) for ids in source], batch_size):
            tokens = jax.device_get(self._search_beams(params, pad_sequences(source, rows, width)).tokens)
            check_decoded_tokens(tokens[rows >= 0])
            for row, sentence in _occupied_rows(rows):
                target[sentence] = _cut_at_eos(tokens[row, 0])
        # Beam search keeps no attention weights; a forward pass over the best hypothesis computes them.
        weights = self.score_translations(params, source, target, batch_size)[2]
        return [
            Translation(ids, layers[self.model.alignment_layer_index])
            for ids, layers in zip(target, weights, strict=True)
        ]

    def translate_greedily(
        self, params: Params, source: SentenceIds, batch_size: int | None = None
    ) -> list[Translation]:
        """Return the translations of greedy decoding, whatever `beams` is; arguments and errors of `translate`."""
        translations: list[Any] = [None] * len(source)
        for width, rows in self._batches([len(ids) for ids in source], batch_size):
            tokens, weights = jax.device_get(self._search_greedily(params, pad_sequences(source, rows, width)))
            check_decoded_tokens(tokens[rows >= 0])
            for row, sentence in _occupied_rows(rows):
                ids = _cut_at_eos(tokens[row])
                translations[sentence] = Translation(ids, weights[row, : len(ids), : len(source[sentence])])
        return translations

    def score_translations(
        self, params: Params, source: SentenceIds, target: SentenceIds, batch_size: int | None = None
    ) -> tuple[float, int, list[np.ndarray]]:
        """Score existing translations by teacher forcing.

        Returns the negative log-likelihood of all target tokens in nats, the number of target tokens, and the attention
        of each sentence, [L, T, S] float32: L decoder layers, T target tokens, S source tokens.
        """
        nll, count, attention = 0.0, 0, [np.zeros((1, 0, 0), np.float32)] * len(source)
        lengths = [max(len(a), len(b)) for a, b in zip(source, target, strict=True)]
        for width, rows in self._batches(lengths, batch_size):
            sums, weights = jax.device_get(
                self._score(params, pad_sequences(source, rows, width), pad_sequences(target, rows, width))
            )
            nll, count = nll + float(sums.extras['nll']), count + int(sums.weight)
            for row, sentence in _occupied_rows(rows):
                attention[sentence] = weights[row, :, : len(target[sentence]), : len(source[sentence])]
        return nll, count, attention

    def _score_batch(self, params: Params, source: jax.Array, labels: jax.Array) -> tuple[LossSums, jax.Array]:
        """Return the loss and the attention [B, L, T, S] for source [B, S] and labels [B, T]."""
        source, labels = mesh_axes.shard_rows(source), mesh_axes.shard_rows(labels)
        logits, weights = self.model.forward_with_attention(params, source, shift_right(labels))
        return mesh_axes.replicate_arrays((cross_entropy(logits, labels, padding=PAD), weights))

    def _greedy_batch(self, params: Params, source: jax.Array) -> GreedyResult:
        limit, state, step = self._start_decoding(params, source)
        return mesh_axes.replicate_arrays(
            greedy_search(step, state, source.shape[0], bos_id=BOS, eos_id=EOS, max_tokens=limit)
        )

    def _beam_batch(self, params: Params, source: jax.Array) -> Hypotheses:
        limit, state, step = self._start_decoding(params, source)
        first = jnp.full(source.shape[:1], BOS)
        penalty = self.length_penalty
        return beam_search(step, state, first, beams=self.beams, max_tokens=limit, eos_id=EOS, length_penalty=penalty)

    def _start_decoding(self, params: Params, source: jax.Array) -> tuple[int, Any, partial[Any]]:
        """Return the largest number of target tokens, the initial state and the step function."""
        limit, source = max_translation_tokens(source.shape[1]), mesh_axes.shard_rows(source)
        return limit, self.model.init_state(params, source, limit), partial(self.model.decode_step, params, limit)

    def _batches(self, lengths: Sequence[int], batch_size: int | None) -> list[BatchIndices]:
        """Plan batches of sentences; UserError if the longest needs more positions than the model has learned."""
        needed = max_translation_tokens(padded_width(max(lengths, default=1), self.widths))
        positions = self.model.max_length
        if positions is not None and needed > positions:
            raise UserError(
                f'a sentence of {max(lengths)} tokens needs {needed} positions; '
                f'expected at most {positions}, the learned positions of the model'
            )
        return plan_batches(np.array(lengths), np.arange(len(lengths)), self.widths, batch_size or self.batch_size)


def _occupied_rows(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (row of the batch, index of the sentence) for rows that are not empty; an empty row has index -1."""
    return ((row, int(sentence)) for row, sentence in enumerate(rows) if sentence >= 0)


def _cut_at_eos(tokens: np.ndarray) -> list[int]:
    """Return the ids up to EOS, or all ids if the length limit was reached first."""
    ids = tokens.tolist()
    return ids[: ids.index(EOS) + 1] if EOS in ids else ids
