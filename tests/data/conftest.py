"""Where the real data lies: ATTNLAB_DATA names a folder that holds `multi30k/` and `hansards/`."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope='session')
def shared():
    """The path of a folder of real data by its name; skips where it is absent."""

    def find(name: str) -> Path:
        folder = os.environ.get('ATTNLAB_DATA')
        if not folder or not (Path(folder) / name).is_dir():
            pytest.skip(f'no {name}/ in the folder that ATTNLAB_DATA names')
        return Path(folder) / name

    return find
