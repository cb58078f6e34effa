"""The progress bar of a training on a terminal of 80 columns."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from attnlab.train import progress

PROGRAM = """
import time
from attnlab.train.progress import progress_bar
with progress_bar({total}, 0) as advance:
    for step in range(1, 4):
        time.sleep(0.1)
        advance(step * {total} // 4, {{'loss': 0.15512, 'valid accuracy': 0.97, 'valid calibration_error': 0.0123}})
"""


def run_on_terminal(program, columns, **environment):
    """Return the output of a program on its standard error, a terminal."""
    parent_end, child_end = pty.openpty()
    fcntl.ioctl(child_end, termios.TIOCSWINSZ, struct.pack('HHHH', 24, columns, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ('COLUMNS', 'LINES', 'NO_COLOR')}
    root = str(Path(progress.__file__).parents[2])
    env |= {'TERM': 'xterm', 'PYTHONPATH': root} | environment
    with subprocess.Popen([sys.executable, '-c', program], stdin=child_end, stderr=child_end, env=env):
        os.close(child_end)
        output = b''
        try:
            while data := os.read(parent_end, 65536):
                output += data
        except OSError:  # raised by Linux at the end of the output
            pass
    os.close(parent_end)
    return output.decode()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize('total', [200, 12_000, 600_000])
def test_bar_shows_step_rate_time_and_first_score_in_80_columns(total):
    lines = re.split(r'[\r\n]+', run_on_terminal(PROGRAM.format(total=total), 80, NO_COLOR='1'))
    last = [re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', line) for line in lines if '/' in line][-1]
    numbers = 'loss 0.155  valid accuracy 0.97'
    assert re.search(rf' {3 * total // 4}/{total} +[0-9.]+ steps/s [0-9]+:[0-9:]+ {numbers} *$', last)
    assert len(last) <= 80


def test_bar_has_no_colours_with_no_color_or_a_dumb_terminal():
    colours = r'\x1b\[[0-9;]*m'
    program = PROGRAM.format(total=200)
    assert re.search(colours, run_on_terminal(program, 80))
    assert not re.search(colours, run_on_terminal(program, 80, NO_COLOR='1'))
    assert '\x1b' not in run_on_terminal(program, 80, TERM='dumb')
