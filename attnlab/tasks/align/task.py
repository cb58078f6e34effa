"""The task of translation with alignment."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import files
from attnlab.configs import AlignConfig, GrammarPairs, RunConfig, TranslatorConfig
from attnlab.data import batches
from attnlab.data.alignments import Link, write_links
from attnlab.data.pairs import SentencePairs
from attnlab.data.vocabulary import BOS, PAD
from attnlab.errors import UserError
from attnlab.kernels.losses import LossSums, cross_entropy
from attnlab.models.sequence2sequence import Sequence2SequenceModel, make_sequence2sequence_model
from attnlab.tasks import blocks, head_grid
from attnlab.tasks.align import alignment, corpus, pictures, scores
from attnlab.tasks.align.translator import Translation, Translator, shift_right
from attnlab.tasks.checks import check_data_paths, check_model_init
from attnlab.tasks.task import AttentionMaps, Batch, Outline, Params, TranslatedSentence, perplexity

ALIGNMENT_SHIFTS = {'emit': 0, 'shifted': 1}
"""Name -> `shift` of `alignment.extract_links`: weights of the step that emits a word, or of the step after it."""


@dataclass(eq=False)
class AlignTask:
    """Translation of sentences, and the word alignment that attention learns; a `Task`."""

    Config: ClassVar[type[RunConfig]] = AlignConfig
    best: ClassVar[tuple[str, Literal['max', 'min']]] = ('bleu', 'max')
    default_split: ClassVar[str] = 'test'

    config: AlignConfig
    workdir: Path | None = None

    def check(self) -> None:
        """Raise UserError if a data path is empty or the model cannot be built; no data is read."""
        check_data_paths(self.config.data)
        self._check_model()

    def _check_model(self) -> None:
        check_model_init(self.config.model, make_sequence2sequence_model(self.config.model, 5, 5).init)

    def outline(self, layers: int | None, countable: bool) -> Outline:
        """Outline of one sentence pair of the largest width, with vocabularies of the configured size."""
        self._check_model()
        config, size, T = self.config.model, self.config.data.vocabulary_size, self.config.data.widths[-1]
        if isinstance(config, TranslatorConfig):
            config = blocks.outline_config(dataclasses.replace(config, alignment_layer=1), layers, countable)
        model = make_sequence2sequence_model(config, size, size)
        params = jax.eval_shape(model.init, jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((1, T), jnp.int32)
        state = jax.eval_shape(lambda params, source: model.init_state(params, source, T), params, tokens)
        return Outline(
            f'{T} source and {T} target tokens, vocabularies {size}', 2 * T, params, (tokens, tokens),
            lambda params, source, inputs: model.forward(params, source, inputs, None)[0],
            state['cache']['decoder'] if isinstance(config, TranslatorConfig) else None,
        )  # fmt: skip

    # Data

    @cached_property
    def _splits(self) -> tuple[SentencePairs, SentencePairs]:
        """The training and validation splits, without gold alignments."""
        train, valid = (
            corpus.read_pairs(self.config.data, split, self.config.seed, linked=False) for split in ('train', 'valid')
        )
        return train, valid

    @cached_property
    def vocabularies(self) -> corpus.Vocabularies:
        """The vocabularies (source, target), loaded from `workdir` or built from the training split."""
        if self.workdir is not None:
            return corpus.load_vocabularies(self.workdir)
        return corpus.build_vocabularies(self.config.data, self._splits[0])

    @cached_property
    def _encoded(self) -> tuple[corpus.EncodedPairs, corpus.EncodedPairs]:
        """The training split, cut to the largest width, and the validation split, as token ids."""
        train, valid = self._splits
        data = self.config.data
        return (
            corpus.encode_pairs(train, self.vocabularies, data.widths[-1]),
            corpus.encode_pairs(valid, self.vocabularies, corpus.max_sentence_length(data)),
        )

    @property
    def examples(self) -> int:
        """Number of training pairs."""
        return len(self._encoded[0].source)

    @cached_property
    def _batch_indices(self) -> Callable[[int], batches.BatchIndices]:
        """Step -> indices of the training pairs in its batch, and the width to which they are padded."""
        lengths = np.array([max(len(a), len(b)) for a, b in zip(*self._encoded[0], strict=True)])
        config = self.config
        return batches.shuffled_batches(lengths, config.data.widths, config.train.batch_size, config.seed)

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """Return 'source' [B, S] and 'target' [B, T] int32 token ids of a step, S = T, or some of its rows."""
        width, examples = self._batch_indices(step)
        source, target = (batches.pad_sequences(side, examples[rows], width) for side in self._encoded[0])
        return {'source': source, 'target': target}

    def save(self, workdir: Path) -> None:
        """Write the vocabularies."""
        corpus.save_vocabularies(self.vocabularies, workdir)

    # Model

    @cached_property
    def model(self) -> Sequence2SequenceModel:
        """The model for the vocabularies of this task."""
        source, target = self.vocabularies
        return make_sequence2sequence_model(self.config.model, source.size, target.size)

    @cached_property
    def translator(self) -> Translator:
        """The model with the beams and the length penalty of `config.decode`."""
        config = self.config
        return Translator(
            self.model, config.data.widths, config.train.batch_size, config.decode.beams, config.decode.length_penalty
        )

    def init(self, rng: jax.Array) -> Params:
        """Return newly initialised parameters."""
        return self.model.init(rng)

    def loss(self, params: Params, batch: Batch, rng: jax.Array) -> LossSums:
        """Return the cross-entropy of the target tokens, and the auxiliary losses of experts."""
        logits, aux = self.model.forward(params, batch['source'], shift_right(batch['target']), rng)
        sums = cross_entropy(logits, batch['target'], self.config.train.label_smoothing, PAD)
        return blocks.add_expert_losses(self.config.model, sums, aux)

    # Scores

    def validate(self, params: Params) -> dict[str, float]:
        """Return loss (nats per token), perplexity, and BLEU of greedy decoding."""
        encoded = self._encoded[1]
        nll, count, _ = self.translator.score_translations(params, *encoded)
        if not np.isfinite(nll):  # the model cannot translate; the training loop raises an error for this loss
            return {'loss': nll}
        outputs = self._decode(self.translator.translate_greedily(params, encoded.source))
        bleu = scores.compute_bleu(outputs, self._splits[1].target)
        return {'loss': nll / count, 'perplexity': perplexity(nll / count), 'bleu': bleu}

    def evaluate(self, params: Params, split: str) -> dict[str, Any]:
        """Return all scores of a split.

        Writes `samples/SPLIT.json`, and the links that the model gives to the references, `samples/SPLIT.links`.
        """
        data = self.config.data
        pairs = corpus.read_pairs(data, split, self.config.seed)
        encoded = corpus.encode_pairs(pairs, self.vocabularies, corpus.max_sentence_length(data))
        nll, count, weights = self.translator.score_translations(params, *encoded)
        translations = self.translator.translate(params, encoded.source)
        outputs = self._decode(translations)
        source_language, target_language = corpus.language_pair(data)
        result: dict[str, Any] = {'split': split, 'sentences': len(outputs)}
        result |= scores.score_texts(outputs, pairs.target, target_language)
        result |= {'loss': nll / count, 'perplexity': perplexity(nll / count)}
        if isinstance(data, GrammarPairs):
            result['exact_match'] = scores.exact_match_rate(outputs, pairs.target, target_language)
        links = self._links(weights, encoded, self.model.alignment_layer_index) if self.model.has_attention else None
        if links and pairs.links is not None:
            inverted = corpus.read_inversions(data, split, self.config.seed)
            result |= scores.score_alignments(links, pairs.links, inverted)
            if len(weights[0]) > 1:
                result['aer_by_layer'] = self._aer_by_layer(weights, encoded, pairs)
        result['by_length'] = scores.bleu_by_length(pairs.source, outputs, pairs.target, source_language)
        if self.workdir is not None:
            shift = self.model.alignment_shift
            samples = pictures.select_samples(pairs, outputs, encoded.source, translations, self.vocabularies, shift)
            with files.log_write_errors(self.workdir):
                folder = self.workdir / 'samples'
                folder.mkdir(exist_ok=True)
                if links:
                    write_links(folder / f'{split}.links', links['shifted' if shift else 'emit'])
                text = json.dumps(samples, ensure_ascii=False) + '\n'
                (folder / f'{split}.json').write_text(text, encoding='utf-8')
        return result

    def _decode(self, translations: Sequence[Translation]) -> list[str]:
        """Return the text of each translation."""
        return [self.vocabularies[1].decode(translation.target) for translation in translations]

    def _links(
        self, weights: Sequence[np.ndarray], encoded: corpus.EncodedPairs, layer: int
    ) -> dict[str, list[frozenset[Link]]]:
        """Return the links of each sentence from one layer of its weights [L, T, S], for each of `ALIGNMENT_SHIFTS`."""
        layer_weights = [layers[layer] for layers in weights]
        return {
            name: alignment.extract_split_links(layer_weights, encoded.source, encoded.target, self.vocabularies, shift)
            for name, shift in ALIGNMENT_SHIFTS.items()
        }

    def _aer_by_layer(
        self, weights: Sequence[np.ndarray], encoded: corpus.EncodedPairs, pairs: SentencePairs
    ) -> list[dict[str, Any]]:
        """Return the alignment error rate of each layer, counted from 1, for each of `ALIGNMENT_SHIFTS`."""
        assert pairs.links is not None
        rows = []
        for layer in range(len(weights[0])):
            rates = scores.score_alignments(self._links(weights, encoded, layer), pairs.links, None)
            rows.append({'layer': layer + 1, **{name: rates[f'aer_{name}'] for name in ALIGNMENT_SHIFTS}})
        return rows

    # Use

    def translate(
        self,
        params: Params,
        sentences: Sequence[str],
        joined: bool = False,
        layer: int | None = None,
        shifted: bool = False,
    ) -> list[TranslatedSentence]:
        """Translate sentences that a user typed.

        joined: align words instead of sub-words.  layer, shifted: as in `with_alignment_at`.
        """
        task = self.with_alignment_at(layer, shifted)
        vocabularies, shift = task.vocabularies, task.model.alignment_shift
        translated = []
        for sentence, ids, translation in task._translate_typed(params, sentences):
            text = vocabularies[1].decode(translation.target)
            alignment = np.zeros((0, 0), np.float32), [], []
            if translation.weights.size and len(translation.target) > shift:
                alignment = pictures.label_alignment(sentence, ids, translation, vocabularies, joined, shift)
            translated.append(TranslatedSentence(sentence, text, *alignment))
        return translated

    def with_alignment_at(self, layer: int | None, shifted: bool) -> 'AlignTask':
        """Return this task with the alignment taken from other attention weights.

        layer: decoder layer, from 1; None: as in the config.
        shifted: take the weights of the step after the one that emits a word; False: as in the config.

        Raises UserError for a recurrent model, which has only one attention, and for a layer that the model lacks.
        """
        if layer is None and not shifted:
            return self
        model = self.config.model
        if not isinstance(model, TranslatorConfig):
            raise UserError(f'a {model.name} model has only one attention; --layer and --shifted need a transformer')
        layer = model.alignment_layer if layer is None else layer
        shift = 1 if shifted else model.alignment_shift
        model = dataclasses.replace(model, alignment_layer=layer, alignment_shift=shift)
        return AlignTask(dataclasses.replace(self.config, model=model), self.workdir)

    def attend(self, params: Params, texts: Sequence[str], layer: int | None, head: int | None) -> None:
        """Draw every attention of the model over each sentence and its translation; print the paths of the files."""
        for sentence, maps in zip(texts, self._iterate_maps(params, texts), strict=True):
            folder = head_grid.figure_path(self.workdir or Path(), 'attend', sentence)
            head_grid.draw_head_grids(folder, *maps, layer, head)

    def attention_maps(self, params: Params, text: str) -> AttentionMaps:
        """Return every attention of the model over a sentence and its translation."""
        return next(self._iterate_maps(params, [text]))

    def _iterate_maps(self, params: Params, sentences: Sequence[str]) -> Iterator[AttentionMaps]:
        """Yield the attention of the model over each sentence and its translation."""
        compute_maps = jax.jit(self.model.attention_maps)
        for sentence, ids, translation in self._translate_typed(params, sentences):
            maps = jax.device_get(compute_maps(params, np.array([ids]), np.array([[BOS, *translation.target[:-1]]])))
            labels = pictures.label_maps(sentence, ids, translation.target, self.vocabularies)
            yield AttentionMaps({kind: weights[0] for kind, weights in maps.items()}, labels)

    def _translate_typed(self, params: Params, sentences: Sequence[str]) -> list[tuple[str, list[int], Translation]]:
        """Return (sentence, source ids, translation) of each sentence that a user typed."""
        source = corpus.encode_user_sentences(
            sentences, self.vocabularies[0], corpus.max_sentence_length(self.config.data)
        )
        # As many rows as sentences, at most the training batch size: a single sentence is not padded to a whole batch.
        batch_size = min(len(source), self.config.train.batch_size)
        return list(zip(sentences, source, self.translator.translate(params, source, batch_size), strict=True))
