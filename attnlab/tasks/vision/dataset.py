"""Image data of a config: splits, augmented training batches, evaluation batches, statistics for normalisation."""

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

ImageData = Cifar10Data | Cifar100Data | DigitsData | ImageFiles
"""Configs of images."""

AUGMENT_GROUP = 128
"""Rows of a training batch that are augmented together."""


class ImageStatistics(NamedTuple):
    """What a trained model needs of its training images.

    mean, deviation: mean and standard deviation of each channel [C]; pixels range from 0 to 1.
    names: names of the classes, in the order of the labels.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    names: tuple[str, ...]


def image_shape(data: ImageData) -> tuple[int, int, int]:
    """Return (height, width, channels) of the stored images."""
    match data:
        case DigitsData():
            return digits.DIGIT_SIDE, digits.DIGIT_SIDE, 1
        case ImageFiles():
            return data.shape
        case _:
            return images.CIFAR_SIDE, images.CIFAR_SIDE, 3


def class_count(data: ImageData) -> int:
    """Return the number of classes."""
    return data.classes if isinstance(data, ImageFiles) else images.CLASS_COUNTS[data.name]


def read_images(data: ImageData, split: str, seed: int) -> Images:
    """Return the images of a split: 'train', 'valid' (held out from the training images) or 'test'.

    Raises UserError for an unknown split.
    """
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


def read_training_images(data: ImageData, seed: int) -> tuple[Images, Images]:
    """Return the training and the validation images; the files are read once."""
    match data:
        case DigitsData():
            train = images.draw_digit_images('train', data.train_examples, seed)
            return train, images.draw_digit_images('valid', data.test_examples, seed)
        case ImageFiles():
            train_and_valid = images.load_npz_images(expand_home(data.train, 'data.train'), data.classes, data.shape)
        case _:
            train_and_valid = images.load_cifar(data.name, 'train', expand_home(data.folder, 'data.folder'))
    return images.split_held_out(train_and_valid, data.held_out)


def build_batch_function(data: ImageData, train: Images, B: int, seed: int) -> Callable[..., dict[str, np.ndarray]]:
    """Return the function (step, rows=all) -> training batch of B images, or some rows of it.

    Every epoch has each image once, in a new order and with new augmentations. The batch has 'images' uint8
    [B, H, W, C]; 'first' and 'second', int32 labels [B], -1 in empty rows; and 'share' float32 [B], the weight of the
    first label (Mixup and CutMix combine two images). Each group of `AUGMENT_GROUP` rows has random numbers of its own
    and combines only its own images, so a process can compute the groups of its rows alone.
    """
    augment = Augment(
        data.crop, data.flip, data.policy, data.operations, data.strength, data.erase, data.mixup, data.cutmix
    )
    indices = batches.shuffled_batches(np.ones(len(train.labels), int), [1], B, seed)

    def batch(step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        examples = indices(step).examples
        start, stop, _ = rows.indices(B)
        first_group = start // AUGMENT_GROUP * AUGMENT_GROUP  # starts at or before the first row
        groups = [
            augmented_group(step, offset, examples[offset : offset + AUGMENT_GROUP])
            for offset in range(first_group, stop, AUGMENT_GROUP)
        ]
        selected = slice(start - first_group, stop - first_group)
        return {name: np.concatenate([group[name] for group in groups])[selected] for name in groups[0]}

    def augmented_group(step: int, offset: int, examples: np.ndarray) -> dict[str, np.ndarray]:
        occupied = examples >= 0
        pixels, labels = train.pixels[examples], np.where(occupied, train.labels[examples], -1)
        pixels[~occupied] = 0
        # The step is a spawn key, not a part of the seed, so that no two steps share a random sequence.
        spawn_key = (step, offset) if offset else (step,)
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=spawn_key)))
        pixels, mixed_labels = augment(pixels, labels, random)
        return {'images': pixels, **mixed_labels._asdict()}

    return batch


def evaluation_batches(dataset: Images, B: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return all images in batches of B, as (pixels uint8 [B, H, W, C], labels int32 [B]).

    The last batch is padded with empty images of label -1.
    """
    padded_batches = []
    for start in range(0, len(dataset.labels), B):
        pixels, labels = dataset.pixels[start : start + B], dataset.labels[start : start + B]
        missing = B - len(labels)
        if missing:
            pixels = np.pad(pixels, ((0, missing), (0, 0), (0, 0), (0, 0)))
            labels = np.pad(labels, (0, missing), constant_values=-1)
        padded_batches.append((pixels, labels))
    return padded_batches


def compute_image_statistics(train: Images) -> ImageStatistics:
    """Return the statistics of the training images."""
    mean, deviation = images.channel_statistics(train.pixels)
    return ImageStatistics(tuple(map(float, mean)), tuple(map(float, deviation)), train.names)


def save_image_statistics(statistics: ImageStatistics, workdir: Path) -> None:
    """Write the statistics to `images.json` in a run's directory."""
    files.write_file(workdir / 'images.json', json.dumps(statistics._asdict(), indent=1) + '\n')


def load_image_statistics(workdir: Path) -> ImageStatistics:
    """Read the statistics from a run's directory; UserError if `images.json` is missing or damaged."""
    path = workdir / 'images.json'
    try:
        fields = json.loads(path.read_text('utf-8'))
        return ImageStatistics(*(tuple(fields[name]) for name in ImageStatistics._fields))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f'{path} cannot be read ({error}); expected the file that the training of this run wrote when it started'
        ) from None
