"""A strict environment, set before JAX is imported, and the folder of real data."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import submitit  # noqa: F401  (it configures logging when it is imported, and absl, if there before, closes stderr)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell starts with it ignored

_CACHE = Path(__file__).resolve().parents[1] / '.cache' / 'jax'

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8 ' + os.environ.get('XLA_FLAGS', '')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # as `environment.configure_process`, for tests that read the screen
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_CACHE))
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'  # programs under a second are most of the time

from jaxtyping import install_import_hook  # noqa: E402  (after the environment, as it may import JAX)

install_import_hook(['attnlab.kernels', 'attnlab.layers', 'attnlab.models'], 'beartype.beartype')
hypothesis.settings.register_profile('repeatable', derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile('repeatable')


@pytest.fixture(scope='session')
def shared() -> Callable[[str], Path]:
    """The folder of real data of a name (`multi30k`, `hansards`); skips where it is absent."""

    def find(name: str) -> Path:
        root = os.environ.get('ATTNLAB_DATA')
        if not root or not (Path(root) / name).is_dir():
            pytest.skip(f'no {name}/ in the folder that ATTNLAB_DATA names (it is {root!r})')
        return Path(root) / name

    return find


@pytest.fixture
def as_used() -> Iterator[None]:
    """Without the checks of annotations, which in the tests raise before the code's own errors do."""
    import jaxtyping

    jaxtyping.config.update('jaxtyping_disable', True)
    yield
    jaxtyping.config.update('jaxtyping_disable', False)


@pytest.fixture
def quickly() -> Iterator[None]:
    """With the compiler's optimiser off: for tests that run much code once and ask for no bits of it."""
    import jax

    jax.config.update('jax_disable_most_optimizations', True)
    yield
    jax.config.update('jax_disable_most_optimizations', False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that would begin after the time of day that a run of limited length sets, in seconds since 1970."""
    if (deadline := os.environ.get('ATTNLAB_TEST_DEADLINE')) and time.time() > float(deadline):
        pytest.skip('it would begin after ATTNLAB_TEST_DEADLINE')


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Rooms of long tests first: at the end the processes that share a run's files are left with short ones."""
    long = ('train/', 'sweeps/', 'test_experiments', 'tasks/', 'models/')
    place = lambda item: next((at for at, name in enumerate(long) if f'tests/{name}' in item.nodeid), len(long))
    items.sort(key=place)
