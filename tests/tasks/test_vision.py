"""The image classification task: batches, scores, invalid configs, starting from another run."""

import json

import jax
import numpy as np
import pytest

from attnlab import cli, configs
from attnlab.errors import UserError
from attnlab.report import page
from attnlab.tasks import create_task
from attnlab.tasks.vision import dataset, scores
from attnlab.tasks.vision.preprocess import preprocess_images
from attnlab.train import count, metrics, run
from tests.tiny import DIGITS, random_parameter, tiny_digits_config

SMALL = 'experiments/vision/cifar10_small.py'


# Batches


def batch_function(config, count=20):
    """Return the first images of the training split, and the function from a step to a batch of eight of them."""
    config = create_task(config).config
    train = dataset.read_images(config.data, 'train', config.seed)
    images = train._replace(pixels=train.pixels[:count], labels=train.labels[:count])
    return images, dataset.build_batch_function(config.data, images, 8, config.seed)


def test_an_epoch_has_every_image_once_and_pads_with_empty_rows():
    images, batch = batch_function(tiny_digits_config(data__crop=0))
    for epoch in (0, 1):
        batches = [batch(3 * epoch + step) for step in range(3)]
        labels = np.concatenate([b['first'] for b in batches])
        pixels = np.concatenate([b['images'] for b in batches])
        assert (labels == -1).sum() == 4 and not pixels[labels == -1].any()
        epoch_images = sorted(image.tobytes() for image in pixels[labels >= 0])
        assert epoch_images == sorted(image.tobytes() for image in images.pixels)
    assert not np.array_equal(batch(0)['first'], batch(3)['first'])
    assert np.array_equal(batch(4)['images'], batch_function(tiny_digits_config(data__crop=0))[1](4)['images'])


def test_augmentation_differs_between_steps_and_is_reproducible():
    config = tiny_digits_config(
        data__crop=2, data__policy='trivial', data__cutmix='1.0', data__mixup='0.5', data__erase='0.5'
    )
    batch = batch_function(config, 8)[1]
    again = batch_function(config, 8)[1]
    for name in ('images', 'first', 'second', 'share'):
        np.testing.assert_array_equal(batch(5)[name], again(5)[name])
    order = [np.argsort(batch(step)['first'], kind='stable') for step in (0, 1)]
    assert not np.array_equal(batch(0)['images'][order[0]], batch(1)['images'][order[1]])


def test_only_the_groups_of_the_requested_rows_are_augmented(monkeypatch):
    monkeypatch.setattr(dataset, 'AUGMENT_GROUP', 8)
    changes = dict(data__crop=2, data__policy='rand', data__cutmix='1.0', data__mixup='0.5', data__erase='0.5')
    config = create_task(tiny_digits_config(**changes)).config
    train = dataset.read_images(config.data, 'train', config.seed)
    batch, calls = dataset.build_batch_function(config.data, train, 24, config.seed), []
    augment = dataset.Augment.__call__
    monkeypatch.setattr(dataset.Augment, '__call__', lambda self, *args: calls.append(1) or augment(self, *args))
    whole = batch(3)
    assert len({whole['images'][i : i + 8].tobytes() for i in (0, 8, 16)}) == 3 and len(calls) == 3
    for rows, groups in ((slice(0, 12), 2), (slice(12, 24), 2), (slice(16, 24), 1), (slice(5, 6), 1)):
        calls.clear()
        part = batch(3, rows)
        assert len(calls) == groups
        for name, x in whole.items():
            np.testing.assert_array_equal(part[name], x[rows])


def test_loss_of_mixed_images_weighs_both_labels_by_their_share():
    task = create_task(tiny_digits_config(train__label_smoothing='0.1'))
    params = jax.tree_util.tree_map_with_path(random_parameter, jax.eval_shape(task.init, jax.random.key(0)))
    batch = task.batch(0)
    loss = jax.jit(task.loss)
    mixed = loss(params, batch | {'second': (batch['first'] + 1) % 10, 'share': np.full(16, 0.7, np.float32)},
                 jax.random.key(0))  # fmt: skip
    one, other = (loss(params, batch | {'first': labels, 'second': labels}, jax.random.key(0))
                  for labels in (batch['first'], (batch['first'] + 1) % 10))  # fmt: skip
    assert float(mixed.total) == pytest.approx(0.7 * float(one.total) + 0.3 * float(other.total), rel=1e-5)
    assert float(mixed.weight) == pytest.approx(16)
    empty = loss(params, {name: np.full_like(x, -1) if x.dtype == np.int32 else x for name, x in batch.items()},
                 jax.random.key(0))  # fmt: skip
    assert float(empty.total) == float(empty.weight) == 0


# Scores


def test_scores_equal_those_computed_by_hand():
    p = np.array([[0.7, 0.1, 0.1, 0.05, 0.03, 0.02], [0.1, 0.4, 0.3, 0.1, 0.06, 0.04], [0.3, 0.3, 0.1, 0.1, 0.1, 0.1],
                  [0.02, 0.9, 0.02, 0.02, 0.02, 0.02]])  # fmt: skip
    labels = np.array([0, 2, 0, 5])
    result = scores.score_classification(p, labels)
    assert result['accuracy'] == 0.25  # of two equal probabilities, neither counts as correct
    assert result['top5'] == 0.75
    assert result['loss'] == pytest.approx(-np.mean(np.log([0.7, 0.3, 0.3, 0.02])))
    # Bins of width 1/15: each confidence (0.7, 0.4, 0.3, 0.9) has its own; accuracies are 1, 0, 1 (by argmax), 0.
    assert result['calibration_error'] == pytest.approx((0.3 + 0.4 + 0.7 + 0.9) / 4)
    table = scores.confusion_matrix(p, labels)
    assert table.sum() == 4 and table[0, 0] == 2 and table[2, 1] == 1 and table[5, 1] == 1
    assert 'top5' not in scores.score_classification(p[:, :3], np.array([0, 1, 2, 0]))
    nan_result = scores.score_classification(np.full((4, 6), np.nan), labels)
    assert nan_result['accuracy'] == nan_result['top5'] == 0 and np.isnan(nan_result['loss'])


@pytest.mark.slow
@pytest.mark.parametrize('size', [1, 7, 30, 64])
def test_every_image_is_evaluated_once_for_any_batch_size(size, vision_run, monkeypatch):
    task, params, _ = run.load_run(vision_run)
    test_images = dataset.read_images(task.config.data, 'test', task.config.seed)
    monkeypatch.setattr('attnlab.tasks.vision.task.EVALUATION_IMAGES', size)
    probabilities = task.probabilities(params, test_images)
    alone = [task.model.forward(params, preprocess_images(image[None], task.statistics, task.model.image_size), None)[0]
             for image in test_images.pixels[:3]]  # fmt: skip
    assert probabilities.shape == (30, 10)
    np.testing.assert_allclose(probabilities[:3], jax.nn.softmax(np.concatenate(alone)), atol=1e-5)
    stored = json.loads((vision_run / 'scores-test.json').read_text())
    assert scores.score_classification(probabilities, test_images.labels)['accuracy'] == stored['accuracy']


@pytest.mark.slow
def test_evaluation_writes_scores_confusion_matrix_and_pictures(vision_run):
    stored = json.loads((vision_run / 'scores-test.json').read_text())
    assert stored['images'] == 30 and {'accuracy', 'top5', 'loss', 'calibration_error'} < set(stored)
    with np.load(vision_run / 'samples' / 'test.npz') as arrays:
        assert arrays['confusion'].sum() == 30 and arrays['probabilities'].shape == (30, 10)
        table = scores.confusion_matrix(arrays['probabilities'], arrays['labels'])
        np.testing.assert_array_equal(table, arrays['confusion'])
    index = json.loads((vision_run / 'figures' / 'eval-test' / 'pictures.json').read_text())
    names = [picture['file'].removesuffix('.png') for picture in index]
    assert names == ['rollout', 'mistakes', 'confusion', 'calibration', 'positions', 'filters']
    text = page.write_run_page(vision_run).read_text()
    assert text.count('<img') == 1 + len(index) and 'Accuracy' in text and 'principal components' in text


def test_metrics_have_accuracy_and_the_time_spent_waiting_for_data(vision_run):
    records = [json.loads(line) for line in (vision_run / 'metrics.jsonl').read_text().splitlines()]
    assert {'accuracy', 'nll', 'loss'} < set(records[0]) and records[0]['split'] == 'train'
    assert any('data_share' in record for record in records if record['split'] == 'speed')


def test_normalisation_uses_the_statistics_of_the_training_images(vision_run):
    statistics, config = dataset.load_image_statistics(vision_run), run.load_task(vision_run).config
    train = dataset.read_images(config.data, 'train', config.seed)
    x = np.asarray(preprocess_images(train.pixels, statistics, (16, 16)))
    assert abs(x.mean()) < 1e-4 and abs(x.std() - 1) < 1e-4
    larger = preprocess_images(train.pixels[:2], statistics, (32, 16))
    assert larger.shape == (2, 32, 16, 1)
    (vision_run / 'images.json').rename(vision_run / 'elsewhere.json')
    with pytest.raises(UserError, match='images.json cannot be read'):
        dataset.load_image_statistics(vision_run)
    for damaged in ('[]', 'null', '{"mean": 1, "deviation": 1, "names": 1}', '{'):
        (vision_run / 'images.json').write_text(damaged)
        with pytest.raises(UserError, match='images.json cannot be read'):
            dataset.load_image_statistics(vision_run)
    (vision_run / 'elsewhere.json').rename(vision_run / 'images.json')


# Models


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('changes', [
    dict(model__pool='class'), dict(model__pool='attention'), dict(model__registers=2), dict(model__positions='rotary'),
    dict(model__positions='sinusoidal'), dict(model__positions='none'), dict(model__embedding='tokenizer'),
    dict(model__patch='8,4'), dict(model__layer_drop='0.5', model__layers=2), dict(model__dropout='0.5'),
    dict(model__qk_norm='rms'), dict(model__experts=2), dict(data__policy='rand'), dict(data__mixup='1.0'),
    dict(model__image='32,32'),
], ids=str)  # fmt: skip
def test_each_field_changes_the_first_loss(changes, first_losses):
    unchanged_loss, first_loss = first_losses
    assert np.isfinite(loss := first_loss(**changes)) and abs(loss - unchanged_loss) > 1e-4


@pytest.fixture(scope='module')
def first_losses():
    """The first loss without changes, and the function from config changes to the first loss.

    Parameters with the same name and shape have the same values in every model.
    """

    def first_loss(**changes):
        task = create_task(tiny_digits_config(**changes))
        params = jax.tree_util.tree_map_with_path(random_parameter, jax.eval_shape(task.init, jax.random.key(0)))
        sums = jax.jit(task.loss)(params, task.batch(0), jax.random.key(0))
        return float(sums.total / sums.weight)

    return first_loss(), first_loss


def test_convolution_embedding_equals_product_embedding(first_losses):
    unchanged_loss, first_loss = first_losses
    assert first_loss(model__embedding='convolution') == pytest.approx(unchanged_loss, rel=1e-5)


@pytest.mark.parametrize(('override', 'message'), [
    ('model.patch=5,5', 'model: patches of height 5 do not divide images of height 16; expected a divisor'),
    ('model.patch=4', 'model.patch'),
    ('model.pool=max', "model.pool is 'max'; expected 'mean', 'class' or 'attention'"),
    ('model.positions=alibi', "model: positions is 'alibi'; expected 'learned', 'sinusoidal', 'rotary', 'none'"),
    ('model.registers=-1', 'model.registers is -1; expected 0 or more'),
    ('model.convolutions=0', 'model.convolutions is 0; expected 1 or more'),
    ('model.heads=5', 'model: queries have width 64; expected a multiple of 5 heads'),
    ('model.name=cnn', "model.name is 'cnn'; expected 'vit' or 'resnet'"),
    ('data.name=mnist', "data.name is 'mnist'; expected 'cifar10', 'cifar100', 'digits' or 'files'"),
    ('data.policy=auto', "data.policy is 'auto'; expected 'none', 'trivial' or 'rand'"),
    ('data.erase=1.5', 'data.erase is 1.5; expected 0 to 1'),
    ('data.crop=-1', 'data.crop is -1; expected 0 or more'),
    ('data.test_examples=0', 'data.test_examples is 0; expected 1 or more'),
    ('train.ema=1.0', 'train.ema is 1.0; expected 0.0 <= ema < 1.0'),
    ('optimizer.layer_decay=0.0', 'optimizer.layer_decay is 0.0; expected 0.0 < layer_decay <= 1.0'),
    ('start=nowhere', "start is 'nowhere'; expected the directory of a trained run"),
])  # fmt: skip
def test_invalid_values_are_refused_before_anything_is_written(override, message, tmp_path, capsys, as_used):
    line = ['train', f'--config={DIGITS}', f'--workdir={tmp_path / "run"}', f'--config.{override}']
    assert cli.main(line) == 2
    error = capsys.readouterr().err
    assert message in error and error.count('\n') == 1
    assert not (tmp_path / 'run').exists()


def test_models_of_the_cifar10_experiment_have_similar_parameter_counts():
    sizes = {}
    for arg in ('', ':vit', ':resnet'):
        sizes[arg] = count.tree_size(create_task(configs.load_experiment(SMALL + arg)).outline(None, False).params)
    assert sizes[':vit'] == pytest.approx(sizes[''], rel=0.1) and sizes[':resnet'] == pytest.approx(sizes[''], rel=0.1)


# Starting from another run


@pytest.mark.slow
def test_run_starts_from_another_with_positions_interpolated(quickly, vision_run, tmp_path):
    config = tiny_digits_config(start=str(vision_run), model__image='32,16', train__duration='1 steps')
    loaded = run.load_run(vision_run)
    params = create_task(config).adapt_params(loaded.task, loaded.params)
    assert params['positions']['table'].shape == (32, 16)
    source_table, table = (np.asarray(x['positions']['table']) for x in (loaded.params, params))
    np.testing.assert_allclose(table.reshape(8, 4, 16).mean(axis=(0, 1)), source_table.mean(axis=0), atol=0.01)
    run.train_run(config, tmp_path / 'larger')
    first = json.loads((tmp_path / 'larger' / 'metrics.jsonl').read_text().splitlines()[0])
    fresh = tiny_digits_config(model__image='32,16', train__duration='1 steps')
    run.train_run(fresh, tmp_path / 'fresh')
    assert first['loss'] != json.loads((tmp_path / 'fresh' / 'metrics.jsonl').read_text().splitlines()[0])['loss']


@pytest.mark.slow
def test_start_works_on_several_devices_and_with_an_empty_checkpoint_folder(quickly, vision_run, tmp_path):
    losses = {}
    for name, changes in {'one': {}, 'two': dict(train__mesh='data=2'), 'none': dict(start='')}.items():
        (tmp_path / name / 'checkpoints').mkdir(parents=True)  # as after a kill before the first save
        run.train_run(
            tiny_digits_config(**(dict(start=str(vision_run), train__duration='1 steps') | changes)), tmp_path / name
        )
        losses[name] = metrics.read_metrics(tmp_path / name)[0]['loss']
    assert losses['two'] == pytest.approx(losses['one'], rel=1e-5)
    assert abs(losses['one'] - losses['none']) > 1e-3


def test_start_with_other_parameter_shapes_is_refused(vision_run, tmp_path):
    config = tiny_digits_config(start=str(vision_run), model__pool='class')
    with pytest.raises(UserError, match=r'start .*/class has shape None; this config expects \(16,\)'):
        run.train_run(config, tmp_path / 'run')
    larger = tiny_digits_config(start=str(vision_run), model__pool='class', model__image='32,32')
    with pytest.raises(UserError, match=r'class has shape None|table has shape \(64, 16\); this config expects \(65,'):
        run.train_run(larger, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_checkpoint_of_another_pooling_is_refused(vision_run):
    config = configs.load_config(vision_run / 'config.json')
    with config.copy_and_resolve_references().unlocked() as changed:
        changed.model.pool = 'class'
    configs.save_config(changed, vision_run / 'config.json')
    try:
        with pytest.raises(UserError, match=r'params/class has shape None; this config expects \(16,\)'):
            run.load_run(vision_run)
    finally:
        configs.save_config(config, vision_run / 'config.json')
