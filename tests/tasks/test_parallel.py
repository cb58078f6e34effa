"""The tasks on one device and on four: equal losses, with dropout, experts and padding, and equal scores."""

import jax
import numpy as np
import pytest

from attnlab import configs
from attnlab.kernels import mesh_axes
from attnlab.tasks import create_task
from attnlab.tasks.vision.task import VisionTask
from attnlab.train import devices, metrics, run
from tests.tiny import (
    random_parameter,
    tiny_digits_config,
    tiny_grammar_config,
    tiny_language_config,
    tiny_transformer_config,
)

NOISE = dict(model__dropout='0.2', model__attention_dropout='0.2', train__duration='3 steps')
RUNS = {
    'language': lambda folder, **mesh: tiny_language_config(
        folder, data__documents='lines', model__experts='2', model__experts_per_token='1', **NOISE, **mesh
    ),
    'vision': lambda folder, **mesh: tiny_digits_config(data__mixup='0.5', model__layer_drop='0.3', **NOISE, **mesh),
    'pmap': lambda folder, train__mesh: tiny_digits_config(
        data__mixup='0.5', train__duration='3 steps', train__mesh=train__mesh,
        train__parallel='jit' if train__mesh == 'data=1' else 'pmap',
    ),
    'align': lambda folder, **mesh: tiny_grammar_config(model__dropout='0.2', train__duration='3 steps', **mesh),
}  # fmt: skip
"""Configs by name, each a function of a folder for the data and of the mesh."""


@pytest.mark.slow  # tests/train/test_sharding.py has faster tests of rows over eight devices, by jit and by pmap
@pytest.mark.parametrize('name', ['vision', 'language', 'pmap', 'align'])
def test_losses_on_four_devices_equal_those_on_one(name, tmp_path):
    train_records = []
    for number in (1, 4):
        workdir = tmp_path / str(number)
        run.train_run(RUNS[name](tmp_path / 'data', train__mesh=f'data={number}'), workdir)
        train_records.append([record for record in metrics.read_metrics(workdir) if record['split'] == 'train'])
    assert len(train_records[0]) == len(train_records[1]) == 3
    for expected, record in zip(*train_records, strict=True):
        for key in expected.keys() - {'split'}:
            message = f'{key}, step {expected["step"]}'
            np.testing.assert_allclose(expected[key], record[key], rtol=2e-4, err_msg=message)


# Validation: rows are sharded, parameters stay where they are

VALIDATED = {
    'language': lambda folder: tiny_language_config(folder),
    'experts': lambda folder: tiny_language_config(folder, model__experts='2', model__experts_per_token='2'),
    'documents': lambda folder: tiny_language_config(
        folder, data__documents='lines', model__norm='rms', model__scan='true'
    ),
    'images': lambda folder: tiny_digits_config(),
    'residual': lambda folder: small_resnet_config(),
    'recurrent': lambda folder: tiny_grammar_config(),
    'transformer': lambda folder: tiny_transformer_config(),
}


def small_resnet_config():
    """Return the config of a small residual network on the data of `tiny_digits_config`."""
    config = configs.load_experiment(
        'experiments/vision/cifar10_small.py:resnet', [('model.width', '8'), ('model.blocks', '1')]
    )
    with config.unlocked():
        config.data = tiny_digits_config().data
    return config


@pytest.fixture
def programs(monkeypatch):
    """List of (compiled function, arguments, result) of each call of a function that was jitted without options."""
    calls, jit = [], jax.jit

    def recording_jit(function, **options):
        compiled = jit(function, **options)

        def call(*args):
            calls.append((compiled, args, compiled(*args)))
            return calls[-1][-1]

        return compiled if options else call

    monkeypatch.setattr(jax, 'jit', recording_jit)
    return calls


def validate(config, mesh, programs):
    """Return the validation scores of random parameters, and the operations of one device in all programs."""
    task = create_task(config)
    layout = devices.make_layout('jit', mesh, rows=16)
    shapes = layout.stored_shapes(jax.eval_shape(task.init, jax.random.key(0)))
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(random_parameter(path, x), x.sharding), shapes
    )
    programs.clear()
    scores = layout.evaluate(task.validate, params)
    assert all(x.is_fully_replicated for *_, result in programs for x in jax.tree.leaves(result))
    # Each combination of program and shapes once.
    distinct = {repr(jax.tree.map(np.shape, (id(program), *args))): (program, args) for program, args, _ in programs}
    costs = layout.evaluate(
        lambda _: [program.lower(*args).compile().cost_analysis() for program, args in distinct.values()], params
    )
    return scores, sum(cost['flops'] for cost in costs)


MESHES = ['data=4', 'fsdp=2,tensor=2', 'data=2,sequence=2']
NOT_SLOW = [('residual', 'data=4'), ('recurrent', 'data=4'), ('documents', 'data=2,sequence=2')] + [
    (name, 'fsdp=2,tensor=2') for name in ('experts', 'images', 'transformer')
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(('name', 'mesh'), [
    pytest.param(name, mesh, marks=[] if (name, mesh) in NOT_SLOW else pytest.mark.slow)
    for name in VALIDATED for mesh in MESHES
])  # fmt: skip
def test_scores_on_several_devices_equal_those_on_one(name, mesh, tmp_path, programs, quickly):
    config = VALIDATED[name](tmp_path / 'data')
    scores, operations = validate(config, 'data=1', programs)
    sharded_scores, sharded_operations = validate(config, mesh, programs)
    assert scores == pytest.approx(sharded_scores, rel=1e-5)
    # The residual and the recurrent model divide little except rows.
    parts = 2 if name in ('residual', 'recurrent') and mesh != 'data=4' else 4
    assert sharded_operations < 1.5 * operations / parts


@pytest.mark.slow
def test_evaluation_uses_the_mesh_of_training_or_the_available_devices(tmp_path, monkeypatch, quickly):
    config = tiny_digits_config(train__mesh='fsdp=4', train__duration='1 steps')
    run.train_run(config, tmp_path)
    used_meshes = []

    def evaluate(task, params, split):
        sizes = jax.tree.leaves(params)[0].sharding.mesh.shape
        used_meshes.append({axis: size for axis, size in sizes.items() if size > 1})
        return {'rows': mesh_axes.evaluation_batch_size(1, 100)}

    monkeypatch.setattr(VisionTask, 'evaluate', evaluate)
    meshes = {'fsdp=4': {'fsdp': 4}, 'fsdp=64': {'data': 8}, 'data=1': {}}  # eight devices are available
    rows = []
    for mesh in meshes:
        config.train.mesh = mesh
        configs.save_config(config, tmp_path / 'config.json')
        rows.append(run.evaluate_run(tmp_path)[1]['rows'])
    assert used_meshes == list(meshes.values()) and rows == [4, 8, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('make', 'changes'), [(tiny_digits_config, {}), (tiny_transformer_config, {'decode__beams': '2'})]
)
def test_evaluation_on_several_devices_equals_that_on_one(tmp_path, make, changes):
    config, all_scores = make(train__duration='2 steps', **changes), []
    run.train_run(config, tmp_path)
    for mesh in ('data=1', 'fsdp=2,tensor=2'):
        config.train.mesh = mesh
        configs.save_config(config, tmp_path / 'config.json')
        scores = run.evaluate_run(tmp_path)[1]
        all_scores.append({name: score for name, score in scores.items() if isinstance(score, float | int)})
    assert all_scores[0] == pytest.approx(all_scores[1], rel=1e-5) and len(all_scores[0]) > 3
