"""Every config has the fields that the code reads, of their types, and no others; a config that has not is refused."""

import json

import pytest
from ml_collections import ConfigDict

from attnlab import cli, configs
from attnlab.errors import UserError
from attnlab.sweeps import points
from attnlab.tasks import fields
from attnlab.train import count, run, traffic
from tests.test_experiments import EXPERIMENTS, leaves

ONE_A_TASK = {
    'align': 'experiments/align/grammar_transformer.py',
    'recurrent': 'experiments/align/grammar_gru.py',
    'language': 'experiments/language/shakespeare_char.py',
    'vision': 'experiments/vision/digits.py',
    'resnet': 'experiments/vision/cifar10_small.py:resnet',
}
NEEDED = {'experiments/align/files_gru.py': [(f'data.{split}', 'x') for split in ('train', 'valid', 'test')]}
OPTIONAL = {'start', 'optimizer.layer_decay', 'train.mesh', 'train.parallel', 'train.ema'}


def loaded(experiment):
    return configs.load(experiment, NEEDED.get(experiment, []))


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


def all_keys(experiment):
    config = loaded(experiment)
    return [*leaves(config), *(key for key in config if isinstance(config[key], ConfigDict))]


@pytest.mark.parametrize('experiment', EXPERIMENTS)
def test_an_experiment_has_the_fields_of_the_table(experiment):
    fields.check(loaded(experiment))


def test_every_field_of_the_table_is_one_of_an_experiment():
    """Which tests/test_experiments.py shows to be read."""
    known, used = set(), set()
    for task, more in fields.TASKS.items():
        for name, section in (fields.COMMON | more).items():
            known |= {(task, f'{name}.{field}') for field in section.known()}
    variants = [*EXPERIMENTS, 'experiments/vision/cifar10_small.py:resnet']
    for config in map(loaded, variants):
        used |= {(config.task, key) for key in leaves(config)}
    for task in ('align', 'language'):  # read for every task, set by images' experiments alone
        used |= {(task, 'optimizer.layer_decay'), (task, 'train.ema')}
    # No experiment of a language model has the grammar's sentences; attnlab/tasks/language/corpus.py reads them.
    assert known - used == {('language', 'data.train_examples'), ('language', 'data.test_examples')}


@pytest.mark.parametrize('task', ONE_A_TASK)
def test_each_missing_field_is_named(task):
    for key in all_keys(ONE_A_TASK[task]):
        config = changed(ONE_A_TASK[task], key, remove=True)
        if key in OPTIONAL:
            fields.check(config)
            continue
        with pytest.raises(UserError) as caught:
            fields.check(config)
        assert key in str(caught.value) and '\n' not in str(caught.value)


ENTRANCES = {
    'train': lambda config, folder: run.train(config, folder / 'new'),
    'count': lambda config, folder: count.count(config),
    'count --mesh': lambda config, folder: traffic.count(config, 'data=1'),
    'a run': lambda config, folder: configs.save(config, folder / 'config.json') or run.config(folder),
}


@pytest.mark.parametrize('entrance', ENTRANCES)
@pytest.mark.parametrize(('key', 'message'), [
    ('optimizer.warmup', 'config has no optimizer.warmup; expected a str'),
    ('train.batch_size', 'config has no train.batch_size; expected an int'),
    ('model.heads', "model.name is 'transformer', which asks for model.heads; the config has no such field"),
    ('decode', 'config has no decode; expected a section with the fields beams, length_penalty'),
    ('seed', 'config has no seed; expected an int'),
    ('task', 'config has no task; expected a str'),
])  # fmt: skip
def test_every_command_names_a_missing_field(tmp_path, entrance, key, message):
    with pytest.raises(UserError) as caught:
        ENTRANCES[entrance](changed(ONE_A_TASK['align'], key, remove=True), tmp_path)
    where = f'{tmp_path / "config.json"}: ' if entrance == 'a run' else ''
    assert str(caught.value) == where + message
    assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize(('key', 'message'), [
    ('model.dropuot', 'there is no config.model.dropuot; did you mean config.model.dropout?'),
    ('optimizer.grad_clip', 'there is no config.optimizer.grad_clip; did you mean config.optimizer.clip?'),
    ('trian', 'there is no config.trian; did you mean config.train?'),
    ('model.qwzj', 'there is no config.model.qwzj; expected one of model.active, '),
])  # fmt: skip
@pytest.mark.parametrize('entrance', ENTRANCES)
def test_every_command_refuses_a_field_that_no_code_reads(tmp_path, entrance, key, message):
    with pytest.raises(UserError) as caught:
        ENTRANCES[entrance](changed(ONE_A_TASK['align'], key, 0.5), tmp_path)
    assert message in str(caught.value)
    assert not (tmp_path / 'new').exists()


def test_a_sweep_refuses_them_too(tmp_path):
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
            points.plan(str(path), (), [name], {})


@pytest.mark.parametrize(('key', 'value', 'message'), [
    ('model.layers', '4', "config.model.layers is '4'; expected an int"),
    ('model.layers', 4.0, 'config.model.layers is 4.0; expected an int'),
    ('model.layers', True, 'config.model.layers is True; expected an int'),
    ('model.layers', None, 'config.model.layers is None; expected an int'),
    ('model.dropout', '0.1', "config.model.dropout is '0.1'; expected a finite float"),
    ('model.dropout', float('inf'), 'config.model.dropout is inf; expected a finite float'),
    ('model.dropout', 10**400, f'config.model.dropout is {10**400}; expected a finite float'),
    ('model.sinks', 1, 'config.model.sinks is 1; expected true or false'),
    ('model.name', 3, 'config.model.name is 3; expected a str'),
    ('model.name', {'x': 1}, 'config.model.name is a section; expected a str'),
    ('data.widths', 20, 'config.data.widths is 20; expected a tuple of int'),
    ('data.widths', (20, 'x'), "config.data.widths is (20, 'x'); expected a tuple of int"),
    ('data.name', 'gramar', "data.name is 'gramar'; expected 'grammar', 'multi30k' or 'files'"),
    ('model', None, 'config.model is None; expected a section'),
    ('train', 3, 'config.train is 3; expected a section'),
    ('task', 'aline', "task is 'aline'; expected 'align', 'language' or 'vision'"),
    ('task', {'x': 1}, 'config.task is a section; expected a str'),
])  # fmt: skip
def test_a_value_of_another_type_is_refused(key, value, message):
    with pytest.raises(UserError) as caught:
        fields.check(changed(ONE_A_TASK['align'], key, value))
    assert str(caught.value) == message


def test_an_int_serves_for_a_float():
    fields.check(changed(ONE_A_TASK['align'], 'optimizer.clip', 1))


def test_a_field_of_another_name_may_stay():
    """As in --config.data.name=..., which changes the name alone."""
    fields.check(changed(ONE_A_TASK['align'], 'data.folder', 'x'))


# config.json of a run

GOOD = json.dumps(configs.tree(loaded(ONE_A_TASK['vision'])))
DAMAGED = {
    '{}': 'config has no task; expected a str',
    GOOD.replace('"layers": 3', '"layers": "4"'): "config.model.layers is '4'; expected an int",
    GOOD.replace('"layers": 3', '"layers": 0'): 'model.layers is 0; expected 1 to 1000',
    GOOD.replace('"layers": 3', f'"layers": -{10**30}'): f'model.layers is -{10**30}; expected 1 to 1000',
    GOOD.replace('"heads": 4, ', ''): "model.name is 'vit', which asks for model.heads; the config has no such field",
    GOOD.replace('"crop": 1', '"crop": 1e999'): 'config.data.crop is inf; expected an int',
    GOOD.replace('"digits"', '"digit"'): "data.name is 'digit'; expected 'cifar10', 'cifar100', 'digits' or 'files'",
    json.dumps({'task': 'vision', 'seed': 0, 'model': None}): 'config has no optimizer; expected a section',
    json.dumps(json.loads(GOOD) | {'model': None}): 'config.model is None; expected a section',
    json.dumps(json.loads(GOOD) | {'seed': -1}): 'seed is -1; expected 0 to 4294967295',
    json.dumps(json.loads(GOOD) | {'later': 1}): 'there is no config.later; ',
    '{"a": ' + '[' * 100_000: 'RecursionError',
    '{"__class__": 1}': '__class__ cannot be overridden.',
    '': 'JSONDecodeError',
}


@pytest.mark.parametrize('command', [['eval'], ['translate', 'A cat.'], ['generate'], ['attend', '0']])
@pytest.mark.parametrize('text', DAMAGED, ids=[message[:40] for message in DAMAGED.values()])
def test_a_run_whose_config_is_damaged_is_refused_in_one_line(tmp_path, capsys, as_used, text, command):
    assert text != GOOD
    (tmp_path / 'config.json').write_text(text)
    assert cli.main([command[0], f'--workdir={tmp_path}', *command[1:]]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'attnlab: {tmp_path}/config.json') and error.count('\n') == 1
    assert DAMAGED[text] in error
    assert [path.name for path in tmp_path.iterdir()] == ['config.json']


def test_a_training_that_goes_on_says_what_differs(tmp_path):
    (tmp_path / 'config.json').write_text('{}')
    (tmp_path / 'checkpoints' / '1').mkdir(parents=True)
    with pytest.raises(UserError, match='the work directory holds a run of another config'):
        run.train(loaded(ONE_A_TASK['vision']), tmp_path)


# Fields that are paths


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
    """The error names the file in the home folder, as there is none."""
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    config = configs.load(experiment, changes)
    with pytest.raises(UserError) as caught:
        run.train(config, tmp_path / 'new')
    if 'start' in dict(changes):
        assert str(caught.value).startswith("start is '~/run'; expected the directory of a trained run")
    else:
        assert str(tmp_path / 'home') in str(caught.value)
    assert not (tmp_path / 'new').exists()
