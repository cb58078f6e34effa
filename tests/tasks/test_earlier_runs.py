"""Runs of earlier versions, whose config.json lacks fields that were added later."""

import json
import logging
import shutil

import pytest

from attnlab import configs
from attnlab.errors import UserError
from attnlab.train import run
from tests.experiments import leaves

IDENTITY = ('task', 'data.name', 'model.name')  # without a default, because they select which other fields there are


def remove_field(key, text):
    """Return the text of a config.json without a field."""
    config = json.loads(text)
    *path, name = key.split('.')
    section = config
    for part in path:
        section = section[part]
    del section[name]
    return json.dumps(config)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('fixture', ['recurrent_run', 'transformer_run', 'stream_run'])
def test_a_missing_field_gets_its_default_and_the_log_names_it(fixture, tmp_path, request, caplog):
    """Fields whose default is the value of the run give the same config."""
    workdir = request.getfixturevalue(fixture)
    text = (workdir / 'config.json').read_text('utf-8')
    complete_config, same = run.load_task(workdir).config, 0
    shutil.copytree(workdir, tmp_path / 'run')
    for key in leaves(configs.load_config(workdir / 'config.json')):
        (tmp_path / 'run' / 'config.json').write_text(remove_field(key, text))
        caplog.clear()
        if key in IDENTITY and not (fixture == 'stream_run' and key == 'model.name'):
            with pytest.raises(UserError, match=key):
                run.load_task(tmp_path / 'run')
            continue
        with caplog.at_level(logging.WARNING):
            try:
                config = run.load_task(tmp_path / 'run').config
            except UserError:  # learned positions, the default, need a longer context
                assert (fixture, key) == ('transformer_run', 'model.positions')
                config = None
        assert f'{key} = ' in caplog.text
        same += config == complete_config
    assert same > 10


@pytest.mark.slow
def test_a_run_without_later_fields_evaluates_and_continues(transformer_run, tmp_path):
    shutil.copytree(transformer_run, tmp_path / 'run')
    scores = run.evaluate_run(tmp_path / 'run', 'test')
    text = (transformer_run / 'config.json').read_text('utf-8')
    for key in ('model.sinks', 'train.ema', 'optimizer.layer_decay', 'start', 'decode.beams'):
        text = remove_field(key, text)
    (tmp_path / 'run' / 'config.json').write_text(text)
    assert run.evaluate_run(tmp_path / 'run', 'test') == scores
    config = configs.load_config(transformer_run / 'config.json')
    run.train_run(config, tmp_path / 'run')  # accepted as the same run


FORMER_NAMES = {'kernel_size': 'taps', 'experts_per_token': 'active'}


def test_a_run_saved_with_former_field_names_evaluates_and_continues(documents_run, tmp_path, caplog):
    shutil.copytree(documents_run, tmp_path / 'run')
    before = run.evaluate_run(tmp_path / 'run', 'valid')
    saved = json.loads((documents_run / 'config.json').read_text('utf-8'))
    assert saved['model']['experts_per_token'] == 1  # not the default
    for name, former in FORMER_NAMES.items():
        saved['model'][former] = saved['model'].pop(name)
    (tmp_path / 'run' / 'config.json').write_text(json.dumps(saved))
    with caplog.at_level(logging.WARNING):
        assert run.load_task(tmp_path / 'run').config == run.load_task(documents_run).config
    assert not caplog.records
    assert run.evaluate_run(tmp_path / 'run', 'valid') == before
    run.train_run(configs.load_config(documents_run / 'config.json'), tmp_path / 'run')  # accepted as the same run
