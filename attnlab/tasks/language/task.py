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
"""Approximate number of tokens of an evaluation batch."""


class _TrainingData(NamedTuple):
    """batch: (step, rows) -> rows of the training batch.  examples: rows of an epoch.  valid: the validation split."""

    batch: BatchFunction
    examples: int
    valid: TokenRows


@dataclass(eq=False)
class LanguageTask:
    """Language modelling: predicting the next token of a text; a `Task`."""

    Config: ClassVar[type[RunConfig]] = LanguageConfig
    best: ClassVar[tuple[str, Literal['max', 'min']]] = ('loss', 'min')
    default_split: ClassVar[str] = 'valid'

    config: LanguageConfig
    workdir: Path | None = None

    def check(self) -> None:
        """Raise UserError if a data path is empty or the model cannot be built; no data is read."""
        check_data_paths(self.config.data)
        self._check_model()

    def _check_model(self) -> None:
        check_model_init(self.config.model, _init_function(LanguageModel(5, self.config.model)))

    def outline(self, layers: int | None, countable: bool) -> Outline:
        """Outline of one row of `context` tokens."""
        self._check_model()
        size = corpus.vocabulary_size(self.config.data, self.config.seed)
        config = blocks.outline_config(self.config.model, layers, countable)
        model, T = LanguageModel(size, config), config.context
        params = jax.eval_shape(_init_function(model), jax.random.key(0))
        cached = jax.eval_shape(lambda params: cache.init_cache(model, params, 1, T), params)
        return Outline(
            f'{T} tokens, vocabulary {size}', T, params, (jax.ShapeDtypeStruct((1, T), jnp.int32),),
            lambda params, tokens: model.apply({'params': params}, tokens)[0],
            cached.layers if config.mixer == 'attention' else None,
        )  # fmt: skip

    # Data

    @cached_property
    def _texts(self) -> dict[str, list[corpus.SourceText]]:
        """The texts of both splits."""
        return {split: corpus.read_texts(self.config.data, split, self.config.seed) for split in corpus.SPLITS}

    @cached_property
    def vocabulary(self) -> Tokenizer:
        """The tokenizer, loaded from `workdir` or built from the training split."""
        if self.workdir is not None:
            return corpus.load_text_tokenizer(self.workdir)
        return corpus.build_text_tokenizer(self.config.data, self._texts['train'])

    @cached_property
    def _training(self) -> _TrainingData:
        data, T, B = self.config.data, self.config.model.context, self.config.train.batch_size
        train, valid = (corpus.encode_texts(data, self._texts[split], self.vocabulary) for split in corpus.SPLITS)
        length = sum(map(len, train))
        if T > length:  # rows would be mostly padding, and could exceed the memory
            raise UserError(f'model.context is {T}; expected at most {length}, the tokens of the training text')
        train_rows = corpus.build_rows(data, train, T)
        if data.documents:
            batch = rows.shuffled_row_batches(train_rows, B, self.config.seed)
        else:
            batch = rows.random_windows(train[0], T, B, self.config.seed)
        return _TrainingData(batch, len(train_rows.tokens), corpus.build_rows(data, valid, T))

    @property
    def examples(self) -> int:
        """Number of rows of `context` tokens that hold the training text once."""
        return self._training.examples

    def batch(self, step: int, rows: slice = ALL_ROWS) -> dict[str, np.ndarray]:
        """Return 'tokens', 'labels' and, for packed documents, 'segments' [B, T] int32 of a step, or some rows."""
        return _model_inputs(self._training.batch(step, rows), bool(self.config.data.documents))

    def save(self, workdir: Path) -> None:
        """Write the tokenizer."""
        corpus.save_text_tokenizer(self.vocabulary, workdir)

    # Model

    @cached_property
    def model(self) -> LanguageModel:
        """The model for the vocabulary of this task."""
        return LanguageModel(self.vocabulary.size, self.config.model)

    def init(self, rng: jax.Array) -> Params:
        """Return newly initialised parameters."""
        return _init_function(self.model)(rng)

    def loss(self, params: Params, batch: Batch, rng: jax.Array) -> LossSums:
        """Return the cross-entropy of the labels, and the auxiliary losses of experts."""
        logits, aux = self.model.apply(
            {'params': params}, batch['tokens'], batch.get('segments'), False, rngs={'dropout': rng}
        )
        sums = cross_entropy(logits, batch['labels'], self.config.train.label_smoothing, IGNORE_LABEL)
        return blocks.add_expert_losses(self.config.model, sums, aux)

    # Scores

    def validate(self, params: Params) -> dict[str, float]:
        """Return loss and perplexity of the validation split."""
        return self.scores(params, self._training.valid)

    def scores(self, params: Params, held_out: TokenRows) -> dict[str, float]:
        """Return the mean loss of all labels in nats, and its perplexity."""
        count, T = held_out.tokens.shape
        batches = rows.ordered_row_batches(
            held_out, mesh_axes.evaluation_batch_size(max(1, EVALUATION_TOKENS // T), count)
        )
        sums = [self._score(params, _model_inputs(batch, True)) for batch in batches]
        total, weight = (sum(map(float, column)) for column in zip(*sums, strict=True))
        return {'loss': total / weight, 'perplexity': perplexity(total / weight)}

    @cached_property
    def _score(self) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
        """Compiled function (params, batch) -> (sum of the losses, number of labels)."""

        @jax.jit
        def score(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
            batch = jax.tree.map(mesh_axes.shard_rows, batch)
            logits, _ = self.model.apply({'params': params}, batch['tokens'], batch['segments'])
            sums = cross_entropy(logits, batch['labels'], padding=IGNORE_LABEL)
            return mesh_axes.replicate_arrays((sums.total, sums.weight))

        return score

    def evaluate(self, params: Params, split: str) -> dict[str, Any]:
        """Return the mean loss of all tokens of a split in nats, its perplexity, and bits per character of the text."""
        data = self.config.data
        texts = corpus.read_texts(data, split, self.config.seed)
        held_out = corpus.build_rows(data, corpus.encode_texts(data, texts, self.vocabulary), self.config.model.context)
        scores = self.scores(params, held_out)
        labels = int(np.sum(held_out.labels != IGNORE_LABEL))
        bits = scores['loss'] * labels / sum(len(text.text) for text in texts) / math.log(2)
        return {'split': split, 'tokens': labels, **scores, 'bits_per_character': bits}

    # Use

    def generate(self, params: Params, prompt: str, **options: Any) -> list[str]:
        """Return the prompt with a continuation, for each sample; options: as in `generation.generate_texts`."""
        documents = bool(self.config.data.documents)
        return generation.generate_texts(self.model, params, self.vocabulary, prompt, documents, **options)

    def attend(self, params: Params, texts: Sequence[str], layer: int | None, head: int | None) -> None:
        """Draw the attention over each text, of one layer or head (from 1) or of all (None); print the paths.

        Raises UserError for a text that is longer than the context.
        """
        for text in texts:
            maps = self.attention_maps(params, text)
            folder = head_grid.figure_path(self.workdir or Path(), 'attend', text)
            head_grid.draw_head_grids(folder, *maps, layer, head)

    def attention_maps(self, params: Params, text: str) -> AttentionMaps:
        """Return the attention of every layer and head over a text.

        Raises UserError for a text that is longer than the context.
        """
        ids = generation.encode_prompt(self.vocabulary, text, bool(self.config.data.documents))
        if len(ids) > (context := self.config.model.context):
            raise UserError(f'the text has {len(ids)} tokens; expected at most {context}, the context of the model')
        maps = apply_with_attention_maps(self.model, params, jnp.asarray(ids, jnp.int32)[None])[1]
        pieces = self.vocabulary.pieces(ids)
        return AttentionMaps(
            {kind: jax.device_get(weights[0]) for kind, weights in maps.items()},
            {kind: (pieces, pieces) for kind in maps},
        )


def _init_function(model: LanguageModel) -> Callable[[jax.Array], Params]:
    """Return the function PRNG key -> parameters of a model."""
    return lambda rng: model.init(rng, jnp.zeros((1, 2), jnp.int32))['params']


def _model_inputs(batch: TokenRows, documents: bool) -> dict[str, np.ndarray]:
    """Return tokens, labels and, if a row may hold several documents, segment ids, which cost the model a mask."""
    arrays = {'tokens': batch.tokens, 'labels': batch.labels}
    return arrays | {'segments': batch.segment_ids} if documents else arrays
