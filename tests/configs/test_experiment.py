"""Experiment files: content, search path and errors."""

import sys
from pathlib import Path

import pytest

from attnlab import configs
from attnlab.configs import experiment as experiment_files
from tests.configs.conftest import EXPERIMENT


def test_derived_values_follow_the_overrides(experiment, error, changed):
    assert configs.load_experiment(experiment).model.width == 32
    assert configs.load_experiment(experiment, [('model.layers', '3')]).model.width == 48
    assert configs.load_experiment(experiment, [('model.width', '7')]).model.width == 7
    inverse = changed("get_ref('layers') * 16", "get_ref('layers') ** -1")
    assert 'a derived value cannot be computed: ZeroDivisionError' in error(inverse, ('model.layers', '0'))


def test_the_config_is_locked(experiment):
    config = configs.load_experiment(experiment)
    with pytest.raises(AttributeError):
        config.model.laysers = 3
    with pytest.raises(AttributeError):
        config.other = 3


def test_the_argument_of_get_config(experiment, error, changed):
    assert configs.load_experiment('e.py').name == 'plain'
    assert configs.load_experiment('e.py:').name == 'plain'
    assert configs.load_experiment('e.py:a.py:b').name == 'a.py:b'
    assert configs.load_experiment(str(Path('e.py').resolve()) + ':x').name == 'x'
    failing = changed("def get_config(arg=''):\n    if arg:\n        raise KeyError(arg)\n    return None")
    assert error(f'{failing}:huge') == "other.py:huge: get_config fails at line 3: KeyError: 'huge'"
    assert 'returns NoneType, expected a config dataclass or ConfigDict' in error(failing)
    assert "does not take the argument 'x'" in error(changed('def get_config(): return 3') + ':x')
    assert 'without an argument' in error(changed('def get_config(arg): return 3'))


def test_files_that_are_not_experiments_are_refused(experiment, error, changed):
    assert 'there is no experiment file f.py' in error('f.py')
    assert 'expected an experiment file as path.py[:arg]' in error('e.yaml')
    Path('experiments').mkdir()
    Path('experiments/small.py').write_text(EXPERIMENT)
    assert error('experiments/smal.py').endswith('did you mean experiments/small.py?')
    assert error('experiments/small').endswith('did you mean experiments/small.py?')
    for name in ('/nope.py', 'zebra.py'):
        assert error(name) == f'there is no experiment file {name}'
    for text in ('x = 3', 'get_config = 3'):
        assert error(changed(text)) == "other.py has no get_config(arg='')"
    assert error(changed('x = 3\nget_config(')).startswith('other.py, line 2: SyntaxError: ')
    assert error(changed('\nimport no_such_module')) == (
        "other.py fails at line 2: ModuleNotFoundError: No module named 'no_such_module'")
    assert 'other.py' in error(changed('x = "\0"'))


def test_modules_beside_the_experiment_can_be_imported_when_it_loads_and_later(tmp_path, experiment, monkeypatch):
    folder = tmp_path / 'mine'
    folder.mkdir()
    (folder / 'common_of_mine.py').write_text('seed = 5')
    (folder / 'later_of_mine.py').write_text('rates = [0.1]')
    (folder / 'json.py').write_text('raise ImportError')  # the module of the standard library is found first
    (folder / 'e.py').write_text("""import json
from ml_collections import ConfigDict
from common_of_mine import seed

def get_config(arg=''): return ConfigDict(dict(task='toy_task:ToyTask', seed=seed))

def sweep_rates():
    from later_of_mine import rates
    return [{'rate': rate} for rate in rates]
""")
    for spec in ('mine/e.py', str(folder / 'e.py')):
        assert configs.load_experiment(spec).seed == 5
        assert configs.experiment_functions(spec, 'sweep_')['rates']() == [{'rate': 0.1}]
    assert sys.path.count(str(folder)) == 1


def test_the_repository_is_searched_after_the_current_folder(tmp_path, experiment, monkeypatch):
    (tmp_path / 'root' / 'experiments' / 'align').mkdir(parents=True)
    (tmp_path / 'root' / 'experiments' / 'align' / 'far.py').write_text(EXPERIMENT.replace('plain', 'far'))
    (tmp_path / 'root' / 'e.py').write_text(EXPERIMENT.replace('plain', 'far'))
    monkeypatch.setattr(experiment_files, '_ROOT', tmp_path / 'root')
    assert configs.load_experiment('experiments/align/far.py').name == 'far'
    assert configs.load_experiment('align/far.py').name == 'far'
    assert configs.load_experiment('e.py').name == 'plain'


@pytest.mark.parametrize(('value', 'expected'), [
    ('[1, 2]', 'config.model.shape is a list, expected a tuple'),
    ('(1, [2])', 'config.model.shape[1] is a list'),
    ('float("nan")', 'config.model.shape is nan'),
    ('(0.0, float("inf"))', 'config.model.shape[1] is inf'),
    ('print', 'config.model.shape is a builtin_function_or_method'),
    ('b"x"', 'config.model.shape is a bytes'),
    ('({"x": 1},)', 'config.model.shape is a tuple'),
    ('__import__("numpy").float64(1)', 'config.model.shape is a float64'),
    ('config_dict.required_placeholder(int)', 'a value is required: --config.model.shape=...'),
])  # fmt: skip
def test_a_value_that_json_cannot_hold_is_refused(experiment, value, expected, error, changed):
    head = 'from ml_collections import ConfigDict, config_dict\n'
    fields = f'task="toy_task:ToyTask", model=dict(shape={value})'
    assert expected in error(changed(f'{head}def get_config(arg=""): return ConfigDict(dict({fields}))'))


def test_a_required_value_may_be_given_as_an_override(experiment, changed):
    file = changed('from ml_collections import ConfigDict, config_dict\n'
                 'def get_config(arg=""): return ConfigDict(dict(task="toy_task:ToyTask", '
                 'seed=config_dict.required_placeholder(int)))')
    assert configs.load_experiment(file, [('seed', '3')]).seed == 3


@pytest.mark.parametrize(('module', 'message'), [
    ('', "module 'broken_task' has no attribute 'Mine'"),
    ('class Mine: pass', "a class whose `Config` is a dataclass of a config's fields"),
    ('class Mine:\n    Config = dict', "a class whose `Config` is a dataclass of a config's fields"),
    ('1 / 0', 'which cannot be imported: ZeroDivisionError: division by zero'),
    ('class Mine(', 'which cannot be imported: SyntaxError'),
    ('import no_such_module', 'which cannot be imported: ModuleNotFoundError'),
])  # fmt: skip
def test_an_invalid_task_of_the_user_is_refused_in_one_line(experiment, error, changed, monkeypatch, module, message):
    Path('broken_task.py').write_text(module)
    monkeypatch.delitem(sys.modules, 'broken_task', raising=False)
    assert message in error(changed('toy_task:ToyTask', 'broken_task:Mine'))
