"""A run of a real model, killed with SIGKILL at step 7 and started again, matches the uninterrupted run bit for bit."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from attnlab import configs
from attnlab.train import metrics
from tests.tiny import tiny_grammar_config
from tests.train.helpers import newest_of

# Logs the batches of a run, and kills it when the batch after step `kill` is made, once the steps before are done.
DRIVER = """
import hashlib, os, signal, sys, time
from pathlib import Path
from attnlab import configs
from attnlab.tasks.align.task import AlignTask
from attnlab.train import run

workdir, kill = Path(sys.argv[1]), int(sys.argv[2])
batch = AlignTask.batch

def logged_batch(task, step, rows=slice(None)):
    if step == kill:
        while f'"step": {kill - 1}, "split": "train"' not in (workdir / 'metrics.jsonl').read_text():
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    arrays = batch(task, step, rows)
    sums = [hashlib.sha256(arrays[name].tobytes()).hexdigest() for name in sorted(arrays)]
    with open(workdir / 'batches.txt', 'a') as file:
        print(step, *sums, file=file)
    return arrays

AlignTask.batch = logged_batch
run.train_run(configs.load_config(sys.argv[3]), workdir)
"""


def start(workdir, kill, config):
    return subprocess.run([sys.executable, '-c', DRIVER, str(workdir), str(kill), str(config)], capture_output=True)


def lines(workdir):
    return [json.dumps(record) for record in metrics.read_metrics(workdir) if record['split'] != 'speed']


def batches(workdir):
    """Return the checksums of each step's batch; assert that batches made twice because of the kill are equal."""
    sums_by_step = {}
    for line in (workdir / 'batches.txt').read_text().splitlines():
        step, sums = line.split(' ', 1)
        assert sums_by_step.setdefault(int(step), sums) == sums
    return sums_by_step


@pytest.mark.slow  # a resume without a kill is tested in tests/tasks/test_language.py
def test_killed_and_resumed_run_matches_uninterrupted_run(tmp_path):
    config, file = tiny_grammar_config(model__dropout='0.2', train__accumulate='2'), tmp_path / 'given.json'
    configs.save_config(config, file)
    whole, broken = tmp_path / 'whole', tmp_path / 'broken'
    assert start(whole, -1, file).returncode == 0
    assert start(broken, 7, file).returncode == -signal.SIGKILL
    assert max(batches(broken)) == 6 and not any(record['step'] > 7 for record in metrics.read_metrics(broken))
    assert start(broken, -1, file).returncode == 0
    assert lines(whole) == lines(broken)
    assert batches(whole) == batches(broken) and sorted(batches(whole)) == list(range(20))
    left, right = newest_of(config, whole), newest_of(config, broken)
    assert left.step == right.step == 20 and left.progress == right.progress
    jax.tree.map(np.testing.assert_array_equal, left, right)
    assert Path(whole / 'config.json').read_bytes() == Path(broken / 'config.json').read_bytes()
