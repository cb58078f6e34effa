"""Command lines of `attnlab sweep` that are refused in one line, before anything is written."""

from pathlib import Path

import pytest

from attnlab import cli
from tests.sweeps import made
from tests.sweeps.experiments import CHECKED


@pytest.fixture
def refused(experiment, tmp_path, capsys):
    """Return a function that runs the command with some flags and returns its error line."""
    config = experiment(CHECKED)

    def line(*flags):
        assert cli.main(['sweep', f'--config={config}', f'--workdir={tmp_path}/new', *flags]) == 2
        out, err = capsys.readouterr()
        assert out == '' and err.startswith('attnlab: ') and err.count('\n') == 1
        assert [path.name for path in tmp_path.iterdir() if path.name != '__pycache__'] == [Path(config).name]
        return err.removeprefix('attnlab: ').rstrip('\n')

    return line


@pytest.mark.parametrize(('flags', 'message'), [
    ([], 'sweep needs --sweep=NAME[,NAME]'),
    (['--sweep=seeds', '--workers=0'], '--workers is 0; expected 1 to 256'),
    (['--sweep=seeds', '--workers=nan'], "--workers expects a whole number, got 'nan'"),
    (['--sweep=seeds', '--workers=1000000'], '--workers is 1000000; expected 1 to 256'),
    (['--sweep=space', '--trials=-1'], '--trials is -1; expected 1 to 10000'),
    (['--sweep=space', '--trials=1_000_000_000'], '--trials is 1000000000; expected 1 to 10000'),
    (['--sweep=seeds', '--workers=2', '--worker=2'], '--worker is 2; expected 0 to 1'),
    (['--sweep=seeds', '--index=999'], '--index is 999; expected 0 to 2'),
    (['--sweep=seeds', '--retry='], "--retry: ignored explicit argument ''"),
    (['--sweep=seeds', '--best='], '--best expects FILE.py, got nothing'),
    (['--sweep=', '--list'], '--sweep expects NAME[,NAME], got nothing'),
    (['--sweep=,', '--list'], "has no sweep ''"),
    (['--sweep=seeds,', '--list'], "has no sweep ''"),
    (['--sweep=seeds,seeds', '--list'], 'config.seed is set by two sweeps of a product: to 0 and 0'),
    (['--sweep=seeds', '--launcher=local', '--launcher_options==b'], "expects KEY=VALUE,..., got '=b'"),
    (['--sweep=seeds', '--launcher=local', '--launcher_options=timeout_min=x'], '"timeout_min" expected type'),
    (['--sweep=seeds', '--launcher=local', '--storage=nonsense://'], '--storage=nonsense:// cannot be reached'),
    (['--sweep=seeds', '--launcher=local', '--storage=nonsense'], '--storage expects a URL as in postgresql://user@host'),
    (['--sweep=seeds', '--launcher=local', '--storage=sqlite:////no/x.db'], 'there is no folder /no'),
    (['--sweep=seeds', '--workers=two'], "--workers expects a whole number, got 'two'"),
    (['--sweep=seeds', '--index=3'], '--index is 3; expected 0 to 2'),
    (['--sweep=seeds', '--index=-1'], '--index is -1; expected 0 to 9999'),
    (['--sweep=space', '--index=0'], 'space is a search, whose points are drawn when they run'),
    (['--sweep=space', '--list'], 'space is a search, whose points are drawn when they run'),
    (['--sweep=space', '--sampler=cma'], "--sampler is 'cma'; did you mean cmaes?"),
    (['--sweep=space', '--pruner=asher'], "--pruner is 'asher'; did you mean asha?"),
    (['--sweep=seeds', '--launcher=pbs'], "--launcher is 'pbs'; expected one of slurm, local"),
    (['--sweep=seeds', '--launcher_options=x=1'], '--launcher_options needs --launcher'),
    (['--sweep=seeds', '--launcher=slurm'], '--launcher=slurm needs --storage=URL'),
    (['--sweep=seeds', '--launcher=local', '--launcher_options=x'], "--launcher_options expects KEY=VALUE,..., got"),
    (['--sweep=sedes', '--list'], "has no sweep 'sedes'; did you mean seeds?"),
    (['--sweep=typo', '--list'], 'point 1 of the sweep (model.hiden=3): there is no config.model.hiden'),
    (['--sweep=seeds', '--list', '--config.seed=3'], 'config.seed is varied by the sweep, and --config.seed=3 sets it'),
    (['--sweep=seeds', '--lst'], "sweep does not understand '--lst'; did you mean --list?"),
])  # fmt: skip
def test_an_invalid_command_line_is_refused(refused, flags, message):
    assert message in refused(*flags)


def test_list_prints_the_points(experiment, tmp_path, capsys):
    config = experiment(CHECKED)
    assert cli.main(['sweep', f'--config={config}', f'--workdir={tmp_path}/new', '--sweep=sizes,seeds', '--list']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and not (tmp_path / 'new').exists()
    assert lines[1] == ('1\tpoints/hidden=8,embedding=4,seed=1\tmodel.hidden=8 model.embedding=4 seed=1')


def test_best_refuses_the_directory_of_another_sweep(experiment, tmp_path, capsys):
    config, folder = experiment(CHECKED), tmp_path / 'sweep'
    made.write_sweep(folder, [made.make_point({'seed': 1}, value=1.0, metrics=[])], config=config, names=('seeds',))
    best = lambda name, *more: cli.main(['sweep', f'--config={config}', f'--workdir={folder}', f'--sweep={name}',
                                         f'--best={tmp_path}/best.py', *more])  # fmt: skip
    assert best('sizes') == 2 and not (tmp_path / 'best.py').exists()
    message = f'holds another sweep: sizes of {config} here and seeds of {config} there'
    assert message in capsys.readouterr().err
    assert best('seeds', '--config.model.hidden=64', '--trials=7') == 2
    assert f'{folder} holds another sweep: one without --trials=7 --config.model.hidden=64' in capsys.readouterr().err
    assert best('seeds') == 0 and (tmp_path / 'best.py').exists()


@pytest.mark.parametrize(('functions', 'message'), [
    ('def sweep_x(): pass', 'sweep_x() returns None; expected dicts dotted key -> value'),
    ('def sweep_x(): return 3', "--sweep=x fails: TypeError: 'int' object is not iterable"),
    ('def sweep_x(): return {"seed": 1}', "a point of a sweep is a dict dotted key -> value, got 'seed'"),
    ('def sweep_x(): return [{3: 4}]', 'a point of a sweep is a dict dotted key -> value, got {3: 4}'),
    ('def sweep_x(): raise ValueError("two\\nlines")', '--sweep=x fails: ValueError: two lines'),
    ('def sweep_x(): raise SystemExit(0)', '--sweep=x fails: SystemExit: 0'),
    ('def sweep_x(): return sweep_x()', '--sweep=x fails: RecursionError: '),
    ('def sweep_x(y): return [{"seed": y}]', '--sweep=x fails: TypeError: sweep_x() missing 1 required positional'),
    ('def sweep_x():\n    yield {"seed": 1}\n    raise KeyError("a")', "--sweep=x fails: KeyError: 'a'"),
    ('def sweep_x():\n    while True:\n        yield {"seed": 1}', '--sweep=x has more than 10000 points'),
    ('def sweep_x(): return [{"seed": 1}, {"seed": 1}]', 'points 0 and 1 of the sweep are the same: seed=1'),
    ('def sweep_x(): return [{"model.hiden": 1}]', 'there is no config.model.hiden; did you mean config.model.hidden?'),
    ('def sweep_x(): return [{"model": {"hidden": 1}}]', 'config.model is a section, set one of its fields'),
    ('def sweep_x(): return [{"optimizer.learning_rate": float("nan")}]', 'learning_rate is nan; expected a finite'),
    ('sweep_x = 3', 'it has neither sweep_NAME() nor search_NAME(trial)'),
])  # fmt: skip
@pytest.mark.parametrize('flag', ['--list', '--index=0', '--launcher=local'])
def test_an_invalid_sweep_function_is_refused_in_one_line(experiment, tmp_path, capsys, functions, message, flag):
    argv = ['sweep', f'--config={experiment(functions)}', f'--workdir={tmp_path}/new', '--sweep=x', flag]
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == '' and message in err and err.count('\n') == 1 and not (tmp_path / 'new').exists()


@pytest.mark.parametrize('best', ['', '/best.py', '/best.txt', '/none/best.py'])
def test_best_refuses_an_unusable_file_name(experiment, tmp_path, capsys, best):
    config, folder = experiment(CHECKED), tmp_path / 'sweep'
    made.write_sweep(folder, [made.make_point({'seed': 1}, value=1.0, metrics=[])], config=config, names=('seeds',))
    (tmp_path / 'best.py').write_text('mine')
    before = sorted(tmp_path.rglob('*'))
    argv = ['sweep', f'--config={config}', f'--workdir={folder}', '--sweep=seeds', f'--best={tmp_path}{best}']
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.count('\n') == 1
    assert sorted(tmp_path.rglob('*')) == before and (tmp_path / 'best.py').read_text() == 'mine'


@pytest.mark.parametrize('text', ['', '{}', '[]', 'null', '3', '"x"', '{"config": 1}', '\x00', '[' * 100000])
@pytest.mark.parametrize('file', ['sweep.json', 'points/p0/outcome.json', 'points/p0/running.json'])
def test_a_damaged_sweep_file_is_named_in_the_error(experiment, tmp_path, capsys, text, file):
    config, folder = experiment(CHECKED), tmp_path / 'sweep'
    made.write_sweep(folder, [made.make_point({'seed': 1}, 'running')], config=config, names=('seeds',))
    (folder / file).write_text(text)
    argv = ['sweep', f'--config={config}', f'--workdir={folder}', '--sweep=seeds', f'--best={tmp_path}/best.py']
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert err.count('\n') == 1 and f'{folder / file} ' in err
