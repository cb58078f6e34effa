"""The command `attnlab sweep`: check flags, then list points, run workers, submit jobs or write the best config."""

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

_MAX_MESH_DEVICES = 64
"""As many devices as any mesh of one machine needs."""

_FIRST_WORKER_WAIT = 60.0
"""Seconds that the other workers wait for worker 0 to report a user error; it may start later on a busy machine."""

_LIMITS = {'workers': (1, 256), 'index': (0, MAX_POINTS - 1), 'trials': (1, MAX_POINTS), 'worker': (0, 255)}
"""Least and greatest value of each number.  256 workers are more than a machine or cluster queue runs at once."""

_CHOICES = {
    'sampler': ('random', 'tpe', 'cmaes'),
    'pruner': ('none', 'median', 'asha', 'hyperband'),
    'launcher': ('slurm', 'local'),
}


def run_sweep_command(args: argparse.Namespace) -> int | None:
    """Run the command and return its exit code.

    Raises Stopped if a signal stopped the command.
    """
    if args.worker is not None:  # a worker handles signals itself; before it runs points, a signal ends it at once
        return _dispatch(args)
    with handle_stop_signals(raises=True):
        return _dispatch(args)


def _dispatch(args: argparse.Namespace) -> int | None:
    folder, numbers = Path(args.workdir), _parse_numbers(args)
    count = numbers['workers'] or 1
    if args.best is not None:
        return _write_best(args, folder)
    if numbers['worker'] is not None:
        return _run_worker(args, folder, numbers['worker'], count)
    if args.list or args.index is not None:
        environment.configure_process(count)
        plan = _make_plan(args, folder)
        if plan.search:
            raise UserError(f'{args.sweep} is a search, whose points are drawn when they run')
        if args.list:
            return _print_points(plan)
        return _run_one_point(folder, plan, numbers['index'] or 0, args.retry)
    # Not `configure_process`: each worker calls it for itself.
    logging.basicConfig(level=logging.INFO, format='%(message)s')
    if args.launcher is not None:
        code = _submit_jobs(args, folder, count)
    else:
        from attnlab.sweeps import master

        if args.retry:
            _prepare_directory(args, folder)  # failed outcomes are deleted before a worker could read them
        code = master.run_workers(_command_line(args, retry=False), folder, count)
    return code or _print_results(folder)


def _make_plan(args: argparse.Namespace, folder: Path) -> 'SweepPlan':
    """Return the plan that the command line describes.

    Raises UserError if the plan is invalid, the directory holds something else, or the database cannot be reached.
    """
    from attnlab.sweeps import points, sweep_directory

    plan = points.make_sweep_plan(args.config, args.overrides, args.sweep.split(','), _search_options(args))
    sweep_directory.check_same_sweep(folder, plan)
    if args.storage:
        from attnlab.sweeps import database

        database.check_database(args.storage)
    return plan


def _command_line(args: argparse.Namespace, **changes: Any) -> list[str]:
    """Return the arguments of this command with some flags changed; None and False remove a flag."""
    values = {name: value for name, value in (vars(args) | changes).items() if value not in (None, False)}
    del values['words'], values['overrides']
    flags = [f'--{name}' if value is True else f'--{name}={value}' for name, value in values.items()]
    return ['sweep', *flags, *(f'--config.{key}={text}' for key, text in args.overrides)]


def _parse_numbers(args: argparse.Namespace) -> dict[str, int | None]:
    """Return the flags that are numbers; None for a flag that is not set.

    Raises UserError for an invalid flag, and for flags that do not go together.
    """
    numbers = {name: number(name, getattr(args, name), int) for name in _LIMITS}
    for name, (least, greatest) in _LIMITS.items():
        value = numbers[name]
        if value is not None and not least <= value <= greatest:
            raise UserError(f'--{name} is {value}; expected {least} to {greatest}')
    workers, worker = numbers['workers'] or 1, numbers['worker']
    if worker is not None and worker >= workers:
        raise UserError(f'--worker is {worker}; expected 0 to {workers - 1}')
    for name, choices in _CHOICES.items():
        value = getattr(args, name)
        if value is not None and value not in choices:
            raise UserError(f'--{name} is {value!r}{nearest(value, choices)}')
    if args.launcher_options is not None and args.launcher is None:
        raise UserError('--launcher_options needs --launcher')
    if args.launcher == 'slurm' and args.storage is None:
        alternative = '--index=$SLURM_ARRAY_TASK_ID in your own job array, which needs no database'
        raise UserError(f'--launcher=slurm needs --storage=URL, a database that all jobs share; or use {alternative}')
    return numbers


def _search_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a search that are set on the command line."""
    trials = number('trials', args.trials, int)
    options = {'trials': trials, 'sampler': args.sampler, 'pruner': args.pruner}
    return {name: value for name, value in options.items() if value is not None}


def _print_points(plan: 'SweepPlan') -> None:
    from attnlab.report.values import format_value
    from attnlab.sweeps.sweep_files import point_folder

    def escape(value: Any) -> Any:
        return format_value(value) if isinstance(value, str) else value  # a line break would split the line

    for point in plan.points:
        overrides = ' '.join(f'{key}={escape(value)}' for key, value in point.overrides.items())
        print(point.number, point_folder(Path(), point.name), overrides, sep='\t')


def _run_one_point(folder: Path, plan: 'SweepPlan', index: int, retry: bool) -> int:
    from attnlab.sweeps import progress, sweep_directory, worker

    if index >= len(plan.points):
        raise UserError(f'--index is {index}; expected 0 to {len(plan.points) - 1}')
    sweep_directory.ensure_sweep_directory(folder, plan)
    sweep_progress = progress.SweepProgress(folder, plan)
    if retry:
        sweep_progress.reset_failed([index])
    outcome = worker.run_point(sweep_progress, index)
    print(f'{plan.points[index].name}: {outcome}')
    return int(outcome.status == 'failed')


def _run_worker(args: argparse.Namespace, folder: Path, worker_number: int, worker_count: int) -> int:
    """Run points as one of the workers.

    All workers meet the same user error; worker 0 reports it if it can.
    """
    environment.stop_with_launcher()
    environment.restrict_hardware(worker_number, worker_count)
    environment.configure_process()
    from attnlab.sweeps import progress, sweep_directory, worker

    try:
        plan = _make_plan(args, folder)
        spec = sweep_directory.ensure_sweep_directory(folder, plan)
        url = args.storage or f'sqlite:///{folder.resolve()}/sweep.db'
        worker.run_points(progress.SweepProgress(folder, plan), spec['id'], url)
    except UserError:
        if worker_number:
            time.sleep(_FIRST_WORKER_WAIT)  # worker 0 reports the same error, and then the other workers are ended
        raise
    except Stopped as stopped:
        return stopped.code
    return 0


def _submit_jobs(args: argparse.Namespace, folder: Path, count: int) -> int:
    from attnlab.sweeps import launcher

    options = launcher.parse_launcher_options(args.launcher_options)
    with tempfile.TemporaryDirectory() as scratch:  # the executor creates its folder before it checks the options
        launcher.create_executor(Path(scratch), args.launcher, options)
    _prepare_directory(args, folder)
    argv = _command_line(args, workers=1, launcher=None, launcher_options=None, retry=False)
    launcher.run_jobs(argv, folder, count, args.launcher, options)
    return 0


def _prepare_directory(args: argparse.Namespace, folder: Path) -> None:
    """Create the directory of a sweep whose points other processes run, and reset failed points under --retry."""
    with _simulated_devices():
        from attnlab.sweeps import progress, sweep_directory

        plan = _make_plan(args, folder)
        sweep_directory.ensure_sweep_directory(folder, plan)
        if args.retry:
            sweep_progress = progress.SweepProgress(folder, plan)
            sweep_progress.reset_failed(sweep_progress.point_numbers)


@contextmanager
def _simulated_devices() -> Iterator[None]:
    """Simulate enough devices to check any config; this process need not have the devices of the workers.

    The environment variables are restored at the end, because the workers inherit them.
    """
    before = dict(os.environ)
    environment.simulate_cpu_devices(_MAX_MESH_DEVICES)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _write_best(args: argparse.Namespace, folder: Path) -> None:
    from attnlab.sweeps import sweep_files, winner

    sweep = sweep_files.read_sweep(folder)
    here, there = f'{args.sweep} of {args.config}', f'{",".join(sweep.sweep)} of {sweep.config}'
    if here != there:
        raise UserError(f'--workdir={folder} holds another sweep: {here} here and {there} there')
    saved_search = (sweep_files.read_spec(folder) or {}).get('search') or {}
    other = [f'--{name}={value}' for name, value in _search_options(args).items() if saved_search.get(name) != value]
    other += [f'--config.{key}={text}' for key, text in args.overrides if (key, text) not in sweep.overrides]
    if other:
        raise UserError(f'--workdir={folder} holds another sweep: one without {" ".join(other)}')
    row = winner.write_best_config(sweep, args.best)
    print(f'{args.best}: point {row.number}, {row.name}')


def _print_results(folder: Path) -> int:
    """Print the results and write the page of a sweep; return 1 if a point failed or has not ended, else 0."""
    from attnlab.sweeps import results, sweep_files

    sweep, search = sweep_files.read_sweep(folder), (sweep_files.read_spec(folder) or {}).get('search')
    results.print_sweep(sweep)
    print(f'page: {results.write_sweep_report(folder)}')
    statuses = [row.status for row in sweep.rows]
    ended = sum(map(statuses.count, ('done', 'pruned', 'failed')))
    unfinished = (search['trials'] if search else len(statuses)) - ended
    if unfinished:
        logging.warning('%d points have not ended; run the same command again to continue them', unfinished)
    return int(bool(unfinished) or 'failed' in statuses)
