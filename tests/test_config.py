"""Case 43: overrides are typed and strict, and a saved config comes back equal."""

import json
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from attnlab import configs
from attnlab.errors import UserError

EXPERIMENT = """
from ml_collections import ConfigDict, config_dict

def get_config(arg=''):
    config = ConfigDict()
    config.seed = 0
    config.name = arg or 'plain'
    config.optimizer = ConfigDict(dict(lr=0.1, warmup=config_dict.placeholder(int), nesterov=False, width=3.0))
    config.model = ConfigDict(dict(layers=2, shape=(8, 8), languages=('en', 'fr'), rates=(0, 0.5), mixed=('a', 1)))
    config.model.nested = ((1, 2), (3, 4))
    config.model.none = ()
    config.model.pool = config_dict.placeholder(str)
    config.model.window = config_dict.placeholder(tuple)
    config.model.width = config.model.get_ref('layers') * 16
    config.empty = ConfigDict()
    return config
"""


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'e.py').write_text(EXPERIMENT)
    return 'e.py'


def write(text: str) -> str:
    Path('other.py').write_text(text)
    return 'other.py'


def error(spec, *overrides) -> str:
    """The one line that refuses the config."""
    with pytest.raises(UserError) as caught:
        configs.load(spec, overrides)
    assert '\n' not in str(caught.value)
    return str(caught.value)


def get(config, key):
    for part in key.split('.'):
        config = config[part]
    return config


@pytest.mark.parametrize(('key', 'text', 'value'), [
    ('optimizer.lr', '1', 1.0),
    ('optimizer.lr', '-2e-3', -0.002),
    ('model.layers', '4', 4),
    ('model.layers', '-4', -4),
    ('model.layers', '20_000', 20000),
    ('optimizer.nesterov', 'true', True),
    ('optimizer.nesterov', 'false', False),
    ('name', 'None', 'None'),
    ('name', ' a,b=(1) ', ' a,b=(1) '),
    ('name', '', ''),
    ('model.pool', 'None', None),
    ('model.pool', 'mean', 'mean'),
    ('optimizer.warmup', '7', 7),
    ('optimizer.warmup', 'None', None),
    ('model.window', '()', ()),
    ('model.shape', '16,16', (16, 16)),
    ('model.shape', '(4, 5, 6)', (4, 5, 6)),
    ('model.shape', '3', (3,)),
    ('model.shape', '(3,)', (3,)),
    ('model.shape', '()', ()),
    ('model.rates', '1,2', (1.0, 2.0)),
    ('model.languages', 'de,nl', ('de', 'nl')),
    ('model.languages', "('de', \"nl\")", ('de', 'nl')),
    ('model.mixed', 'b,2', ('b', 2)),
])  # fmt: skip
def test_an_override_has_the_type_of_its_field(experiment, key, text, value):
    found = get(configs.load(experiment, [(key, text)]), key)
    assert repr(found) == repr(value)  # 1 == 1.0 == True, their reprs differ


@pytest.mark.parametrize(('key', 'text', 'expected'), [
    ('model.layers', '4.0', 'an int'),
    ('model.layers', '1e2', 'an int'),
    ('model.layers', '', 'an int'),
    ('model.layers', 'None', 'an int'),
    ('model.layers', 'true', 'an int'),
    ('model.layers', '٣', 'an int'),
    ('optimizer.lr', 'nan', 'expects a finite float'),
    ('optimizer.lr', 'inf', 'expects a finite float'),
    ('optimizer.lr', '-inf', 'expects a finite float'),
    ('optimizer.lr', '1e999', 'expects a finite float'),
    ('optimizer.lr', 'None', 'expects a finite float'),
    ('optimizer.lr', 'fast', 'expects a finite float'),
    ('optimizer.nesterov', 'no', 'true or false'),
    ('optimizer.nesterov', '1', 'true or false'),
    ('optimizer.nesterov', 'True', 'true or false'),
    ('optimizer.warmup', '7.0', 'an int'),
    ('model.shape', '16,16.0', 'an int'),
    ('model.shape', '16,,16', 'an int'),
    ('model.shape', 'None', 'an int'),
    ('model.rates', '0,nan', 'expects a finite float'),
    ('model.mixed', 'b', 'expects 2 elements'),
    ('model.mixed', '1,b', 'an int'),
    ('model.nested', '1,2', 'nested tuple'),
    ('model.none', '1,2', 'unknown'),
])  # fmt: skip
def test_a_wrong_type_is_refused(experiment, key, text, expected):
    message = error(experiment, (key, text))
    assert f'config.{key} ' in message
    assert expected in message


@pytest.mark.parametrize(('key', 'given', 'value'), [
    ('seed', 3, 3),
    ('seed', '3', 3),
    ('optimizer.lr', 1, 1.0),
    ('optimizer.lr', 1e-3, 1e-3),
    ('optimizer.nesterov', True, True),
    ('optimizer.warmup', None, None),
    ('optimizer.warmup', 5, 5),
    ('name', 'a b', 'a b'),
    ('model.pool', None, None),
    ('model.shape', (4, 4, 4), (4, 4, 4)),
    ('model.shape', [16, 4], (16, 4)),
    ('model.shape', (), ()),
    ('model.rates', (1, 2), (1.0, 2.0)),
    ('model.languages', ('d,e', 'f'), ('d,e', 'f')),
    ('model.mixed', ('b', 2), ('b', 2)),
])  # fmt: skip
def test_a_value_in_place_of_a_text(experiment, key, given, value):
    found = get(configs.load(experiment, [(key, given)]), key)
    assert repr(found) == repr(value)


@pytest.mark.parametrize(('key', 'given', 'expected'), [
    ('seed', 3.0, "config.seed expects an int, got 3.0"),
    ('seed', True, "config.seed expects an int, got True"),
    ('seed', None, "config.seed expects an int, got None"),
    ('optimizer.lr', float('nan'), "config.optimizer.lr expects a finite float, got nan"),
    ('optimizer.lr', float('inf'), "config.optimizer.lr expects a finite float, got inf"),
    ('optimizer.lr', False, "config.optimizer.lr expects a finite float, got False"),
    ('optimizer.nesterov', 1, "config.optimizer.nesterov expects true or false, got 1"),
    ('name', 3, "config.name expects a str, got 3"),
    ('model.shape', 3, "config.model.shape expects a tuple, got 3"),
    ('model.shape', (1, 2.5), "config.model.shape expects an int, got 2.5"),
    ('model.mixed', ('b',), "config.model.mixed expects 2 elements like ('a', 1), got ('b',)"),
    ('model.none', (1,), 'config.model.none is empty in its file'),
    ('model.nested', ((1, 2),), 'config.model.nested is a nested tuple'),
    ('model', {}, 'config.model is a section'),
])  # fmt: skip
def test_a_value_of_a_wrong_type(experiment, key, given, expected):
    assert error(experiment, (key, given)).startswith(expected)


@pytest.mark.parametrize(('key', 'nearest'), [
    ('model.laysers', 'model.layers'),
    ('modle.layers', 'model.layers'),
    ('layers', 'model.layers'),
    ('train.layers', 'model.layers'),
    ('optimizer.layers', 'model.layers'),
    ('modle.width', 'model.width'),
    ('optimiser.width', 'optimizer.width'),
    ('optimiser.lr', 'optimizer.lr'),
    ('optimizer.warmpu', 'optimizer.warmup'),
    ('model.pol', 'model.pool'),
    ('sed', 'seed'),
])  # fmt: skip
def test_a_misspelt_key_is_refused_with_the_nearest(experiment, key, nearest):
    message = error(experiment, (key, '3'))
    assert message.startswith(f'there is no config.{key};')
    assert message.endswith(f'did you mean config.{nearest}?')


@pytest.mark.parametrize(('key', 'names'), [
    ('', 'empty, model, name, optimizer, seed'),
    ('zzz', 'empty, model, name, optimizer, seed'),
    ('optimizer.zzz', 'optimizer.lr, optimizer.nesterov, optimizer.warmup, optimizer.width'),
    ('zzz.zzz', 'empty, model, name, optimizer, seed'),
])  # fmt: skip
def test_a_key_unlike_every_other_is_refused_with_all_of_its_section(experiment, key, names):
    assert error(experiment, (key, '3')) == f'there is no config.{key}; expected one of {names}'


def test_sections_and_fields_are_not_confused(experiment):
    assert 'config.optimizer.lr, config.optimizer.nesterov' in error(experiment, ('optimizer', '3'))
    assert 'config.model.layers is a int, not a section' in error(experiment, ('model.layers.x', '3'))
    assert 'it has none' in error(experiment, ('empty', '3'))


def test_a_key_set_twice_is_refused(experiment):
    assert 'config.seed is set 2 times' in error(experiment, ('seed', '1'), ('name', 'x'), ('seed', '1'))


def test_derived_values_follow_the_overrides(experiment):
    assert configs.load(experiment).model.width == 32
    assert configs.load(experiment, [('model.layers', '3')]).model.width == 48
    assert configs.load(experiment, [('model.width', '7')]).model.width == 7
    inverse = write(EXPERIMENT.replace("get_ref('layers') * 16", "get_ref('layers') ** -1"))
    assert 'a derived value fails: ZeroDivisionError' in error(inverse, ('model.layers', '0'))


def test_the_config_is_locked(experiment):
    config = configs.load(experiment)
    with pytest.raises(AttributeError):
        config.model.laysers = 3
    with pytest.raises(AttributeError):
        config.other = 3


def test_the_argument(experiment):
    assert configs.load('e.py').name == 'plain'
    assert configs.load('e.py:').name == 'plain'
    assert configs.load('e.py:a.py:b').name == 'a.py:b'
    assert configs.load(str(Path('e.py').resolve()) + ':x').name == 'x'
    bad = write("def get_config(arg=''):\n    if arg:\n        raise KeyError(arg)\n    return None")
    assert error(f'{bad}:huge') == "other.py:huge: get_config fails at line 3: KeyError: 'huge'"
    assert 'returns NoneType, expected an ml_collections.ConfigDict' in error(bad)
    assert "does not take the argument 'x'" in error(write('def get_config(): return 3') + ':x')
    assert 'without an argument' in error(write('def get_config(arg): return 3'))


def test_a_file_that_is_none(experiment):
    assert 'there is no experiment file f.py' in error('f.py')
    assert 'expected an experiment file as path.py[:arg]' in error('e.yaml')
    Path('experiments').mkdir()
    Path('experiments/small.py').write_text(EXPERIMENT)
    assert error('experiments/smal.py').endswith('did you mean experiments/small.py?')
    assert error('experiments/small').endswith('did you mean experiments/small.py?')
    for name in ('/nope.py', 'zebra.py'):
        assert error(name) == f'there is no experiment file {name}'
    for text in ('x = 3', 'get_config = 3'):
        assert error(write(text)) == "other.py has no get_config(arg='')"
    assert error(write('x = 3\nget_config(')).startswith('other.py, line 2: SyntaxError: ')
    assert error(write('\nimport no_such_module')) == (
        "other.py fails at line 2: ModuleNotFoundError: No module named 'no_such_module'")
    assert 'other.py' in error(write('x = "\0"'))


def test_modules_beside_the_experiment_can_be_imported_when_it_loads_and_later(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, 'path', [*sys.path])
    folder = tmp_path / 'mine'
    folder.mkdir()
    (folder / 'common_of_mine.py').write_text('rate = 0.5')
    (folder / 'later_of_mine.py').write_text('rates = [0.1]')
    (folder / 'json.py').write_text('raise ImportError')  # the standard library's is found first
    (folder / 'e.py').write_text("""import json
from ml_collections import ConfigDict
from common_of_mine import rate

def get_config(arg=''): return ConfigDict(dict(rate=rate))

def sweep_rates():
    from later_of_mine import rates
    return [{'rate': rate} for rate in rates]
""")
    monkeypatch.chdir(tmp_path)
    for spec in ('mine/e.py', str(folder / 'e.py')):
        assert configs.load(spec).rate == 0.5
        assert configs.functions(spec, 'sweep_')['rates']() == [{'rate': 0.1}]
    assert sys.path.count(str(folder)) == 1 and sys.path[-1] == str(folder)


def test_the_repository_is_searched_after_the_current_folder(tmp_path, experiment, monkeypatch):
    (tmp_path / 'root' / 'experiments' / 'align').mkdir(parents=True)
    (tmp_path / 'root' / 'experiments' / 'align' / 'far.py').write_text(EXPERIMENT.replace('plain', 'far'))
    (tmp_path / 'root' / 'e.py').write_text(EXPERIMENT.replace('plain', 'far'))
    monkeypatch.setattr(configs, '_ROOT', tmp_path / 'root')
    assert configs.load('experiments/align/far.py').name == 'far'
    assert configs.load('align/far.py').name == 'far'
    assert configs.load('e.py').name == 'plain'


@pytest.mark.parametrize(('value', 'expected'), [
    ('[1, 2]', 'config.a.b is a list, expected a tuple'),
    ('(1, [2])', 'config.a.b[1] is a list'),
    ('float("nan")', 'config.a.b is nan'),
    ('(0.0, float("inf"))', 'config.a.b[1] is inf'),
    ('print', 'config.a.b is a builtin_function_or_method'),
    ('b"x"', 'config.a.b is a bytes'),
    ('({"x": 1},)', 'config.a.b is a tuple'),
    ('__import__("numpy").float64(1)', 'config.a.b is a float64'),
    ('config_dict.required_placeholder(int)', 'a value is required: --config.a.b=...'),
])  # fmt: skip
def test_a_file_with_a_value_that_no_json_holds(experiment, value, expected):
    head = 'from ml_collections import ConfigDict, config_dict\n'
    assert expected in error(write(f'{head}def get_config(arg=""): return ConfigDict(dict(a=dict(b={value})))'))


def test_a_required_value_is_taken(experiment):
    file = write('from ml_collections import ConfigDict, config_dict\n'
                 'def get_config(arg=""): return ConfigDict(dict(a=config_dict.required_placeholder(int)))')
    assert configs.load(file, [('a', '3')]).a == 3


def test_saved_and_read_it_is_equal(experiment):
    config = configs.load('e.py:café', [('model.shape', '1,2,3'), ('optimizer.lr', '1')])
    configs.save(config, 'config.json')
    found = configs.read('config.json')
    assert found == config
    assert repr(found) == repr(config)
    assert found.is_locked
    assert type(found.model.shape) is tuple
    assert type(found.model.nested[0]) is tuple
    assert type(found.optimizer.lr) is float
    assert found.empty == ConfigDict().lock()
    assert json.loads(Path('config.json').read_text('utf-8'))['model']['shape'] == [1, 2, 3]
    assert sorted(path.name for path in Path().iterdir()) == ['config.json', 'e.py']
    configs.check_same(found, config)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
tuples = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)
names = st.sampled_from(['seed', 'lr', 'x_1', 'été'])
leaves = st.dictionaries(names, tuples, max_size=3)
sections = st.recursive(leaves, lambda inner: st.dictionaries(names, inner | tuples, max_size=3))


@given(sections)
def test_any_config_comes_back_equal(fields):
    config = ConfigDict(fields).lock()
    with tempfile.TemporaryDirectory() as folder:
        configs.save(config, Path(folder) / 'config.json')
        found = configs.read(Path(folder) / 'config.json')
    assert found == config
    assert repr(found.to_dict()) == repr(config.to_dict())


@pytest.mark.parametrize('text', ['{"a": NaN}', '{"a": Infinity}', '[1]', '{', '', '{"a.b": 1}', '\xff'])
def test_what_is_no_config_is_refused(tmp_path, text):
    (tmp_path / 'config.json').write_text(text, 'latin-1')
    with pytest.raises(UserError, match=r'config\.json is no config'):
        configs.read(tmp_path / 'config.json')


def test_a_missing_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r'config\.json: No such file'):
        configs.read(tmp_path / 'config.json')


def test_another_config_is_refused_naming_what_differs(experiment):
    saved = configs.load(experiment)
    given = configs.load(experiment, [('model.layers', '3'), ('model.shape', '8'), ('seed', '1')])
    with pytest.raises(UserError) as caught:
        configs.check_same(given, saved)
    message = str(caught.value)
    for part in ('model.layers is 3 here and 2 there', 'model.shape is (8,) here and (8, 8) there', 'seed is 1 here'):
        assert part in message
    assert 'optimizer' not in message
    with pytest.raises(UserError, match='a is 1 here and 1.0 there'):
        configs.check_same(ConfigDict({'a': 1}), ConfigDict({'a': 1.0}))
    with pytest.raises(UserError, match='b is absent here and None there'):
        configs.check_same(ConfigDict({'a': 1}), ConfigDict({'a': 1, 'b': None}))
    with pytest.raises(UserError, match=r': 0 is 0 here [^:]*, 4 is 4 here and absent there, and 4 more$'):
        configs.check_same(ConfigDict({str(i): i for i in range(9)}), ConfigDict())
