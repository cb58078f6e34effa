"""What the loop costs beside its compiled step: batches, metrics, the bar on the screen."""

import statistics
import time
from typing import Any

import jax
import pytest

from attnlab import tasks
from attnlab.train import loop
from tests.tasks.test_vision import tiny
from tests.train.test_loop import records

STEPS, LIMIT = 100, 1.03


@pytest.mark.timing
def test_the_loop_adds_at_most_three_per_cent_to_a_step(tmp_path):
    config: Any = tiny(
        model__layers=3, model__width=64, model__heads=4, model__mlp_width=128, train__batch_size=64,
        data__train_examples=2000, train__duration=f'{2 * STEPS} steps', train__log_every=f'{STEPS} steps',
        train__eval_every=f'{2 * STEPS} steps', train__save_every=f'{2 * STEPS} steps', train__mesh='data=1',
    )  # fmt: skip
    task, layout = tasks.module(config).build(config, tmp_path), loop.layout_of(config)
    optimize = loop.recipe(config, task.examples)[2]
    state = layout.state(layout.start(lambda: loop.initial(task.init, optimize, 0, ema=config.train.ema)))
    update, batch = loop.compiled(config, task, layout, state), layout.batch(task.batch(0))
    state, _ = update(state, batch)
    ours, bare = [], []
    for turn in range(5):  # one after the other, as the machine is not equally fast at all times
        jax.block_until_ready(state)
        start = time.perf_counter()
        for _ in range(STEPS):
            state, values = update(state, batch)
        jax.block_until_ready((state, values))
        bare.append((time.perf_counter() - start) / STEPS)
        loop.train(config, task, tmp_path / str(turn))
        ours.append(1 / records(tmp_path / str(turn), 'speed')[-1]['steps_per_second'])
    each = [f'{1e3 * statistics.median(times):.2f} ms' for times in (bare, ours)]
    told = f'step {each[0]}, in the loop {each[1]}; {[round(a / b, 3) for a, b in zip(ours, bare, strict=True)]}'
    print(told)
    assert statistics.median(a / b for a, b in zip(ours, bare, strict=True)) <= LIMIT, told
