"""Limits of a run: number of compiled programs, and growth of memory."""

import json
import subprocess
import sys

import pytest

# 200 steps over sentences of all lengths: counts compilations of the training step, and measures memory during the run.
DRIVER = """
import json, logging, sys
from pathlib import Path
import jax
from attnlab.tasks.align.task import AlignTask
from attnlab.train import run
from tests.tiny import tiny_grammar_config

compiled, shapes, resident = [], set(), {}
batch = AlignTask.batch

class Counter(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith('Finished XLA compilation of jit(update)'):
            compiled.append(record)

jax.config.update('jax_log_compiles', True)
logging.getLogger('jax').addHandler(Counter())

def pages():
    return int(Path('/proc/self/statm').read_text().split()[1])

def recorded_batch(task, step, rows=slice(None)):
    resident[step] = pages()
    arrays = batch(task, step, rows)
    shapes.add(arrays['source'].shape)
    return arrays

AlignTask.batch = recorded_batch
changes = {'train__duration': '200 steps', 'train__eval_every': '50 steps', 'data__widths': '8,12,16,20'}
run.train_run(tiny_grammar_config(**changes), Path(sys.argv[1]))
print(json.dumps([len(compiled), len(shapes), resident[60], resident[199]]))
"""


@pytest.mark.slow
def test_one_compilation_for_each_batch_width_and_constant_memory(tmp_path):
    done = subprocess.run([sys.executable, '-c', DRIVER, str(tmp_path / 'run')], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled, widths, early, late = json.loads(done.stdout.splitlines()[-1])
    assert compiled == widths == 4
    assert late <= 1.05 * early
