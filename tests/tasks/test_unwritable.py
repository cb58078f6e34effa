"""A result is printed also where the files beside it cannot be written."""

import errno
import shutil

import pytest

from attnlab import cli, environment

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(environment, 'configure_process', lambda: None)


@pytest.fixture
def blocked(request, tmp_path):
    """A run where something stands in the way of every file that a command would write: so it does for root, too."""
    workdir = shutil.copytree(request.getfixturevalue(request.param), tmp_path / 'run')
    for name in ('samples', 'figures'):
        shutil.rmtree(workdir / name, ignore_errors=True)
        (workdir / name).touch()
    for name in ('scores-test.json', 'scores-valid.json', 'report.html'):
        (workdir / name).unlink(missing_ok=True)
        (workdir / name / 'in-the-way').mkdir(parents=True)
    return workdir


@pytest.mark.parametrize('blocked', ['tiny', 'stream'], indirect=True)
def test_scores_are_printed(blocked, capsys, caplog):
    assert cli.main(['eval', f'--workdir={blocked}']) == 0
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith('loss ') for line in printed) and 'parameters, step' in printed[-1]
    [line] = [each for each in caplog.messages if 'cannot be written' in each]
    assert line.startswith(f'files in {blocked} cannot be written ({blocked}/')


@pytest.mark.parametrize('blocked', ['tiny'], indirect=True)
def test_translations_are_printed(blocked, capsys, caplog):
    assert cli.main(['translate', 'The cat sleeps.', 'The dog sleeps.', f'--workdir={blocked}']) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2 and '.png' not in captured.err
    assert len([each for each in caplog.messages if 'cannot be written' in each]) == 1


def test_what_only_writes_files_is_refused_before_it_computes(tiny, monkeypatch, capsys):
    def read_only(path, *args):
        raise OSError(errno.EROFS, 'Read-only file system', str(path))

    monkeypatch.setattr('pathlib.Path.touch', read_only)
    monkeypatch.setattr('attnlab.train.run.load_run', lambda workdir: pytest.fail('it computes'))
    assert cli.main(['attend', 'The cat sleeps.', f'--workdir={tiny}']) == 1
    assert capsys.readouterr().err == f'attnlab: {tiny}: Read-only file system\n'
