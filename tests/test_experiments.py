"""Every experiment loads, and code reads every field of its config."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from attnlab import configs
from attnlab.configs import fields
from attnlab.data.images import CIFAR_LAYOUTS, CLASS_COUNTS
from attnlab.errors import UserError
from attnlab.sweeps import points
from attnlab.tasks import create_task
from attnlab.train import run
from tests.experiments import EXPERIMENTS, leaves
from tests.tiny import TINY_GRAMMAR

TRAIN = {key: value for key, value in TINY_GRAMMAR.items() if key.startswith('train.')} | {'train.duration': '2 steps'}
RECURRENT = {key: value for key, value in TINY_GRAMMAR.items() if key.startswith('model.')}
TRANSFORMER = {
    'model.layers': '1', 'model.width': '16', 'model.heads': '2', 'model.context': '32', 'train.accumulate': '1',
}  # fmt: skip
VISION = TRAIN | {
    'optimizer.warmup': '2 steps', 'model.layers': '1', 'model.width': '16', 'model.heads': '2',
    'model.mlp_width': '16',
}  # fmt: skip
SIMILAR = (  # these run no code that the others do not run
    'gpt', 'llama', 'mixtral', 'base', 'big', 'multi30k', 'grammar_transformer', 'files', 'rnnsearch',
    'cifar10_small', 'cifar10.', 'cifar10_pmap', 'cifar100', 'imagenet',
)  # fmt: skip
TEXT = [('the cat sleeps.', 'le chat dort.'), ('the dog sings.', 'le chien chante.')] * 10


def write_corpus(folder):
    for name in ('train', 'val', 'test_2016_flickr', 'test_2017_flickr'):
        for side, language in enumerate(('en', 'fr')):
            (folder / f'{name}.{language}').write_text(''.join(pair[side] + '\n' for pair in TEXT))


def write_images(name, folder):
    """Write a few images into `folder`; returns overrides by which an experiment reads them."""
    random = np.random.default_rng(0)
    if 'digits' in name:
        return {'data.train_examples': '40', 'data.test_examples': '8'}
    if 'imagenet' in name:
        for split in ('train', 'test'):
            np.savez(folder / f'{split}.npz', images=random.integers(0, 256, (20, 32, 32, 3)).astype(np.uint8),
                     labels=np.arange(20))  # fmt: skip
        sizes = {'data.shape': '32,32,3', 'data.classes': '20', 'model.image': '32,32', 'model.patch': '16,16'}
        where = {f'data.{split}': str(folder / f'{split}.npz') for split in ('train', 'test')}
        return sizes | where | {'data.held_out': '4'}
    kind = 'cifar100' if 'cifar100' in name else 'cifar10'
    layout = CIFAR_LAYOUTS[kind][1]
    for file in (*layout.train, *layout.test):
        front = np.zeros((8, layout.label_bytes), np.uint8)
        pixels = random.integers(0, 256, (8, 3072)).astype(np.uint8)
        (folder / file).write_bytes(np.concatenate([front, pixels], axis=1).tobytes())
    (folder / layout.names).write_text('\n'.join(f'class{i}' for i in range(CLASS_COUNTS[kind])))
    return {'data.folder': str(folder), 'data.held_out': '4'}


def small_overrides(name, folder):
    """Return overrides that shorten an experiment to seconds, on files in `folder` unless its data is generated."""
    if 'vision' in name:
        return list((VISION | write_images(name, folder)).items())
    recurrent = 'gru' in name or 'rnn' in name
    more = TRAIN | {'optimizer.warmup': '2 steps'} | (RECURRENT if recurrent else TRANSFORMER)
    if 'language' in name:
        (folder / 'input.txt').write_text('\n\n'.join(pair[0] for pair in TEXT))
        where = {'data.folder': str(folder)} if 'shakespeare' in name else {
            'data.path': str(folder / 'input.txt'), 'data.vocabulary_size': '300'}
        kinds = {'model.kv_heads': '1', 'model.mlp_width': '0'} if 'mixtral' in name else {'model.mlp_width': '0'}
        return list((more | where | kinds).items())
    data = {'data.vocabulary_size': '400'}
    if 'grammar' in name:
        data |= {key: value for key, value in TINY_GRAMMAR.items() if key.startswith('data.')}
    elif 'multi30k' in name:
        data['data.folder'] = str(folder)
    else:
        data |= {f'data.{split}': str(folder / file) for split, file in
                 (('train', 'train'), ('valid', 'val'), ('test', 'test_2016_flickr'))}
    if not recurrent:
        more |= {'model.alignment_layer': '1', 'model.mlp_width': '0'}
    return list((more | data | {'data.widths': '20'}).items())


def slow_if_similar(name):
    return pytest.param(name, marks=[pytest.mark.slow] if any(word in name for word in SIMILAR) else [])


def sections(config, above=''):
    """Yield (prefix of dotted keys, section) of a config dataclass and its sections."""
    yield above, config
    for field in fields.fields_of(type(config)):
        if field.sections:
            yield from sections(getattr(config, field.name), f'{above}{field.name}.')


def record_field_reads(config, monkeypatch):
    """Return a set to which each dotted key that the package reads from now on is added.

    Copies, comparisons and hashes do not count.
    """
    prefixes = {id(section): above for above, section in sections(config)}
    read = set()

    def recorded(self, name):
        caller = sys._getframe(1).f_code.co_filename
        if id(self) in prefixes and 'attnlab' in caller and not caller.endswith('configs/fields.py'):
            read.add(prefixes[id(self)] + name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(fields.Section, '__getattribute__', recorded)
    return read


NAMES = {'data.name', 'model.name'}  # read when a config becomes a dataclass
EXPERTS = {
    'model.experts_per_token', 'model.capacity_factor', 'model.shared_expert', 'model.load_balance', 'model.router_z',
}  # fmt: skip
DEPENDENT = [  # (experiment, values of other fields, fields that are read only with them)
    ('experiments/language/shakespeare_char.py', {'model.experts': '2', 'model.positions': 'rotary'},
     EXPERTS | {'model.rotary_base'}),
    ('experiments/language/shakespeare_char.py', {'model.mixer': 'convolution'}, {'model.kernel_size'}),
    ('experiments/align/grammar_transformer.py', {'model.positions': 'learned', 'model.context': '512'},
     {'model.context'}),
    ('experiments/vision/digits.py', {'model.embedding': 'tokenizer'}, {'model.convolutions', 'model.channels'}),
    ('experiments/vision/digits.py', {'model.embedding': 'product'}, {'model.patch'}),
]  # fmt: skip


def fields_and_reads(experiment, folder, monkeypatch, changes=()):
    """Return the dotted keys of a config, and those that training and evaluation read."""
    write_corpus(folder)
    overrides = dict(small_overrides(experiment, folder)) | dict(changes)
    loaded = configs.load_experiment(experiment, list(overrides.items()))
    config = create_task(loaded).config
    read = record_field_reads(config, monkeypatch)
    run.train_run(config, folder / 'run')
    task = create_task(config, folder / 'run')
    task.evaluate(jax.jit(task.init)(jax.random.key(0)), task.default_split)
    return set(leaves(loaded)), read


@pytest.mark.slow
@pytest.mark.parametrize('experiment', [slow_if_similar(name) for name in EXPERIMENTS])
def test_every_field_is_read(experiment, tmp_path, monkeypatch, quickly):
    fields_of_config, read = fields_and_reads(experiment, tmp_path, monkeypatch)
    dependent = {key for _, _, keys in DEPENDENT for key in keys}
    assert fields_of_config - read <= NAMES | dependent


@pytest.mark.slow
@pytest.mark.parametrize(('experiment', 'changes', 'keys'), DEPENDENT)
def test_a_field_that_depends_on_others_is_read_with_them(
    experiment, changes, keys, tmp_path, monkeypatch, quickly
):
    _, read = fields_and_reads(experiment, tmp_path, monkeypatch, changes)
    assert keys <= read


@pytest.mark.parametrize('experiment', EXPERIMENTS)
def test_an_unknown_argument_is_refused(experiment):
    with pytest.raises(UserError, match="the argument is 'nonsense'; expected"):
        configs.load_experiment(f'{experiment}:nonsense')


@pytest.mark.parametrize('experiment', EXPERIMENTS)
def test_the_docstring_has_the_train_command(experiment):
    assert f'attnlab train --config={experiment}' in Path(experiment).read_text('utf-8').split('"""')[1]


SWEEPS = {
    'experiments/language/shakespeare_char.py': dict(rates=7, orders=3, heads=5, sizes=12, experts=5, seeds=3),
    'experiments/align/grammar_gru.py': dict(scores=3, seeds=3),
}  # fmt: skip


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize('experiment', EXPERIMENTS)
def test_every_point_of_its_sweeps_can_be_trained(experiment):
    """Each sweep is checked as the command checks it: types, model, optimizer, no point twice."""
    found = {name: len(points.make_sweep_plan(experiment, (), [name], {}).points)
             for name in configs.experiment_functions(experiment, 'sweep_')}  # fmt: skip
    assert found == SWEEPS.get(experiment, {})
