"""What a run may cost: programs compiled and memory kept."""

import json
import subprocess
import sys

# 200 steps over sentences of all lengths: counts the traces of the training step, and the memory on the way.
DRIVER = """
import json, sys
from pathlib import Path
from attnlab.tasks import align
from attnlab.train import run
from tests.tasks.conftest import tiny_config

traces, resident = [], {}
build = align.build

def pages():
    return int(Path('/proc/self/statm').read_text().split()[1])

def counted(config, workdir):
    task = build(config, workdir)
    def loss(params, batch, rng):
        traces.append(batch['source'].shape)
        return task.loss(params, batch, rng)
    def batch(step):
        resident[step] = pages()
        return task.batch(step)
    return align.Task(**{**vars(task), 'loss': loss, 'batch': batch})

align.build = counted
changes = {'train__duration': '200 steps', 'train__eval_every': '50 steps', 'data__widths': '8,12,16,20'}
run.train(tiny_config(**changes), Path(sys.argv[1]))
print(json.dumps([traces, resident[60], resident[199]]))
"""


def test_one_program_for_each_width_and_no_growth(tmp_path):
    done = subprocess.run([sys.executable, '-c', DRIVER, str(tmp_path / 'run')], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    traces, early, late = json.loads(done.stdout.splitlines()[-1])
    assert len(traces) == len({tuple(shape) for shape in traces}) <= 4
    assert late <= 1.05 * early
