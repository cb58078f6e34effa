"""A small task for tests, linear regression on noisy inputs, and helpers to run it."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import tasks
from attnlab.configs.run import OptimizerConfig, RunConfig, TrainConfig
from attnlab.kernels.losses import LossSums
from attnlab.train import checkpoint, loop, metrics
from attnlab.train.setup import make_setup
from attnlab.train.step import Hyperparameters, make_update

EXAMPLES, BATCH = 32, 8
INPUTS = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)
TARGETS = INPUTS @ np.array([1.0, -2.0, 0.5], np.float32)


def make_task(loss=None, evaluate=None, batch=None):
    """Return the regression task; the arguments replace its loss, validation and batches."""

    def squares(params, batch, rng):
        inputs = batch['x'] + 0.1 * jax.random.normal(rng, batch['x'].shape)
        errors = jnp.where(batch['kept'], (inputs @ params['w'] - batch['y']) ** 2, 0.0)
        return LossSums(jnp.sum(errors), jnp.sum(batch['kept']), {'squares': jnp.sum(errors)})

    def draw_batch(step):
        rows = np.random.default_rng((0, step)).permutation(EXAMPLES)[:BATCH]
        return {'x': INPUTS[rows], 'y': TARGETS[rows], 'kept': np.ones(BATCH, bool)}

    def validate(params):
        return {'loss': float(np.mean((INPUTS @ np.asarray(params['w']) - TARGETS) ** 2))}

    initial = {'w': jnp.zeros(3)}
    return SimpleNamespace(
        save=lambda workdir: None, examples=EXAMPLES, init=lambda rng: initial, batch=batch or draw_batch,
        loss=loss or squares, validate=evaluate or validate, best=('loss', 'min'),
    )  # fmt: skip


def config(seed=3, **changes):
    """Return a config of 20 steps; changes: fields of its train and optimizer sections."""
    train = dict(
        batch_size=BATCH, duration='20 steps', log_every='1 steps', eval_every='5 steps', save_every='3 steps',
        accumulate=1, patience=0, ema=0.0, mesh='data=1', parallel='jit',
    )  # fmt: skip
    optimizer = dict(name='sgd', learning_rate=0.1, schedule='linear', warmup='5 steps', clip=0.0)
    for key, value in changes.items():
        (train if key in train else optimizer)[key] = value
    return RunConfig(seed=seed, train=TrainConfig(**train), optimizer=OptimizerConfig(**optimizer))


def records(workdir, split):
    return [record for record in metrics.read_metrics(workdir) if record['split'] == split]


def same_runs(first, second):
    """Assert that two runs have equal metrics, except for speed, and equal newest checkpoints."""
    for split in ('train', 'valid'):
        assert records(first, split) == records(second, split)
    left, right = (newest(workdir) for workdir in (first, second))
    assert left.step == right.step and left.progress == right.progress
    jax.tree.map(np.testing.assert_array_equal, left, right)


def newest(workdir, name='sgd'):
    """Return the newest checkpoint of a run of the regression task."""
    return _newest(config(name=name), lambda key: {'w': jnp.zeros(3)}, workdir)


def newest_of(config, workdir):
    """Return the newest checkpoint of a run of any config."""
    task = tasks.create_task(config, workdir)
    return _newest(task.config, task.init, workdir)


def _newest(config, init, workdir):
    shapes = jax.eval_shape(partial(make_setup(config, EXAMPLES).initial_state, init), np.uint32(0))
    with checkpoint.checkpoint_manager(workdir) as manager:
        return checkpoint.restore_latest(manager, *loop.checkpoint_items(shapes))


def update_of(loss, make_optimizer, accumulate=1, rate=1.0, **options):
    """Return a step with seed 0 and a constant learning rate: (state, batch) -> (state, metrics)."""
    update = make_update(loss, make_optimizer, lambda i: 1.0, accumulate=accumulate, **options)
    return lambda state, batch: update(state, batch, Hyperparameters(0, rate, 0.0))
