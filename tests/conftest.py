"""A strict environment, set before JAX is imported, and the folders of real data."""

import os
from pathlib import Path

import hypothesis
import pytest

_CACHE = Path(__file__).resolve().parents[1] / '.cache' / 'jax'

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=4'
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_CACHE))
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'  # programs under a second are most of the time

from jaxtyping import install_import_hook  # noqa: E402  (after the environment, as it may import JAX)

install_import_hook(['attnlab.kernels', 'attnlab.layers'], 'beartype.beartype')
hypothesis.settings.register_profile('repeatable', derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile('repeatable')


def _data(name: str) -> Path:
    root = os.environ.get('ATTNLAB_DATA')
    if not root:
        pytest.skip(f'ATTNLAB_DATA is unset: it names the folder that holds {name}/')
    if not (Path(root) / name).is_dir():
        pytest.skip(f'ATTNLAB_DATA={root} holds no {name}/')
    return Path(root) / name


@pytest.fixture(scope='session')
def multi30k() -> Path:
    """The folder of Multi30k's files."""
    return _data('multi30k')


@pytest.fixture(scope='session')
def hansards() -> Path:
    """The folder of the Hansards' gold alignments."""
    return _data('hansards')
