"""The disk cache: equal results, computed again if code or file changed, and no errors if it cannot be used."""

import numpy as np
import pytest

from attnlab.data import digits, disk_cache, grammar, images, vocabulary


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the cache, which is empty and takes 10 examples or more."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(disk_cache, 'MIN_EXAMPLES', 10)
    return tmp_path / 'attnlab' / 'made'


def cached(value, calls=None, name='a', count=20, key=(0,)):
    """Return the first element of a cached array that is computed as `value`, and list the computation in `calls`."""

    def compute():
        if calls is not None:
            calls.append(value)
        return {'x': np.full(3, value)}

    return disk_cache.cached_arrays(name, count, key, compute)['x'][0]


def test_arrays_are_computed_once_for_each_key_and_version_of_the_code(folder, monkeypatch):
    calls = []
    for value, key in ((1, (0,)), (2, (0,)), (3, (1,)), (4, (1,))):
        assert cached(value, calls, key=key) == (1 if key == (0,) else 3)
    assert calls == [1, 3] and len(list(folder.iterdir())) == 2
    monkeypatch.setattr(disk_cache, '_code_digest', lambda: b'other')
    assert cached(5) == 5
    assert cached(6, count=21) == cached(6, name='b', count=21) == 6


@pytest.mark.parametrize('damage', [b'', b'x' * 500, None])
def test_a_damaged_file_is_computed_again(folder, damage):
    cached(1)
    [file] = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-40] if damage is None else damage)
    calls = []
    assert cached(2, calls) == 2 and calls
    assert cached(3) == 2


def test_few_examples_are_not_cached_and_an_unwritable_cache_is_skipped(folder, monkeypatch, tmp_path):
    assert cached(1, count=9) == 1 and not folder.exists()
    (tmp_path / 'file').touch()
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
    assert [cached(value) for value in (1, 2)] == [1, 2]


def test_cached_sentences_and_digits_equal_computed_ones(folder):
    for split in ('train', 'test_lengths'):
        examples = grammar.grammar_examples(split, 30, 7)
        for _ in range(2):
            pairs = grammar.grammar_pairs(split, 30, 7)
            assert pairs.source == tuple(e.source for e in examples)
            assert pairs.target == tuple(e.target for e in examples)
            assert pairs.links == tuple(e.links for e in examples)
    pixels, labels = digits.draw_digits(30, (7, 0))
    for _ in range(2):
        loaded = images.draw_digit_images('train', 30, 7)
        np.testing.assert_array_equal(loaded.pixels, pixels)
        np.testing.assert_array_equal(loaded.labels, labels)
        assert loaded.pixels.dtype == np.uint8 and loaded.labels.dtype == np.int32
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize('kind', vocabulary.VOCABULARY_SUFFIXES)
def test_cached_vocabularies_and_ids_equal_computed_ones(folder, monkeypatch, kind):
    lines = [pair.source for pair in grammar.grammar_examples('train', 40, 0)]
    fresh = vocabulary.build_vocabulary(kind, lines[:9], 350, 'en')  # so few are not cached
    assert not folder.exists()
    built = vocabulary.build_vocabulary(kind, lines, 350, 'en')
    ids = built.encode_batch(lines)
    assert [built.encode(line) for line in lines] == ids and built.tokens != fresh.tokens
    monkeypatch.setattr(vocabulary, '_words', None)  # a computation would now raise TypeError
    again = vocabulary.build_vocabulary(kind, iter(lines), 350, 'en')
    assert again == built and again.encode_batch(iter(lines)) == ids
    assert all(type(i) is int for line in again.encode_batch(lines) for i in line)
    for not_cached in (
        lambda: vocabulary.build_vocabulary(kind, lines, 349, 'en'),
        lambda: vocabulary.build_vocabulary(kind, lines, 350, 'fr'),
        lambda: vocabulary.build_vocabulary(kind, lines[1:], 350, 'en'),
        lambda: built.encode_batch(lines[::-1]),
        lambda: fresh.encode_batch(lines),
    ):
        with pytest.raises(TypeError, match='NoneType'):
            not_cached()


def test_large_arrays_are_not_cached(folder, monkeypatch):
    monkeypatch.setattr(disk_cache, 'MAX_BYTES', 23)
    assert cached(1) == 1 and not folder.exists()
