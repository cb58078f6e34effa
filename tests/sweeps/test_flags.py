"""What the command refuses, in one line and before anything is written."""

from pathlib import Path

import pytest

from attnlab import cli
from tests.sweeps import made
from tests.sweeps.test_points import SWEEPS


@pytest.fixture
def refused(experiment, tmp_path, capsys):
    """The line that refuses these flags."""
    config = experiment(SWEEPS)

    def line(*flags):
        assert cli.main(['sweep', f'--config={config}', f'--workdir={tmp_path}/new', *flags]) == 2
        out, err = capsys.readouterr()
        assert out == '' and err.startswith('attnlab: ') and err.count('\n') == 1
        assert [path.name for path in tmp_path.iterdir() if path.name != '__pycache__'] == [Path(config).name]
        return err.removeprefix('attnlab: ').rstrip('\n')

    return line


@pytest.mark.parametrize(('flags', 'said'), [
    ([], 'sweep needs --sweep=NAME[,NAME]'),
    (['--sweep=seeds', '--workers=0'], '--workers is 0; expected 1 or more'),
    (['--sweep=seeds', '--workers=two'], "--workers expects a whole number, got 'two'"),
    (['--sweep=seeds', '--index=3'], '--index is 3; expected 0 to 2'),
    (['--sweep=seeds', '--index=-1'], '--index is -1; expected 0 or more'),
    (['--sweep=space', '--index=0'], 'space is a search, whose points are drawn when they run'),
    (['--sweep=space', '--list'], 'space is a search, whose points are drawn when they run'),
    (['--sweep=space', '--sampler=cma'], "--sampler is 'cma'; did you mean cmaes?"),
    (['--sweep=space', '--pruner=asher'], "--pruner is 'asher'; did you mean asha?"),
    (['--sweep=seeds', '--launcher=pbs'], "--launcher is 'pbs'; expected one of slurm, local"),
    (['--sweep=seeds', '--launcher_options=x=1'], '--launcher_options goes with --launcher'),
    (['--sweep=seeds', '--launcher=slurm'], '--launcher=slurm needs --storage=URL'),
    (['--sweep=seeds', '--launcher=local', '--launcher_options=x'], "--launcher_options expects KEY=VALUE,..., got"),
    (['--sweep=sedes', '--list'], "has no sweep 'sedes'; did you mean seeds?"),
    (['--sweep=typo', '--list'], 'point 1 of the sweep (model.hiden=3): there is no config.model.hiden'),
    (['--sweep=seeds', '--list', '--config.seed=3'], 'config.seed is varied by the sweep, and --config.seed=3 sets it'),
    (['--sweep=seeds', '--lst'], "sweep does not understand '--lst'; did you mean --list?"),
])  # fmt: skip
def test_a_command_line_that_is_none(refused, flags, said):
    assert said in refused(*flags)


def test_the_list(experiment, tmp_path, capsys):
    config = experiment(SWEEPS)
    assert cli.main(['sweep', f'--config={config}', f'--workdir={tmp_path}/new', '--sweep=sizes,seeds', '--list']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and not (tmp_path / 'new').exists()
    assert lines[1] == (
        '1\tpoints/hidden=8,embedding=4,seed=1\tmodel.hidden=8 model.embedding=4 seed=1'
    )


def test_the_best_of_another_sweep_is_not_written(experiment, tmp_path, capsys):
    config, folder = experiment(SWEEPS), tmp_path / 'sweep'
    made.sweep(folder, [made.point({'seed': 1}, value=1.0, metrics=[])], config=config, names=('seeds',))
    best = lambda name, *more: cli.main(['sweep', f'--config={config}', f'--workdir={folder}', f'--sweep={name}',
                                         f'--best={tmp_path}/best.py', *more])  # fmt: skip
    assert best('sizes') == 2 and not (tmp_path / 'best.py').exists()
    said = f'holds another sweep: sizes of {config} here and seeds of {config} there'
    assert said in capsys.readouterr().err
    assert best('seeds', '--config.model.hidden=64', '--trials=7') == 2
    assert f'{folder} holds another sweep: one without --trials=7 --config.model.hidden=64' in capsys.readouterr().err
    assert best('seeds') == 0 and (tmp_path / 'best.py').exists()
