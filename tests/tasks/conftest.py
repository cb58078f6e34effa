"""Small trained runs, each trained once in a test session."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.train import run
from tests.tiny import (
    T,
    random_parameter,
    tiny_digits_config,
    tiny_grammar_config,
    tiny_language_config,
    tiny_transformer_config,
)


@pytest.fixture(scope='session')
def recurrent_run(tmp_path_factory):
    """Work directory of a trained recurrent translation model."""
    workdir = tmp_path_factory.mktemp('runs') / 'tiny'
    run.train_run(tiny_grammar_config(), workdir)
    return workdir


@pytest.fixture(scope='session')
def stream_run(tmp_path_factory):
    """Work directory of a language model trained on one stream of text."""
    folder = tmp_path_factory.mktemp('stream')
    run.train_run(tiny_language_config(folder, model__dropout='0.1', train__accumulate='2'), folder / 'run')
    return folder / 'run'


@pytest.fixture(scope='session')
def documents_run(tmp_path_factory):
    """Work directory of a language model trained on documents of one line, too briefly to learn where they end."""
    folder = tmp_path_factory.mktemp('documents')
    changes = dict(data__documents='lines', train__duration='3 steps', model__experts='2', model__experts_per_token='1')
    run.train_run(tiny_language_config(folder, **changes), folder / 'run')
    return folder / 'run'


@pytest.fixture(scope='session')
def transformer_run(tmp_path_factory):
    """Work directory of a trained Transformer that translates."""
    workdir = tmp_path_factory.mktemp('runs') / 'transformer'
    run.train_run(tiny_transformer_config(), workdir)
    return workdir


@pytest.fixture(scope='session')
def vision_run(tmp_path_factory):
    """Work directory of a small run on digits, trained and evaluated."""
    workdir = tmp_path_factory.mktemp('runs') / 'vision_run'
    run.train_run(tiny_digits_config(), workdir)
    run.evaluate_run(workdir)
    return workdir


@pytest.fixture(scope='session')
def language_model(stream_run):
    """Model, random parameters, tokenizer, and a function from ids [t] to logits [t, V].

    The parameters are random because after a few training steps all texts continue alike.
    """
    loaded = run.load_run(stream_run)
    model, vocabulary = loaded.task.model, loaded.task.vocabulary
    params = jax.tree.map(jnp.asarray, jax.tree_util.tree_map_with_path(random_parameter, loaded.params))
    apply = jax.jit(lambda ids: model.apply({'params': params}, ids)[0][0])

    def logits(ids):
        return np.asarray(apply(np.pad(ids, (0, T - len(ids)))[None].astype(np.int32)))[: len(ids)]

    return model, params, vocabulary, logits
