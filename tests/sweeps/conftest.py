"""Fixtures: experiment files that train for a second, and databases."""

import os
import uuid

import pytest

from tests.sweeps.experiments import EXPERIMENT, LANGUAGE


@pytest.fixture
def experiment(tmp_path):
    """Return a function that writes an experiment file with the given sweep functions and returns its path."""
    from tests.tiny import TINY_GRAMMAR

    def write(functions):
        path = tmp_path / 'experiment.py'
        path.write_text(EXPERIMENT.format(tiny=TINY_GRAMMAR) + functions)
        return str(path)

    return write


@pytest.fixture
def trainable(tmp_path):
    """Like `experiment`, with a small language model that trains quickly."""
    from tests.tiny import LINES, TINY_TRAINING, TINY_TRANSFORMER

    def write(functions):
        (tmp_path / 'input.txt').write_text('\n'.join(LINES) + '\n')
        fields = TINY_TRANSFORMER | TINY_TRAINING | {'data.folder': str(tmp_path), 'train.save_every': '3 steps'}
        path = tmp_path / 'experiment.py'
        path.write_text(LANGUAGE.format(fields=fields | {'train.eval_every': '10 steps'}) + functions)
        return str(path)

    return write


@pytest.fixture(params=['sqlite', 'postgresql'])
def database(request, tmp_path):
    """URL of an empty database."""
    if request.param == 'sqlite':
        yield f'sqlite:///{tmp_path}/claims.db'
        return
    server = os.environ.get('ATTNLAB_POSTGRES')
    if not server:
        pytest.skip('no PostgreSQL server: ATTNLAB_POSTGRES names none, as in postgresql://postgres@127.0.0.1:5432')
    import psycopg

    name = f'attnlab_{uuid.uuid4().hex}'
    with psycopg.connect(f'{server}/postgres', autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE {name}')
        yield f'{server}/{name}'
        connection.execute(f'DROP DATABASE {name} WITH (FORCE)')
