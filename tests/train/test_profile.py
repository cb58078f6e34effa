"""Profiler traces of some steps of a run, which do not change its results."""

import gzip
import json
import logging

import pytest

from attnlab.errors import RunError, UserError
from attnlab.train import loop, run
from tests.tiny import tiny_grammar_config
from tests.train.helpers import config, make_task, same_runs


def steps_in(folder):
    """Return the numbers of the steps in a trace, in order."""
    [file] = folder.rglob('*.trace.json.gz')
    events = json.loads(gzip.decompress(file.read_bytes()))['traceEvents']
    return sorted(int(event['args']['step_num']) for event in events if event.get('name') == 'train')


@pytest.mark.slow
def test_requested_steps_are_traced(tmp_path, caplog):
    loop.run_training_loop(config(), make_task(), tmp_path / 'plain')
    with caplog.at_level(logging.INFO):
        # The traced steps include an evaluation and a save.
        loop.run_training_loop(config(), make_task(), tmp_path / 'traced', profile=(5, 7))
    same_runs(tmp_path / 'plain', tmp_path / 'traced')
    assert steps_in(tmp_path / 'traced' / 'profile') == [5, 6, 7]
    [message] = [line for line in caplog.messages if 'are traced in' in line]
    assert message.startswith(f'steps 5 to 7 are traced in {tmp_path}/traced/profile: open ')


def test_trace_is_written_if_the_run_ends_early(tmp_path):
    plain = make_task()

    def batch_with_nan(step):
        return plain.batch(step) | ({'y': plain.batch(0)['y'] * float('nan')} if step > 6 else {})

    task = make_task(batch=batch_with_nan)
    with pytest.raises(RunError):
        loop.run_training_loop(config(), task, tmp_path, profile=(6, 15))
    assert steps_in(tmp_path / 'profile')[:2] == [6, 7]


def test_resumed_run_past_the_profiled_steps_logs_a_warning(tmp_path, caplog):
    loop.run_training_loop(config(schedule='constant', duration='5 steps'), make_task(), tmp_path)
    loop.run_training_loop(config(schedule='constant'), make_task(), tmp_path, profile=(5, 7))
    assert '--profile=5..7: the run continues from step 5; nothing is traced' in caplog.messages
    assert not (tmp_path / 'profile').exists()


def test_profile_beyond_the_last_step_is_refused_before_writing(tmp_path):
    with pytest.raises(UserError, match='--profile is 15..21; expected steps of the run, which has 20'):
        run.train_run(tiny_grammar_config(), tmp_path / 'new', profile=(15, 21))
    assert not (tmp_path / 'new').exists()
