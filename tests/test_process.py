"""attnlab as a separate process: its imports, the time of its start, its exit codes and output streams."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import attnlab
from attnlab import environment
from tests import toy

OUT = 'True café \u2603\n'


def _environment() -> dict[str, str]:
    return {**os.environ, 'PYTHONPATH': str(Path(attnlab.__file__).parents[1])}


def python(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *argv], env=_environment(), capture_output=True, text=True, timeout=60)


def python_in_shell(line: str) -> subprocess.CompletedProcess:
    line = f'exec {shlex.quote(sys.executable)} {line}'
    return subprocess.run(line, shell=True, env=_environment(), capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize('argv', [['--help'], ['--version'], ['train', '--help'], ['eval', '--workdir=x'], ['trian']])
def test_command_line_help_imports_no_heavy_modules(argv):
    lines = python('-X', 'importtime', '-m', 'attnlab', *argv).stderr.splitlines()
    loaded = {line.split('|')[-1].strip().split('.')[0] for line in lines if line.startswith('import time:')}
    assert 'attnlab' in loaded
    assert not loaded & {'jax', 'jaxlib', 'flax', 'numpy', 'ml_collections', 'matplotlib', 'rich', 'sacrebleu'}


def test_importing_the_package_imports_no_heavy_modules():
    code = 'import sys, attnlab, json; print(json.dumps(sorted(sys.modules)))'
    assert not set(json.loads(python('-c', code).stdout)) & {'jax', 'numpy', 'ml_collections', 'matplotlib'}


SHADOWS = ('random', 'token', 'queue', 'argparse', 'json', 'signal', 'jax', 'numpy')


@pytest.mark.parametrize('start', [['-m', 'attnlab'], environment.attnlab_command()[1:]], ids=['python -m', 'workers'])
def test_files_of_the_current_folder_do_not_shadow_modules(tmp_path, monkeypatch, start):
    """A random.py of the user replaces no module; this folder has no `attnlab` itself."""
    for name in SHADOWS:
        (tmp_path / f'{name}.py').write_text(f'raise SystemExit("{name}.py of the current folder was run")')
    monkeypatch.chdir(tmp_path)
    done = python(*start, 'aer', '--gold=x', '--links=y')
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr.startswith('attnlab: x: ') and 'current folder' not in done.stderr


def test_only_environment_builds_command_lines():
    """Also the processes of `sweep`, `--processes` and jobs: none of them imports from the current folder."""
    sources = Path(attnlab.__file__).parent.rglob('*.py')
    starts = {path.name for path in sources if 'sys.executable' in path.read_text('utf-8')}
    assert starts == {'environment.py'}


def test_uninstalled_copy_runs_its_own_code(tmp_path):
    copy = tmp_path / 'attnlab'
    shutil.copytree(Path(attnlab.__file__).parent, copy, ignore=shutil.ignore_patterns('__pycache__', 'tasks', 'train'))
    (copy / '__init__.py').write_text('__version__ = "of the copy"')
    done = subprocess.run([sys.executable, '-P', copy / '__main__.py', '--version'], capture_output=True, text=True)
    assert done.stdout == 'attnlab of the copy\n'


@pytest.mark.parametrize(('redirection', 'code', 'out', 'error'), [
    ('>&-', 0, '', ''),
    ('2>&-', 0, OUT, ''),
    ('<&-', 0, OUT, ''),
    ('<&- >&- 2>&-', 0, '', ''),
    ('>/dev/full', 1, '', 'attnlab: No space left on device\n'),
])  # fmt: skip
def test_closed_or_full_stream_prints_no_traceback(tmp_path, redirection, code, out, error):
    """Also, no file that is opened gets the file descriptor of a closed stream."""
    program = (
        'import sys; from attnlab import cli, environment; sys.argv = ["attnlab"]; '
        'cli._dispatch = lambda argv: print(open(sys.executable).fileno() > 2, "café \u2603"); sys.exit(cli.main())'
    )
    (tmp_path / 'program.py').write_text(program, 'utf-8')
    done = python_in_shell(f'{tmp_path}/program.py {redirection}')
    assert (done.returncode, done.stdout, done.stderr) == (code, out, error)


@pytest.mark.parametrize(('encoding', 'out'), [
    ('ascii', b'True caf\\xe9 \\u2603\n'), ('latin-1', b'True caf\xe9 \\u2603\n'), ('utf-8', OUT.encode())
])  # fmt: skip
def test_unencodable_characters_are_printed_as_escapes(monkeypatch, encoding, out):
    monkeypatch.setenv('PYTHONIOENCODING', encoding)
    program = 'from attnlab import environment; environment.open_standard_streams(); print(True, "café \u2603")'
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, env=_environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, out, b'')


def test_help_takes_less_than_300_ms():
    def seconds() -> float:
        start = time.perf_counter()
        assert python('-m', 'attnlab', '--help').returncode == 0
        return time.perf_counter() - start

    assert min(seconds() for _ in range(7)) < 0.3


def test_user_error_exits_with_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    toy.write()
    before = toy.tree()
    done = python('-m', 'attnlab', 'train', '--config=e.py', '--workdir=new', '--config.lr=nan')
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr == "attnlab: config.lr expects a finite float, got 'nan'\n"
    assert [path for path in toy.tree() if '__pycache__' not in path] == before


def test_computing_commands_restart_with_large_pages(monkeypatch):
    """A process starts once if GLIBC_TUNABLES is set or nothing is computed; the exit code is that of the last."""
    program = (
        'import os, sys; sys.argv = ["attnlab", *sys.argv[1:]]; from attnlab import cli; '
        'print(os.environ.get("GLIBC_TUNABLES"), flush=True); sys.exit(cli.main())'
    )
    monkeypatch.delenv('GLIBC_TUNABLES', raising=False)

    def run(*argv):
        done = python('-c', program, *argv)
        return done.returncode, done.stdout.split()

    second_start = ['glibc.malloc.hugetlb=1'] if sys.platform == 'linux' else []
    assert run('eval', '--workdir=nowhere') == (2, ['None', *second_start])
    assert run('aer') == (2, ['None'])
    monkeypatch.setenv('GLIBC_TUNABLES', 'glibc.malloc.check=0')
    assert run('eval', '--workdir=nowhere') == (2, ['glibc.malloc.check=0'])


def test_processes_auto_without_a_cluster_is_refused(tmp_path):
    repository = Path(attnlab.__file__).parents[1]
    flags = [f'--config={repository}/experiments/vision/digits.py', f'--workdir={tmp_path}/run', '--processes=auto']
    done = python('-m', 'attnlab', 'train', *flags)
    assert done.returncode == 2
    assert 'attnlab: the processes of the run cannot connect: found no settings of SLURM, Open MPI or' in done.stderr
    assert not (tmp_path / 'run').exists()


def test_run_error_ends_the_process_without_waiting_for_threads():
    program = """
import sys, threading, time
from attnlab import cli
from attnlab.errors import RunError

def fail(argv):
    threading.Thread(target=time.sleep, args=(50,)).start()
    print('output')
    raise RunError('the error')

cli._dispatch, sys.argv = fail, ['attnlab']
sys.exit(cli.main())
"""
    start = time.perf_counter()
    done = python('-c', program)
    assert (done.returncode, done.stdout, done.stderr) == (1, 'output\n', 'attnlab: the error\n')
    assert time.perf_counter() - start < 30
