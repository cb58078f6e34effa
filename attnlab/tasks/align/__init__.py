"""English to French, and the alignment that the attention learned on the way."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.data import batches, grammar
from attnlab.data.alignments import Link, write_links
from attnlab.data.vocabulary import PAD, Vocabulary
from attnlab.errors import UserError
from attnlab.kernels.losses import Sums, cross_entropy
from attnlab.models.recurrent import RecurrentSeq2Seq
from attnlab.tasks.align import alignment, corpus, pictures, scores, translator
from attnlab.tasks.task import Params, Task

READINGS = {'emit': 0, 'shifted': 1}
"""How the alignment is read: at the step that emits a word, and one later (see `alignment.links`)."""


def check(config: Any) -> None:
    """Raises UserError for values that no model or corpus can be made of, before anything is read or written."""
    if config.seed < 0:
        raise UserError(f'seed is {config.seed}; expected 0 or more')
    corpus.check(config.data)
    build_model(config, 5, 5)
    if not 0.0 <= config.train.label_smoothing < 1.0:
        raise UserError(f'train.label_smoothing is {config.train.label_smoothing}; expected 0 <= smoothing < 1')


def build_model(config: Any, source_size: int, target_size: int) -> RecurrentSeq2Seq:
    """The model of a config for vocabularies of the given sizes."""
    model = config.model
    choices = {'cell': ('gru', 'lstm'), 'attention': ('additive', 'dot', 'none'), 'name': ('recurrent',)}
    for field, allowed in choices.items():
        if model[field] not in allowed:
            raise UserError(f'model.{field} is {model[field]!r}; expected one of {", ".join(allowed)}')
    for field in ('embedding', 'hidden', 'encoder_layers'):
        if model[field] < 1:
            raise UserError(f'model.{field} is {model[field]}; expected 1 or more')
    if not 0.0 <= model.dropout < 1.0:
        raise UserError(f'model.dropout is {model.dropout}; expected 0 <= rate < 1')
    return RecurrentSeq2Seq(
        source_size, target_size, model.cell, model.embedding, model.hidden, model.encoder_layers,
        model.bidirectional, model.reverse_source, model.attention, model.dropout,
    )  # fmt: skip


def init_params(model: RecurrentSeq2Seq, rng: jax.Array) -> Params:
    """Fresh parameters."""
    tokens = jnp.ones((1, 2), jnp.int32)
    return model.init(rng, tokens, tokens)['params']


def build(config: Any, workdir: Path) -> Task:
    """Data and model of a config, with the vocabularies that lie in `workdir` or, in a new run, built from its data."""
    train = corpus.read(config.data, 'train', config.seed)
    valid = corpus.read(config.data, 'valid', config.seed)
    vocabularies = corpus.vocabularies(config.data, workdir, train)
    widths = tuple(config.data.widths)
    encoded = corpus.encode_pairs(train, vocabularies, limit=widths[-1])
    held_out = corpus.encode_pairs(valid, vocabularies)
    model = build_model(config, *(each.size for each in vocabularies))
    lengths = np.array([max(len(a), len(b)) for a, b in zip(*encoded, strict=True)])
    rows_of = batches.shuffled(lengths, widths, config.train.batch_size, config.seed)
    use = translator.make(model, widths, config.train.batch_size)

    def batch(step: int) -> dict[str, np.ndarray]:
        width, rows = rows_of(step)
        source, target = (batches.pad(side, rows, width) for side in encoded)
        return {'source': source, 'target': target}

    def loss(params: Params, batch: Any, rng: jax.Array) -> Sums:
        inputs = translator.shift(batch['target'])
        logits, _ = model.apply({'params': params}, batch['source'], inputs, False, rngs={'dropout': rng})
        return cross_entropy(logits, batch['target'], config.train.label_smoothing, PAD)

    def evaluate(params: Params) -> dict[str, float]:
        nll, count, _ = translator.force(use, params, *held_out)
        translations = translator.translate(use, params, held_out.source)
        outputs = [vocabularies[1].decode(translation.target) for translation in translations]
        return {'loss': nll / count, 'perplexity': math.exp(nll / count), 'bleu': scores.bleu(outputs, valid.target)}

    return Task(
        save=lambda workdir: corpus.save(vocabularies, workdir),
        examples=len(train.source),
        init=lambda rng: init_params(model, rng),
        batch=batch,
        loss=loss,
        evaluate=evaluate,
        best=('bleu', 'max'),
    )


def init(config: Any, workdir: Path) -> Callable[[jax.Array], Params]:
    """A key gives fresh parameters, of the sizes that the vocabularies of a run's directory ask for."""
    model = build_model(config, *(each.size for each in corpus.vocabularies(config.data, workdir)))
    return lambda rng: init_params(model, rng)


def in_use(config: Any, workdir: Path) -> tuple[translator.Translator, tuple[Vocabulary, Vocabulary]]:
    """What a trained run needs besides its parameters."""
    vocabularies = corpus.vocabularies(config.data, workdir)
    model = build_model(config, *(each.size for each in vocabularies))
    return translator.make(model, tuple(config.data.widths), config.train.batch_size), vocabularies


def evaluate(config: Any, workdir: Path, params: Params, split: str) -> dict[str, Any]:
    """All scores of a split; writes `samples/SPLIT.json` and the references' alignment, `samples/SPLIT.links`."""
    pairs = corpus.read(config.data, split, config.seed)
    use, vocabularies = in_use(config, workdir)
    encoded = corpus.encode_pairs(pairs, vocabularies)
    nll, count, forced = translator.force(use, params, *encoded)
    translations = translator.translate(use, params, encoded.source)
    outputs = [vocabularies[1].decode(translation.target) for translation in translations]
    source_language, target_language = corpus.languages(config.data)
    found: dict[str, Any] = {'split': split, 'sentences': len(outputs)}
    found |= scores.text_scores(outputs, pairs.target)
    found |= {'loss': nll / count, 'perplexity': math.exp(nll / count)}
    if config.data.name == 'grammar':
        found['exact_match'] = scores.exact_match(outputs, pairs.target, target_language)
    samples = workdir / 'samples'
    samples.mkdir(exist_ok=True)
    if config.model.attention != 'none':
        links = {name: alignment.of_split(forced, *encoded, vocabularies, shift) for name, shift in READINGS.items()}
        write_links(samples / f'{split}.links', links['emit'])
        if pairs.links is not None:
            found |= scores.alignment_scores(links, pairs.links, inversions(config, split))
    found['by_length'] = scores.by_length(pairs.source, outputs, pairs.target, source_language)
    pictures.write_samples(samples / f'{split}.json', pairs, outputs, encoded.source, translations, vocabularies)
    return found


def translate(config: Any, workdir: Path, params: Params, sentences: Sequence[str], joined: bool) -> None:
    """Prints the French of each sentence and draws its alignment."""
    use, vocabularies = in_use(config, workdir)
    source = corpus.encode(sentences, vocabularies[0])
    # As many rows as sentences, up to the batch of training: one sentence does not pay for a whole batch.
    translations = translator.translate(use, params, source, min(len(source), use.batch_size))
    for sentence, ids, translation in zip(sentences, source, translations, strict=True):
        pictures.show(workdir, sentence, ids, translation, vocabularies, joined)


def inversions(config: Any, split: str) -> Sequence[Sequence[Link]] | None:
    """The adjectives of each sentence that change places with their noun, where the corpus knows them."""
    if config.data.name != 'grammar':
        return None
    return [example.inverted for example in grammar.examples(split, config.data.test_examples, config.seed)]
