"""A user's own task outside the package, named in the config: trained, resumed, evaluated, swept, reported."""

import json
import sys

import pytest

from attnlab import cli, configs
from attnlab.errors import UserError
from attnlab.tasks import create_task
from attnlab.train import metrics

TASK = '''
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from attnlab.configs import RunConfig, field
from attnlab.kernels.losses import LossSums


@dataclass(frozen=True, kw_only=True)
class LineConfig(RunConfig):
    task: str = field('my_task:LineTask', 'task')
    slope: float = field(2.0, 'of the line')


@dataclass(eq=False)
class LineTask:
    Config, best, default_split, examples = LineConfig, ('error', 'min'), 'valid', 32

    config: LineConfig
    workdir: Path | None = None

    def check(self):
        pass

    def init(self, rng):
        return {'slope': jnp.zeros(())}

    def batch(self, step, rows=slice(None)):
        return {'x': np.random.default_rng((self.config.seed, step)).normal(size=4).astype(np.float32)[rows]}

    def loss(self, params, batch, rng):
        errors = ((params['slope'] - self.config.slope) * batch['x']) ** 2
        return LossSums(jnp.sum(errors), jnp.float32(errors.size), {})

    def validate(self, params):
        return {'error': abs(float(params['slope']) - self.config.slope)}

    def evaluate(self, params, split):
        return {'split': split, **self.validate(params)}

    def save(self, workdir):
        (workdir / 'slope.txt').write_text(str(self.config.slope))
'''

EXPERIMENT = '''
from my_task import LineConfig

from attnlab.configs import OptimizerConfig, TrainConfig


def get_config(arg=''):
    train = TrainConfig(
        batch_size=4, duration='3 steps', log_every='1 steps', eval_every='1 steps', save_every='1 steps', mesh='data=1'
    )
    return LineConfig(optimizer=OptimizerConfig(learning_rate=0.1, schedule='constant', warmup='0 steps'), train=train)


def sweep_slopes():
    return [{'slope': slope} for slope in (1.0, 3.0)]
'''


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """Experiment file with its own task, in the current folder."""
    (tmp_path / 'my_task.py').write_text(TASK)
    (tmp_path / 'line.py').write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    yield 'line.py'
    sys.modules.pop('my_task', None)


def test_own_task_is_trained_resumed_evaluated_and_reported(experiment, tmp_path, capsys):
    train = ['train', f'--config={experiment}', '--workdir=run']
    assert cli.main(train) == 0
    records = metrics.read_metrics(tmp_path / 'run')
    assert [record['step'] for record in records if record['split'] == 'valid'] == [1, 2, 3]
    (tmp_path / 'run' / 'slope.txt').unlink()
    assert cli.main(train) == 0 and (tmp_path / 'run' / 'slope.txt').read_text() == '2.0'
    assert cli.main([*train, '--config.slope=1.0']) == 2
    assert 'slope is 1.0 here and 2.0 there' in capsys.readouterr().err
    assert cli.main(['eval', '--workdir=run']) == 0
    assert json.loads((tmp_path / 'run' / 'scores-valid.json').read_text())['error'] < 2
    assert 'error' in (tmp_path / 'run' / 'report.html').read_text().lower()


@pytest.mark.slow
def test_own_task_is_swept(experiment, capsys):
    sweep = ['sweep', f'--config={experiment}', '--sweep=slopes', '--workdir=sweep']
    assert cli.main([*sweep, '--list']) == 0
    assert 'slope=3.0' in capsys.readouterr().out
    assert cli.main([*sweep, '--index=1']) == 0


def test_commands_that_own_task_does_not_support_are_refused(experiment, capsys):
    assert cli.main(['train', f'--config={experiment}', '--workdir=run']) == 0
    assert cli.main(['attend', '--workdir=run', 'x']) == 2
    assert "the task 'my_task:LineTask' does not attend" in capsys.readouterr().err
    assert cli.main(['count', f'--config={experiment}']) == 2
    assert "the task 'my_task:LineTask' does not have a model that can be counted" in capsys.readouterr().err


def test_config_fields_of_own_task_are_checked(experiment):
    config = configs.load_experiment(experiment)
    assert create_task(config).config.slope == 2.0
    with config.unlocked():
        config.slop = 1.0
    with pytest.raises(UserError, match='there is no config.slop; did you mean config.slope?'):
        create_task(config)
