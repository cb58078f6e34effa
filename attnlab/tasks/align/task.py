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
"""How the alignment is read: at the step that emits a word, and one later (see `alignment.extract_links`)."""


@dataclass(eq=False)
class AlignTask:
    """English to French, and the alignment that attention learns."""

    Config: ClassVar[type[RunConfig]] = AlignConfig
    best: ClassVar[tuple[str, Literal['max', 'min']]] = ('bleu', 'max')
    default_split: ClassVar[str] = 'test'

    config: AlignConfig
    workdir: Path | None = None

    def check(self) -> None:
        check_data_paths(self.config.data)
        self._check_model()

    def _check_model(self) -> None:
        check_model_init(self.config.model, make_sequence2sequence_model(self.config.model, 5, 5).init)

    def outline(self, layers: int | None, active: bool) -> Outline:
        """One pair of sentences of the largest width, with vocabularies of the configured size."""
        self._check_model()
        config, size, T = self.config.model, self.config.data.vocabulary_size, self.config.data.widths[-1]
        if isinstance(config, TranslatorConfig):
            config = blocks.outline_config(dataclasses.replace(config, alignment_layer=1), layers, active)
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
        """The training and validation splits."""
        read = lambda split: corpus.read_pairs(self.config.data, split, self.config.seed, linked=False)
        return read('train'), read('valid')

    @cached_property
    def vocabularies(self) -> corpus.Vocabularies:
        if self.workdir is not None:
            return corpus.load_vocabularies(self.workdir)
        return corpus.build_vocabularies(self.config.data, self._splits[0])

    @cached_property
    def _encoded(self) -> tuple[corpus.EncodedPairs, corpus.EncodedPairs]:
        """Training sentences cut to the largest width, and those of the validation split."""
        train, valid = self._splits
        cut = corpus.encode_pairs(train, self.vocabularies, self.config.data.widths[-1])
        return cut, corpus.encode_pairs(valid, self.vocabularies, corpus.max_sentence_length(self.config.data))

    @property
    def examples(self) -> int:
        return len(self._encoded[0].source)

    @cached_property
    def _draw(self) -> Callable[[int], batches.BatchIndices]:
        lengths = np.array([max(len(a), len(b)) for a, b in zip(*self._encoded[0], strict=True)])
        config = self.config
        return batches.shuffled_batches(lengths, config.data.widths, config.train.batch_size, config.seed)

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        width, examples = self._draw(step)
        source, target = (batches.pad_sequences(side, examples[rows], width) for side in self._encoded[0])
        return {'source': source, 'target': target}

    def save(self, workdir: Path) -> None:
        corpus.save_vocabularies(self.vocabularies, workdir)

    # Model

    @cached_property
    def model(self) -> Sequence2SequenceModel:
        return make_sequence2sequence_model(self.config.model, *(each.size for each in self.vocabularies))

    @cached_property
    def translator(self) -> Translator:
        """Decoding as `config.decode` says."""
        config = self.config
        decode = config.decode.beams, config.decode.length_penalty
        return Translator(self.model, config.data.widths, config.train.batch_size, *decode)

    def init(self, rng: jax.Array) -> Params:
        return self.model.init(rng)

    def loss(self, params: Params, batch: Batch, rng: jax.Array) -> LossSums:
        logits, aux = self.model.forward(params, batch['source'], shift_right(batch['target']), rng)
        sums = cross_entropy(logits, batch['target'], self.config.train.label_smoothing, PAD)
        return blocks.add_expert_losses(self.config.model, sums, aux)

    # Scores

    def validate(self, params: Params) -> dict[str, float]:
        """Loss and perplexity, and BLEU of greedy decoding."""
        encoded = self._encoded[1]
        nll, count, _ = self.translator.force(params, *encoded)
        if not np.isfinite(nll):  # nothing can be translated; the loop raises for the loss
            return {'loss': nll}
        outputs = self._decoded(self.translator.greedy(params, encoded.source))
        bleu = scores.compute_bleu(outputs, self._splits[1].target)
        return {'loss': nll / count, 'perplexity': perplexity(nll / count), 'bleu': bleu}

    def evaluate(self, params: Params, split: str) -> dict[str, Any]:
        """All scores; writes `samples/SPLIT.json` and the alignment of the references, `samples/SPLIT.links`."""
        data = self.config.data
        pairs = corpus.read_pairs(data, split, self.config.seed)
        encoded = corpus.encode_pairs(pairs, self.vocabularies, corpus.max_sentence_length(data))
        nll, count, weights = self.translator.force(params, *encoded)
        translations = self.translator.translate(params, encoded.source)
        outputs = self._decoded(translations)
        source_language, target_language = corpus.language_pair(data)
        found: dict[str, Any] = {'split': split, 'sentences': len(outputs)}
        found |= scores.score_texts(outputs, pairs.target, target_language)
        found |= {'loss': nll / count, 'perplexity': perplexity(nll / count)}
        if isinstance(data, GrammarPairs):
            found['exact_match'] = scores.exact_match_rate(outputs, pairs.target, target_language)
        links = self._links(weights, encoded, self.model.alignment_layer_index) if self.model.has_attention else None
        if links and pairs.links is not None:
            inverted = corpus.read_inversions(data, split, self.config.seed)
            found |= scores.score_alignments(links, pairs.links, inverted)
            if len(weights[0]) > 1:
                found['aer_by_layer'] = self._by_layer(weights, encoded, pairs)
        found['by_length'] = scores.bleu_by_length(pairs.source, outputs, pairs.target, source_language)
        if self.workdir is not None:
            at = self.model.alignment_shift
            shown = pictures.select_samples(pairs, outputs, encoded.source, translations, self.vocabularies, at)
            with files.log_write_errors(self.workdir):
                folder = self.workdir / 'samples'
                folder.mkdir(exist_ok=True)
                if links:
                    write_links(folder / f'{split}.links', links['shifted' if at else 'emit'])
                text = json.dumps(shown, ensure_ascii=False) + '\n'
                (folder / f'{split}.json').write_text(text, encoding='utf-8')
        return found

    def _decoded(self, translations: Sequence[Translation]) -> list[str]:
        return [self.vocabularies[1].decode(translation.target) for translation in translations]

    def _links(
        self, weights: Sequence[np.ndarray], encoded: corpus.EncodedPairs, layer: int
    ) -> dict[str, list[frozenset[Link]]]:
        """The links of every sentence by each reading of one layer of the weights [L, T, S]."""
        chosen = [one[layer] for one in weights]
        return {
            name: alignment.extract_split_links(chosen, encoded.source, encoded.target, self.vocabularies, shift)
            for name, shift in ALIGNMENT_SHIFTS.items()
        }

    def _by_layer(
        self, weights: Sequence[np.ndarray], encoded: corpus.EncodedPairs, pairs: SentencePairs
    ) -> list[dict[str, Any]]:
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
        """Translate sentences; layer, shifted: as in `read_at`.  joined: align words, not sub-words."""
        task = self.read_at(layer, shifted)
        vocabularies, at = task.vocabularies, task.model.alignment_shift
        translated = []
        for sentence, ids, translation in task._typed(params, sentences):
            text = vocabularies[1].decode(translation.target)
            alignment = np.zeros((0, 0), np.float32), [], []
            if translation.weights.size and len(translation.target) > at:
                alignment = pictures.label_alignment(sentence, ids, translation, vocabularies, joined, at)
            translated.append(TranslatedSentence(sentence, text, *alignment))
        return translated

    def read_at(self, layer: int | None, shifted: bool) -> 'AlignTask':
        """This task with the alignment read off another layer, from 1, or one step after a word."""
        if layer is None and not shifted:
            return self
        model = self.config.model
        if not isinstance(model, TranslatorConfig):
            raise UserError(f'a {model.name} model has one attention, read where it makes a word; --layer and '
                            '--shifted are for a transformer')  # fmt: skip
        layer = model.alignment_layer if layer is None else layer
        at = 1 if shifted else model.alignment_shift
        model = dataclasses.replace(model, alignment_layer=layer, alignment_shift=at)
        return AlignTask(dataclasses.replace(self.config, model=model), self.workdir)

    def attend(self, params: Params, texts: Sequence[str], layer: int | None, head: int | None) -> None:
        """Draw every attention of the model over each sentence and its translation."""
        for sentence, maps in zip(texts, self._maps(params, texts), strict=True):
            folder = head_grid.figure_path(self.workdir or Path(), 'attend', sentence)
            head_grid.draw_head_grids(folder, *maps, layer, head)

    def attention_maps(self, params: Params, text: str) -> AttentionMaps:
        """Return every attention of the model over a sentence and its translation."""
        return next(self._maps(params, [text]))

    def _maps(self, params: Params, sentences: Sequence[str]) -> Iterator[AttentionMaps]:
        run = jax.jit(self.model.attention_maps)
        for sentence, ids, translation in self._typed(params, sentences):
            maps = jax.device_get(run(params, np.array([ids]), np.array([[BOS, *translation.target[:-1]]])))
            labels = pictures.label_maps(sentence, ids, translation.target, self.vocabularies)
            yield AttentionMaps({kind: weights[0] for kind, weights in maps.items()}, labels)

    def _typed(self, params: Params, sentences: Sequence[str]) -> list[tuple[str, list[int], Translation]]:
        """(sentence, ids, translation) of sentences that a user typed."""
        source = corpus.encode_user_sentences(
            sentences, self.vocabularies[0], corpus.max_sentence_length(self.config.data)
        )
        # A batch has as many rows as sentences, up to that of training: one sentence does not cost a whole batch.
        count = min(len(source), self.config.train.batch_size)
        return list(zip(sentences, source, self.translator.translate(params, source, count), strict=True))
