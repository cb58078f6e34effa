"""Tiny runs of experiments, each trained once a session."""

import hashlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import configs
from attnlab.tasks import language
from attnlab.train import run

TINY = {
    'data.train_examples': '128', 'data.test_examples': '24', 'data.widths': '12,20',
    'model.embedding': '8', 'model.hidden': '12',
    'optimizer.learning_rate': '0.01', 'optimizer.warmup': '2 steps',
    'train.batch_size': '16', 'train.duration': '20 steps', 'train.eval_every': '10 steps',
    'train.save_every': '3 steps', 'train.log_every': '1 steps', 'train.mesh': 'data=1',
}  # fmt: skip
T = 16  # the context of a tiny language model


def tiny_config(arg='', **changes):
    """The grammar experiment cut down to a second or two; changes: dotted keys with `__` for the dot."""
    overrides = TINY | {key.replace('__', '.'): value for key, value in changes.items()}
    return configs.load(f'experiments/align/grammar_gru.py{":" + arg if arg else ""}', list(overrides.items()))


@pytest.fixture(scope='session')
def tiny(tmp_path_factory):
    """The work directory of a trained tiny run."""
    workdir = tmp_path_factory.mktemp('runs') / 'tiny'
    run.train(tiny_config(), workdir)
    return workdir


LINES = [f'the {who} {does} {whom}.' for who in ('cat', 'dog', 'old teacher') for does in ('sees', 'fears', 'likes')
         for whom in ('Zoe', 'a bird', 'the quick mouse', 'Jim')]  # fmt: skip
TRANSFORMER = {'model.layers': '1', 'model.width': '16', 'model.heads': '2', 'model.context': '16'}
STEPS = {
    'optimizer.learning_rate': '0.01', 'optimizer.warmup': '2 steps', 'train.batch_size': '4',
    'train.duration': '20 steps', 'train.eval_every': '14 steps', 'train.save_every': '7 steps',
    'train.log_every': '1 steps', 'train.mesh': 'data=1',
}  # fmt: skip


def tiny_language(folder, arg='', **changes):
    """The experiment with Shakespeare's characters on `LINES`, which are put into a folder, as small."""
    folder.mkdir(exist_ok=True)
    (folder / 'input.txt').write_text('\n'.join(LINES) + '\n')
    overrides = TRANSFORMER | STEPS | {'data.folder': str(folder)}
    overrides |= {key.replace('__', '.'): str(value) for key, value in changes.items()}
    return configs.load(f'experiments/language/shakespeare_char.py{":" + arg if arg else ""}', list(overrides.items()))


def tiny_transformer(**changes):
    """The grammar's Transformer, as small, with two layers."""
    data = {key: value for key, value in TINY.items() if key.startswith(('data.', 'train.'))}
    overrides = TRANSFORMER | data | {'model.layers': '2', 'data.widths': '20'}
    overrides |= {'optimizer.warmup': '2 steps', 'train.duration': '3 steps'}
    overrides |= {'model.alignment_layer': '2', 'model.alignment_shift': '1'}
    overrides |= {key.replace('__', '.'): str(value) for key, value in changes.items()}
    return configs.load('experiments/align/grammar_transformer.py', list(overrides.items()))


@pytest.fixture(scope='session')
def stream(tmp_path_factory):
    """The work directory of a trained language model of a stream of text."""
    folder = tmp_path_factory.mktemp('stream')
    run.train(tiny_language(folder, model__dropout='0.1', train__accumulate='2'), folder / 'run')
    return folder / 'run'


@pytest.fixture(scope='session')
def documents(tmp_path_factory):
    """The work directory of a trained language model of one line a document, short of learning when they end."""
    folder = tmp_path_factory.mktemp('documents')
    changes = dict(data__documents='lines', train__duration='3 steps', model__experts='2', model__active='1')
    run.train(tiny_language(folder, **changes), folder / 'run')
    return folder / 'run'


@pytest.fixture(scope='session')
def translating(tmp_path_factory):
    """The work directory of a trained tiny Transformer."""
    workdir = tmp_path_factory.mktemp('runs') / 'transformer'
    run.train(tiny_transformer(), workdir)
    return workdir


def files(workdir):
    """What a run's directory holds, but for figures/."""
    found = [path for path in workdir.rglob('*') if path.is_file() and 'figures' not in path.parts]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def text_of(vocabulary, ids):
    return ''.join(vocabulary.characters[i] for i in ids)


def drawn(path, shape):
    """Values that a parameter of this name and shape has in any model: nothing else makes two losses differ."""
    seed = zlib.crc32(jax.tree_util.keystr(path).encode())
    return 0.3 * np.random.default_rng(seed).standard_normal(shape.shape, np.float32)


@pytest.fixture(scope='session')
def speaker(stream):
    """Model, parameters, vocabulary, and logits [T, V] of ids; drawn, as after few steps all texts go on alike."""
    loaded = run.load(stream)
    model, vocabulary = language.in_use(loaded.config, stream)
    params = jax.tree.map(jnp.asarray, jax.tree_util.tree_map_with_path(drawn, loaded.params))
    apply = jax.jit(lambda ids: model.apply({'params': params}, ids)[0][0])

    def logits(ids):
        return np.asarray(apply(np.pad(ids, (0, T - len(ids)))[None].astype(np.int32)))[: len(ids)]

    return model, params, vocabulary, logits
