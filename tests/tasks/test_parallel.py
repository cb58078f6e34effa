"""Real tasks on one device and on four: the same losses, noise, experts and padding included, and the same scores."""

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
        folder, data__documents='lines', model__experts='2', model__active='1', **NOISE, **mesh
    ),
    'vision': lambda folder, **mesh: tiny_digits_config(data__mixup='0.5', model__layer_drop='0.3', **NOISE, **mesh),
    'pmap': lambda folder, train__mesh: tiny_digits_config(
        data__mixup='0.5', train__duration='3 steps', train__mesh=train__mesh,
        train__parallel='jit' if train__mesh == 'data=1' else 'pmap',
    ),
    'align': lambda folder, **mesh: tiny_grammar_config(model__dropout='0.2', train__duration='3 steps', **mesh),
}  # fmt: skip



@pytest.mark.slow  # rows over eight devices, by jit and by pmap: tests/train/test_sharding.py
@pytest.mark.parametrize('name', ['vision', 'language', 'pmap', 'align'])
def test_several_devices_train_as_one(name, tmp_path):
    found = []
    for number in (1, 4):
        workdir = tmp_path / str(number)
        run.train_run(RUNS[name](tmp_path / 'data', train__mesh=f'data={number}'), workdir)
        found.append([record for record in metrics.read_metrics(workdir) if record['split'] == 'train'])
    assert len(found[0]) == len(found[1]) == 3
    for one, other in zip(*found, strict=True):
        for key in one.keys() - {'split'}:
            np.testing.assert_allclose(one[key], other[key], rtol=2e-4, err_msg=f'{key}, step {one["step"]}')


# Scores: rows divided, parameters where they lie

SCORED = {
    'language': lambda folder: tiny_language_config(folder),
    'experts': lambda folder: tiny_language_config(folder, model__experts='2', model__active='2'),
    'documents': lambda folder: tiny_language_config(
        folder, data__documents='lines', model__norm='rms', model__scan='true'
    ),
    'images': lambda folder: tiny_digits_config(),
    'residual': lambda folder: residual(),
    'recurrent': lambda folder: tiny_grammar_config(),
    'transformer': lambda folder: tiny_transformer_config(),
}


def residual():
    """A small residual network on the digits of `tiny_digits`."""
    config = configs.load_experiment(
        'experiments/vision/cifar10_small.py:resnet', [('model.width', '8'), ('model.blocks', '1')]
    )
    with config.unlocked():
        config.data = tiny_digits_config().data
    return config


@pytest.fixture
def programs(monkeypatch):
    """(function, arguments, what came out) of each call of what was compiled with no options."""
    called, jit = [], jax.jit

    def recording(function, **options):
        run = jit(function, **options)

        def call(*args):
            called.append((run, args, run(*args)))
            return called[-1][-1]

        return run if options else call

    monkeypatch.setattr(jax, 'jit', recording)
    return called


def scored(config, mesh, programs):
    """The scores of drawn parameters, and the operations of one device in all its programs."""
    task = create_task(config)
    layout = devices.make_layout('jit', mesh, rows=16)
    shapes = layout.stored_shapes(jax.eval_shape(task.init, jax.random.key(0)))
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(random_parameter(path, x), x.sharding), shapes
    )
    programs.clear()
    scores = layout.evaluate(task.validate, params)
    assert all(x.is_fully_replicated for *_, result in programs for x in jax.tree.leaves(result))
    each = {jax.tree.map(np.shape, (id(run), *args)).__repr__(): (run, args) for run, args, _ in programs}
    costs = layout.evaluate(lambda _: [run.lower(*args).compile().cost_analysis() for run, args in each.values()], params)
    return scores, sum(cost['flops'] for cost in costs)


MESHES = ['data=4', 'fsdp=2,tensor=2', 'data=2,sequence=2']
OFTEN = [('residual', 'data=4'), ('recurrent', 'data=4'), ('documents', 'data=2,sequence=2')] + [
    (name, 'fsdp=2,tensor=2') for name in ('experts', 'images', 'transformer')
]


@pytest.mark.parametrize(('name', 'mesh'), [
    pytest.param(name, mesh, marks=[] if (name, mesh) in OFTEN else pytest.mark.slow)
    for name in SCORED for mesh in MESHES
])  # fmt: skip
def test_several_devices_score_as_one(name, mesh, tmp_path, programs, quickly):
    config = SCORED[name](tmp_path / 'data')
    (one, alone), (several, divided) = (scored(config, each, programs) for each in ('data=1', mesh))
    assert one == pytest.approx(several, rel=1e-5)
    parts = 2 if name in ('residual', 'recurrent') and mesh != 'data=4' else 4  # which divide little but rows
    assert divided < 1.5 * alone / parts


def test_a_trained_run_is_scored_as_it_was_trained_or_on_what_there_is(tmp_path, monkeypatch, quickly):
    config = tiny_digits_config(train__mesh='fsdp=4', train__duration='1 steps')
    run.train_run(config, tmp_path)
    found = []

    def evaluate(task, params, split):
        sizes = jax.tree.leaves(params)[0].sharding.mesh.shape
        found.append({axis: size for axis, size in sizes.items() if size > 1})
        return {'rows': mesh_axes.evaluation_batch_size(1, 100)}

    monkeypatch.setattr(VisionTask, 'evaluate', evaluate)
    meshes = {'fsdp=4': {'fsdp': 4}, 'fsdp=64': {'data': 8}, 'data=1': {}}  # of eight devices
    rows = []
    for mesh in meshes:
        config.train.mesh = mesh
        configs.save_config(config, tmp_path / 'config.json')
        rows.append(run.evaluate_run(tmp_path)[1]['rows'])
    assert found == list(meshes.values()) and rows == [4, 8, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('make', 'changes'), [(tiny_digits_config, {}), (tiny_transformer_config, {'decode__beams': '2'})]
)
def test_a_whole_evaluation_on_several_devices_is_that_on_one(tmp_path, make, changes):
    config, found = make(train__duration='2 steps', **changes), []
    run.train_run(config, tmp_path)
    for mesh in ('data=1', 'fsdp=2,tensor=2'):
        config.train.mesh = mesh
        configs.save_config(config, tmp_path / 'config.json')
        scores = run.evaluate_run(tmp_path)[1]
        found.append({name: score for name, score in scores.items() if isinstance(score, float | int)})
    assert found[0] == pytest.approx(found[1], rel=1e-5) and len(found[0]) > 3
