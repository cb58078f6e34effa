"""Running `attnlab sweep` in a process of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import attnlab
from attnlab.sweeps import sweep_files
from attnlab.train import metrics
from tests.quick import QUICK


def process_environment(**more):
    """Return environment variables for a process that starts and compiles fast and imports the tested package."""
    root = str(Path(attnlab.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get('PYTHONPATH')]))
    quick = ' '.join(f'--{name}={str(value).lower()}' for name, value in QUICK.items())
    flags = {'XLA_FLAGS': f'--xla_force_host_platform_device_count=1 {quick}'}
    return {**os.environ, 'PYTHONPATH': path, 'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=0', **flags, **more}


def start_python(*argv, **options):
    """Start Python in a process and return its `Popen`."""
    return subprocess.Popen([sys.executable, *map(str, argv)], env=process_environment(), text=True, **options)


def start_sweep(config, workdir, *flags, **options):
    """Start `attnlab sweep` in a process; its output is read by `wait_for_exit`."""
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, **options}
    return start_python('-m', 'attnlab', 'sweep', f'--config={config}', f'--workdir={workdir}', *flags, **pipes)


def wait_for_exit(process, limit=300):
    """Wait for a process and return its exit code and output."""
    text, _ = process.communicate(timeout=limit)
    return process.returncode, text


def read_run_records(folder):
    """Return the metrics of every point's run by point name, without records of speed."""
    return {row.name: [record for record in metrics.read_metrics(row.run) if record['split'] != 'speed']
            for row in sweep_files.read_sweep(folder).rows}  # fmt: skip


def wait_until(condition, limit=60):
    """Wait until `condition()` is true, for at most `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
