"""What the loop costs beside its compiled step: batches, metrics, the bar on the screen."""

import functools
import statistics
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attnlab import tasks
from attnlab.train import loop
from tests.tasks.test_vision import tiny
from tests.train.test_loop import records

STEPS, STEP, LIMIT = 100, 0.02, 0.03


def config_of(steps) -> Any:
    return tiny(
        model__layers=3, model__width=64, model__heads=4, model__mlp_width=128, train__batch_size=64,
        data__train_examples=2000, train__duration=f'{steps} steps', train__log_every='50 steps',
        train__eval_every=f'{steps} steps', train__save_every=f'{steps} steps', train__mesh='data=1',
    )  # fmt: skip


@pytest.fixture
def sleeping(monkeypatch):
    """Makes of a compiled step one that does the same in no time and then sleeps, as one on another device."""
    compiled = loop.compiled

    def nap(x):
        time.sleep(STEP)
        return x

    def made(config, task, layout, state):
        # The update is of no parameter: what a step of 20 ms computes on these cores would be theirs to lose.
        shapes = jax.eval_shape(compiled(config, task, layout, state), state, layout.batch(task.batch(0)))[1]
        values = {name: jnp.ones(x.shape, x.dtype) for name, x in shapes.items()}

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, batch):
            later = jax.pure_callback(nap, jax.ShapeDtypeStruct((), state.step.dtype), state.step)
            return state._replace(step=later + 1), jax.tree.map(lambda x: x + 0.0 * later.astype(x.dtype), values)

        return step

    monkeypatch.setattr(loop, 'compiled', made)


@pytest.mark.timing
def test_the_loop_adds_at_most_three_per_cent_to_a_step_of_twenty_milliseconds(tmp_path, sleeping):
    """On a device that is not these cores: what the host does meanwhile costs nothing, what it does in between does."""
    config = config_of(STEPS)
    task, layout = tasks.module(config).build(config, tmp_path), loop.layout_of(config)
    optimize = loop.recipe(config, task.examples)[2]
    fresh = lambda: layout.start(functools.partial(loop.initial, task.init, optimize, ema=config.train.ema), 0)
    update, batch = loop.compiled(config, task, layout, fresh()), layout.batch(task.batch(0))
    ours, bare = [], []
    for turn in range(5):  # one after the other, as the machine is not equally fast at all times
        state, _ = jax.block_until_ready(update(fresh(), batch))
        start = time.perf_counter()
        for _ in range(STEPS):
            state, values = update(state, batch)
        jax.block_until_ready((state, values))
        bare.append((time.perf_counter() - start) / STEPS)
        loop.train(config, task, tmp_path / str(turn))
        ours.append(1 / records(tmp_path / str(turn), 'speed')[-1]['steps_per_second'])
    each = [f'{1e3 * statistics.median(times):.2f} ms' for times in (bare, ours)]
    ratios = [round(a / b, 4) for a, b in zip(ours, bare, strict=True)]
    told = f'step {each[0]}, in the loop {each[1]}; {ratios}'
    print(told)
    assert min(bare) >= STEP and statistics.median(ratios) <= 1 + LIMIT, told


@pytest.mark.timing
def test_between_two_steps_the_host_computes_for_at_most_three_per_cent_of_twenty_milliseconds(tmp_path, monkeypatch):
    """On a device that is these cores, where nothing hides it; making batches, which is another row, is told beside."""
    marks: dict[str, list[tuple[float, float]]] = {'main': [], 'batches': []}

    def timed(name, function):
        def call(*args):
            start = time.thread_time()
            made = function(*args)
            marks[name].append((start, time.thread_time()))
            return made

        return call

    compiled, ahead = loop.compiled, loop.ahead
    monkeypatch.setattr(loop, 'compiled', lambda *args: timed('main', compiled(*args)))
    monkeypatch.setattr(loop, 'ahead', lambda batch, *args: ahead(timed('batches', batch), *args))
    config = config_of(4 * STEPS)
    assert threading.current_thread() is threading.main_thread()
    loop.train(config, tasks.module(config).build(config, tmp_path), tmp_path / 'run')
    between = [b[0] - a[1] for a, b in zip(marks['main'], marks['main'][1:], strict=False)]
    batches = [end - start for start, end in marks['batches']]
    host = [1e3 * statistics.mean(times[STEPS:]) for times in (between, batches)]
    told = f'{host[0]:.3f} ms between two steps and {host[1]:.3f} ms for a batch'
    print(told)
    assert host[0] <= LIMIT * 1e3 * STEP, told
