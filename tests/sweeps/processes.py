"""Sweeps as processes of their own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import attnlab
from attnlab.sweeps import sweep_files
from attnlab.train import metrics
from tests.quick import QUICK


def environment(**more):
    """Of a process that starts at once, compiles in no time, and finds the package that is tested."""
    root = str(Path(attnlab.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get('PYTHONPATH')]))
    quick = ' '.join(f'--{name}={str(value).lower()}' for name, value in QUICK.items())
    flags = {'XLA_FLAGS': f'--xla_force_host_platform_device_count=1 {quick}'}
    return {**os.environ, 'PYTHONPATH': path, 'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=0', **flags, **more}


def start_python(*argv, **options):
    """A process of Python; `wait` for it as for any `Popen`."""
    return subprocess.Popen([sys.executable, *map(str, argv)], env=environment(), text=True, **options)


def start_sweep(config, workdir, *flags, **options):
    """`attnlab sweep` as a process, with what it says kept."""
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, **options}
    return start_python('-m', 'attnlab', 'sweep', f'--config={config}', f'--workdir={workdir}', *flags, **pipes)


def wait_for_exit(process, limit=300):
    """The exit code of a process and what it said."""
    text, _ = process.communicate(timeout=limit)
    return process.returncode, text


def read_run_records(folder):
    """The records of every point's run, but for how fast it was."""
    return {row.name: [record for record in metrics.read_metrics(row.run) if record['split'] != 'speed']
            for row in sweep_files.read_sweep(folder).rows}  # fmt: skip


def wait_until(condition, limit=60):
    """Waits for something that comes soon."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
