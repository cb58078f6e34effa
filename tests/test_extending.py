"""The examples of docs/extending.md, applied to a copy of the package and run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / 'docs' / 'extending.md').read_text('utf-8')
LANGUAGE = [
    '--config=experiments/language/shakespeare_char.py', '--config.data.name=grammar', '--config.data.documents=lines',
    '--config.data.train_examples=60', '--config.data.test_examples=10', '--config.model.layers=1',
    '--config.model.width=16', '--config.model.heads=2', '--config.train.duration=2 steps', '--workdir=run',
    '--config.train.log_every=1 steps', '--config.train.eval_every=2 steps', '--config.train.save_every=2 steps',
    '--config.optimizer.warmup=1 steps', '--config.train.mesh=data=1',
]  # fmt: skip


def section(title):
    """Return the text of a section of the page."""
    return re.search(rf'^## {title}\n(.*?)(?=^## |\Z)', PAGE, flags=re.M | re.S)[1]


def files(text):
    """Return (name, content) of each code block that is a whole file."""
    return re.findall(r'```python\n# (\S+)\n(.*?)```', text, flags=re.S)


def changes(text):
    """Yield (name, old text, new text) of each diff."""
    for name, diff in re.findall(r'```diff\n--- (\S+)\n(.*?)```', text, flags=re.S):
        lines = [(line[:1], line[1:]) for line in diff.splitlines(keepends=True)]
        yield name, *(''.join(line for mark, line in lines if mark in marks) for marks in (' -', ' +'))


@pytest.fixture
def extended(tmp_path):
    """A function that applies the changes and files of a section to a copy of the package and returns a function `run`,
    which runs Python there and returns its output."""
    for name in ('attnlab', 'experiments'):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns('__pycache__'))
    environment = os.environ | {'PYTHONPATH': str(tmp_path), 'XLA_FLAGS': ''}

    def extend(title):
        text = section(title)
        for name, content in files(text):
            (tmp_path / name).write_text(content)
        for name, old, new in changes(text):
            source = (tmp_path / name).read_text()
            assert source.count(old) == 1, f'{name} does not contain exactly once\n{old}'
            (tmp_path / name).write_text(source.replace(old, new))

        def run(*arguments, code=0):
            command = [sys.executable, *arguments]
            process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert process.returncode == code, process.stderr
            return process.stdout + process.stderr

        return run

    return extend


@pytest.mark.slow
def test_a_new_field_of_the_block_is_read_checked_and_described(extended):
    run = extended('A field of the block')
    run('-m', 'attnlab', 'train', *LANGUAGE, '--config.model.residual_scale=0.5')
    error = run('-m', 'attnlab', 'train', *LANGUAGE, '--config.model.residual_scale=0', code=2)
    assert 'model.residual_scale is 0.0; expected more than 0.0' in error
    assert 'factor of the output of a branch' in run('-m', 'attnlab', 'config', *LANGUAGE[:1])


@pytest.mark.slow
def test_a_new_position_encoding_trains_and_is_an_error_for_images(extended):
    run = extended('A position encoding')
    run('-m', 'attnlab', 'train', *LANGUAGE, '--config.model.positions=log_distance')
    error = run('-m', 'attnlab', 'count', '--config=experiments/vision/digits.py',
                '--config.model.positions=log_distance', code=2)  # fmt: skip
    assert 'log_distance' in error


@pytest.mark.slow
def test_a_new_attention_implementation_trains_and_equals_dense(extended):
    run = extended('An attention implementation')
    run('-m', 'attnlab', 'train', *LANGUAGE, '--config.model.implementation=checkpointed')
    check = """
import jax, numpy as np
from attnlab import dot_product_attention
x = jax.random.normal(jax.random.key(0), (1, 5, 2, 4))
loss = lambda x, name: dot_product_attention(x, x, x, is_causal=True, implementation=name).sum()
for actual, expected in zip(*(jax.value_and_grad(loss)(x, name) for name in ('checkpointed', 'dense'))):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
"""
    run('-c', check)


@pytest.mark.slow
def test_the_conformance_suite_tests_a_new_implementation(extended, tmp_path):
    run = extended('An attention implementation')
    for name in ('tests', 'setup.cfg'):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    suite = 'tests/kernels/test_conformance.py'
    output = run('-m', 'pytest', '-q', '-p', 'no:cacheprovider', suite, '-k', 'checkpointed')
    assert int(re.search(r'(\d+) passed', output)[1]) > 10


@pytest.mark.slow
def test_a_new_task_and_its_experiment_work_with_the_commands(extended, tmp_path):
    run = extended('A task of your own')
    for name, content in files(section('An experiment')):
        (tmp_path / name).write_text(content)
    train = ['-m', 'attnlab', 'train', '--config=line.py', '--workdir=runs/line']
    run(*train)
    assert 'error' in run('-m', 'attnlab', 'eval', '--workdir=runs/line')
    assert 'slope of the line' in run('-m', 'attnlab', 'config', '--config=line.py:3')
    run(*train)
    assert 'slope is 1.0 here and 2.0 there' in run(*train, '--config.slope=1.0', code=2)
    assert 'slope=3.0' in run('-m', 'attnlab', 'sweep', '--config=line.py', '--sweep=slopes', '--workdir=sw', '--list')
