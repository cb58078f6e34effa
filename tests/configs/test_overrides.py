"""Case 43: overrides are typed and strict."""

import pytest

from attnlab import configs


def get(config, key):
    for part in key.split('.'):
        config = config[part]
    return config


@pytest.mark.parametrize(('key', 'text', 'value'), [
    ('optimizer.lr', '1', 1.0),
    ('optimizer.lr', '2e-3', 0.002),
    ('optimizer.width', '-2', -2.0),
    ('model.layers', '4', 4),
    ('model.layers', '-4', -4),
    ('model.layers', '20_000', 20000),
    ('model.later', '3', 3),
    ('optimizer.nesterov', 'true', True),
    ('optimizer.nesterov', 'false', False),
    ('name', 'None', 'None'),
    ('name', ' a,b=(1) ', ' a,b=(1) '),
    ('name', '', ''),
    ('model.pool', 'max', 'max'),
    ('model.heads', '2', 2),
    ('model.shape', '16,16', (16, 16)),
    ('model.shape', '(4, 5, 6)', (4, 5, 6)),
    ('model.shape', '3', (3,)),
    ('model.shape', '(3,)', (3,)),
    ('model.shape', '()', ()),
    ('model.rates', '1,2', (1.0, 2.0)),
    ('model.languages', 'de,nl', ('de', 'nl')),
    ('model.languages', "('de', \"nl\")", ('de', 'nl')),
])  # fmt: skip
def test_an_override_has_the_type_of_its_field(experiment, key, text, value):
    found = get(configs.load_experiment(experiment, [(key, text)]), key)
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
    ('model.shape', '16,16.0', 'an int'),
    ('model.shape', '16,,16', 'an int'),
    ('model.shape', 'None', 'an int'),
    ('model.rates', '0,nan', 'expects a finite float'),
    ('model.image', '4', 'expects 2 elements'),
    ('model.heads', 'two', 'an int'),
])  # fmt: skip
def test_a_wrong_type_is_refused(experiment, error, key, text, expected):
    message = error(experiment, (key, text))
    assert f'config.{key} ' in message
    assert expected in message


@pytest.mark.parametrize(('key', 'given', 'value'), [
    ('seed', 3, 3),
    ('seed', '3', 3),
    ('optimizer.lr', 1, 1.0),
    ('optimizer.lr', 1e-3, 1e-3),
    ('optimizer.nesterov', True, True),
    ('name', 'a b', 'a b'),
    ('model.shape', (4, 4, 4), (4, 4, 4)),
    ('model.shape', [16, 4], (16, 4)),
    ('model.shape', (), ()),
    ('model.rates', (1, 2), (1.0, 2.0)),
    ('model.languages', ('d,e', 'f'), ('d,e', 'f')),
])  # fmt: skip
def test_a_value_in_place_of_a_text(experiment, key, given, value):
    found = get(configs.load_experiment(experiment, [(key, given)]), key)
    assert repr(found) == repr(value)


@pytest.mark.parametrize(('key', 'given', 'expected'), [
    ('seed', 3.0, 'seed is 3.0; expected an int'),
    ('seed', True, 'seed is True; expected an int'),
    ('seed', None, 'seed is None; expected an int'),
    ('optimizer.lr', float('nan'), 'optimizer.lr is nan; expected a finite float'),
    ('optimizer.lr', float('inf'), 'optimizer.lr is inf; expected a finite float'),
    ('optimizer.lr', False, 'optimizer.lr is False; expected a finite float'),
    ('optimizer.lr', '-1', 'optimizer.lr is -1.0; expected 0 or more'),
    ('optimizer.nesterov', 1, 'optimizer.nesterov is 1; expected true or false'),
    ('name', 3, 'name is 3; expected a str'),
    ('model.shape', 3, 'model.shape is 3; expected a tuple of int'),
    ('model.shape', (1, 2.5), 'model.shape is (1, 2.5); expected a tuple of int'),
    ('model.image', (1,), 'model.image is (1,); expected a tuple of 2 int'),
    ('model.image', (1, 0), 'model.image is (1, 0); expected numbers 1 or more'),
    ('model.pool', 'men', "model.pool is 'men'; expected 'mean' or 'max'"),
    ('model.heads', '3', 'model.heads is 3; expected 1 or 2'),
    ('model', {}, 'config.model is a section'),
])  # fmt: skip
def test_a_value_of_a_wrong_type_or_out_of_bounds(experiment, error, key, given, expected):
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
    ('optimizer.nestrov', 'optimizer.nesterov'),
    ('model.pol', 'model.pool'),
    ('model.latre', 'model.later'),
    ('sed', 'seed'),
])  # fmt: skip
def test_a_misspelt_key_is_refused_with_the_nearest(experiment, error, key, nearest):
    message = error(experiment, (key, '3'))
    assert message.startswith(f'there is no config.{key};')
    assert message.endswith(f'did you mean config.{nearest}?')


def test_a_former_name_is_refused_with_the_present_one(experiment, error):
    assert error(experiment, ('model.earlier', '3')) == (
        'there is no config.model.earlier; did you mean config.model.later?'
    )
    spec = 'experiments/language/shakespeare_char.py'
    for former, present in (('taps', 'kernel_size'), ('active', 'experts_per_token')):
        assert error(spec, (f'model.{former}', '3')) == (
            f'there is no config.model.{former}; did you mean config.model.{present}?'
        )


@pytest.mark.parametrize(('key', 'names'), [
    ('', 'model, name, optimizer, seed, task'),
    ('zzz', 'model, name, optimizer, seed, task'),
    ('optimizer.zzz', 'optimizer.lr, optimizer.nesterov, optimizer.width'),
    ('zzz.zzz', 'model, name, optimizer, seed, task'),
])  # fmt: skip
def test_a_key_unlike_every_other_is_refused_with_all_of_its_section(experiment, error, key, names):
    assert error(experiment, (key, '3')) == f'there is no config.{key}; expected one of {names}'


def test_sections_and_fields_are_not_confused(experiment, error):
    assert 'config.optimizer.lr, config.optimizer.nesterov' in error(experiment, ('optimizer', '3'))
    assert 'config.model.layers is a int, not a section' in error(experiment, ('model.layers.x', '3'))


def test_a_key_set_twice_is_refused(experiment, error):
    assert 'config.seed is set 2 times' in error(experiment, ('seed', '1'), ('name', 'x'), ('seed', '1'))


def test_another_name_brings_its_fields(experiment):
    spec = 'experiments/language/shakespeare_char.py'
    config = configs.load_experiment(spec, [('data.path', 'x.txt'), ('data.name', 'file')])
    assert config.data.name == 'file' and config.data.path == 'x.txt' and config.data.share == 0.9


def test_a_field_of_another_name_is_refused_as_such(error):
    spec = 'experiments/align/grammar_gru.py'
    assert error(spec, ('data.folder', 'x')) == (
        "config.data.folder is a field of data.name 'multi30k'; data.name is 'grammar'"
    )
    assert error(spec, ('model.layers', '3')) == (
        "config.model.layers is a field of model.name 'transformer'; model.name is 'recurrent'"
    )
    assert error(spec, ('data.name', 'multi30k'), ('data.train_examples', '5')).endswith("data.name is 'multi30k'")
