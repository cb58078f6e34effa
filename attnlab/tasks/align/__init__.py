"""English to French, and the alignment that the attention learned on the way."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.data import batches, grammar
from attnlab.data.vocabulary import PAD, Vocabulary
from attnlab.errors import UserError
from attnlab.models.recurrent import RecurrentSeq2Seq
from attnlab.tasks.align import corpus, pictures, scores, translator
from attnlab.train import checkpoint
from attnlab.train.losses import cross_entropy
from attnlab.train.task import Params, Sums, Task


def check(config: Any) -> None:
    """Raises UserError for values that no model or corpus can be made of, before anything is read or written."""
    corpus.splits(config.data)
    widths = tuple(config.data.widths)
    if not widths or list(widths) != sorted(set(widths)) or widths[0] < 2:
        raise UserError(f'data.widths is {widths}; expected ascending numbers of tokens, 2 or more')
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
    """Data and model of a config; the vocabularies are made once and then stay in `workdir`."""
    train = corpus.read(config.data, 'train', config.seed)
    valid = corpus.read(config.data, 'valid', config.seed)
    vocabularies = corpus.vocabularies(config.data, workdir, train)
    widths = tuple(config.data.widths)
    encoded = corpus.encode_pairs(train, vocabularies, limit=widths[-1])
    held_out = corpus.encode_pairs(valid, vocabularies)
    model = build_model(config, vocabularies[0].size, vocabularies[1].size)
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
        outputs = translator.decode_texts(vocabularies[1], translator.translate(use, params, held_out.source))
        return {'loss': nll / count, 'perplexity': math.exp(nll / count), 'bleu': scores.bleu(outputs, valid.target)}

    return Task(
        examples=len(train.source),
        init=lambda rng: init_params(model, rng),
        batch=batch,
        loss=loss,
        evaluate=evaluate,
        best=('bleu', 'max'),
    )


class Run(NamedTuple):
    """A trained run, ready for use."""

    config: Any
    vocabularies: tuple[Vocabulary, Vocabulary]
    translator: translator.Translator
    params: Params
    step: int


def load(config: Any, workdir: Path) -> Run:
    """The best parameters of a run's directory; raises UserError if it has none yet."""
    vocabularies = corpus.vocabularies(config.data, workdir, None)
    model = build_model(config, vocabularies[0].size, vocabularies[1].size)
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    with checkpoint.manager(workdir) as manager:
        saved = checkpoint.best(manager, shapes)
    if saved is None:
        raise UserError(f'{workdir} has no checkpoint yet; train it first: attnlab train --workdir={workdir} ...')
    use = translator.make(model, tuple(config.data.widths), config.train.batch_size)
    return Run(config, vocabularies, use, saved.params, saved.step)


def evaluate(config: Any, workdir: Path, split: str) -> dict[str, Any]:
    """All scores of a split; writes `samples/SPLIT.json`."""
    pairs = corpus.read(config.data, split, config.seed)
    run = load(config, workdir)
    encoded = corpus.encode_pairs(pairs, run.vocabularies)
    nll, count, forced = translator.force(run.translator, run.params, *encoded)
    translations = translator.translate(run.translator, run.params, encoded.source)
    outputs = translator.decode_texts(run.vocabularies[1], translations)
    source_language, target_language = corpus.languages(config.data)
    found: dict[str, Any] = {
        'split': split,
        'sentences': len(outputs),
        'step': run.step,
        'parameters': sum(x.size for x in jax.tree.leaves(run.params)),
        'loss': nll / count,
        'perplexity': math.exp(nll / count),
        **scores.text_scores(outputs, pairs.target),
    }
    if config.data.name == 'grammar':
        found['exact_match'] = scores.exact_match(outputs, pairs.target, target_language)
    if pairs.links is not None and config.model.attention != 'none':
        found |= scores.alignment_scores(
            forced, *encoded, run.vocabularies, pairs.links, inversions(config, split)
        )
    found['by_length'] = scores.by_length(pairs.source, outputs, pairs.target, source_language)
    pictures.write_samples(workdir, split, pairs, outputs, encoded.source, translations, run.vocabularies)
    return found


def show(workdir: Path, split: str, found: dict[str, Any]) -> None:
    """Prints the scores of `evaluate` and writes the page."""
    from attnlab.report import page

    for key in ('bleu', 'chrf'):
        print(f'{key:<18} {found[key]:8.2f}  {found[f"{key}_signature"]}')
    for key, value in found.items():
        if isinstance(value, float) and key not in ('bleu', 'chrf'):
            print(f'{key:<18} {value:8.4f}')
    for row in found['by_length']:
        print(f'bleu, {row["from"]:>2}-{row["to"]:<2} words  {row["bleu"]:8.2f}  {row["sentences"]} sentences')
    print(f'{found["sentences"]} sentences, {found["parameters"]:,} parameters, step {found["step"]}')
    print(f'page: {page.align_page(workdir, split)}')


def translate(config: Any, workdir: Path, sentences: Sequence[str], joined: bool) -> list[str]:
    """Prints the French of each sentence and draws its alignment; returns the French."""
    run = load(config, workdir)
    source = corpus.encode(sentences, run.vocabularies[0])
    # As many rows as sentences, up to the batch of training: one sentence does not pay for a whole batch.
    size = min(len(source), run.config.train.batch_size)
    translations = translator.translate(run.translator, run.params, source, size)
    outputs = translator.decode_texts(run.vocabularies[1], translations)
    for sentence, output, ids, translation in zip(sentences, outputs, source, translations, strict=True):
        pictures.show(workdir, sentence, output, ids, translation, run.vocabularies, joined)
    return outputs


def inversions(config: Any, split: str) -> Sequence[Sequence[tuple[int, int]]] | None:
    """The adjectives of each sentence that change places with their noun, where the corpus knows them."""
    if config.data.name != 'grammar':
        return None
    return [example.inverted for example in grammar.examples(split, config.data.test_examples, config.seed)]
