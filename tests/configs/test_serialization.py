"""config.json: a loaded config equals the saved one; missing and renamed fields of earlier versions are accepted."""

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from attnlab import configs
from attnlab.configs.fields import to_dataclass
from attnlab.configs.tasks import config_class
from attnlab.errors import UserError


def test_a_loaded_config_equals_the_saved_one(experiment):
    config = configs.load_experiment('e.py:café', [('model.shape', '1,2,3'), ('optimizer.lr', '1')])
    configs.save_config(config, 'config.json')
    loaded = configs.load_config('config.json')
    assert loaded == config
    assert repr(loaded) == repr(config)
    assert loaded.is_locked
    assert type(loaded.model.shape) is tuple
    assert type(loaded.optimizer.lr) is float
    assert json.loads(Path('config.json').read_text('utf-8'))['model']['shape'] == [1, 2, 3]
    assert {path.name for path in Path().iterdir()} - {'__pycache__'} == {'config.json', 'e.py', 'toy_task.py'}
    configs.check_same_config(loaded, config)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
tuples = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)
names = st.sampled_from(['seed', 'lr', 'x_1', 'été'])
leaves = st.dictionaries(names, tuples, max_size=3)
sections = st.recursive(leaves, lambda inner: st.dictionaries(names, inner | tuples, max_size=3))


@pytest.mark.slow
@given(sections)
def test_any_config_survives_json(values):
    config = ConfigDict(values).lock()
    loaded = configs.config_from_json(json.loads(json.dumps(configs.config_to_json(config))))
    assert loaded == config
    assert repr(loaded.to_dict()) == repr(config.to_dict())


@pytest.mark.parametrize('text', ['{"a": NaN}', '{"a": Infinity}', '[1]', '{', '', '\xff'])
def test_a_file_that_is_not_a_config_is_refused(tmp_path, text):
    (tmp_path / 'config.json').write_text(text, 'latin-1')
    with pytest.raises(UserError, match=r'config\.json is not a config'):
        configs.load_config(tmp_path / 'config.json')


def test_a_missing_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r'config\.json: No such file'):
        configs.load_config(tmp_path / 'config.json')


def test_another_config_is_refused_with_the_differences(experiment):
    saved = configs.load_experiment(experiment)
    other = configs.load_experiment(experiment, [('model.layers', '3'), ('model.shape', '8'), ('seed', '1')])
    with pytest.raises(UserError) as caught:
        configs.check_same_config(other, saved)
    message = str(caught.value)
    for part in ('model.layers is 3 here and 2 there', 'model.shape is (8,) here and (8, 8) there', 'seed is 1 here'):
        assert part in message
    assert 'optimizer' not in message
    with pytest.raises(UserError, match='a is 1 here and 1.0 there'):
        configs.check_same_config(ConfigDict({'a': 1}), ConfigDict({'a': 1.0}))
    with pytest.raises(UserError, match='b is absent here and None there'):
        configs.check_same_config(ConfigDict({'a': 1}), ConfigDict({'a': 1, 'b': None}))
    end = 'and 4 more; expected the same config, or another directory$'
    with pytest.raises(UserError, match=r': 0 is 0 here [^:]*, 4 is 4 here and absent there, ' + end):
        configs.check_same_config(ConfigDict({str(i): i for i in range(9)}), ConfigDict())


def test_missing_fields_get_their_defaults_and_are_named_in_a_warning(experiment, caplog):
    config = configs.load_experiment(experiment)
    values = configs.config_to_json(config)
    del values['model']['later'], values['name'], values['optimizer']
    Path('config.json').write_text(json.dumps(values))
    with caplog.at_level(logging.WARNING):
        loaded = configs.load_config('config.json')
    assert loaded == config
    assert len(caplog.records) == 1
    for part in ("name = 'plain'", 'optimizer.lr = 0.1', 'model.later = 7'):
        assert part in caplog.text


def test_a_field_with_its_former_name_is_loaded_under_its_present_one(experiment, caplog):
    config = configs.load_experiment(experiment, [('model.later', '9')])
    values = configs.config_to_json(config)
    values['model']['earlier'] = values['model'].pop('later')
    Path('config.json').write_text(json.dumps(values))
    with caplog.at_level(logging.WARNING):
        assert configs.load_config('config.json') == config
    assert not caplog.records


def test_a_former_name_beside_the_present_one_stays_an_unknown_field(experiment):
    config = configs.load_experiment(experiment)
    values = configs.config_to_json(config)
    values['model']['earlier'] = 9
    Path('config.json').write_text(json.dumps(values))
    loaded = configs.load_config('config.json')
    assert loaded.model.later == 7
    with pytest.raises(UserError, match=r'there is no config\.model\.earlier; did you mean config\.model\.later\?'):
        to_dataclass(config_class(loaded.task), loaded)


def test_a_config_with_all_fields_is_loaded_without_a_warning(experiment, caplog):
    configs.save_config(configs.load_experiment(experiment), 'config.json')
    with caplog.at_level(logging.WARNING):
        configs.load_config('config.json')
    assert not caplog.records


def test_a_config_without_a_valid_task_is_refused(experiment):
    for text, message in (('{}', 'config has no task; expected'), ('{"task": "aline"}', "task is 'aline'; expected")):
        Path('config.json').write_text(text)
        with pytest.raises(UserError, match=f'config.json: {message}'):
            configs.load_config('config.json')
