"""Settings of the test environment, made before JAX is imported, and common fixtures."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import submitit  # noqa: F401  (its import configures logging; if absl were imported before it, absl would close stderr)

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in a background job of a shell

_CACHE = Path(__file__).resolve().parents[1] / '.cache' / 'jax'

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8 ' + os.environ.get('XLA_FLAGS', '')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # as in `environment.configure_process`, for tests that read output
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_CACHE))
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'  # most of the time is spent on small programs

from jaxtyping import install_import_hook  # noqa: E402  (after the environment, as it may import JAX)

install_import_hook(['attnlab.kernels', 'attnlab.layers', 'attnlab.models'], 'beartype.beartype')
hypothesis.settings.register_profile('repeatable', derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile('repeatable')


@pytest.fixture(scope='session')
def shared() -> Callable[[str], Path]:
    """Return a function (name, such as `multi30k` or `hansards`) -> folder of real data.

    The function skips the test if the folder does not exist.
    """

    def find_folder(name: str) -> Path:
        root = os.environ.get('ATTNLAB_DATA')
        if not root or not (Path(root) / name).is_dir():
            pytest.skip(f'there is no folder {name}/ in ATTNLAB_DATA, which is {root!r}')
        return Path(root) / name

    return find_folder


@pytest.fixture
def as_used() -> Iterator[None]:
    """Disable the checks of jaxtyping annotations, which in tests raise before the code raises its own errors."""
    import jaxtyping

    jaxtyping.config.update('jaxtyping_disable', True)
    yield
    jaxtyping.config.update('jaxtyping_disable', False)


@pytest.fixture
def quickly() -> Iterator[None]:
    """Disable compiler optimisations, for tests that run much code once and compare no exact bits."""
    import jax

    jax.config.update('jax_disable_most_optimizations', True)
    yield
    jax.config.update('jax_disable_most_optimizations', False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that would begin after ATTNLAB_TEST_DEADLINE, a time in seconds since 1970."""
    if (deadline := os.environ.get('ATTNLAB_TEST_DEADLINE')) and time.time() > float(deadline):
        pytest.skip('the test would begin after ATTNLAB_TEST_DEADLINE')


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases beyond `quick_cases(n)` as slow, and sort the tests."""
    mark_slow_cases(items)
    sort_by_folder(items)


def mark_slow_cases(items: list[pytest.Item]) -> None:
    """Keep n cases, spread evenly, of a test with `quick_cases(n)` among the quick tests; mark the others slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker('quick_cases') and not item.get_closest_marker('slow'):
            cases.setdefault(item.nodeid.partition('[')[0], []).append(item)
    for group in cases.values():
        count = group[0].get_closest_marker('quick_cases').args[0]  # type: ignore[union-attr]
        quick = {i * len(group) // count for i in range(count)}
        for i, item in enumerate(group):
            if i not in quick:
                item.add_marker('slow')


def sort_by_folder(items: list[pytest.Item]) -> None:
    """Run folders with long tests first: parallel test processes then end at about the same time."""
    slow_folders = ('train/', 'sweeps/', 'test_experiments', 'tasks/', 'models/')

    def position(item: pytest.Item) -> int:
        positions = (i for i, name in enumerate(slow_folders) if f'tests/{name}' in item.nodeid)
        return next(positions, len(slow_folders))

    items.sort(key=position)
