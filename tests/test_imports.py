"""The rooms of the package: a module imports only what stands below it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / 'attnlab'
# From the top.  A config knows nothing but files and errors, so every room that reads one stands above it.
ROOMS = (
    'cli bench sweeps report train tasks decode models layers kernels data configs flags launch environment files '
    'parameters errors'
).split()
FORBIDDEN = {
    'kernels': {'flax', 'optax', 'orbax'},
    'data': {'jax', 'jaxlib', 'flax', 'optax', 'orbax', 'chex', 'jaxtyping'},
    'configs': {'jax', 'flax', 'numpy'},
    'flags': {'jax', 'flax', 'numpy'},
    'launch': {'jax', 'flax', 'numpy'},
    'environment': {'jax', 'flax', 'numpy'},
    'files': {'jax', 'flax', 'numpy'},
    'parameters': {'jax', 'flax', 'numpy'},
    'errors': {'jax', 'flax', 'numpy'},
    'report': {'jax', 'jaxlib', 'flax', 'optax', 'orbax', 'chex'},
}
HIDDEN = {  # rooms that stand below, but are no business of the room
    'report': {'train', 'decode', 'models', 'layers', 'kernels', 'configs'},
    'train': {'decode', 'models', 'layers'},
    'data': {'configs'},
}


def imports(source: str, package: str) -> set[str]:
    """Dotted names of all that a module of the package imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split('.')[: len(package.split('.')) - node.level + 1] if node.level else []
            base = '.'.join([*above, *filter(None, [node.module])])
            found |= {f'{base}.{alias.name}' for alias in node.names}
    return found


def faults(room: str, names: set[str]) -> set[str]:
    """The imports that the room may not make."""
    wrong = {name for name in names if name.split('.')[0] in FORBIDDEN.get(room, set())}
    if room == 'train':  # it knows what a task is, and no task by name
        wrong |= {name for name in names if name.startswith('attnlab.tasks.') and name.split('.')[2] != 'task'}
    for name in names:
        parts = name.split('.')
        if parts[0] == 'attnlab' and len(parts) > 1 and (target := parts[1]) in ROOMS:
            if ROOMS.index(target) < ROOMS.index(room) or target in HIDDEN.get(room, set()):
                wrong.add(name)
    return wrong


def modules() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob('*.py'))


@pytest.mark.parametrize('file', modules())
def test_modules_import_only_lower_packages(file):
    path = PACKAGE.parent / file
    room = path.relative_to(PACKAGE).parts[0].removesuffix('.py')
    room = {'__init__': 'cli', '__main__': 'cli'}.get(room, room)
    assert room in ROOMS, f'{file} stands in no room'
    assert not faults(room, imports(path.read_text('utf-8'), '.'.join(Path(file).parts[:-1])))


@pytest.mark.parametrize(('room', 'source'), [
    ('kernels', 'import flax.linen as nn'),
    ('kernels', 'from attnlab.layers import attention'),
    ('kernels', 'def f():\n    from attnlab import models'),
    ('data', 'import jax'),
    ('data', 'def f():\n    import jax.numpy as jnp'),
    ('train', 'from attnlab.tasks import align'),
    ('train', 'from attnlab import models'),
    ('tasks', 'from attnlab.train import loop'),
    ('layers', 'from .. import models'),
    ('layers', 'from ..models.recurrent import Seq2Seq'),
    ('report', 'from attnlab.train import metrics'),
    ('report', 'from attnlab.sweeps import outcome'),
    ('tasks', 'import attnlab.report.page'),
    ('errors', 'from attnlab import configs'),
])  # fmt: skip
def test_forbidden_import_is_detected(room, source):
    assert faults(room, imports(source, f'attnlab.{room}'))


@pytest.mark.parametrize(('room', 'source'), [
    ('layers', 'import flax.linen as nn\nfrom attnlab.kernels import masks\nfrom . import attention'),
    ('tasks', 'from attnlab.decode import greedy\nfrom attnlab import models, data'),
    ('report', 'import numpy\nfrom attnlab.data import alignments'),
    ('train', 'from attnlab.tasks.task import Task\nfrom attnlab import errors, tasks'),
])  # fmt: skip
def test_allowed_import_passes(room, source):
    assert not faults(room, imports(source, f'attnlab.{room}'))
