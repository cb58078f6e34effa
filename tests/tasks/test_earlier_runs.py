"""A run of an earlier version: its config.json lacks fields that came later, and it is used as before."""

import json
import logging
import shutil

import pytest

from attnlab import configs
from attnlab.errors import UserError
from attnlab.train import run
from tests.experiments import leaves

IDENTITY = ('task', 'data.name', 'model.name')  # which fields there are depends on them, so they have no default


def without(key, text):
    """The text of a config.json with a field taken away."""
    config = json.loads(text)
    *path, name = key.split('.')
    section = config
    for part in path:
        section = section[part]
    del section[name]
    return json.dumps(config)


@pytest.mark.parametrize('fixture', ['tiny', 'translating', 'stream'])
def test_each_field_in_turn_may_be_missing(fixture, tmp_path, request, caplog):
    """The field has its default. Where that is what the run had, it is the same run; else the change is named."""
    workdir = request.getfixturevalue(fixture)
    text = (workdir / 'config.json').read_text('utf-8')
    whole, same = run.load_task(workdir).config, 0
    shutil.copytree(workdir, tmp_path / 'run')
    for key in leaves(configs.load_config(workdir / 'config.json')):
        (tmp_path / 'run' / 'config.json').write_text(without(key, text))
        caplog.clear()
        if key in IDENTITY and not (fixture == 'stream' and key == 'model.name'):
            with pytest.raises(UserError, match=key):
                run.load_task(tmp_path / 'run')
            continue
        with caplog.at_level(logging.WARNING):
            try:
                found = run.load_task(tmp_path / 'run').config
            except UserError:  # no default goes with the other fields: learned positions want a longer context
                assert (fixture, key) == ('translating', 'model.positions')
                found = None
        assert f'{key} = ' in caplog.text
        same += found == whole
    assert same > 10


def test_it_evaluates_and_continues(translating, tmp_path):
    shutil.copytree(translating, tmp_path / 'run')
    before = run.evaluate_run(tmp_path / 'run', 'test')
    text = (translating / 'config.json').read_text('utf-8')
    for key in ('model.sinks', 'train.ema', 'optimizer.layer_decay', 'start', 'decode.beams'):
        text = without(key, text)
    (tmp_path / 'run' / 'config.json').write_text(text)
    assert run.evaluate_run(tmp_path / 'run', 'test') == before
    config = configs.load_config(translating / 'config.json')
    run.train_run(config, tmp_path / 'run')  # accepted as the same run


FORMER_NAMES = {'kernel_size': 'taps', 'experts_per_token': 'active'}


def test_a_run_saved_with_former_field_names_evaluates_and_continues(documents, tmp_path, caplog):
    shutil.copytree(documents, tmp_path / 'run')
    before = run.evaluate_run(tmp_path / 'run', 'valid')
    saved = json.loads((documents / 'config.json').read_text('utf-8'))
    assert saved['model']['experts_per_token'] == 1  # not the default
    for name, former in FORMER_NAMES.items():
        saved['model'][former] = saved['model'].pop(name)
    (tmp_path / 'run' / 'config.json').write_text(json.dumps(saved))
    with caplog.at_level(logging.WARNING):
        assert run.load_task(tmp_path / 'run').config == run.load_task(documents).config
    assert not caplog.records
    assert run.evaluate_run(tmp_path / 'run', 'valid') == before
    run.train_run(configs.load_config(documents / 'config.json'), tmp_path / 'run')  # accepted as the same run
