"""Images with labels: CIFAR-10 and CIFAR-100 in their published layouts, arrays in a file, digits drawn by us."""

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
from attnlab.data.kept import kept
from attnlab.data.text import check_regular_file
from attnlab.errors import UserError

CIFAR_SIDE = 32
PLANE = CIFAR_SIDE * CIFAR_SIDE
IMAGE_SPLITS = ('train', 'valid', 'test')


class Images(NamedTuple):
    """pixels: uint8 [n, H, W, C], channels last.  labels: int32 [n].  names: of the classes, in the labels' order."""

    pixels: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...]


class CifarLayout(NamedTuple):
    """A published layout: its folder, its archive, the files of each split, and where labels and names stand.

    label: the key of the pickled labels, or the place of the label's byte in front of a binary record.
    before: bytes of a binary record before its pixels; 0 for pickles.
    """

    folder: str
    archive: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    label: str | int
    before: int = 0


_TEN = [f'data_batch_{i}' for i in range(1, 6)]
CIFAR_LAYOUTS = {
    'cifar10': (
        CifarLayout('cifar-10-batches-py', 'cifar-10-python.tar.gz', tuple(_TEN), ('test_batch',), 'batches.meta', 'labels'),
        CifarLayout(
            'cifar-10-batches-bin', 'cifar-10-binary.tar.gz', tuple(f'{name}.bin' for name in _TEN),
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
    """CIFAR-10 or CIFAR-100 (Krizhevsky 2009): 50,000 images to train on and 10,000 to test on, 32 x 32, RGB; fewer
    where the files of a folder have fewer.

    It is read from `folder` if given, else from $ATTNLAB_DATA/NAME if set, else from the cache ($XDG_CACHE_HOME or
    ~/.cache, attnlab/NAME), where the archive is downloaded if it is missing, its checksum compared.  A folder holds
    the published files, the published folder with them, or the published archive, python or binary; it may also be
    the archive itself.  CIFAR-100 has its 100 fine labels.

    split: 'train', all of it, or 'test'.
    """
    archive = CIFAR_LAYOUTS[name][0].archive
    root = download.data_folder(name, folder, {archive: (CIFAR_URL + archive, CIFAR_SHA256[name])})
    layout, read = _source(name, root)
    files = layout.test if split == 'test' else layout.train
    first, *rest = read([layout.names, *files])
    names = _names(layout, first, CLASS_COUNTS[name])
    parts = [_records(layout, data, file, len(names)) for file, data in zip(files, rest, strict=True)]
    pixels, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Images(pixels, labels, names)


def load_npz_images(path: str | Path, classes: int, shape: Sequence[int]) -> Images:
    """An .npz file with `images` uint8 [n, H, W, C] and `labels` int [n], each from 0 to classes - 1."""
    check_regular_file(path)
    try:
        opened = np.load(path, allow_pickle=False)
        if not isinstance(opened, np.lib.npyio.NpzFile):
            raise ValueError('it is one array')
        with opened as file:
            found = {name: file[name] for name in ('images', 'labels') if name in file}
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f'{path}: cannot be read as .npz ({_brief(error)})') from None
    if len(found) < 2:
        lacking = ' and '.join(sorted({'images', 'labels'} - set(found)))
        raise UserError(f"{path} lacks {lacking}; expected 'images' and 'labels'")
    pixels, labels = found['images'], found['labels']
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
    """`count` digits of a split, drawn by `attnlab.data.digits`: nothing to download."""
    key = seed, IMAGE_SPLITS.index(split)
    made = kept(
        'digits', count, key, lambda: dict(zip(('pixels', 'labels'), digits.draw_digits(count, key), strict=True))
    )
    return Images(made['pixels'], made['labels'], tuple('0123456789'))


def split_held_out(whole: Images, held_out: int) -> tuple[Images, Images]:
    """Of images to train on all but the last `held_out`, and those; UserError where none would be left."""
    at = len(whole.labels) - held_out
    if at < 1:
        raise UserError(f'data.held_out is {held_out}; expected fewer than the {len(whole.labels)} images to train on')
    cut = lambda chosen: whole._replace(pixels=whole.pixels[chosen], labels=whole.labels[chosen])
    return cut(slice(at)), cut(slice(at, None))


def channel_statistics(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel [C], of values from 0 to 1; a constant channel has deviation 1."""
    counts = np.stack([np.bincount(pixels[..., channel].ravel(), minlength=256) for channel in range(pixels.shape[-1])])
    values, total = np.arange(256) / 255, counts.sum(axis=1)
    mean = counts @ values / total
    deviation = np.sqrt(np.maximum(counts @ values**2 / total - mean**2, 0.0))
    return mean, np.where(deviation < 1e-6, 1.0, deviation)


# Files of CIFAR


def _source(name: str, root: Path) -> tuple[CifarLayout, Callable[[Sequence[str]], list[bytes]]]:
    """The layout that stands below a folder, or in an archive, and what reads files of it."""
    for layout in CIFAR_LAYOUTS[name]:
        for folder in (root, root / layout.folder):
            if (folder / layout.test[0]).is_file():
                return layout, lambda files, folder=folder: [_read(folder / file) for file in files]
        for archive in (root, root / layout.archive):
            if archive.is_file() and archive.name == layout.archive:
                return layout, lambda files, layout=layout, archive=archive: _extract(archive, layout.folder, files)
    known = ' or '.join(f'{layout.folder} or {layout.archive}' for layout in CIFAR_LAYOUTS[name])
    raise UserError(f'{root}: no {name} there; expected {known}')


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f'{path}: cannot be read ({error.strerror})') from None


def _extract(archive: Path, folder: str, files: Sequence[str]) -> list[bytes]:
    """In one pass, as each file sought would unpack what stands before it anew."""
    wanted, found = {f'{folder}/{file}' for file in files}, {}
    try:
        with tarfile.open(archive, 'r|*') as opened:
            for entry in opened:
                if entry.name in wanted and (file := opened.extractfile(entry)):
                    found[entry.name] = file.read()
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f'{archive}: cannot be read ({_brief(error)}); it may be damaged') from None
    for name in sorted(wanted - found.keys()):
        raise UserError(f'{archive}: there is no {name} in it')
    return [found[f'{folder}/{file}'] for file in files]


class _Unpickler(pickle.Unpickler):
    """Arrays, numbers, strings and containers of them: a pickle from elsewhere could run anything."""

    KNOWN = {
        ('numpy.core.multiarray', '_reconstruct'), ('numpy._core.multiarray', '_reconstruct'), ('numpy', 'ndarray'),
        ('numpy', 'dtype'), ('_codecs', 'encode'),
        ('numpy.core.multiarray', 'scalar'), ('numpy._core.multiarray', 'scalar'),  # labels that are NumPy's numbers
        ('numpy.core.numeric', '_frombuffer'), ('numpy._core.numeric', '_frombuffer'),  # arrays in protocol 5
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f'{module}.{name} is no part of a data set')
        return super().find_class(module.replace('numpy.core', 'numpy._core'), name)


def _unpickle(data: bytes, file: str) -> dict[str, Any]:
    try:
        found = _Unpickler(io.BytesIO(data), encoding='bytes').load()
    except Exception as error:  # whatever damaged bytes ask a pickle to do
        raise UserError(f'{file}: cannot be read as a pickle ({_brief(error)})') from None
    if not isinstance(found, dict):
        raise UserError(f'{file}: holds a {type(found).__name__}; expected a dict')
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in found.items()}


def _names(layout: CifarLayout, data: bytes, classes: int) -> tuple[str, ...]:
    if layout.before:
        lines = data.decode('utf-8', 'replace').splitlines()  # a name a line: it may hold blanks
        names = tuple(line.strip() for line in lines if line.strip())
    else:
        key = str(layout.label).removesuffix('s') + '_names'  # labels: label_names, fine_labels: fine_label_names
        each = _unpickle(data, layout.names).get(key)
        if not isinstance(each, list | tuple):
            raise UserError(f'{layout.names}: {key} is a {type(each).__name__}; expected a list of names')
        names = tuple(name.decode('utf-8', 'replace') if isinstance(name, bytes) else str(name) for name in each)
    if len(names) != classes:
        raise UserError(f'{layout.names}: {len(names)} names of classes; expected {classes}')
    return names


def _records(layout: CifarLayout, data: bytes, file: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [n, 32, 32, 3] and labels [n]; a record is a plane of red, one of green, one of blue, each row-major."""
    if isinstance(layout.label, int):
        width = layout.before + 3 * PLANE
        if not data or len(data) % width:
            raise UserError(f'{file}: {len(data)} bytes; expected a multiple of {width}, the size of a record')
        records = np.frombuffer(data, np.uint8).reshape(-1, width)
        labels, planes = records[:, layout.label], records[:, layout.before :]
    else:
        found = _unpickle(data, file)
        for key in ('data', layout.label):
            if key not in found:
                raise UserError(f'{file}: there is no {key!r} in it')
        try:
            labels, planes = np.asarray(found[layout.label]), np.asarray(found['data'])
        except ValueError as error:  # lists of unequal lengths
            raise UserError(f'{file}: {_brief(error)}') from None
        if not np.issubdtype(labels.dtype, np.integer):
            raise UserError(f'{file}: labels are {labels.dtype}; expected integers')
    if planes.dtype != np.uint8 or planes.ndim != 2 or planes.shape[1] != 3 * PLANE or labels.shape != planes.shape[:1]:
        came = f'data are {planes.dtype} {planes.shape} with labels {labels.shape}'
        raise UserError(f'{file}: {came}; expected uint8 [n, {3 * PLANE}] and n labels')
    _check_labels(labels, classes, file)
    return planes.reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE).transpose(0, 2, 3, 1).copy(), labels.astype(np.int32)


def _check_labels(labels: np.ndarray, classes: int, where: str) -> None:
    bad = labels[(labels < 0) | (labels >= classes)]
    if bad.size:
        raise UserError(f'{where}: label {bad[0]} is outside the classes; expected 0 to {classes - 1}')


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
