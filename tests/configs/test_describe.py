"""Description of fields: `attnlab config` and docs/configs.md."""

from pathlib import Path

from attnlab import cli, configs
from attnlab.configs import describe, fields
from attnlab.configs.tasks import config_class


def test_docs_configs_md_is_up_to_date():
    assert Path('docs/configs.md').read_text('utf-8') == describe.config_markdown(), (
        'python -m attnlab.configs.describe > docs/configs.md'
    )


def test_the_command_shows_every_field_once_with_its_value(capsys):
    experiment = 'experiments/vision/digits.py'
    assert cli.main(['config', f'--config={experiment}', '--config.model.patch=2,2', '--config.model.norm=rms']) == 0
    lines = capsys.readouterr().out.splitlines()
    config = configs.load_experiment(experiment)
    leaves = [key for key in fields.present_keys(config) if key not in ('data', 'model', 'optimizer', 'train')]
    assert sorted(line.split()[0] for line in lines) == sorted(leaves)
    by_key = {line.split()[0]: line for line in lines}
    assert '(2, 2)' in by_key['model.patch'] and 'tuple of int, numbers 1 or more' in by_key['model.patch']
    assert by_key['model.norm'].split()[1] == 'rms' and by_key['model.norm'].endswith('(layer, rms)')
    assert 'rotary' in by_key['model.positions']


def test_the_command_refuses_an_invalid_value(capsys):
    experiment = 'experiments/vision/digits.py'
    assert cli.main(['config', f'--config={experiment}', '--config.model.positions=rotry']) == 2
    assert "model.positions is 'rotry'; expected 'learned'" in capsys.readouterr().err


def test_a_users_own_task_is_described(experiment):
    config = configs.load_experiment(experiment)
    text = describe.config_table(config_class(config.task), config)
    assert 'model.pool' in text and 'pooling (mean, max)' in text
