"""The experiments of the project, for tests that apply to each of them."""

from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

EXPERIMENTS = sorted(str(path) for path in Path('experiments').rglob('*.py'))


def leaves(config: ConfigDict, above: str = '') -> Iterator[str]:
    """Yield the dotted keys of all fields of a config, without its sections."""
    for key in config:
        value = config[key]
        yield from leaves(value, f'{above}{key}.') if isinstance(value, ConfigDict) else [f'{above}{key}']
