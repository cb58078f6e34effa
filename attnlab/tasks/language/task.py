"""The task of language modelling."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.configs import LanguageConfig, RunConfig
from attnlab.data import rows
from attnlab.data.rows import ALL_ROWS, IGNORE_LABEL, BatchFunction, TokenRows
from attnlab.data.tokenizers import Tokenizer
from attnlab.decode import cache
from attnlab.errors import UserError
from attnlab.kernels import mesh_axes
from attnlab.kernels.losses import LossSums, cross_entropy
from attnlab.models.language import LanguageModel
from attnlab.models.maps import apply_with_attention_maps
from attnlab.tasks import blocks, head_grid
from attnlab.tasks.checks import check_data_paths, check_model_init
from attnlab.tasks.language import corpus, generation
from attnlab.tasks.task import AttentionMaps, Batch, Outline, Params, perplexity

EVALUATION_TOKENS = 8192
"""About the number of tokens of a batch in evaluation."""


class _Training(NamedTuple):
    """draw: (step, rows) -> rows of the training batch.  examples: rows of an epoch.  valid: the validation split."""

    draw: BatchFunction
    examples: int
    valid: TokenRows


@dataclass(eq=False)
class LanguageTask:
    """Text that a model learns to continue."""

    Config: ClassVar[type[RunConfig]] = LanguageConfig
    best: ClassVar[tuple[str, Literal['max', 'min']]] = ('loss', 'min')
    default_split: ClassVar[str] = 'valid'

    config: LanguageConfig
    workdir: Path | None = None

    def check(self) -> None:
        check_data_paths(self.config.data)
        self._check_model()

    def _check_model(self) -> None:
        check_model_init(self.config.model, _init(LanguageModel(5, self.config.model)))

    def outline(self, layers: int | None, active: bool) -> Outline:
        """One row of `context` tokens."""
        self._check_model()
        size = corpus.vocabulary_size(self.config.data, self.config.seed)
        config = blocks.outline_config(self.config.model, layers, active)
        model, T = LanguageModel(size, config), config.context
        params = jax.eval_shape(_init(model), jax.random.key(0))
        cached = jax.eval_shape(lambda params: cache.init_cache(model, params, 1, T), params)
        return Outline(
            f'{T} tokens, vocabulary {size}', T, params, (jax.ShapeDtypeStruct((1, T), jnp.int32),),
            lambda params, tokens: model.apply({'params': params}, tokens)[0],
            cached.layers if config.mixer == 'attention' else None,
        )  # fmt: skip

    # Data

    @cached_property
    def _texts(self) -> dict[str, list[corpus.SourceText]]:
        return {split: corpus.read_texts(self.config.data, split, self.config.seed) for split in corpus.SPLITS}

    @cached_property
    def vocabulary(self) -> Tokenizer:
        if self.workdir is not None:
            return corpus.load_vocabulary(self.workdir)
        return corpus.build_vocabulary(self.config.data, self._texts['train'])

    @cached_property
    def _training(self) -> _Training:
        data, T, B = self.config.data, self.config.model.context, self.config.train.batch_size
        train, valid = (corpus.encode_texts(data, self._texts[split], self.vocabulary) for split in corpus.SPLITS)
        length = sum(map(len, train))
        if T > length:  # rows would be padding for the most part, as large as the memory or larger
            raise UserError(f'model.context is {T}; expected at most {length}, the tokens of the training text')
        every = corpus.build_rows(data, train, T)
        if data.documents:
            draw = rows.shuffled_row_batches(every, B, self.config.seed)
        else:
            draw = rows.random_windows(train[0], T, B, self.config.seed)
        return _Training(draw, len(every.tokens), corpus.build_rows(data, valid, T))

    @property
    def examples(self) -> int:
        return self._training.examples

    def batch(self, step: int, rows: slice = ALL_ROWS) -> dict[str, np.ndarray]:
        return _arrays(self._training.draw(step, rows), bool(self.config.data.documents))

    def save(self, workdir: Path) -> None:
        corpus.save_vocabulary(self.vocabulary, workdir)

    # Model

    @cached_property
    def model(self) -> LanguageModel:
        return LanguageModel(self.vocabulary.size, self.config.model)

    def init(self, rng: jax.Array) -> Params:
        return _init(self.model)(rng)

    def loss(self, params: Params, batch: Batch, rng: jax.Array) -> LossSums:
        logits, aux = self.model.apply(
            {'params': params}, batch['tokens'], batch.get('segments'), False, rngs={'dropout': rng}
        )
        sums = cross_entropy(logits, batch['labels'], self.config.train.label_smoothing, IGNORE_LABEL)
        return blocks.add_expert_losses(self.config.model, sums, aux)

    # Scores

    def validate(self, params: Params) -> dict[str, float]:
        return self.scores(params, self._training.valid)

    def scores(self, params: Params, held_out: TokenRows) -> dict[str, float]:
        """Mean loss in nats of all labels, and its perplexity."""
        count, T = held_out.tokens.shape
        batches = rows.ordered_row_batches(
            held_out, mesh_axes.evaluation_batch_size(max(1, EVALUATION_TOKENS // T), count)
        )
        sums = [self._score(params, _arrays(batch, True)) for batch in batches]
        total, weight = (sum(float(each) for each in column) for column in zip(*sums, strict=True))
        return {'loss': total / weight, 'perplexity': perplexity(total / weight)}

    @cached_property
    def _score(self) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
        """(params, batch) -> sum of the loss, and of the weights."""

        @jax.jit
        def score(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
            batch = jax.tree.map(mesh_axes.shard_rows, batch)
            logits, _ = self.model.apply({'params': params}, batch['tokens'], batch['segments'])
            sums = cross_entropy(logits, batch['labels'], padding=IGNORE_LABEL)
            return mesh_axes.replicate_arrays((sums.total, sums.weight))

        return score

    def evaluate(self, params: Params, split: str) -> dict[str, Any]:
        """Loss of all tokens of a split in nats, its perplexity, and bits per character of the text."""
        data = self.config.data
        texts = corpus.read_texts(data, split, self.config.seed)
        held_out = corpus.build_rows(data, corpus.encode_texts(data, texts, self.vocabulary), self.config.model.context)
        found = self.scores(params, held_out)
        predicted = int(np.sum(held_out.labels != IGNORE_LABEL))
        bits = found['loss'] * predicted / sum(len(text.text) for text in texts) / math.log(2)
        return {'split': split, 'tokens': predicted, **found, 'bits_per_character': bits}

    # Use

    def generate(self, params: Params, prompt: str, **options: Any) -> list[str]:
        """Return continuations of a prompt, each with the prompt before it; options: as in `writer.generate_texts`."""
        documents = bool(self.config.data.documents)
        return generation.generate_texts(self.model, params, self.vocabulary, prompt, documents, **options)

    def attend(self, params: Params, texts: Sequence[str], layer: int | None, head: int | None) -> None:
        """Draw the attention of every layer and head over each text; UserError if one is longer than the context."""
        for text in texts:
            maps = self.attention_maps(params, text)
            folder = head_grid.figure_path(self.workdir or Path(), 'attend', text)
            head_grid.draw_head_grids(folder, *maps, layer, head)

    def attention_maps(self, params: Params, text: str) -> AttentionMaps:
        """Return the attention of every layer and head over a text; UserError if it is longer than the context."""
        ids = generation.encode_prompt(self.vocabulary, text, bool(self.config.data.documents))
        if len(ids) > (context := self.config.model.context):
            raise UserError(f'the text has {len(ids)} tokens; expected at most {context}, the context of the model')
        maps = apply_with_attention_maps(self.model, params, jnp.asarray(ids, jnp.int32)[None])[1]
        pieces = self.vocabulary.pieces(ids)
        return AttentionMaps(
            {kind: jax.device_get(weights[0]) for kind, weights in maps.items()},
            {kind: (pieces, pieces) for kind in maps},
        )


def _init(model: LanguageModel) -> Callable[[jax.Array], Params]:
    return lambda rng: model.init(rng, jnp.zeros((1, 2), jnp.int32))['params']


def _arrays(batch: TokenRows, documents: bool) -> dict[str, np.ndarray]:
    """What the model reads; segments only if a row may have several, because they cost a mask."""
    arrays = {'tokens': batch.tokens, 'labels': batch.labels}
    return arrays | {'segments': batch.segment_ids} if documents else arrays
