"""A sweep's workers as jobs of a cluster, through submitit."""

import logging
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab import environment
from attnlab.errors import Stopped, UserError
from attnlab.sweeps import master

_POLL = 2.0


class WorkerJob:
    """`attnlab ARGV` in a job, which goes on in the next one where its time is up; submitit asks for an object."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = list(argv)

    def __call__(self) -> int:
        return subprocess.run(environment.attnlab_command(*self.argv)).returncode

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def parse_launcher_options(text: str | None) -> dict[str, Any]:
    """partition=gpu,timeout_min=60 as keywords of submitit; whole numbers are ints."""
    found: dict[str, Any] = {}
    for part in text.split(',') if text else ():
        key, equals, value = part.partition('=')
        if not (equals and key and value):
            raise UserError(f'--launcher_options expects KEY=VALUE,..., got {text!r}')
        found[key] = int(value) if value.isdecimal() else value
    return found


def create_executor(folder: Path, launcher: str, options: dict[str, Any]) -> Any:
    """Submitit's executor, whose files go into `folder`; UserError for options that it does not know."""
    try:
        import submitit
    except ImportError:
        raise UserError(f"--launcher={launcher} needs submitit; pip install 'attnlab[slurm]'") from None
    # On a cluster what submitit does not know by a name of its own is a parameter of SLURM's.
    known = submitit.AutoExecutor._typed_parameters()
    named = {key if key in known or key.startswith('slurm_') else f'slurm_{key}': each for key, each in options.items()}
    try:
        made = submitit.AutoExecutor(folder=folder, cluster=launcher)
        made.update_parameters(**{'name': 'attnlab', 'stderr_to_stdout': True} | named)
    except (RuntimeError, NameError, ValueError, AssertionError, TypeError) as error:
        raise UserError(f'--launcher={launcher}: {" ".join(str(error).split())}') from error
    return made


def run_jobs(argv: Sequence[str], folder: Path, count: int, launcher: str, options: dict[str, Any]) -> None:
    """Submits `count` jobs of `attnlab ARGV`, which share a sweep, and tells of its points until the last has ended."""
    made = create_executor(folder / 'jobs', launcher, options)
    os.environ['PYTHONSAFEPATH'] = '1'  # inherited by submitit's own processes: see `environment.attnlab_command`
    told = master.ended_point_names(folder)
    try:
        jobs = [made.submit(WorkerJob(argv)) for _ in range(count)]
        ids = ' '.join(job.job_id for job in jobs)
        logging.info('jobs %s; their logs are in %s', ids, os.path.join(folder, 'jobs'))
        while not all(job.done() for job in jobs):
            master.log_ended_points(folder, told)
            time.sleep(_POLL)
    except Stopped:
        logging.warning('jobs that were submitted go on; only this command, which waits for them, is stopped')
        raise
    master.log_ended_points(folder, told)
    for job in jobs:
        if code := 'none' if job.exception() else job.result():
            logging.warning('job %s ended with exit code %s; its log is %s', job.job_id, code, job.paths.stdout)
