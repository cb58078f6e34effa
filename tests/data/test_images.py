"""CIFAR in its published layouts, .npz files and drawn digits: reading and errors."""

import io
import pickle
import tarfile

import numpy as np
import pytest

from attnlab.data import images
from attnlab.errors import UserError

TEN, HUNDRED = images.CLASS_COUNTS['cifar10'], images.CLASS_COUNTS['cifar100']
PLANES = np.arange(3 * 1024)


def planes(count=4):
    """Pixels of records, [count, 3072]: red is i % 256 at index i, shifted by one for each record; green 2, blue 3."""
    red = np.arange(1024) % 256
    one = np.concatenate([red, np.full(1024, 2), np.full(1024, 3)]).astype(np.uint8)
    return np.stack([np.roll(one[:1024], k).tolist() + one[1024:].tolist() for k in range(count)]).astype(np.uint8)


def labels_of(file, count=4):
    return [(sum(file.encode()) + k) % TEN for k in range(count)]


def pickled(value):
    return pickle.dumps(value, 2)


def published_files(name, kind):
    """Return a layout and its files: {name: content}."""
    layout = images.CIFAR_LAYOUTS[name][kind]
    files = {}
    for file in (*layout.train, *layout.test):
        labels = labels_of(file)
        if layout.label_bytes:
            front = np.array([[9] * (layout.label_bytes - 1) + [label] for label in labels], np.uint8)
            files[file] = np.concatenate([front, planes()], axis=1).tobytes()
        else:
            files[file] = pickled({b'data': planes(), layout.label.encode(): labels, b'filenames': [b'x.png'] * 4})
    names = [f'class{i}' for i in range(images.CLASS_COUNTS[name])]
    if layout.label_bytes:
        files[layout.names] = '\n'.join([*names, '', '']).encode()
    else:
        files[layout.names] = pickled({layout.label[:-1].encode() + b'_names': [x.encode() for x in names]})
    return layout, files


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (folder / file).write_bytes(data)


def write_archive(path, layout, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, 'w:gz') as file:
        for name, data in files.items():
            entry = tarfile.TarInfo(f'{layout.folder}/{name}')
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))


@pytest.mark.parametrize('name', ['cifar10', 'cifar100'])
@pytest.mark.parametrize('kind', [0, 1])
def test_all_published_layouts_give_the_same_images(name, kind, tmp_path):
    layout, files = published_files(name, kind)
    write(tmp_path / 'files', files)
    write(tmp_path / 'below' / layout.folder, files)
    write_archive(tmp_path / 'packed' / layout.archive, layout, files)
    packed = tmp_path / 'packed'
    for place in (tmp_path / 'files', tmp_path / 'below', packed, packed / layout.archive):
        train, test = (images.load_cifar(name, split, place) for split in ('train', 'test'))
        assert train.labels.tolist() == [x for file in layout.train for x in labels_of(file)]
        assert test.labels.tolist() == labels_of(layout.test[0]) and test.labels.dtype == np.int32
        assert test.pixels.shape == (4, 32, 32, 3) and test.pixels.dtype == np.uint8
        rows, columns = np.divmod(np.arange(1024), 32)
        np.testing.assert_array_equal(test.pixels[0, rows, columns, 0], (32 * rows + columns) % 256)
        assert set(np.unique(test.pixels[..., 1])) == {2} and set(np.unique(test.pixels[..., 2])) == {3}
        assert test.names == tuple(f'class{i}' for i in range(images.CLASS_COUNTS[name]))
        np.testing.assert_array_equal(test.pixels.transpose(0, 3, 1, 2).reshape(4, -1), planes())


@pytest.mark.parametrize('protocol', range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_and_numpy_scalars_are_read(protocol, tmp_path):
    labels, names = [3, 1, 4, 1], [f'class {i}' for i in range(TEN)]
    for kind in (list(np.array(labels, np.int64)), np.array(labels, np.uint8), labels, tuple(labels)):
        for data in (planes(), np.asfortranarray(planes())):
            files = {'test_batch': {'data': data, 'labels': kind, 'filenames': list(np.array(['a.png'] * 4))},
                     'batches.meta': {'label_names': list(np.array(names))}}  # fmt: skip
            write(tmp_path, {file: pickle.dumps(value, protocol) for file, value in files.items()})
            test = images.load_cifar('cifar10', 'test', tmp_path)
            np.testing.assert_array_equal(test.pixels.transpose(0, 3, 1, 2).reshape(4, -1), planes())
            assert test.labels.tolist() == labels and test.names == tuple(names)


def test_a_class_name_of_the_binary_layout_may_hold_a_blank(tmp_path):
    _, files = published_files('cifar10', 1)
    names = ['sea lion', *(f'class{i}' for i in range(1, TEN))]
    write(tmp_path, files | {'batches.meta.txt': '\r\n'.join([*names, '', '']).encode()})
    assert images.load_cifar('cifar10', 'test', tmp_path).names == tuple(names)


def test_the_last_images_are_held_out_and_none_is_lost(tmp_path):
    _, files = published_files('cifar10', 0)
    write(tmp_path, files)
    whole = images.load_cifar('cifar10', 'train', tmp_path)
    parts = images.split_held_out(whole, 7)
    np.testing.assert_array_equal(np.concatenate([part.labels for part in parts]), whole.labels)
    assert [len(part.labels) for part in parts] == [13, 7]
    with pytest.raises(UserError, match='data.held_out is 20; expected fewer than the 20 images'):
        images.split_held_out(whole, 20)


class Bomb:
    """A pickle of it would print 'run' when it is loaded."""

    def __reduce__(self):
        return (print, ('run',))


@pytest.mark.parametrize(('file', 'data', 'message'), [
    ('test_batch', pickled({b'data': planes()}), "test_batch: there is no 'labels' in it"),
    ('test_batch', pickled({b'data': planes()[:, 1:], b'labels': [1] * 4}), r'data are uint8 \(4, 3071\) with labels'),
    ('test_batch', pickled({b'data': planes(), b'labels': [1] * 3}), r'with labels \(3,\); expected uint8'),
    ('test_batch', pickled({b'data': planes(), b'labels': [1, 2, 3, 10]}), 'label 10 is outside the classes'),
    ('test_batch', pickled([1]), 'test_batch: holds a list; expected a dict'),
    ('test_batch', pickled({b'data': planes(), b'labels': [1] * 4})[:-9], 'test_batch: cannot be read as a pickle'),
    ('test_batch', pickle.dumps(Bomb()), 'print is not allowed in the pickle of a data set'),
    ('test_batch', pickled({b'data': planes(), b'labels': [0.5] * 4}), 'test_batch: labels are float64; expected int'),
    ('test_batch', pickled({b'data': planes(), b'labels': [[1], [1, 2]]}), 'test_batch: setting an array element'),
    ('batches.meta', pickled({b'label_names': [b'cat']}), 'batches.meta: 1 names of classes; expected 10'),
    ('batches.meta', pickled({b'label_names': None}), 'batches.meta: label_names is a NoneType; expected a list'),
])  # fmt: skip
def test_the_error_of_a_damaged_file_names_it(file, data, message, tmp_path, capsys):
    _, files = published_files('cifar10', 0)
    write(tmp_path, files | {file: data})
    with pytest.raises(UserError, match=message):
        images.load_cifar('cifar10', 'test', tmp_path)
    assert 'run' not in capsys.readouterr().out


def test_the_error_of_a_truncated_binary_file_names_it(tmp_path):
    _, files = published_files('cifar10', 1)
    write(tmp_path, files | {'test_batch.bin': files['test_batch.bin'][:-5]})
    with pytest.raises(UserError, match='test_batch.bin: 12287 bytes; expected a multiple of 3073'):
        images.load_cifar('cifar10', 'test', tmp_path)


def test_missing_files_and_truncated_archives_are_refused(tmp_path):
    with pytest.raises(UserError, match='cifar10 not found; expected cifar-10-batches-py or cifar-10-python.tar.gz or'):
        images.load_cifar('cifar10', 'train', tmp_path / 'nowhere')
    layout, files = published_files('cifar10', 0)
    del files['data_batch_3']
    write(tmp_path / 'files', files)
    with pytest.raises(UserError, match=r'data_batch_3: cannot be read \(No such file'):
        images.load_cifar('cifar10', 'train', tmp_path / 'files')
    write_archive(tmp_path / layout.archive, layout, files)
    with pytest.raises(UserError, match='there is no cifar-10-batches-py/data_batch_3 in it'):
        images.load_cifar('cifar10', 'train', tmp_path)
    (tmp_path / layout.archive).write_bytes((tmp_path / layout.archive).read_bytes()[:900])
    with pytest.raises(UserError, match='it may be damaged'):
        images.load_cifar('cifar10', 'test', tmp_path)


def test_attnlab_data_names_the_folder(tmp_path, monkeypatch):
    layout, files = published_files('cifar100', 0)
    write(tmp_path / 'cifar100' / layout.folder, files)
    monkeypatch.setenv('ATTNLAB_DATA', str(tmp_path))
    assert len(images.load_cifar('cifar100', 'test').labels) == 4


def test_the_error_of_a_failed_download_gives_the_remedy(tmp_path, monkeypatch):
    monkeypatch.delenv('ATTNLAB_DATA', raising=False)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(images, 'CIFAR_URL', 'file:///nowhere/')
    with pytest.raises(UserError, match='cannot be downloaded .* name their folder by --config.data.fo'):
        images.load_cifar('cifar10', 'test')


def test_npz_files_are_read_and_checked(tmp_path):
    path, pixels = tmp_path / 'some.npz', np.zeros((5, 8, 6, 2), np.uint8)
    np.savez(path, images=pixels, labels=np.array([0, 1, 2, 0, 1]))
    loaded = images.load_npz_images(path, 3, (8, 6, 2))
    assert loaded.pixels.shape == pixels.shape and loaded.labels.dtype == np.int32 and loaded.names == ('0', '1', '2')
    for arrays, message in (
        (dict(images=pixels), "has no labels; expected the arrays 'images' and 'labels'"),
        (dict(images=pixels.astype(np.float32), labels=np.zeros(5, int)), 'images are float32'),
        (dict(images=pixels[:, 1:], labels=np.zeros(5, int)), r'\(5, 7, 6, 2\); expected uint8 \[n, 8, 6, 2\]'),
        (dict(images=pixels, labels=np.zeros(4, int)), r'labels are int64 \(4,\); expected integers \[5\]'),
        (dict(images=pixels, labels=np.full(5, 3)), 'label 3 is outside the classes; expected 0 to 2'),
        (dict(images=pixels, labels=np.full(5, -1)), 'label -1 is outside'),
        (dict(images=pixels[:0], labels=np.zeros(0, int)), 'no images'),
        (dict(images=np.array([{}]), labels=np.zeros(1, int)), 'cannot be read as .npz'),
    ):
        np.savez(path, **arrays)
        with pytest.raises(UserError, match=message):
            images.load_npz_images(path, 3, (8, 6, 2))
    np.save(tmp_path / 'one.npy', pixels)
    with pytest.raises(UserError, match=r'one.npy: cannot be read as .npz \(it holds a single array\)'):
        images.load_npz_images(tmp_path / 'one.npy', 3, (8, 6, 2))
    path.write_bytes(b'PK not really')
    with pytest.raises(UserError, match='cannot be read as .npz'):
        images.load_npz_images(path, 3, (8, 6, 2))


def test_statistics_are_computed_for_each_channel():
    pixels = np.random.default_rng(0).integers(0, 256, (9, 5, 4, 3)).astype(np.uint8)
    pixels[..., 2] = 7
    mean, deviation = images.channel_statistics(pixels)
    values = pixels / 255.0
    np.testing.assert_allclose(mean, values.mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(deviation[:2], values.std(axis=(0, 1, 2))[:2], rtol=1e-9)
    assert deviation[2] == 1.0  # a constant channel is not divided by zero


def test_digits_are_deterministic_and_differ_between_splits():
    first, again, more = (images.draw_digit_images('train', count, 3) for count in (30, 30, 1100))
    np.testing.assert_array_equal(first.pixels, again.pixels)
    np.testing.assert_array_equal(first.pixels, more.pixels[:30])
    assert first.pixels.shape == (30, 16, 16, 1) and first.pixels.dtype == np.uint8
    assert first.names == tuple('0123456789')
    assert np.all(np.bincount(more.labels) > 60)
    for other in (images.draw_digit_images('test', 30, 3), images.draw_digit_images('train', 30, 4)):
        assert not np.array_equal(first.pixels, other.pixels)


@pytest.mark.slow
def test_the_real_set(shared):
    folder = shared('cifar10')
    if not (folder / 'cifar-10-batches-py').is_dir():
        pytest.skip('no published layout of CIFAR-10 in the folder of ATTNLAB_DATA')
    train, test = (images.load_cifar('cifar10', split, folder) for split in ('train', 'test'))
    assert np.bincount(train.labels).tolist() == [5000] * 10 and np.bincount(test.labels).tolist() == [1000] * 10
    mean, deviation = images.channel_statistics(train.pixels)
    scaled = (train.pixels[::50] / 255 - mean) / deviation
    assert np.all(np.abs(scaled.mean(axis=(0, 1, 2))) < 0.05) and np.all(np.abs(scaled.std(axis=(0, 1, 2)) - 1) < 0.05)
