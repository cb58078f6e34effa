"""The command `sweep`: what its flags ask for, and who does it."""

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab import environment
from attnlab.errors import Stopped, UserError
from attnlab.flags import nearest, number
from attnlab.sweeps import MAX_POINTS
from attnlab.sweeps.signals import handle_stop_signals

if TYPE_CHECKING:
    from attnlab.sweeps.points import SweepPlan

_MANY = 64
"""Devices, as many as any mesh of one machine asks for."""

_PATIENCE = 60.0
"""Seconds that another worker leaves to the first one to tell what is wrong; on a busy machine that may start later."""

_LIMITS = {'workers': (1, 256), 'index': (0, MAX_POINTS - 1), 'trials': (1, MAX_POINTS), 'worker': (0, 255)}
"""The least and the most of each number; so many workers are more than any machine or cluster queue serves at once."""

_CHOICES = {
    'sampler': ('random', 'tpe', 'cmaes'),
    'pruner': ('none', 'median', 'asha', 'hyperband'),
    'launcher': ('slurm', 'local'),
}


def run_sweep_command(given: argparse.Namespace) -> int | None:
    """Runs the command; the exit code.  Raises Stopped where a signal has stopped it."""
    if given.worker is not None:  # before it works a signal may end it at once
        return _run(given)
    with handle_stop_signals(raises=True):
        return _run(given)


def _run(given: argparse.Namespace) -> int | None:
    folder, numbers = Path(given.workdir), _numbers(given)
    count = numbers['workers'] or 1
    if given.best is not None:
        return _best(given, folder)
    if numbers['worker'] is not None:
        return _worker(given, folder, numbers['worker'], count)
    if given.list or given.index is not None:
        environment.configure_process(count)
        plan = _plan(given, folder)
        if plan.search:
            raise UserError(f'{given.sweep} is a search, whose points are drawn when they run')
        return _list(plan) if given.list else _one(folder, plan, numbers['index'] or 0, given.retry)
    logging.basicConfig(level=logging.INFO, format='%(message)s')  # not `prepare`, which is each worker's to do
    if given.launcher is not None:
        code = _launch(given, folder, count)
    else:
        from attnlab.sweeps import master

        if given.retry:
            _begin(given, folder)  # before a worker could see what is to be forgotten
        code = master.run_workers(_again(given, retry=False), folder, count)
    return code or _ended(folder)


def _plan(given: argparse.Namespace, folder: Path) -> 'SweepPlan':
    """What the command line asks for; UserError where it is wrong, and for a directory that holds something else."""
    from attnlab.sweeps import points, sweep_directory

    plan = points.make_sweep_plan(given.config, given.overrides, given.sweep.split(','), _search(given))
    sweep_directory.check_same_sweep(folder, plan)
    if given.storage:
        from attnlab.sweeps import database

        database.check_database(given.storage)
    return plan


def _again(given: argparse.Namespace, **changes: Any) -> list[str]:
    """The command line, with changes."""
    values = {name: value for name, value in (vars(given) | changes).items() if value not in (None, False)}
    del values['words'], values['overrides']
    flags = [f'--{name}' if value is True else f'--{name}={value}' for name, value in values.items()]
    return ['sweep', *flags, *(f'--config.{key}={text}' for key, text in given.overrides)]


def _numbers(given: argparse.Namespace) -> dict[str, int | None]:
    found = {name: number(name, getattr(given, name), int) for name in _LIMITS}
    for name, (least, most) in _LIMITS.items():
        value = found[name]
        if value is not None and not least <= value <= most:
            raise UserError(f'--{name} is {value}; expected {least} to {most}')
    workers, worker = found['workers'] or 1, found['worker']
    if worker is not None and worker >= workers:
        raise UserError(f'--worker is {worker}; expected 0 to {workers - 1}')
    for name, choices in _CHOICES.items():
        value = getattr(given, name)
        if value is not None and value not in choices:
            raise UserError(f'--{name} is {value!r}{nearest(value, choices)}')
    if given.launcher_options is not None and given.launcher is None:
        raise UserError('--launcher_options goes with --launcher')
    if given.launcher == 'slurm' and given.storage is None:
        alone = '--index=$SLURM_ARRAY_TASK_ID in a job array of your own, which needs none'
        raise UserError(f'--launcher=slurm needs --storage=URL, a database that its machines share; or use {alone}')
    return found


def _search(given: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of a search."""
    trials = number('trials', given.trials, int)
    every = {'trials': trials, 'sampler': given.sampler, 'pruner': given.pruner}
    return {name: value for name, value in every.items() if value is not None}


def _list(plan: 'SweepPlan') -> None:
    from attnlab.report.values import format_value
    from attnlab.sweeps.sweep_files import point_folder

    for point in plan.points:
        escaped = lambda value: format_value(value) if isinstance(value, str) else value  # a point is a line
        overrides = ' '.join(f'{key}={escaped(value)}' for key, value in point.overrides.items())
        print(point.number, point_folder(Path(), point.name), overrides, sep='\t')


def _one(folder: Path, plan: 'SweepPlan', index: int, retry: bool) -> int:
    from attnlab.sweeps import progress, sweep_directory, worker

    if index >= len(plan.points):
        raise UserError(f'--index is {index}; expected 0 to {len(plan.points) - 1}')
    sweep_directory.ensure_sweep_directory(folder, plan)
    seen = progress.SweepProgress(folder, plan)
    if retry:
        seen.forget_failed([index])
    end = worker.run_point(seen, index)
    print(f'{plan.points[index].name}: {end}')
    return int(end.status == 'failed')


def _worker(given: argparse.Namespace, folder: Path, which: int, count: int) -> int:
    """One of the processes; what is wrong with the command is told by the first of them, if it can."""
    environment.stop_with_launcher()
    environment.restrict_hardware(which, count)
    environment.configure_process()
    from attnlab.sweeps import progress, sweep_directory, worker

    try:
        plan = _plan(given, folder)
        spec = sweep_directory.ensure_sweep_directory(folder, plan)
        url = given.storage or f'sqlite:///{folder.resolve()}/sweep.db'
        worker.run_points(progress.SweepProgress(folder, plan), spec['id'], url)
    except UserError:
        if which:
            time.sleep(_PATIENCE)  # the first has the same to say, whereupon the others are ended
        raise
    except Stopped as wish:
        return wish.code
    return 0


def _launch(given: argparse.Namespace, folder: Path, count: int) -> int:
    from attnlab.sweeps import launcher

    options = launcher.parse_launcher_options(given.launcher_options)
    with tempfile.TemporaryDirectory() as scratch:  # the executor makes its folder before it looks at the options
        launcher.create_executor(Path(scratch), given.launcher, options)
    _begin(given, folder)
    argv = _again(given, workers=1, launcher=None, launcher_options=None, retry=False)
    launcher.run_jobs(argv, folder, count, given.launcher, options)
    return 0


def _begin(given: argparse.Namespace, folder: Path) -> None:
    """Begins a sweep whose points others run."""
    with _many_devices():
        from attnlab.sweeps import progress, sweep_directory

        plan = _plan(given, folder)
        sweep_directory.ensure_sweep_directory(folder, plan)
        if given.retry:
            seen = progress.SweepProgress(folder, plan)
            seen.forget_failed(seen.numbers)


@contextmanager
def _many_devices() -> Iterator[None]:
    """As many devices as any config asks for: those of the workers are not here; the workers inherit no such wish."""
    before = dict(os.environ)
    environment.simulate_cpu_devices(_MANY)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _best(given: argparse.Namespace, folder: Path) -> None:
    from attnlab.sweeps import sweep_files, winner

    found = sweep_files.read_sweep(folder)
    here, there = f'{given.sweep} of {given.config}', f'{",".join(found.sweep)} of {found.config}'
    if here != there:
        raise UserError(f'--workdir={folder} holds another sweep: {here} here and {there} there')
    ran = (sweep_files.read_spec(folder) or {}).get('search') or {}
    other = [f'--{name}={value}' for name, value in _search(given).items() if ran.get(name) != value]
    other += [f'--config.{key}={text}' for key, text in given.overrides if (key, text) not in found.overrides]
    if other:
        raise UserError(f'--workdir={folder} holds another sweep: one without {" ".join(other)}')
    row = winner.write_best_config(found, given.best)
    print(f'{given.best}: point {row.number}, {row.name}')


def _ended(folder: Path) -> int:
    """Shows what came of the sweep; 1 where a point failed, or did not come to an end."""
    from attnlab.sweeps import results, sweep_files

    sweep, search = sweep_files.read_sweep(folder), (sweep_files.read_spec(folder) or {}).get('search')
    results.print_sweep(sweep)
    print(f'page: {results.write_sweep_report(folder)}')
    statuses = [row.status for row in sweep.rows]
    left = (search['trials'] if search else len(statuses)) - sum(map(statuses.count, ('done', 'pruned', 'failed')))
    if left:
        logging.warning('%d points have not come to an end; the same command goes on with them', left)
    return int(bool(left) or 'failed' in statuses)
