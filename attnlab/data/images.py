"""Labelled images: CIFAR-10 and CIFAR-100 in their published layouts, .npz files, digits drawn by a program."""

import functools
import io
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnlab.data import digits, download
from attnlab.data.disk_cache import cached_arrays
from attnlab.data.text import check_regular_file
from attnlab.errors import UserError

CIFAR_SIDE = 32
_PLANE = CIFAR_SIDE * CIFAR_SIDE  # bytes of one colour of an image
IMAGE_SPLITS = ('train', 'valid', 'test')


class Images(NamedTuple):
    """Images and their labels.

    pixels: [n, H, W, C] uint8.  labels: [n] int32.  names: the name of each class, by label.
    """

    pixels: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...]


class CifarLayout(NamedTuple):
    """One of the published layouts of CIFAR.

    folder: name of the folder.  archive: name of the .tar.gz file with the folder.
    train, test: the files of each split.  names: the file with the names of the classes.
    label: the key of the labels in a pickle, or the index of the label's byte in a binary record.
    label_bytes: number of bytes before the pixels of a binary record; 0 for pickles.
    """

    folder: str
    archive: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    label: str | int
    label_bytes: int = 0


_TRAIN_BATCHES = [f'data_batch_{i}' for i in range(1, 6)]
CIFAR_LAYOUTS = {
    'cifar10': (
        CifarLayout(
            'cifar-10-batches-py', 'cifar-10-python.tar.gz', tuple(_TRAIN_BATCHES),
            ('test_batch',), 'batches.meta', 'labels',
        ),
        CifarLayout(
            'cifar-10-batches-bin', 'cifar-10-binary.tar.gz', tuple(f'{name}.bin' for name in _TRAIN_BATCHES),
            ('test_batch.bin',), 'batches.meta.txt', 0, 1,
        ),
    ),
    'cifar100': (
        CifarLayout('cifar-100-python', 'cifar-100-python.tar.gz', ('train',), ('test',), 'meta', 'fine_labels'),
        CifarLayout(
            'cifar-100-binary', 'cifar-100-binary.tar.gz', ('train.bin',), ('test.bin',), 'fine_label_names.txt', 1, 2
        ),
    ),
}  # fmt: skip
CLASS_COUNTS = {'cifar10': 10, 'cifar100': 100, 'digits': 10}
CIFAR_SHA256 = {  # of the python archives
    'cifar10': '6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce',
    'cifar100': '85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7',
}
CIFAR_URL = 'https://www.cs.toronto.edu/~kriz/'


def load_cifar(name: str, split: str, folder: str | Path = '') -> Images:
    """Load CIFAR-10 or CIFAR-100 (Krizhevsky 2009).

    The published sets have 50,000 training and 10,000 test images of 32 x 32 RGB pixels; the files of a folder may
    have fewer.  CIFAR-100 is read with its 100 fine labels.

    name: 'cifar10' or 'cifar100'.  split: 'train', the whole of it, or 'test'.
    folder: read from there if given, else from $ATTNLAB_DATA/NAME if ATTNLAB_DATA is set, else from the cache
      ($XDG_CACHE_HOME or ~/.cache, attnlab/NAME), where the archive is downloaded if it is missing or has the wrong
      checksum.  A folder may hold the published files, the published folder, or the published archive, python or
      binary; `folder` may also be the archive itself.

    Raises UserError for missing, damaged or unexpected files.
    """
    archive = CIFAR_LAYOUTS[name][0].archive
    root = download.data_folder(name, folder, {archive: (CIFAR_URL + archive, CIFAR_SHA256[name])})
    layout, read_files = _find_layout(name, root)
    files = layout.test if split == 'test' else layout.train
    names_data, *file_data = read_files([layout.names, *files])
    names = _parse_names(layout, names_data, CLASS_COUNTS[name])
    parts = [_parse_records(layout, data, file, len(names)) for file, data in zip(files, file_data, strict=True)]
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Images(pixels, labels, names)


def load_npz_images(path: str | Path, classes: int, shape: Sequence[int]) -> Images:
    """Load an .npz file with the arrays `images` [n, H, W, C] uint8 and `labels` [n] int.

    classes: number of classes; labels are in [0, classes).  shape: (H, W, C).

    Raises UserError for a file that cannot be read, for missing or empty arrays, and for another shape, dtype or label.
    """
    check_regular_file(path)
    try:
        opened = np.load(path, allow_pickle=False)
        if not isinstance(opened, np.lib.npyio.NpzFile):
            raise ValueError('it holds a single array')
        with opened as file:
            arrays = {name: file[name] for name in ('images', 'labels') if name in file}
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f'{path}: cannot be read as .npz ({_first_line(error)})') from None
    if len(arrays) < 2:
        missing = ' and '.join(sorted({'images', 'labels'} - set(arrays)))
        raise UserError(f"{path} has no {missing}; expected the arrays 'images' and 'labels'")
    pixels, labels = arrays['images'], arrays['labels']
    if pixels.dtype != np.uint8 or pixels.shape[1:] != tuple(shape):
        expected = ', '.join(map(str, ('n', *shape)))
        raise UserError(f'{path}: images are {pixels.dtype} {pixels.shape}; expected uint8 [{expected}]')
    if labels.shape != pixels.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f'{path}: labels are {labels.dtype} {labels.shape}; expected integers [{len(pixels)}]')
    if not len(labels):
        raise UserError(f'{path}: no images')
    _check_labels(labels, classes, str(path))
    return Images(pixels, labels.astype(np.int32), tuple(map(str, range(classes))))


def draw_digit_images(split: str, count: int, seed: int) -> Images:
    """Draw the first `count` digits of a split, as `attnlab.data.digits` does; nothing is downloaded."""
    key = seed, IMAGE_SPLITS.index(split)

    def compute() -> dict[str, np.ndarray]:
        pixels, labels = digits.draw_digits(count, key)
        return {'pixels': pixels, 'labels': labels}

    arrays = cached_arrays('digits', count, key, compute)
    return Images(arrays['pixels'], arrays['labels'], tuple('0123456789'))


def split_held_out(whole: Images, held_out: int) -> tuple[Images, Images]:
    """Divide training images into all but the last `held_out`, and the last `held_out`, for validation.

    Raises UserError if no training image would be left.
    """
    count = len(whole.labels) - held_out
    if count < 1:
        raise UserError(f'data.held_out is {held_out}; expected fewer than the {len(whole.labels)} images to train on')
    first = whole._replace(pixels=whole.pixels[:count], labels=whole.labels[:count])
    last = whole._replace(pixels=whole.pixels[count:], labels=whole.labels[count:])
    return first, last


def channel_statistics(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each channel, [C] float64 each, of pixel values scaled to [0, 1].

    A constant channel gets the deviation 1.  pixels: [n, H, W, C] uint8.
    """
    counts = np.stack([np.bincount(pixels[..., channel].ravel(), minlength=256) for channel in range(pixels.shape[-1])])
    values, total = np.arange(256) / 255, counts.sum(axis=1)
    mean = counts @ values / total
    deviation = np.sqrt(np.maximum(counts @ values**2 / total - mean**2, 0.0))
    return mean, np.where(deviation < 1e-6, 1.0, deviation)


# Reading the files of CIFAR


def _find_layout(name: str, root: Path) -> tuple[CifarLayout, Callable[[Sequence[str]], list[bytes]]]:
    """Return the layout of a folder or archive, and a function from file names of the layout to their contents."""
    for layout in CIFAR_LAYOUTS[name]:
        for folder in (root, root / layout.folder):
            if (folder / layout.test[0]).is_file():
                return layout, functools.partial(_read_files, folder)
        for archive in (root, root / layout.archive):
            if archive.is_file() and archive.name == layout.archive:
                return layout, functools.partial(_read_archive, archive, layout.folder)
    known = ' or '.join(f'{layout.folder} or {layout.archive}' for layout in CIFAR_LAYOUTS[name])
    raise UserError(f'{root}: {name} not found; expected {known}')


def _read_files(folder: Path, files: Sequence[str]) -> list[bytes]:
    contents = []
    for file in files:
        try:
            contents.append((folder / file).read_bytes())
        except OSError as error:
            raise UserError(f'{folder / file}: cannot be read ({error.strerror})') from None
    return contents


def _read_archive(archive: Path, folder: str, files: Sequence[str]) -> list[bytes]:
    """Read files of a .tar.gz archive in one pass; seeking each file would decompress all data before it again."""
    wanted, contents = {f'{folder}/{file}' for file in files}, {}
    try:
        with tarfile.open(archive, 'r|*') as opened:
            for entry in opened:
                if entry.name in wanted and (file := opened.extractfile(entry)):
                    contents[entry.name] = file.read()
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f'{archive}: cannot be read ({_first_line(error)}); it may be damaged') from None
    for name in sorted(wanted - contents.keys()):
        raise UserError(f'{archive}: there is no {name} in it')
    return [contents[f'{folder}/{file}'] for file in files]


class _Unpickler(pickle.Unpickler):
    """Unpickler of arrays, numbers, strings and containers only: a pickle from elsewhere could run any code."""

    ALLOWED = {
        ('numpy.core.multiarray', '_reconstruct'), ('numpy._core.multiarray', '_reconstruct'), ('numpy', 'ndarray'),
        ('numpy', 'dtype'), ('_codecs', 'encode'),
        ('numpy.core.multiarray', 'scalar'), ('numpy._core.multiarray', 'scalar'),  # labels as NumPy scalars
        ('numpy.core.numeric', '_frombuffer'), ('numpy._core.numeric', '_frombuffer'),  # arrays in pickle protocol 5
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f'{module}.{name} is not allowed in the pickle of a data set')
        return super().find_class(module.replace('numpy.core', 'numpy._core'), name)


def _unpickle(data: bytes, file: str) -> dict[str, Any]:
    try:
        content = _Unpickler(io.BytesIO(data), encoding='bytes').load()
    except Exception as error:  # damaged bytes may raise any exception
        raise UserError(f'{file}: cannot be read as a pickle ({_first_line(error)})') from None
    if not isinstance(content, dict):
        raise UserError(f'{file}: holds a {type(content).__name__}; expected a dict')
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in content.items()}


def _parse_names(layout: CifarLayout, data: bytes, classes: int) -> tuple[str, ...]:
    if layout.label_bytes:
        lines = data.decode('utf-8', 'replace').splitlines()  # one name a line; a name may contain blanks
        names = tuple(line.strip() for line in lines if line.strip())
    else:
        # The key for `labels` is `label_names`, the key for `fine_labels` is `fine_label_names`.
        key = str(layout.label).removesuffix('s') + '_names'
        name_list = _unpickle(data, layout.names).get(key)
        if not isinstance(name_list, list | tuple):
            raise UserError(f'{layout.names}: {key} is a {type(name_list).__name__}; expected a list of names')
        names = tuple(name.decode('utf-8', 'replace') if isinstance(name, bytes) else str(name) for name in name_list)
    if len(names) != classes:
        raise UserError(f'{layout.names}: {len(names)} names of classes; expected {classes}')
    return names


def _parse_records(layout: CifarLayout, data: bytes, file: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels [n, 32, 32, 3] uint8 and labels [n] int32 of a file.

    The file stores each image as its red, its green and its blue pixels, each row-major.
    """
    if isinstance(layout.label, int):
        width = layout.label_bytes + 3 * _PLANE
        if not data or len(data) % width:
            raise UserError(f'{file}: {len(data)} bytes; expected a multiple of {width}, the size of a record')
        records = np.frombuffer(data, np.uint8).reshape(-1, width)
        labels, planes = records[:, layout.label], records[:, layout.label_bytes :]
    else:
        content = _unpickle(data, file)
        for key in ('data', layout.label):
            if key not in content:
                raise UserError(f'{file}: there is no {key!r} in it')
        try:
            labels, planes = np.asarray(content[layout.label]), np.asarray(content['data'])
        except ValueError as error:  # lists of unequal lengths
            raise UserError(f'{file}: {_first_line(error)}') from None
        if not np.issubdtype(labels.dtype, np.integer):
            raise UserError(f'{file}: labels are {labels.dtype}; expected integers')
    well_formed = planes.dtype == np.uint8 and planes.ndim == 2 and planes.shape[1] == 3 * _PLANE
    if not well_formed or labels.shape != planes.shape[:1]:
        shapes = f'data are {planes.dtype} {planes.shape} with labels {labels.shape}'
        raise UserError(f'{file}: {shapes}; expected uint8 [n, {3 * _PLANE}] and n labels')
    _check_labels(labels, classes, file)
    return planes.reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE).transpose(0, 2, 3, 1).copy(), labels.astype(np.int32)


def _check_labels(labels: np.ndarray, classes: int, where: str) -> None:
    invalid = labels[(labels < 0) | (labels >= classes)]
    if invalid.size:
        raise UserError(f'{where}: label {invalid[0]} is outside the classes; expected 0 to {classes - 1}')


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
