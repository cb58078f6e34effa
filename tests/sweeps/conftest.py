"""Experiments with sweeps that train for a second, databases, and the command as processes."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

import attnlab
from tests.quick import QUICK

EXPERIMENT = '''
"""The grammar experiment cut down to a second or two."""
from attnlab import configs
from attnlab.sweeps import chained, grid, product, zipped

TINY = {tiny!r}

def get_config(arg=''):
    config = configs.load('experiments/align/grammar_gru.py', list(TINY.items())).copy_and_resolve_references()
    config.unlock()
    return config
'''


@pytest.fixture
def experiment(tmp_path):
    """Writes an experiment file with these functions behind its config, and returns its path."""
    from tests.tasks.conftest import TINY

    def write(functions):
        path = tmp_path / 'experiment.py'
        path.write_text(EXPERIMENT.format(tiny=TINY) + functions)
        return str(path)

    return write


LANGUAGE = '''
"""A language model that is compiled in a second."""
from attnlab import configs
from attnlab.sweeps import grid

FIELDS = {fields!r}

def get_config(arg=''):
    config = configs.load('experiments/language/shakespeare_char.py', list(FIELDS.items()))
    config = config.copy_and_resolve_references()
    config.unlock()
    return config
'''


@pytest.fixture
def trainable(tmp_path):
    """As `experiment`, of what is quickly trained."""
    from tests.tasks.conftest import LINES, STEPS, TRANSFORMER

    def write(functions):
        (tmp_path / 'input.txt').write_text('\n'.join(LINES) + '\n')
        fields = TRANSFORMER | STEPS | {'data.folder': str(tmp_path), 'train.save_every': '3 steps'}
        path = tmp_path / 'experiment.py'
        path.write_text(LANGUAGE.format(fields=fields | {'train.eval_every': '10 steps'}) + functions)
        return str(path)

    return write


@pytest.fixture(params=['sqlite', 'postgresql'])
def database(request, tmp_path):
    """The URL of an empty database."""
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


def environment(**more):
    """Of a process that starts at once, compiles in no time, and finds the package that is tested."""
    root = str(Path(attnlab.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get('PYTHONPATH')]))
    quick = ' '.join(f'--{name}={str(value).lower()}' for name, value in QUICK.items())
    flags = {'XLA_FLAGS': f'--xla_force_host_platform_device_count=1 {quick}'}
    return {**os.environ, 'PYTHONPATH': path, 'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=0', **flags, **more}


def python(*argv, **options):
    """A process of Python; `wait` for it as for any `Popen`."""
    return subprocess.Popen([sys.executable, *map(str, argv)], env=environment(), text=True, **options)


def sweep(config, workdir, *flags, **options):
    """`attnlab sweep` as a process, with what it says kept."""
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, **options}
    return python('-m', 'attnlab', 'sweep', f'--config={config}', f'--workdir={workdir}', *flags, **pipes)


def said(process, limit=300):
    """The exit code of a process and what it said."""
    text, _ = process.communicate(timeout=limit)
    return process.returncode, text
