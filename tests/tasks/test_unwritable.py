"""Commands print their results even if they cannot write their files."""

import errno
import shutil

import pytest

from attnlab import cli, environment

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_process_setup(monkeypatch):
    """Keep commands from configuring the test process."""
    monkeypatch.setattr(environment, 'configure_process', lambda: None)


@pytest.fixture
def blocked_run(request, tmp_path):
    """Copy of a run in which files and folders block every path that a command writes; this also stops root."""
    workdir = shutil.copytree(request.getfixturevalue(request.param), tmp_path / 'run')
    for name in ('samples', 'figures'):
        shutil.rmtree(workdir / name, ignore_errors=True)
        (workdir / name).touch()
    for name in ('scores-test.json', 'scores-valid.json', 'report.html'):
        (workdir / name).unlink(missing_ok=True)
        (workdir / name / 'in-the-way').mkdir(parents=True)
    return workdir


@pytest.mark.parametrize('blocked_run', ['recurrent_run', 'stream_run'], indirect=True)
def test_eval_prints_scores_although_files_cannot_be_written(blocked_run, capsys, caplog):
    assert cli.main(['eval', f'--workdir={blocked_run}']) == 0
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith('loss ') for line in printed) and 'parameters, step' in printed[-1]
    [line] = [message for message in caplog.messages if 'cannot be written' in message]
    assert line.startswith(f'files in {blocked_run} cannot be written ({blocked_run}/')


@pytest.mark.parametrize('blocked_run', ['recurrent_run'], indirect=True)
def test_translate_prints_although_files_cannot_be_written(blocked_run, capsys, caplog):
    assert cli.main(['translate', 'The cat sleeps.', 'The dog sleeps.', f'--workdir={blocked_run}']) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2 and '.png' not in captured.err
    assert len([message for message in caplog.messages if 'cannot be written' in message]) == 1


def test_attend_fails_before_it_computes_if_files_cannot_be_written(recurrent_run, monkeypatch, capsys):
    def read_only(path, *args):
        raise OSError(errno.EROFS, 'Read-only file system', str(path))

    monkeypatch.setattr('pathlib.Path.touch', read_only)
    monkeypatch.setattr('attnlab.train.run.load_run', lambda workdir: pytest.fail('the run was loaded'))
    assert cli.main(['attend', 'The cat sleeps.', f'--workdir={recurrent_run}']) == 1
    assert capsys.readouterr().err == f'attnlab: {recurrent_run}: Read-only file system\n'
