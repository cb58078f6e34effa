"""Running the workers of a sweep as jobs of a cluster, through submitit."""

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

_POLL_SECONDS = 2.0


class WorkerJob:
    """The command `attnlab ARGV` as a job for submitit; when its time is up, it continues in a new job."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = list(argv)

    def __call__(self) -> int:
        """Run the command and return its exit code."""
        return subprocess.run(environment.attnlab_command(*self.argv)).returncode

    def checkpoint(self) -> Any:
        """Return the submission that continues this job; submitit calls this when the job's time is up."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def parse_launcher_options(text: str | None) -> dict[str, Any]:
    """Parse a text such as partition=gpu,timeout_min=60 into keyword arguments; whole numbers become ints."""
    options: dict[str, Any] = {}
    for part in text.split(',') if text else ():
        key, equals, value = part.partition('=')
        if not (equals and key and value):
            raise UserError(f'--launcher_options expects KEY=VALUE,..., got {text!r}')
        options[key] = int(value) if value.isdecimal() else value
    return options


def create_executor(folder: Path, launcher: str, options: dict[str, Any]) -> Any:
    """Return a submitit executor that writes its files into `folder`.

    launcher: 'slurm' or 'local'.  options: submitit's parameters; a name that submitit does not define is passed to
    SLURM.

    Raises UserError if submitit is not installed or rejects an option.
    """
    try:
        import submitit
    except ImportError:
        raise UserError(f"--launcher={launcher} needs submitit; pip install 'attnlab[slurm]'") from None
    known = submitit.AutoExecutor._typed_parameters()
    parameters: dict[str, Any] = {'name': 'attnlab', 'stderr_to_stdout': True}
    for key, value in options.items():
        parameters[key if key in known or key.startswith('slurm_') else f'slurm_{key}'] = value
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=launcher)
        executor.update_parameters(**parameters)
    except (RuntimeError, NameError, ValueError, AssertionError, TypeError) as error:
        raise UserError(f'--launcher={launcher}: {" ".join(str(error).split())}') from error
    return executor


def run_jobs(argv: Sequence[str], folder: Path, count: int, launcher: str, options: dict[str, Any]) -> None:
    """Submit `count` jobs of `attnlab ARGV` that share one sweep, and wait until all jobs have ended.

    Each point that ends is logged.
    """
    executor = create_executor(folder / 'jobs', launcher, options)
    # Inherited by the Python processes that submitit starts; `environment.attnlab_command` gives the reason.
    os.environ['PYTHONSAFEPATH'] = '1'
    logged_names = master.ended_point_names(folder)
    try:
        jobs = [executor.submit(WorkerJob(argv)) for _ in range(count)]
        ids = ' '.join(job.job_id for job in jobs)
        logging.info('jobs %s; their logs are in %s', ids, os.path.join(folder, 'jobs'))
        while not all(job.done() for job in jobs):
            master.log_ended_points(folder, logged_names)
            time.sleep(_POLL_SECONDS)
    except Stopped:
        logging.warning('only this command is stopped; the submitted jobs continue')
        raise
    master.log_ended_points(folder, logged_names)
    for job in jobs:
        if code := 'none' if job.exception() else job.result():
            logging.warning('job %s ended with exit code %s; its log is %s', job.job_id, code, job.paths.stdout)
