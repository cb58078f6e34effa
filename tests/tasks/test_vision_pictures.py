"""Pictures of the image classification task, and image files that a user names."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attnlab import cli
from attnlab.data.images import Images
from attnlab.errors import UserError
from attnlab.tasks import create_task, heatmap
from attnlab.tasks.vision import dataset, figures, image_files, pictures
from attnlab.train import run
from tests.tiny import hash_run_files, tiny_digits_config

SMALL = 'experiments/vision/cifar10_small.py'


def test_class_names_are_drawn_unchanged():
    names = ['_a', '$a$', r'$\bad$', 'sea lion']
    images = Images(np.zeros((4, 8, 8, 1), np.uint8), np.arange(4, dtype=np.int32), tuple(names))
    probabilities = np.eye(4)[[1, 0, 3, 2]]
    figure = figures.plot_confusion_matrix(probabilities, images)
    heatmap.render_png(figure)  # mathematics that does not parse would raise
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == names
    heatmap.render_png(figures.plot_mistakes(images, probabilities, np.arange(4)))


@pytest.mark.slow
def test_attend_draws_every_attention_and_leaves_the_run_unchanged(vision_run, tmp_path, capsys):
    before = hash_run_files(vision_run)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)).save(tmp_path / 'a.png')
    assert cli.main(['attend', f'--workdir={vision_run}', '3', str(tmp_path / 'a.png')]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in written] == ['weights.npz', 'heads.png', 'rollout.png'] * 2
    assert hash_run_files(vision_run) == before
    with np.load(written[0]) as arrays:
        weights, rollout, image = (arrays[name] for name in ('attention', 'rollout', 'image'))
    config = run.load_task(vision_run).config
    np.testing.assert_array_equal(image, dataset.read_images(config.data, 'test', config.seed).pixels[3])
    assert weights.shape == (1, 2, 16, 16)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
    expected = ((weights[0].mean(axis=0) + np.eye(16)) / 2).mean(axis=0).reshape(4, 4)
    np.testing.assert_allclose(rollout, expected, atol=1e-6)


def test_attention_to_grid_and_rollout_use_the_class_token():
    model = create_task(tiny_digits_config(model__pool='class', model__registers=1)).model
    weights = np.random.default_rng(0).random((2, 18, 18))
    np.testing.assert_array_equal(pictures.attention_to_grid(weights, model), weights[:, 1, 2:].reshape(2, 4, 4))
    layers = np.random.default_rng(1).dirichlet(np.ones(18), (1, 3, 2, 18))
    product = np.eye(18)
    for layer in range(3):
        product = (layers[0, layer].mean(axis=0) / 2 + np.eye(18) / 2) @ product
    np.testing.assert_allclose(pictures.attention_rollout(layers, model)[0], product[1, 2:].reshape(4, 4), atol=1e-12)


@pytest.mark.parametrize('side', [28, 224])
def test_image_of_any_size_is_cropped_and_resized(side, tmp_path):
    for width in (29, 58, 116, 123, 225, 232, 1):
        Image.new('RGB', (width, width + 1), 'red').save(tmp_path / 'a.png')
        np.testing.assert_array_equal(image_files.open_image(str(tmp_path / 'a.png'), (side, side, 3))[..., 0], 255)


def test_16_bit_transparent_and_rotated_images_are_decoded_as_they_look(tmp_path):
    path = str(tmp_path / 'a.png')
    ramp = np.repeat(np.arange(256, dtype=np.uint16) * 257, 256).reshape(256, 256)
    Image.fromarray(ramp).save(path)
    np.testing.assert_array_equal(image_files.open_image(path, (256, 256, 1))[..., 0], ramp // 257)
    transparent = np.zeros((8, 8, 4), np.uint8)
    transparent[2:4, 2:4, 3] = 255  # an opaque black square
    Image.fromarray(transparent).save(path)
    np.testing.assert_array_equal(image_files.open_image(path, (8, 8, 3))[..., 0] == 0, transparent[..., 3] == 255)
    upright = Image.new('L', (6, 6))
    upright.putpixel((0, 0), 255)
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    upright.save(path, exif=exif)
    assert image_files.open_image(path, (6, 6, 1))[5, 5, 0] == 255
    Image.new('F', (6, 6)).save(tmp_path / 'a.tiff')
    with pytest.raises(UserError, match='a.tiff: pixels have 32 bits; expected 8 or 16 in each channel'):
        image_files.open_image(str(tmp_path / 'a.tiff'), (6, 6, 1))


def test_truncated_empty_and_other_files_have_different_errors(tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    path = tmp_path / 'a'
    for kind in ('PNG', 'JPEG', 'GIF', 'WEBP', 'TIFF'):
        noise.save(path, kind)
        whole = path.read_bytes()
        for size in (12, 30, 100, len(whole) // 2):
            path.write_bytes(whole[:size])
            with pytest.raises(UserError, match=r'a: cannot be read \(truncated or damaged\); expected a number'):
                image_files.open_image(str(path), (8, 8, 3))
    for data, message in ((b'', 'empty'), (b'Not an image.', 'not an image')):
        path.write_bytes(data)
        with pytest.raises(UserError, match=rf'a: cannot be read \({message}\)'):
            image_files.open_image(str(path), (8, 8, 3))


@pytest.mark.parametrize('factor', [1.5, 3])  # Pillow warns about the first and refuses the second
def test_large_image_is_read_and_too_large_image_is_refused(tmp_path, monkeypatch, factor):
    Image.new('RGB', (40, 30), 'red').save(tmp_path / 'a.png')
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', int(1200 / factor))
    if factor < 2:
        assert np.all(image_files.open_image(str(tmp_path / 'a.png'), (8, 8, 3)) == (255, 0, 0))
    else:
        with pytest.raises(UserError, match=r'too large: Image size \(1200 pixels\) exceeds limit of 800 pixels\)'):
            image_files.open_image(str(tmp_path / 'a.png'), (8, 8, 3))


def test_endless_device_is_refused(monkeypatch):
    monkeypatch.setattr(image_files, 'MAX_FILE_BYTES', 1000)
    with pytest.raises(UserError, match=r'/dev/zero: cannot be read \(too large: more than 1000 bytes\)'):
        image_files.open_image('/dev/zero', (8, 8, 3))


def test_image_is_read_from_a_pipe(tmp_path):
    Image.new('RGB', (8, 8), 'red').save(tmp_path / 'a.png')
    os.mkfifo(tmp_path / 'pipe')
    data = (tmp_path / 'a.png').read_bytes()
    threading.Thread(target=(tmp_path / 'pipe').write_bytes, args=[data], daemon=True).start()
    assert np.all(image_files.open_image(str(tmp_path / 'pipe'), (8, 8, 3)) == (255, 0, 0))


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(('words', 'message'), [
    (['30'], 'there is no image 30; expected 0 to 29, an image of the test split'),
    (['²'], '²: cannot be read (No such file or directory)'),
    (['9' * 5000], 'cannot be read (File name too long)'),
    (['cat.png'], 'cat.png: cannot be read (No such file or directory); expected a number of the test split or an'),
    (['setup.cfg'], 'setup.cfg: cannot be read (not an image)'),
    (['--head=3', '0'], '--head is 3; expected 1 to 2, the heads of attention'),
    (['--layer=2', '0'], '--layer is 2; expected 1 to 1, the layers of attention'),
    ([], 'attend expects'),
])  # fmt: skip
def test_attend_refuses_invalid_arguments_before_anything_is_written(words, message, vision_run, capsys):
    before = sorted((vision_run / 'figures').iterdir())
    assert cli.main(['attend', f'--workdir={vision_run}', *words]) == 2
    assert message in capsys.readouterr().err
    assert sorted((vision_run / 'figures').iterdir()) == before
