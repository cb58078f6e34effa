"""The images of a config: read, divided, changed for training, and the numbers by which they are brought to scale."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attnlab import files
from attnlab.configs import Cifar10Data, Cifar100Data, DigitsData, ImageFiles
from attnlab.data import batches, digits, images
from attnlab.data.augment import Augment
from attnlab.data.images import IMAGE_SPLITS, Images
from attnlab.errors import UserError
from attnlab.files import expand_home

Data = Cifar10Data | Cifar100Data | DigitsData | ImageFiles

AUGMENT_GROUP = 128
"""Rows of a training batch that are changed together."""


class ImageStatistics(NamedTuple):
    """Mean and deviation of each channel of the training images [C], from 0 to 1, and the names of the classes."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    names: tuple[str, ...]


def image_shape(data: Data) -> tuple[int, int, int]:
    """(height, width, channels) of the images as they are read."""
    match data:
        case DigitsData():
            return digits.DIGIT_SIDE, digits.DIGIT_SIDE, 1
        case ImageFiles():
            return data.shape
        case _:
            return images.CIFAR_SIDE, images.CIFAR_SIDE, 3


def class_count(data: Data) -> int:
    """How many there are."""
    return data.classes if isinstance(data, ImageFiles) else images.CLASS_COUNTS[data.name]


def read_images(data: Data, split: str, seed: int) -> Images:
    """The images of a split: 'train', 'valid', which is held out of it, or 'test'."""
    if split not in IMAGE_SPLITS:
        raise UserError(f'split is {split!r}; expected one of {", ".join(IMAGE_SPLITS)}')
    if split != 'test':
        return read_training_images(data, seed)[IMAGE_SPLITS.index(split)]
    match data:
        case DigitsData():
            return images.draw_digit_images('test', data.test_examples, seed)
        case ImageFiles():
            return images.load_npz_images(expand_home(data.test, 'data.test'), data.classes, data.shape)
        case _:
            return images.load_cifar(data.name, 'test', expand_home(data.folder, 'data.folder'))


def read_training_images(data: Data, seed: int) -> tuple[Images, Images]:
    """The images to train on, and those held out to choose by, from one reading."""
    match data:
        case DigitsData():
            return images.draw_digit_images('train', data.train_examples, seed), images.draw_digit_images(
                'valid', data.test_examples, seed
            )
        case ImageFiles():
            whole = images.load_npz_images(expand_home(data.train, 'data.train'), data.classes, data.shape)
        case _:
            whole = images.load_cifar(data.name, 'train', expand_home(data.folder, 'data.folder'))
    return images.split_held_out(whole, data.held_out)


def build_batch_function(data: Data, whole: Images, B: int, seed: int) -> Callable[..., dict[str, np.ndarray]]:
    """Training batch of step i, (step, rows=all): all images once an epoch, in a new order, each changed anew.

    'images' uint8 [B, H, W, C]; 'first' and 'second' int32 [B] labels, -1 in empty rows, and 'share' float32 [B] of the
    first.  Each `AUGMENT_GROUP` of rows has draws of its own and is blended within itself, so that it can be made alone.
    """
    change = Augment(
        data.crop, data.flip, data.policy, data.operations, data.strength, data.erase, data.mixup, data.cutmix
    )
    order = batches.shuffled_batches(np.ones(len(whole.labels), int), [1], B, seed)

    def batch(step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        examples = order(step).examples
        start, stop, _ = rows.indices(B)
        before = start // AUGMENT_GROUP * AUGMENT_GROUP
        made = [group(step, at, examples[at : at + AUGMENT_GROUP]) for at in range(before, stop, AUGMENT_GROUP)]
        return {name: np.concatenate([each[name] for each in made])[start - before : stop - before] for name in made[0]}

    def group(step: int, at: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        real = rows >= 0
        pixels, labels = whole.pixels[rows], np.where(real, whole.labels[rows], -1)
        pixels[~real] = 0
        # The key of a step apart from the seed: no two of them give one sequence, however large.
        key = (step, at) if at else (step,)
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))
        pixels, labels = change(pixels, labels, random)
        return {'images': pixels, **labels._asdict()}

    return batch


def evaluation_batches(whole: Images, B: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """All images in batches of B, (pixels, labels); the last one is filled up with empty ones of label -1."""
    found = []
    for start in range(0, len(whole.labels), B):
        pixels, labels = whole.pixels[start : start + B], whole.labels[start : start + B]
        missing = B - len(labels)
        if missing:
            pixels = np.pad(pixels, ((0, missing), (0, 0), (0, 0), (0, 0)))
            labels = np.pad(labels, (0, missing), constant_values=-1)
        found.append((pixels, labels))
    return found


def compute_image_statistics(whole: Images) -> ImageStatistics:
    """That of the images to train on."""
    mean, deviation = images.channel_statistics(whole.pixels)
    return ImageStatistics(tuple(map(float, mean)), tuple(map(float, deviation)), whole.names)


def save_image_statistics(scale: ImageStatistics, workdir: Path) -> None:
    """Writes it where `load_image_statistics` looks for it."""
    files.write_file(workdir / 'images.json', json.dumps(scale._asdict(), indent=1) + '\n')


def load_image_statistics(workdir: Path) -> ImageStatistics:
    """That which lies in a run's directory."""
    path = workdir / 'images.json'
    try:
        found = json.loads(path.read_text('utf-8'))
        return ImageStatistics(*(tuple(found[name]) for name in ImageStatistics._fields))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f'{path} cannot be read ({error}); a run of this kind writes it when it starts') from None
