"""The training loop, with the regression task of `helpers`."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.errors import Diverged, Pruned, RunError, Stopped, UserError
from attnlab.kernels.losses import LossSums
from attnlab.train import checkpoint, loop
from attnlab.train.durations import Durations
from tests.train.helpers import BATCH, EXAMPLES, INPUTS, TARGETS, config, make_task, newest, records, same_runs


@pytest.mark.slow
def test_loop_learns_and_writes_metrics(tmp_path):
    summary = loop.run_training_loop(config(duration='200 steps'), make_task(), tmp_path)
    assert summary['step'] == 200 and summary['best_loss'] < 0.05
    assert [record['step'] for record in records(tmp_path, 'valid')] == list(range(5, 201, 5))
    assert len(list(tmp_path.glob('events.*'))) == 1


def test_first_step_is_logged_before_another_batch_shape_is_compiled(tmp_path):
    records_before = {}  # number of records when the loss was first traced for a batch shape

    def loss(params, batch, rng):
        records_before.setdefault(batch['x'].shape, len(records(tmp_path, 'train')))
        return LossSums(jnp.sum((batch['x'] @ params['w'] - batch['y']) ** 2), jnp.float32(len(batch['x'])), {})

    rows = lambda step: slice(BATCH if step == 0 else BATCH // 2)
    batch = lambda step: {'x': INPUTS[rows(step)], 'y': TARGETS[rows(step)]}
    loop.run_training_loop(config(duration='2 steps', learning_rate=0.001), make_task(loss, batch=batch), tmp_path)
    assert records_before == {(BATCH, 3): 0, (BATCH // 2, 3): 1}


def test_unwritable_metrics_file_ends_the_run(tmp_path):
    (tmp_path / 'metrics.jsonl').mkdir()
    with pytest.raises(RunError, match=f'^{tmp_path}/metrics.jsonl cannot be written: Is a directory$'):
        loop.run_training_loop(config(), make_task(), tmp_path)


class Killed(Exception):
    """Stands for a kill at a chosen step."""


@pytest.mark.slow
@pytest.mark.parametrize('name', ['sgd', 'adam'])
@pytest.mark.parametrize('killed', [1, 3, 7, 19])
def test_interrupted_run_matches_uninterrupted_run_bit_for_bit(tmp_path, killed, name):
    whole, broken = tmp_path / 'whole', tmp_path / 'broken'
    loop.run_training_loop(config(name=name), make_task(), whole)
    plain = make_task()

    def batch_or_kill(step):
        if step == killed:
            raise Killed
        return plain.batch(step)

    with pytest.raises(Killed):
        loop.run_training_loop(config(name=name), make_task(batch=batch_or_kill), broken)
    loop.run_training_loop(config(name=name), make_task(), broken)
    for split in ('train', 'valid'):
        assert records(whole, split) == records(broken, split)
    jax.tree.map(np.testing.assert_array_equal, newest(whole, name), newest(broken, name))


def test_run_continues_from_the_step_before_a_damaged_one(tmp_path, caplog):
    whole, broken, plain = tmp_path / 'whole', tmp_path / 'broken', make_task()
    loop.run_training_loop(config(), plain, whole)

    def batch_or_kill(step):
        if step == 13:
            raise Killed
        return plain.batch(step)

    with pytest.raises(Killed):
        loop.run_training_loop(config(), make_task(batch=batch_or_kill), broken)
    (broken / 'checkpoints' / '12' / 'params' / 'manifest.ocdbt').write_bytes(b'')
    with caplog.at_level('INFO'):
        loop.run_training_loop(config(), plain, broken)
    lines = [record.getMessage() for record in caplog.records if record.name == 'root']
    expected = ['step 12 is damaged and skipped: ', 'continues from step 10', 'step 12 is now ']
    assert len(lines) == 3 and all(part in line for part, line in zip(expected, lines, strict=True))
    same_runs(whole, broken)


@pytest.mark.slow
def test_moving_average_is_evaluated_saved_and_restored(tmp_path):
    evaluated = {}

    def make_evaluate(name):
        def evaluate(params):
            evaluated.setdefault(name, []).append(np.asarray(params['w'], np.float64))
            return {'loss': float(np.sum(np.square(params['w'])))}

        return evaluate

    often = dict(eval_every='1 steps', save_every='1 steps')
    loop.run_training_loop(config(**often), make_task(evaluate=make_evaluate('plain')), tmp_path / 'plain')
    whole = config(ema=0.8, **often)
    loop.run_training_loop(whole, make_task(evaluate=make_evaluate('average')), tmp_path / 'whole')
    average = np.zeros(3)
    for step, (trained, averaged) in enumerate(zip(evaluated['plain'], evaluated['average'], strict=True)):
        decay = min(0.8, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * trained
        np.testing.assert_allclose(averaged, average, rtol=1e-5, atol=1e-7)
    assert len(evaluated['plain']) == 20
    loop.run_training_loop(config(ema=0.8, duration='7 steps', schedule='constant'), make_task(), tmp_path / 'one')
    loop.run_training_loop(config(ema=0.8, schedule='constant'), make_task(), tmp_path / 'one')
    loop.run_training_loop(config(ema=0.8, schedule='constant'), make_task(), tmp_path / 'two')
    assert records(tmp_path / 'one', 'train') == records(tmp_path / 'two', 'train')
    assert records(tmp_path / 'one', 'valid')[-1] == records(tmp_path / 'two', 'valid')[-1]
    with checkpoint.checkpoint_manager(tmp_path / 'whole', read_only=True) as manager:
        best = checkpoint.restore_best(manager, jax.eval_shape(lambda: {'w': jnp.zeros(3)}))
    assert best is not None
    np.testing.assert_array_equal(best.params['w'], evaluated['average'][best.step - 1])


def test_given_parameters_are_used_only_without_a_checkpoint(tmp_path):
    near_solution = {'w': jnp.array([1.0, -2.0, 0.5])}
    loop.run_training_loop(config(duration='1 steps', schedule='constant'), make_task(), tmp_path, near_solution)
    first = records(tmp_path, 'train')[0]['loss']
    loop.run_training_loop(
        config(duration='2 steps', schedule='constant'), make_task(), tmp_path, {'w': 100 + near_solution['w']}
    )
    assert first < 0.1 and records(tmp_path, 'train')[1]['loss'] < 0.1


@pytest.fixture
def signals():
    """Set the default signal handlers, as in a program started from a terminal."""
    handlers = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_stops_and_the_run_can_continue(tmp_path, number, signals):
    whole, broken, plain = tmp_path / 'whole', tmp_path / 'broken', make_task()
    loop.run_training_loop(config(), plain, whole)
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    def raise_signal_and_validate(params):
        signal.raise_signal(number)  # in the middle of the evaluation at step 5
        return plain.validate(params)

    with pytest.raises(Stopped, match=f'{number.name}: saved at step 5; run the same command again') as stopped:
        loop.run_training_loop(config(), make_task(evaluate=raise_signal_and_validate), broken)
    assert stopped.value.code == 128 + number
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    with checkpoint.checkpoint_manager(broken, read_only=True) as manager:
        assert manager.latest_step() == 5
    loop.run_training_loop(config(), plain, broken)
    same_runs(whole, broken)


def test_ignored_signal_stays_ignored(tmp_path, signals):
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def raise_ignored_signal(params):
        signal.raise_signal(signal.SIGINT)
        return {'loss': 1.0}

    settings = config(duration='6 steps', schedule='constant')
    assert loop.run_training_loop(settings, make_task(evaluate=raise_ignored_signal), tmp_path)['step'] == 6


def test_second_signal_stops_at_once(tmp_path, signals):
    def raise_signal_twice(params):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError('the second signal did not stop the process')

    with pytest.raises(KeyboardInterrupt):
        loop.run_training_loop(config(), make_task(evaluate=raise_signal_twice), tmp_path)


def test_finished_run_is_not_changed(tmp_path):
    loop.run_training_loop(config(), make_task(), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file() and 'events' not in path.name}
    summary = loop.run_training_loop(config(), make_task(), tmp_path)
    assert summary['step'] == 20
    assert before == {path: path.read_bytes() for path in before}


def test_learning_rate_follows_the_schedule_across_a_resume(tmp_path):
    loop.run_training_loop(config(duration='3 steps', schedule='constant'), make_task(), tmp_path)
    loop.run_training_loop(config(duration='8 steps', schedule='constant'), make_task(), tmp_path)
    rates = [record['learning_rate'] for record in records(tmp_path, 'train')]
    np.testing.assert_allclose(rates, [0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.1, 0.1], rtol=1e-6)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_nonfinite_loss_raises_diverged_with_its_step(tmp_path, bad):
    plain = make_task()

    def batch_with_bad_target(step):
        batch = plain.batch(step)
        return batch | {'y': batch['y'] * (bad if step == 10 else 1)}

    with pytest.raises(Diverged, match='step 11: the loss is (nan|inf); the newest checkpoint is from step 10. Try a '):
        loop.run_training_loop(config(), make_task(batch=batch_with_bad_target), tmp_path)
    assert newest(tmp_path).step == 10
    assert np.all(np.isfinite(newest(tmp_path).params['w']))


def test_nonfinite_score_raises_before_the_step_is_saved(tmp_path):
    task = make_task(evaluate=lambda params: {'loss': float('nan')})
    with pytest.raises(Diverged, match='step 4: the validation loss is nan; the newest checkpoint is from step 2.'):
        loop.run_training_loop(config(eval_every='4 steps', save_every='2 steps'), task, tmp_path)
    assert newest(tmp_path).step == 2


def test_nonfinite_gradient_raises_before_the_step_is_saved(tmp_path):
    def square_root(params, batch, rng):  # sqrt(0) is 0, and its gradient infinite
        return LossSums(jnp.sum(jnp.sqrt(params['w'] * batch['kept'][:3])), jnp.float32(1.0), {})

    with pytest.raises(Diverged, match='step 1: the gradient_norm is inf; there is no checkpoint yet. Try a lower'):
        loop.run_training_loop(config(eval_every='1 steps'), make_task(loss=square_root), tmp_path)
    assert newest(tmp_path) is None


def test_patience_ends_a_run_without_improvement(tmp_path):
    scores = iter([3.0, 2.0, 2.5, 2.0, 1.0])
    summary = loop.run_training_loop(
        config(patience=2), make_task(evaluate=lambda params: {'loss': next(scores)}), tmp_path
    )
    assert (summary['step'], summary['best_loss'], summary['best_step']) == (20, 2.0, 10)
    assert loop.run_training_loop(config(patience=2), make_task(), tmp_path)['step'] == 20


@pytest.mark.slow
def test_patience_is_kept_across_a_resume(tmp_path):
    scores = iter([2.0, 3.0])
    task = make_task(evaluate=lambda params: {'loss': next(scores)})
    loop.run_training_loop(config(duration='10 steps', patience=2), task, tmp_path)
    scores = iter([3.0, 1.0])
    task = make_task(evaluate=lambda params: {'loss': next(scores)})
    assert loop.run_training_loop(config(duration='40 steps', patience=2), task, tmp_path)['step'] == 15


def test_watch_callback_gets_every_evaluation_but_the_last_and_may_end_the_run(tmp_path):
    often = config(duration='40 steps', eval_every='10 steps', save_every='40 steps')
    calls = []
    loop.run_training_loop(
        often, make_task(), tmp_path / 'whole', watch=lambda step, scores: calls.append((step, *scores))
    )
    assert calls == [(10, 'loss'), (20, 'loss'), (30, 'loss')]

    def watch(step, scores):
        if step == 20:
            raise Pruned

    with pytest.raises(Pruned):
        loop.run_training_loop(often, make_task(), tmp_path / 'pruned', watch=watch)
    assert newest(tmp_path / 'pruned').step == 20
    assert records(tmp_path / 'pruned', 'valid') == records(tmp_path / 'whole', 'valid')[:2]


def test_best_score_can_be_a_maximum(tmp_path):
    scores = iter([3.0, 2.0, 2.5, 2.0])
    task = make_task(evaluate=lambda params: {'bleu': next(scores)})
    task.best = ('bleu', 'max')
    assert loop.run_training_loop(config(), task, tmp_path)['best_step'] == 5


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'duration': '0 steps'}, "train.duration is '0 steps'"),
        ({'eval_every': 'daily'}, "train.eval_every is 'daily'"),
        ({'warmup': '5'}, "optimizer.warmup is '5'"),
    ],
)
def test_invalid_durations_of_a_config_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        Durations.from_config(config(**changes), EXAMPLES)


def test_truncated_last_metrics_line_is_written_again(tmp_path):
    loop.run_training_loop(config(duration='4 steps', schedule='constant'), make_task(), tmp_path)
    path = tmp_path / 'metrics.jsonl'
    whole = path.read_text()
    path.write_text(whole[:-20])
    loop.run_training_loop(config(duration='5 steps', schedule='constant'), make_task(), tmp_path)
    assert [record['step'] for record in records(tmp_path, 'train')] == [1, 2, 3, 4, 5]
