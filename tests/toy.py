"""An experiment with a custom task that is never trained, for tests of the command line."""

from pathlib import Path

TASK = """
from dataclasses import dataclass
from attnlab.configs import Section, field

@dataclass(frozen=True, kw_only=True)
class Nested(Section):
    bias: bool = field(True, 'a field of a section in a section')

@dataclass(frozen=True, kw_only=True)
class Model(Section):
    layers: int = field(2, 'layers')
    shape: tuple[int, ...] = field((8, 8), 'sizes')
    dropout: float = field(0.1, 'rate')
    nested: Nested = field(Nested(), 'section')

@dataclass(frozen=True, kw_only=True)
class Config(Section):
    task: str = field('cli_task:Task', 'task')
    lr: float = field(0.1, 'rate')
    name: str = field('', 'name')
    model: Model = field(Model(), 'model')

class Task:
    Config = Config
"""
EXPERIMENT = """
from attnlab.configs import config_dict
from cli_task import Config

def get_config(arg=''):
    return config_dict(Config(name=arg))
"""


def write() -> None:
    """Write the experiment e.py and the module of its task into the current folder."""
    Path('cli_task.py').write_text(TASK)
    Path('e.py').write_text(EXPERIMENT)


def tree() -> list[str]:
    """Return all paths below the current folder, sorted."""
    return sorted(str(path) for path in Path().rglob('*'))
