"""Configs have exactly the fields of their dataclasses, with values of the declared types; all else is an error."""

import dataclasses
import json
from typing import Literal

import pytest
from ml_collections import ConfigDict

from attnlab import cli, configs
from attnlab.configs import BlockConfig, LanguageModelConfig, OptimizerConfig, TrainConfig, fields
from attnlab.configs.align import SPECIAL_TOKEN_COUNT, PairsData
from attnlab.configs.language import TextData
from attnlab.configs.tasks import TASKS, config_class
from attnlab.data import tokenizers, vocabulary
from attnlab.errors import UserError
from attnlab.sweeps import points
from attnlab.train import communication, count, run
from tests.experiments import EXPERIMENTS, leaves

ONE_A_TASK = {
    'align': 'experiments/align/grammar_transformer.py',
    'recurrent': 'experiments/align/grammar_gru.py',
    'language': 'experiments/language/shakespeare_char.py',
    'vision': 'experiments/vision/digits.py',
    'resnet': 'experiments/vision/cifar10_small.py:resnet',
}


def check(config):
    """Return a config as its dataclass."""
    return fields.to_dataclass(config_class(config.get('task')), config)


def loaded(experiment):
    return configs.load_experiment(experiment)


def changed(experiment, key, value=None, remove=False):
    """The config of an experiment with one field set, whether or not the field exists, or removed."""
    config = loaded(experiment).to_dict()
    *path, name = key.split('.')
    section = config
    for part in path:
        section = section[part]
    section[name] = value
    if remove:
        del section[name]
    return ConfigDict(config).lock()


def all_field_keys(experiment):
    config = loaded(experiment)
    return [*leaves(config), *(key for key in config if isinstance(config[key], ConfigDict))]


@pytest.mark.parametrize('experiment', EXPERIMENTS)
def test_an_experiment_has_the_fields_of_its_dataclass(experiment):
    config = loaded(experiment)
    assert configs.config_to_json(configs.config_dict(check(config))) == configs.config_to_json(config)


def declared_fields():
    """Yield (name for errors, field) of all config dataclasses."""
    for task, (cls, _) in TASKS.items():
        for section in sections(cls):
            for field in fields.fields_of(section):
                yield f'{task}: {section.__name__}.{field.name}', field


def sections(cls):
    yield cls
    for field in fields.fields_of(cls):
        for section in field.sections:
            yield from sections(section)


def test_every_field_has_a_description_of_one_line_and_an_allowed_default():
    for key, field in declared_fields():
        assert field.doc and '\n' not in field.doc and len(field.doc) < 110, key
        if not field.required and not field.sections:
            assert fields.checked_value(field, field.default, '') == field.default, key


def test_every_field_is_in_an_experiment():
    """tests/test_experiments.py then shows that code reads it."""
    used = set()
    for config in map(loaded, [*EXPERIMENTS, 'experiments/vision/cifar10_small.py:resnet']):
        used |= {(config.task, key) for key in leaves(config)}
    known = {(task, key) for task, (cls, _) in TASKS.items() for key in fields.possible_keys(cls)}
    known = {(task, key) for task, key in known if key not in ('data', 'model', 'optimizer', 'train', 'decode')}
    # No language experiment has grammar sentences; attnlab/tasks/language/corpus.py reads these fields.
    assert known - used == {('language', 'data.train_examples'), ('language', 'data.test_examples')}


@pytest.mark.parametrize('task', ONE_A_TASK)
def test_each_missing_field_gets_its_default_or_is_an_error(task):
    whole = loaded(ONE_A_TASK[task])
    for key in all_field_keys(ONE_A_TASK[task]):
        config = changed(ONE_A_TASK[task], key, remove=True)
        if key in ('task', 'data', 'model', 'data.name', 'model.name') and (task, key) != ('language', 'model.name'):
            with pytest.raises(UserError) as caught:
                check(config)
            assert key in str(caught.value) and '\n' not in str(caught.value)
            continue
        with config.unlocked():
            added = fields.fill_defaults(config_class(config.task), config)
        assert key in added or all(added_key.startswith(f'{key}.') for added_key in added)
        before, after = dict(leaf_items(whole)), dict(leaf_items(config))
        assert {name for name in before if before[name] != after[name]} <= set(added)


def leaf_items(config, above=''):
    """Yield (dotted key, value) of each field."""
    for name, value in config.items():
        yield from leaf_items(value, f'{above}{name}.') if isinstance(value, ConfigDict) else [(above + name, value)]


ENTRY_POINTS = {
    'train': lambda config, folder: run.train_run(config, folder / 'new'),
    'count': lambda config, folder: count.count_costs(config),
    'count --mesh': lambda config, folder: communication.count_communication(config, 'data=1'),
    'a run': lambda config, folder: configs.save_config(config, folder / 'config.json') or run.load_task(folder),
}


@pytest.mark.parametrize('entry_point', ENTRY_POINTS)
@pytest.mark.parametrize(('key', 'message'), [
    ('model', 'config has no model; expected a section with a name'),
    ('model.name', "config has no model.name; expected 'recurrent' or 'transformer'"),
    ('task', 'config has no task; expected \'align\', \'language\' or \'vision\''),
])  # fmt: skip
def test_every_entry_point_names_a_missing_field(tmp_path, entry_point, key, message):
    with pytest.raises(UserError) as caught:
        ENTRY_POINTS[entry_point](changed(ONE_A_TASK['align'], key, remove=True), tmp_path)
    where = f'{tmp_path / "config.json"}: ' if entry_point == 'a run' else ''
    assert str(caught.value) == where + message
    assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize(('key', 'message'), [
    ('model.dropuot', 'there is no config.model.dropuot; did you mean config.model.dropout?'),
    ('optimizer.grad_clip', 'there is no config.optimizer.grad_clip; did you mean config.optimizer.clip?'),
    ('trian', 'there is no config.trian; did you mean config.train?'),
    ('model.taps', 'there is no config.model.taps; did you mean config.model.kernel_size?'),
    ('model.qwzj', 'there is no config.model.qwzj; expected one of model.alignment_layer, '),
])  # fmt: skip
@pytest.mark.parametrize('entry_point', ENTRY_POINTS)
def test_every_entry_point_refuses_an_unknown_field(tmp_path, entry_point, key, message):
    with pytest.raises(UserError) as caught:
        ENTRY_POINTS[entry_point](changed(ONE_A_TASK['align'], key, 0.5), tmp_path)
    assert message in str(caught.value)
    assert not (tmp_path / 'new').exists()


def test_a_sweep_refuses_an_unknown_field(tmp_path):
    path = tmp_path / 'e.py'
    path.write_text('''import runpy
def get_config(arg=''):
    config = runpy.run_path('experiments/language/shakespeare_char.py')['get_config']()
    config.model.dropuot = 0.1
    return config
def sweep_seeds(): return [{'seed': 0}, {'seed': 1}]
def search_rate(trial): return {'optimizer.learning_rate': trial.suggest_float('x', 0.1, 1.0)}
''')
    for name in ('seeds', 'rate'):
        with pytest.raises(UserError, match=r'config\.model\.dropuot; did you mean config\.model\.dropout\?'):
            points.make_sweep_plan(str(path), (), [name], {})


@pytest.mark.parametrize(('key', 'value', 'message'), [
    ('model.layers', '4', "model.layers is '4'; expected an int"),
    ('model.layers', 4.0, 'model.layers is 4.0; expected an int'),
    ('model.layers', True, 'model.layers is True; expected an int'),
    ('model.layers', None, 'model.layers is None; expected an int'),
    ('model.dropout', '0.1', "model.dropout is '0.1'; expected a finite float"),
    ('model.dropout', float('inf'), 'model.dropout is inf; expected a finite float'),
    ('model.dropout', 10**400, f'model.dropout is {10**400}; expected a finite float'),
    ('model.sinks', 1, 'model.sinks is 1; expected true or false'),
    ('model.name', 3, "model.name is 3; expected 'recurrent' or 'transformer'"),
    ('data.widths', 20, 'data.widths is 20; expected a tuple of int'),
    ('data.widths', (20, 'x'), "data.widths is (20, 'x'); expected a tuple of int"),
    ('data.name', 'gramar', "data.name is 'gramar'; expected 'grammar', 'multi30k' or 'files'"),
    ('model', None, 'config.model is None; expected a section'),
    ('train', 3, 'config.train is 3; expected a section'),
    ('task', 3, "task is 3; expected 'align', 'language' or 'vision', or 'package.module:Class' of a task of your own"),
])  # fmt: skip
def test_a_value_of_another_type_is_refused(key, value, message):
    with pytest.raises(UserError) as caught:
        check(changed(ONE_A_TASK['align'], key, value))
    assert str(caught.value) == message


def test_an_int_is_accepted_for_a_float():
    check(changed(ONE_A_TASK['align'], 'optimizer.clip', 1))


def test_a_field_of_a_section_with_another_name_is_ignored():
    """As after --config.data.name=..., which changes only the name."""
    check(changed(ONE_A_TASK['align'], 'data.folder', 'x'))


# config.json of a run

GOOD = json.dumps(configs.config_to_json(loaded(ONE_A_TASK['vision'])))
DAMAGED = {
    '{}': "config has no task; expected 'align', 'language' or 'vision'",
    GOOD.replace('"layers": 3', '"layers": "4"'): "model.layers is '4'; expected an int",
    GOOD.replace('"layers": 3', '"layers": 0'): 'model.layers is 0; expected 1 or more',
    GOOD.replace('"layers": 3', f'"layers": -{10**30}'): f'model.layers is -{10**30}; expected 1 or more',
    GOOD.replace('"name": "vit", ', ''): "config has no model.name; expected 'vit' or 'resnet'",
    GOOD.replace('"crop": 1', '"crop": 1e999'): 'data.crop is inf; expected an int',
    GOOD.replace('"digits"', '"digit"'): "data.name is 'digit'; expected 'cifar10', 'cifar100', 'digits' or 'files'",
    json.dumps({'task': 'vision', 'seed': 0, 'model': {'name': 'vit'}}): 'config has no data; expected a section',
    json.dumps(json.loads(GOOD) | {'model': None}): 'config.model is None; expected a section',
    json.dumps(json.loads(GOOD) | {'seed': -1}): 'seed is -1; expected 0 to 4294967295',
    json.dumps(json.loads(GOOD) | {'later': 1}): 'there is no config.later; ',
    '{"a": ' + '[' * 100_000: 'RecursionError',
    '{"__class__": 1}': '__class__ cannot be overridden.',
    '': 'JSONDecodeError',
}


@pytest.mark.parametrize('command', [['eval'], ['translate', 'A cat.'], ['generate'], ['attend', '0']])
@pytest.mark.parametrize('text', DAMAGED, ids=[message[:40] for message in DAMAGED.values()])
def test_a_run_with_a_damaged_config_is_refused_in_one_line(tmp_path, capsys, as_used, text, command):
    assert text != GOOD
    (tmp_path / 'config.json').write_text(text)
    assert cli.main([command[0], f'--workdir={tmp_path}', *command[1:]]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'attnlab: {tmp_path}/config.json') and error.count('\n') == 1
    assert DAMAGED[text] in error
    assert [path.name for path in tmp_path.iterdir()] == ['config.json']


def test_training_does_not_continue_from_a_damaged_config(tmp_path):
    (tmp_path / 'config.json').write_text('{}')
    (tmp_path / 'checkpoints' / '1').mkdir(parents=True)
    with pytest.raises(UserError, match='config.json: config has no task'):
        run.train_run(loaded(ONE_A_TASK['vision']), tmp_path)


# Fields that are paths


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(('experiment', 'changes'), [
    ('language/shakespeare_char.py', [('data.folder', '~/plays')]),
    ('language/gpt2_small.py', [('data.path', '~/plays/input.txt')]),
    ('align/multi30k_gru.py', [('data.folder', '~/captions')]),
    ('align/rnnsearch.py', [(f'data.{split}', '~/mine/text') for split in ('train', 'valid', 'test')]),
    ('vision/imagenet_b16.py', [('data.train', '~/mine/images.npz'), ('data.test', '~/mine/images.npz')]),
    ('vision/cifar10_small.py', [('data.folder', '~/cifar')]),
    ('vision/digits.py', [('start', '~/run')]),
])  # fmt: skip
def test_a_path_in_a_config_may_start_with_a_tilde(tmp_path, monkeypatch, experiment, changes):
    """The error of the missing file names its path in the home folder."""
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    config = configs.load_experiment(experiment, changes)
    with pytest.raises(UserError) as caught:
        run.train_run(config, tmp_path / 'new')
    if 'start' in dict(changes):
        assert str(caught.value).startswith("start is '~/run'; expected the directory of a trained run")
    else:
        assert str(tmp_path / 'home') in str(caught.value)
    assert not (tmp_path / 'new').exists()


# The dataclasses without a config


@pytest.mark.parametrize(('make', 'message'), [
    (lambda: BlockConfig(heads=0), 'heads is 0; expected 1 or more'),
    (lambda: BlockConfig(norm='lyer'), "norm is 'lyer'; expected 'layer' or 'rms'"),
    (lambda: BlockConfig(layers=2000), 'layers is 2000; expected 1 to 1000, or up to 100000 with scan'),
    (lambda: LanguageModelConfig(context=0), 'context is 0; expected 1 <= context < 2147483648'),
    (lambda: OptimizerConfig(b2=1.0), 'b2 is 1.0; expected 0.0 <= b2 < 1.0'),
    (lambda: TrainConfig(batch_size=10, accumulate=3), 'accumulate is 3; expected a divisor of batch_size 10'),
])  # fmt: skip
def test_a_dataclass_checks_its_values(make, message):
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_the_choices_of_another_module_are_checked():
    with pytest.raises(UserError, match="model.positions is 'rotry'; expected 'learned'"):
        check(changed(ONE_A_TASK['align'], 'model.positions', 'rotry'))


def test_fields_of_every_type_become_a_dataclass(experiment):
    config = check(configs.load_experiment(experiment, [('optimizer.lr', 1), ('model.shape', [1])]))
    assert dataclasses.is_dataclass(config)
    assert (config.optimizer.lr, config.model.shape, config.model.later) == (1.0, (1,), 7)
    kinds = {field.name: field.kind for field in fields.fields_of(type(config.model))}
    assert kinds['pool'] == Literal['mean', 'max'] and kinds['shape'] == tuple[int, ...]


def test_the_vocabularies_of_configs_and_data_agree():
    """Configs do not import the data package, so the names are in both."""
    kinds = {cls: {field.name: field.allowed() for field in fields.fields_of(cls)} for cls in (PairsData, TextData)}
    assert kinds[PairsData]['vocabulary'] == tuple(vocabulary.VOCABULARY_SUFFIXES)
    assert kinds[TextData]['vocabulary'] == tokenizers.TOKENIZER_KINDS
    assert len(vocabulary.SPECIAL_TOKENS) == SPECIAL_TOKEN_COUNT
