"""What is made once and kept: the same, anew where the code or the file is another, and never in the way."""

import numpy as np
import pytest

from attnlab.data import digits, disk_cache, grammar, images, vocabulary


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(disk_cache, 'MIN_EXAMPLES', 10)
    return tmp_path / 'attnlab' / 'made'


def made(calls, value=1):
    def make():
        calls.append(value)
        return {'x': np.full(3, value)}

    return make


def test_it_is_made_once_for_each_key_and_each_code(folder, monkeypatch):
    calls = []
    for value, key in ((1, (0,)), (2, (0,)), (3, (1,)), (4, (1,))):
        np.testing.assert_array_equal(disk_cache.cached_arrays('a', 20, key, made(calls, value))['x'], [1 if key == (0,) else 3] * 3)
    assert calls == [1, 3] and len(list(folder.iterdir())) == 2
    monkeypatch.setattr(disk_cache, '_code_digest', lambda: b'other')
    assert disk_cache.cached_arrays('a', 20, (0,), made(calls, 5))['x'][0] == 5
    assert disk_cache.cached_arrays('a', 21, (0,), made(calls, 6))['x'][0] == disk_cache.cached_arrays('b', 21, (0,), made(calls, 6))['x'][0] == 6


@pytest.mark.parametrize('damage', [b'', b'x' * 500, None])
def test_a_damaged_file_is_made_anew(folder, damage):
    disk_cache.cached_arrays('a', 20, (0,), made([]))
    [file] = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-40] if damage is None else damage)
    calls = []
    assert disk_cache.cached_arrays('a', 20, (0,), made(calls, 2))['x'][0] == 2 and calls
    assert disk_cache.cached_arrays('a', 20, (0,), made(calls, 3))['x'][0] == 2


def test_few_are_drawn_anew_and_where_nothing_can_be_kept_all_are(folder, monkeypatch, tmp_path):
    assert disk_cache.cached_arrays('a', 9, (0,), made([]))['x'][0] == 1 and not folder.exists()
    (tmp_path / 'file').touch()
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
    assert [disk_cache.cached_arrays('a', 20, (0,), made([], value))['x'][0] for value in (1, 2)] == [1, 2]


def test_sentences_and_digits_come_back_as_they_were_drawn(folder):
    for split in ('train', 'test_lengths'):
        drawn = grammar.grammar_examples(split, 30, 7)
        for _ in range(2):
            pairs = grammar.grammar_pairs(split, 30, 7)
            assert pairs.source == tuple(e.source for e in drawn) and pairs.target == tuple(e.target for e in drawn)
            assert pairs.links == tuple(e.links for e in drawn)
    pixels, labels = digits.draw_digits(30, (7, 0))
    for _ in range(2):
        found = images.draw_digit_images('train', 30, 7)
        np.testing.assert_array_equal(found.pixels, pixels)
        np.testing.assert_array_equal(found.labels, labels)
        assert found.pixels.dtype == np.uint8 and found.labels.dtype == np.int32
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize('kind', vocabulary.VOCABULARY_SUFFIXES)
def test_vocabularies_and_ids_come_back_as_they_were_made(folder, monkeypatch, kind):
    lines = [pair.source for pair in grammar.grammar_examples('train', 40, 0)]
    fresh = vocabulary.build_vocabulary(kind, lines[:9], 350, 'en')  # of so few nothing is kept
    assert not folder.exists()
    made = vocabulary.build_vocabulary(kind, lines, 350, 'en')
    ids = made.encode_batch(lines)
    assert [made.encode(line) for line in lines] == ids and made.tokens != fresh.tokens
    monkeypatch.setattr(vocabulary, '_words', None)
    again = vocabulary.build_vocabulary(kind, iter(lines), 350, 'en')
    assert again == made and again.encode_batch(iter(lines)) == ids
    assert all(type(i) is int for line in again.encode_batch(lines) for i in line)
    for other in (lambda: vocabulary.build_vocabulary(kind, lines, 349, 'en'), lambda: vocabulary.build_vocabulary(kind, lines, 350, 'fr'),
                  lambda: vocabulary.build_vocabulary(kind, lines[1:], 350, 'en'), lambda: made.encode_batch(lines[::-1]),
                  lambda: fresh.encode_batch(lines)):  # fmt: skip
        with pytest.raises(TypeError, match='NoneType'):
            other()


def test_what_is_large_is_not_kept(folder, monkeypatch):
    monkeypatch.setattr(disk_cache, 'MAX_BYTES', 23)
    assert disk_cache.cached_arrays('a', 20, (0,), made([]))['x'][0] == 1 and not folder.exists()
