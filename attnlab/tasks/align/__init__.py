"""English to French, and the alignment that the attention learned on the way."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import files
from attnlab.data import batches, grammar
from attnlab.data.alignments import Link, write_links
from attnlab.data.vocabulary import PAD, Vocabulary
from attnlab.errors import UserError
from attnlab.kernels.losses import Sums, cross_entropy
from attnlab.tasks import transformer
from attnlab.tasks.align import alignment, corpus, models, pictures, scores, translator
from attnlab.tasks.task import Outline, Params, Task, perplexity

SPLIT = 'test'
"""The split that `eval` scores unless told otherwise."""

BEST: tuple[str, Literal['max', 'min']] = ('bleu', 'max')
"""The score, and its better end, that says which parameters to keep."""

READINGS = {'emit': 0, 'shifted': 1}
"""How the alignment is read: at the step that emits a word, and one later (see `alignment.links`)."""


def check(config: Any) -> None:
    """Raises UserError for values that no model or corpus can be made of, before anything is read or written."""
    corpus.check(config.data)
    check_model(config)
    if config.decode.beams < 1:
        raise UserError(f'decode.beams is {config.decode.beams}; expected 1 (greedy) or more')
    if config.decode.length_penalty < 0:
        raise UserError(f'decode.length_penalty is {config.decode.length_penalty}; expected 0 or more')


def check_model(config: Any) -> None:
    """Raises UserError for values that no model can be made of."""
    corpus.check_sizes(config.data)
    transformer.try_init(config.model, models.build(config, 5, 5).init)


def outline(config: Any, layers: int | None, active: bool) -> Outline:
    """One pair of sentences as long as the last of the widths, in vocabularies of the size that is asked for."""
    size, T = config.data.vocabulary_size, config.data.widths[-1]
    with config.copy_and_resolve_references().unlocked() as changed:
        if config.model.name == 'transformer':
            changed.model = transformer.outlined(config.model, layers, active)
            changed.model.alignment_layer = 1
    model = models.build(changed, size, size)
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, T), jnp.int32)
    state = jax.eval_shape(lambda params, source: model.start(params, source, T), params, tokens)
    return Outline(
        f'{T} source and {T} target tokens, vocabularies {size}', 2 * T, params, (tokens, tokens),
        lambda params, source, inputs: model.forward(params, source, inputs, None)[0],
        state['cache']['decoder'] if config.model.name == 'transformer' else None,
    )  # fmt: skip


def build(config: Any, workdir: Path) -> Task:
    """Data and model of a config, with the vocabularies that lie in `workdir` or, in a new run, built from its data."""
    train, valid = (corpus.read(config.data, split, config.seed, linked=False) for split in ('train', 'valid'))
    vocabularies = corpus.vocabularies(config.data, workdir, train)
    widths = tuple(config.data.widths)
    encoded = corpus.encode_pairs(train, vocabularies, limit=widths[-1])
    held_out = corpus.encode_pairs(valid, vocabularies, corpus.longest(config.data))
    model = models.build(config, *(each.size for each in vocabularies))
    lengths = np.array([max(len(a), len(b)) for a, b in zip(*encoded, strict=True)])
    rows_of = batches.shuffled(lengths, widths, config.train.batch_size, config.seed)
    use = translator.make(model, widths, config.train.batch_size)

    def batch(step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        width, examples = rows_of(step)
        source, target = (batches.pad(side, examples[rows], width) for side in encoded)
        return {'source': source, 'target': target}

    def loss(params: Params, batch: Any, rng: jax.Array) -> Sums:
        inputs = translator.shift(batch['target'])
        logits, said = model.forward(params, batch['source'], inputs, rng)
        sums = cross_entropy(logits, batch['target'], config.train.label_smoothing, PAD)
        more, watched = transformer.auxiliary(config.model, said, sums.weight)
        return Sums(sums.total + more, sums.weight, sums.extras | watched)

    def evaluate(params: Params) -> dict[str, float]:
        nll, count, _ = translator.force(use, params, *held_out)
        if not np.isfinite(nll):  # there is nothing to translate with; the loop raises for the loss
            return {'loss': nll}
        translations = translator.translate(use, params, held_out.source)
        outputs = [vocabularies[1].decode(translation.target) for translation in translations]
        return {'loss': nll / count, 'perplexity': perplexity(nll / count), 'bleu': scores.bleu(outputs, valid.target)}

    return Task(
        save=lambda workdir: corpus.save(vocabularies, workdir),
        examples=len(train.source),
        init=model.init,
        batch=batch,
        loss=loss,
        evaluate=evaluate,
        best=BEST,
    )


def init(config: Any, workdir: Path) -> Callable[[jax.Array], Params]:
    """A key gives fresh parameters, of the sizes that the vocabularies of a run's directory ask for."""
    return models.build(config, *(each.size for each in corpus.vocabularies(config.data, workdir))).init


def in_use(config: Any, workdir: Path) -> tuple[translator.Translator, tuple[Vocabulary, Vocabulary]]:
    """What a trained run needs besides its parameters."""
    vocabularies = corpus.vocabularies(config.data, workdir)
    model = models.build(config, *(each.size for each in vocabularies))
    decode = config.decode
    use = translator.make(model, config.data.widths, config.train.batch_size, decode.beams, decode.length_penalty)
    return use, vocabularies


def evaluate(config: Any, workdir: Path, params: Params, split: str) -> dict[str, Any]:
    """All scores of a split; writes `samples/SPLIT.json` and the references' alignment, `samples/SPLIT.links`."""
    pairs = corpus.read(config.data, split, config.seed)
    use, vocabularies = in_use(config, workdir)
    encoded = corpus.encode_pairs(pairs, vocabularies, corpus.longest(config.data))
    nll, count, forced = translator.force(use, params, *encoded)
    translations = translator.translate(use, params, encoded.source)
    outputs = [vocabularies[1].decode(translation.target) for translation in translations]
    source_language, target_language = corpus.languages(config.data)
    found: dict[str, Any] = {'split': split, 'sentences': len(outputs)}
    found |= scores.text_scores(outputs, pairs.target, target_language)
    found |= {'loss': nll / count, 'perplexity': perplexity(nll / count)}
    if config.data.name == 'grammar':
        found['exact_match'] = scores.exact_match(outputs, pairs.target, target_language)
    samples = workdir / 'samples'
    with files.optional(workdir):
        samples.mkdir(exist_ok=True)
    if models.attends(config):
        found |= _alignment(config, use, samples / f'{split}.links', forced, encoded, vocabularies, pairs)
    found['by_length'] = scores.by_length(pairs.source, outputs, pairs.target, source_language)
    path = samples / f'{split}.json'
    with files.optional(workdir):
        pictures.write_samples(path, pairs, outputs, encoded.source, translations, vocabularies, use.shift)
    return found


def _alignment(
    config: Any,
    use: translator.Translator,
    path: Path,
    forced: Any,
    encoded: corpus.Encoded,
    vocabularies: Any,
    pairs: Any,
) -> dict[str, Any]:
    """Writes the links that the attention gives the references, and scores them where the corpus has gold ones."""

    def links(layer: int) -> dict[str, list[frozenset[Link]]]:
        weights = [one[layer] for one in forced]
        return {
            name: alignment.of_split(weights, encoded.source, encoded.target, vocabularies, shift)
            for name, shift in READINGS.items()
        }

    chosen = links(use.layer)
    with files.optional(path.parents[1]):
        write_links(path, chosen['shifted' if use.shift else 'emit'])
    if pairs.links is None:
        return {}
    found: dict[str, Any] = scores.alignment_scores(chosen, pairs.links, inversions(config, path.stem))
    if (layers := forced[0].shape[0]) > 1:
        each = [scores.alignment_scores(links(layer), pairs.links, None) for layer in range(layers)]
        found['aer_by_layer'] = [
            {'layer': layer, **{name: rates[f'aer_{name}'] for name in READINGS}} for layer, rates in enumerate(each, 1)
        ]
    return found


def translate(
    config: Any,
    workdir: Path,
    params: Params,
    sentences: Sequence[str],
    joined: bool,
    layer: int | None = None,
    shifted: bool = False,
) -> None:
    """Prints the French of each sentence and draws its alignment, as `read_as` says."""
    config = read_as(config, layer, shifted)
    use, vocabularies = in_use(config, workdir)
    source = corpus.encode_typed(sentences, vocabularies[0], corpus.longest(config.data))
    # As many rows as sentences, up to the batch of training: one sentence does not pay for a whole batch.
    translations = translator.translate(use, params, source, min(len(source), use.batch_size))
    for sentence, ids, translation in zip(sentences, source, translations, strict=True):
        pictures.show(workdir, sentence, ids, translation, vocabularies, joined, use.shift)


def read_as(config: Any, layer: int | None, shifted: bool) -> Any:
    """The config with its alignment read off another layer, or one step after a word."""
    if layer is None and not shifted:
        return config
    if config.model.name != 'transformer':
        raise UserError(f'a {config.model.name} model has one attention, read where it makes a word; --layer and '
                        '--shifted are for a transformer')  # fmt: skip
    with config.copy_and_resolve_references().unlocked() as changed:
        if layer is not None:
            changed.model.alignment_layer = layer
        if shifted:
            changed.model.alignment_shift = 1
    return changed


def attend(
    config: Any, workdir: Path, params: Params, texts: Sequence[str], layer: int | None, head: int | None
) -> None:
    """Draws every attention of the model over each sentence and its translation."""
    use, vocabularies = in_use(config, workdir)
    model = models.build(config, *(each.size for each in vocabularies))
    source = corpus.encode_typed(texts, vocabularies[0], corpus.longest(config.data))
    translations = translator.translate(use, params, source, min(len(source), use.batch_size))
    for sentence, ids, made in zip(texts, source, translations, strict=True):
        pictures.attend(workdir, model, params, vocabularies, sentence, ids, made.target, layer, head)


def inversions(config: Any, split: str) -> Sequence[Sequence[Link]] | None:
    """The adjectives of each sentence that change places with their noun, where the corpus knows them."""
    if config.data.name != 'grammar':
        return None
    return [example.inverted for example in grammar.examples(split, config.data.test_examples, config.seed)]
