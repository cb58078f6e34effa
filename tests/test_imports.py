"""The order of packages: a module imports only from packages below its own."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / 'attnlab'
# From top to bottom.  `configs` imports only files and errors, so that every package that reads a config is above it.
PACKAGES = (
    'cli commands api notebook bench sweeps report train tasks decode models layers kernels data configs flags '
    'launch environment files parameters errors'
).split()
FORBIDDEN = {
    'kernels': {'flax', 'optax', 'orbax'},
    'data': {'jax', 'jaxlib', 'flax', 'optax', 'orbax', 'chex', 'jaxtyping'},
    'configs': {'jax', 'flax', 'numpy'},
    'commands': {'jax', 'flax', 'numpy'},
    'flags': {'jax', 'flax', 'numpy'},
    'launch': {'jax', 'flax', 'numpy'},
    'environment': {'jax', 'flax', 'numpy'},
    'files': {'jax', 'flax', 'numpy'},
    'parameters': {'jax', 'flax', 'numpy'},
    'errors': {'jax', 'flax', 'numpy'},
    'report': {'jax', 'jaxlib', 'flax', 'optax', 'orbax', 'chex'},
}
NOT_IMPORTED = {  # packages below a package that it still must not import
    'report': {'train', 'decode', 'models', 'layers', 'kernels', 'configs'},
    'train': {'decode', 'models', 'layers'},
    'data': {'configs'},
}


def imports(source: str, package: str) -> set[str]:
    """Return the dotted names of all imports of a module of the package, also of those inside functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split('.')[: len(package.split('.')) - node.level + 1] if node.level else []
            base = '.'.join([*above, *filter(None, [node.module])])
            names |= {f'{base}.{alias.name}' for alias in node.names}
    return names


def forbidden_imports(package: str, names: set[str]) -> set[str]:
    """Return the names that a package must not import."""
    forbidden = {name for name in names if name.split('.')[0] in FORBIDDEN.get(package, set())}
    if package == 'train':  # it imports the task protocol and no particular task
        forbidden |= {name for name in names if name.startswith('attnlab.tasks.') and name.split('.')[2] != 'task'}
    for name in names:
        parts = name.split('.')
        if parts[0] == 'attnlab' and len(parts) > 1 and (target := parts[1]) in PACKAGES:
            if PACKAGES.index(target) < PACKAGES.index(package) or target in NOT_IMPORTED.get(package, set()):
                forbidden.add(name)
    return forbidden


def modules() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob('*.py'))


@pytest.mark.parametrize('file', modules())
def test_modules_import_only_lower_packages(file):
    path = PACKAGE.parent / file
    package = path.relative_to(PACKAGE).parts[0].removesuffix('.py')
    package = {'__init__': 'cli', '__main__': 'cli'}.get(package, package)
    assert package in PACKAGES, f'{file} is in none of the packages {PACKAGES}'
    assert not forbidden_imports(package, imports(path.read_text('utf-8'), '.'.join(Path(file).parts[:-1])))


@pytest.mark.parametrize(('package', 'source'), [
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
def test_forbidden_import_is_detected(package, source):
    assert forbidden_imports(package, imports(source, f'attnlab.{package}'))


@pytest.mark.parametrize(('package', 'source'), [
    ('layers', 'import flax.linen as nn\nfrom attnlab.kernels import masks\nfrom . import attention'),
    ('tasks', 'from attnlab.decode import greedy\nfrom attnlab import models, data'),
    ('report', 'import numpy\nfrom attnlab.data import alignments'),
    ('train', 'from attnlab.tasks.task import Task\nfrom attnlab import errors, tasks'),
])  # fmt: skip
def test_allowed_import_passes(package, source):
    assert not forbidden_imports(package, imports(source, f'attnlab.{package}'))
