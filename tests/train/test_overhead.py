"""Time that the loop adds to its compiled step: batches, metrics, progress bar."""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import configs, tasks
from attnlab.train import loop
from attnlab.train.setup import Setup, make_setup
from tests.train.helpers import records

STEPS, STEP, LIMIT = 100, 0.02, 0.03


def make_sleeping_step(task):
    """Return a replacement for `Setup.compile_step`, whose step sleeps `STEP` seconds."""
    compile_step = Setup.compile_step

    def compile_sleeping_step(setup, loss, state):
        batch = setup.layout.put_batch(task.batch(0))
        values = jax.eval_shape(compile_step(setup, loss, state), state, batch)[1]
        values = {name: jnp.ones(x.shape, x.dtype) for name, x in values.items()}

        def sleep(x):
            time.sleep(STEP)
            return x

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, batch):
            number = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), state.step.dtype), state.step)
            return state._replace(step=number + 1), jax.tree.map(lambda x: x + 0.0 * number.astype(x.dtype), values)

        return step

    return compile_sleeping_step


@pytest.mark.timing
def test_loop_adds_at_most_three_percent_to_a_step_of_20_ms(tmp_path, monkeypatch):
    """The sleep stands for an accelerator: work of the host during a step costs nothing, work between steps does."""
    changes = {
        'model.layers': 3, 'model.width': 64, 'model.heads': 4, 'model.mlp_width': 128, 'train.batch_size': 64,
        'data.train_examples': 2000, 'data.test_examples': 40, 'train.duration': f'{STEPS} steps',
        'train.log_every': f'{STEPS // 2} steps', 'train.eval_every': f'{STEPS} steps',
        'train.save_every': f'{STEPS} steps', 'train.mesh': 'data=1',
    }  # fmt: skip
    config = configs.load_experiment('experiments/vision/digits.py', list(changes.items()))
    task = tasks.create_task(config)
    monkeypatch.setattr(Setup, 'compile_step', make_sleeping_step(task))
    setup = make_setup(task.config, task.examples)
    fresh = lambda: setup.layout.initialize(functools.partial(setup.initial_state, task.init), np.uint32(0))
    update, batch = setup.compile_step(task.loss, fresh()), setup.layout.put_batch(task.batch(0))
    loop_times, step_times = [], []
    for turn in range(5):  # alternating, because the speed of the machine varies
        state, _ = jax.block_until_ready(update(fresh(), batch))
        start = time.perf_counter()
        for _ in range(STEPS):
            state, values = update(state, batch)
        jax.block_until_ready((state, values))
        step_times.append((time.perf_counter() - start) / STEPS)
        loop.run_training_loop(task.config, task, tmp_path / str(turn))
        loop_times.append(1 / records(tmp_path / str(turn), 'speed')[-1]['steps_per_second'])
    medians = [f'{1e3 * statistics.median(times):.2f} ms' for times in (step_times, loop_times)]
    ratios = [round(a / b, 4) for a, b in zip(loop_times, step_times, strict=True)]
    message = f'step {medians[0]}, in the loop {medians[1]}; {ratios}'
    print(message)
    assert min(step_times) >= STEP and statistics.median(ratios) <= 1 + LIMIT, message
