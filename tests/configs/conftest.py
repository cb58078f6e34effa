"""An experiment of a task of its own, whose config has a field of every type."""

import sys
from pathlib import Path

import pytest

from attnlab import configs
from attnlab.errors import UserError

TASK = """
from dataclasses import dataclass
from typing import Literal
from attnlab.configs import Section, field

@dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    lr: float = field(0.1, 'rate', least=0)
    nesterov: bool = field(False, 'momentum')
    width: float = field(3.0, 'width')

@dataclass(frozen=True, kw_only=True)
class Model(Section):
    layers: int = field(2, 'layers')
    shape: tuple[int, ...] = field((8, 8), 'sizes')
    image: tuple[int, int] = field((4, 4), 'height and width', least=1)
    languages: tuple[str, str] = field(('en', 'fr'), 'languages')
    rates: tuple[float, ...] = field((0.0, 0.5), 'rates')
    pool: Literal['mean', 'max'] = field('mean', 'pooling')
    heads: Literal[1, 2] = field(1, 'heads')
    width: int = field(32, 'width')
    later: int = field(7, 'a field that the experiment leaves out', former='earlier')

@dataclass(frozen=True, kw_only=True)
class Toy(Section):
    task: str = field('toy_task:ToyTask', 'task')
    seed: int = field(0, 'seed')
    name: str = field('plain', 'name')
    optimizer: Optimizer = field(Optimizer(), 'optimizer')
    model: Model = field(Model(), 'model')

class ToyTask:
    Config = Toy
"""

EXPERIMENT = """
from ml_collections import ConfigDict, config_dict

def get_config(arg=''):
    config = ConfigDict()
    config.task = 'toy_task:ToyTask'
    config.seed = 0
    config.name = arg or 'plain'
    config.optimizer = ConfigDict(dict(lr=0.1, nesterov=False, width=3.0))
    config.model = ConfigDict(dict(layers=2, shape=(8, 8), image=(4, 4), languages=('en', 'fr'), rates=(0.0, 0.5)))
    config.model.pool = 'mean'
    config.model.heads = 1
    config.model.width = config.model.get_ref('layers') * 16
    return config
"""


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """The name of the experiment's file, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    monkeypatch.delitem(sys.modules, 'toy_task', raising=False)
    (tmp_path / 'toy_task.py').write_text(TASK)
    (tmp_path / 'e.py').write_text(EXPERIMENT)
    return 'e.py'


@pytest.fixture
def changed(experiment):
    """Writes another experiment file, of the given text or with one text in place of another; returns its name."""

    def write(text: str, new: str | None = None) -> str:
        Path('other.py').write_text(text if new is None else EXPERIMENT.replace(text, new))
        return 'other.py'

    return write


@pytest.fixture
def error():
    """The one line that refuses a config."""

    def refused(spec, *overrides) -> str:
        with pytest.raises(UserError) as caught:
            configs.load_experiment(spec, overrides)
        assert '\n' not in str(caught.value)
        return str(caught.value)

    return refused
