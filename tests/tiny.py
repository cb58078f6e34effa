"""Configs of tiny runs of each task, and helpers for tests of runs."""

import hashlib
import zlib

import jax
import numpy as np

from attnlab import configs

TINY_GRAMMAR = {
    'data.train_examples': '128', 'data.test_examples': '24', 'data.widths': '12,20',
    'model.embedding': '8', 'model.hidden': '12',
    'optimizer.learning_rate': '0.01', 'optimizer.warmup': '2 steps',
    'train.batch_size': '16', 'train.duration': '20 steps', 'train.eval_every': '10 steps',
    'train.save_every': '3 steps', 'train.log_every': '1 steps', 'train.mesh': 'data=1',
}  # fmt: skip
T = 16  # the context of a tiny language model


def tiny_grammar_config(arg='', **changes):
    """Return the config of the grammar experiment, reduced to a run of a second or two.

    changes: values by dotted key, with `__` in place of each dot.
    """
    overrides = TINY_GRAMMAR | {key.replace('__', '.'): value for key, value in changes.items()}
    return configs.load_experiment(
        f'experiments/align/grammar_gru.py{":" + arg if arg else ""}', list(overrides.items())
    )


LINES = [f'the {who} {does} {whom}.' for who in ('cat', 'dog', 'old teacher') for does in ('sees', 'fears', 'likes')
         for whom in ('Zoe', 'a bird', 'the quick mouse', 'Jim')]  # fmt: skip
TINY_TRANSFORMER = {'model.layers': '1', 'model.width': '16', 'model.heads': '2', 'model.context': '16'}
TINY_TRAINING = {
    'optimizer.learning_rate': '0.01', 'optimizer.warmup': '2 steps', 'train.batch_size': '4',
    'train.duration': '20 steps', 'train.eval_every': '14 steps', 'train.save_every': '7 steps',
    'train.log_every': '1 steps', 'train.mesh': 'data=1',
}  # fmt: skip


def tiny_language_config(folder, arg='', **changes):
    """Return a similarly small config of the Shakespeare experiment; its text is `LINES`, written to `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / 'input.txt').write_text('\n'.join(LINES) + '\n')
    overrides = TINY_TRANSFORMER | TINY_TRAINING | {'data.folder': str(folder)}
    overrides |= {key.replace('__', '.'): str(value) for key, value in changes.items()}
    return configs.load_experiment(
        f'experiments/language/shakespeare_char.py{":" + arg if arg else ""}', list(overrides.items())
    )


def tiny_transformer_config(**changes):
    """Return a similarly small config of the grammar's Transformer, with two layers."""
    data = {key: value for key, value in TINY_GRAMMAR.items() if key.startswith(('data.', 'train.'))}
    overrides = TINY_TRANSFORMER | data | {'model.layers': '2', 'data.widths': '20'}
    overrides |= {'optimizer.warmup': '2 steps', 'train.duration': '3 steps'}
    overrides |= {'model.alignment_layer': '2', 'model.alignment_shift': '1'}
    overrides |= {key.replace('__', '.'): str(value) for key, value in changes.items()}
    return configs.load_experiment('experiments/align/grammar_transformer.py', list(overrides.items()))


DIGITS = 'experiments/vision/digits.py'


def tiny_digits_config(**changes):
    """Return a similarly small config of the experiment with digits."""
    overrides = {
        'data.train_examples': '90', 'data.test_examples': '30', 'model.layers': '1', 'model.width': '16',
        'model.heads': '2', 'model.mlp_width': '16', 'train.batch_size': '16', 'train.duration': '8 steps',
        'train.eval_every': '4 steps', 'train.save_every': '3 steps', 'train.log_every': '1 steps',
        'train.mesh': 'data=1', 'optimizer.warmup': '2 steps',
    }  # fmt: skip
    overrides |= {key.replace('__', '.'): str(value) for key, value in changes.items()}
    return configs.load_experiment(DIGITS, list(overrides.items()))


def hash_run_files(workdir):
    """Return the hash of each file in a run's directory, except in figures/."""
    paths = [path for path in workdir.rglob('*') if path.is_file() and 'figures' not in path.parts]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def decode_ids(vocabulary, ids):
    """Return the text of character ids."""
    return ''.join(vocabulary.characters[i] for i in ids)


def random_parameter(path, shape):
    """Return random values that depend only on the name and shape of a parameter, so that models can be compared."""
    seed = zlib.crc32(jax.tree_util.keystr(path).encode())
    return 0.3 * np.random.default_rng(seed).standard_normal(shape.shape, np.float32)
