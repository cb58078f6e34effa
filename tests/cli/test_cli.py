"""The command line as a whole: exit codes, error lines, help."""

import jax  # here, because JAX reads JAX_PLATFORMS when it is imported
import pytest

import attnlab
from attnlab import cli, commands
from attnlab.errors import Stopped, UserError
from tests.cli.helpers import refused


def test_a_command_is_needed(capsys):
    assert refused(capsys).startswith('a command is missing: expected one of train, sweep, eval')


@pytest.mark.parametrize(('raised', 'code', 'line'), [
    (UserError('a\nb'), 2, 'attnlab: a b\n'),
    (KeyboardInterrupt(), 130, 'attnlab: interrupted\n'),
    (OSError(28, 'No space left on device', 'runs/one/x'), 1, 'attnlab: runs/one/x: No space left on device\n'),
    (BrokenPipeError(), 1, ''),
    (MemoryError('Unable to allocate 7 TiB'), 1, 'attnlab: not enough memory: Unable to allocate 7 TiB\n'),
    (MemoryError(), 1, 'attnlab: not enough memory: Python has none left\n'),
    (RuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nMore'), 1,
     'attnlab: not enough memory: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\n'),
    (Stopped(15, 7), 143, 'attnlab: SIGTERM: saved at step 7; run the same command again to continue\n'),
])  # fmt: skip
def test_exit_codes(monkeypatch, capsys, raised, code, line):
    def stop(*args, **kw):
        raise raised

    monkeypatch.setattr('attnlab.train.run.evaluate_run', stop)
    assert cli.main(['eval', '--workdir=runs/one']) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(('error', 'reason'), [
    (AssertionError(), 'this JAX was installed without it'),
    (RuntimeError("Unable to initialize backend 'cuda': no GPU (set JAX_PLATFORMS='' to ...)"),
     "Unable to initialize backend 'cuda': no GPU"),
])  # fmt: skip
def test_a_platform_that_is_not_there_is_told_in_one_line(monkeypatch, capsys, error, reason):
    def absent(*args, **kw):
        raise error

    monkeypatch.setenv('JAX_PLATFORMS', 'cuda')
    monkeypatch.setattr(jax, 'devices', absent)
    monkeypatch.setattr('attnlab.train.run.evaluate_run', absent)
    assert cli.main(['eval', '--workdir=runs/one']) == 2
    expected = 'expected a platform of this machine, such as cpu'
    assert capsys.readouterr().err == f"attnlab: JAX_PLATFORMS is 'cuda': {reason}; {expected}\n"


def test_a_runtime_error_with_devices_keeps_its_traceback(monkeypatch):
    def fail(*args, **kw):
        raise RuntimeError('of ours')

    monkeypatch.setattr('attnlab.train.run.evaluate_run', fail)
    with pytest.raises(RuntimeError, match='of ours'):
        cli.main(['eval', '--workdir=runs/one'])


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr('attnlab.train.run.evaluate_run', lambda *args, **kw: {}['x'])
    with pytest.raises(KeyError):
        cli.main(['eval', '--workdir=runs/one'])


def test_every_command_has_help(capsys):
    assert cli.main(['--help']) == 0
    overview = capsys.readouterr().out
    for name, command in commands.COMMANDS.items():
        assert f'  {name:<10} {command.summary}\n' in overview
        with pytest.raises(SystemExit) as caught:
            cli.main([name, '--help'])
        assert caught.value.code == 0
        text = capsys.readouterr().out
        assert text.startswith(f'usage: attnlab {name} ')
        assert all(f'--{flag.name}' in text for flag in command.flags)
    assert cli.main(['--version']) == 0
    assert capsys.readouterr().out == f'attnlab {attnlab.__version__}\n'
