"""Text that a model learns to go on with."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.config import check_common
from attnlab.configs import LanguageConfig
from attnlab.configs.fields import typed
from attnlab.data import rows
from attnlab.data.rows import ALL, IGNORE, Rows
from attnlab.data.tokens import Tokens
from attnlab.decode import cache
from attnlab.errors import UserError
from attnlab.kernels import axes
from attnlab.kernels.losses import Sums, cross_entropy
from attnlab.models.language import LanguageModel
from attnlab.tasks import transformer
from attnlab.tasks.language import corpus, pictures, writer
from attnlab.tasks.task import Outline, Params, Task, perplexity

SPLIT = 'valid'
"""The split that `eval` scores unless told otherwise."""

BEST: tuple[str, Literal['max', 'min']] = ('loss', 'min')
"""The score, and its better end, that says which parameters to keep."""

EVALUATED = 8192
"""About so many tokens of an evaluation are in one memory at once."""


def check(config: Any) -> None:
    """Raises UserError for values that no model or text can be made of, before anything is read or written."""
    check_common(config)
    corpus.check(config.data)
    check_model(config)


def check_model(config: Any) -> None:
    """Raises UserError for values that no model can be made of."""
    corpus.check_tokens(config.data)
    transformer.try_init(config.model, _init(build_model(config, 5)))


def outline(config: Any, layers: int | None, active: bool) -> Outline:
    """One row of `context` tokens."""
    size = corpus.vocabulary_size(config.data, config.seed)
    fields = transformer.outlined(config.model, layers, active)
    with config.copy_and_resolve_references().unlocked() as changed:
        changed.model = fields
    model, T = build_model(changed, size), fields.context
    params = jax.eval_shape(_init(model), jax.random.key(0))
    cached = jax.eval_shape(lambda params: cache.start(model, params, 1, T), params)
    return Outline(
        f'{T} tokens, vocabulary {size}', T, params, (jax.ShapeDtypeStruct((1, T), jnp.int32),),
        lambda params, tokens: model.apply({'params': params}, tokens)[0],
        cached.layers if fields.mixer == 'attention' else None,
    )  # fmt: skip


def build_model(config: Any, size: int) -> LanguageModel:
    """The model of a config for a vocabulary of the given size."""
    return LanguageModel(size, typed(LanguageConfig, config).model)


def _init(model: LanguageModel) -> Callable[[jax.Array], Params]:
    return lambda rng: model.init(rng, jnp.zeros((1, 2), jnp.int32))['params']


def build(config: Any, workdir: Path) -> Task:
    """Data and model of a config, with the vocabulary that lies in `workdir` or, in a new run, built from its text."""
    texts = {split: corpus.read(config.data, split, config.seed) for split in corpus.SPLITS}
    vocabulary = corpus.vocabulary(config.data, workdir, texts['train'])
    ids = {split: corpus.encode(config.data, each, vocabulary) for split, each in texts.items()}
    model = build_model(config, vocabulary.size)
    T, B = config.model.context, config.train.batch_size
    length = sum(map(len, ids['train']))
    if T > length:  # rows would be padding for the most part, as large as the memory or larger
        raise UserError(f'model.context is {T}; expected at most {length}, the tokens of the training text')
    every = corpus.every(config.data, ids['train'], T)
    if config.data.documents:
        draw = rows.shuffled(every, B, config.seed)
    else:
        draw = rows.windows(ids['train'][0], T, B, config.seed)
    held_out = corpus.every(config.data, ids['valid'], T)
    score = scorer(model)
    smoothing = config.train.label_smoothing

    def loss(params: Params, batch: Any, rng: jax.Array) -> Sums:
        logits, said = model.apply(
            {'params': params}, batch['tokens'], batch.get('segments'), False, rngs={'dropout': rng}
        )
        sums = cross_entropy(logits, batch['labels'], smoothing, IGNORE)
        more, watched = transformer.auxiliary(config.model, said, sums.weight)
        return Sums(sums.total + more, sums.weight, sums.extras | watched)

    return Task(
        save=lambda workdir: corpus.save(vocabulary, workdir),
        examples=len(every.tokens),
        init=_init(model),
        batch=lambda step, rows=ALL: arrays(draw(step, rows), bool(config.data.documents)),
        loss=loss,
        evaluate=lambda params: score(params, held_out),
        best=BEST,
    )


def arrays(batch: Rows, documents: bool) -> dict[str, np.ndarray]:
    """What the model reads; the segments only where there are several, as all of one row's pays no mask."""
    both = {'tokens': batch.tokens, 'labels': batch.labels}
    return both | {'segments': batch.segment_ids} if documents else both


def scorer(model: LanguageModel) -> Callable[[Params, Rows], dict[str, float]]:
    """(params, rows) -> mean loss in nats of every label, and its perplexity."""

    @jax.jit
    def score(params: Params, batch: Any) -> tuple[jax.Array, jax.Array]:
        batch = jax.tree.map(axes.spread, batch)
        logits, _ = model.apply({'params': params}, batch['tokens'], batch['segments'])
        sums = cross_entropy(logits, batch['labels'], padding=IGNORE)
        return axes.whole((sums.total, sums.weight))

    def all_of(params: Params, held_out: Rows) -> dict[str, float]:
        count, T = held_out.tokens.shape
        batches = rows.in_order(held_out, axes.at_once(max(1, EVALUATED // T), count))
        sums = [score(params, arrays(batch, True)) for batch in batches]
        total, weight = (sum(float(each) for each in column) for column in zip(*sums, strict=True))
        return {'loss': total / weight, 'perplexity': perplexity(total / weight)}

    return all_of


def init(config: Any, workdir: Path) -> Callable[[jax.Array], Params]:
    """A key gives fresh parameters, of the size that the vocabulary of a run's directory asks for."""
    return _init(build_model(config, corpus.vocabulary(config.data, workdir).size))


def in_use(config: Any, workdir: Path) -> tuple[LanguageModel, Tokens]:
    """What a trained run needs besides its parameters."""
    vocabulary = corpus.vocabulary(config.data, workdir)
    return build_model(config, vocabulary.size), vocabulary


def evaluate(config: Any, workdir: Path, params: Params, split: str) -> dict[str, Any]:
    """The loss of every token of a split, in nats, its perplexity, and bits per character of the text."""
    texts = corpus.read(config.data, split, config.seed)
    model, vocabulary = in_use(config, workdir)
    held_out = corpus.every(config.data, corpus.encode(config.data, texts, vocabulary), config.model.context)
    found = scorer(model)(params, held_out)
    predicted = int(np.sum(held_out.labels != IGNORE))
    characters = sum(len(text.text) for text in texts)
    bits = found['loss'] * predicted / characters / math.log(2)
    return {'split': split, 'tokens': predicted, **found, 'bits_per_character': bits}


def generate(config: Any, workdir: Path, params: Params, prompt: str, **choices: Any) -> None:
    """Prints the prompt and what the model says after it; choices as in `writer.write`."""
    model, vocabulary = in_use(config, workdir)
    for text in writer.write(model, params, vocabulary, prompt, bool(config.data.documents), **choices):
        print(text)


def attend(config: Any, workdir: Path, params: Params, texts: list[str], **choices: Any) -> None:
    """Draws the attention of every layer and head over a text; choices as in `pictures.draw`."""
    model, vocabulary = in_use(config, workdir)
    for text in texts:
        pictures.show(workdir, model, params, vocabulary, text, bool(config.data.documents), **choices)
