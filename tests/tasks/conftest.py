"""Tiny runs of experiments, each trained once a session."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.train import run
from tests.tiny import T, random_parameter, tiny_grammar_config, tiny_language_config, tiny_transformer_config


@pytest.fixture(scope='session')
def tiny(tmp_path_factory):
    """The work directory of a trained tiny run."""
    workdir = tmp_path_factory.mktemp('runs') / 'tiny'
    run.train_run(tiny_grammar_config(), workdir)
    return workdir


@pytest.fixture(scope='session')
def stream(tmp_path_factory):
    """The work directory of a trained language model of a stream of text."""
    folder = tmp_path_factory.mktemp('stream')
    run.train_run(tiny_language_config(folder, model__dropout='0.1', train__accumulate='2'), folder / 'run')
    return folder / 'run'


@pytest.fixture(scope='session')
def documents(tmp_path_factory):
    """The work directory of a trained language model of one line a document, short of learning when they end."""
    folder = tmp_path_factory.mktemp('documents')
    changes = dict(data__documents='lines', train__duration='3 steps', model__experts='2', model__experts_per_token='1')
    run.train_run(tiny_language_config(folder, **changes), folder / 'run')
    return folder / 'run'


@pytest.fixture(scope='session')
def translating(tmp_path_factory):
    """The work directory of a trained tiny Transformer."""
    workdir = tmp_path_factory.mktemp('runs') / 'transformer'
    run.train_run(tiny_transformer_config(), workdir)
    return workdir


@pytest.fixture(scope='session')
def speaker(stream):
    """Model, parameters, vocabulary, and logits [T, V] of ids; drawn, as after few steps all texts go on alike."""
    loaded = run.load_run(stream)
    model, vocabulary = loaded.task.model, loaded.task.vocabulary
    params = jax.tree.map(jnp.asarray, jax.tree_util.tree_map_with_path(random_parameter, loaded.params))
    apply = jax.jit(lambda ids: model.apply({'params': params}, ids)[0][0])

    def logits(ids):
        return np.asarray(apply(np.pad(ids, (0, T - len(ids)))[None].astype(np.int32)))[: len(ids)]

    return model, params, vocabulary, logits
