"""Reading of lines, normalisation and tokenisation of text."""

import gzip
import logging
import os
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attnlab.data import corpus, images
from attnlab.data.parallel_text import MULTI30K_SPLITS, read_sentence_pairs
from attnlab.data.text import (
    JOIN_MARK,
    SPACE_MARK,
    detokenise,
    is_blank,
    normalise,
    read_lines,
    strip_spacing_mark,
    tokenise,
)
from attnlab.errors import UserError

# The characters that the rules depend on are drawn more often than others.
TEXTS = st.text(st.one_of(
    st.sampled_from('aésdlqutTm019 \'"«»?!;:.,-()/&#$’ʼ“…\u00a0\u202f\u200b\u00ad\u0301\ufeff_▁'
                    + JOIN_MARK + SPACE_MARK),
    st.characters(exclude_categories=['Cs']),
), max_size=40)  # fmt: skip
EXACT = settings(max_examples=400, derandomize=True, deadline=None)


def real_lines(shared):
    multi30k, hansards = shared('multi30k'), shared('hansards')
    for language in ('en', 'fr'):
        for path in [multi30k / f'{name}.{language}.gz' for name in MULTI30K_SPLITS.values()] + [
            hansards / f'{name}.en-fr.{language}' for name in ('trial', 'test')
        ]:
            yield from ((line, language) for line in read_lines(path))


# Lines of a file


def write(path, data: bytes):
    path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)
    return path


@pytest.mark.parametrize('name', ['a.en', 'a.en.gz'])
@pytest.mark.parametrize(('text', 'lines'), [
    ('', []),
    ('\n', ['']),
    ('a\nb\n', ['a', 'b']),
    ('a\r\nb', ['a', 'b']),
    ('a\n\nb\n', ['a', '', 'b']),
    ('\ufeffa\nb', ['a', 'b']),
    ('a\rb\x0bc\x0cd\x1ce\x85f\u2028g\u2029h\n', ['a\rb\x0bc\x0cd\x1ce\x85f\u2028g\u2029h']),
    ('a\n\r', ['a', '\r']),
    ('a\r\r\n', ['a\r']),
    ('été 漢 \U0001f600', ['été 漢 \U0001f600']),
])  # fmt: skip
def test_lines_end_at_line_feeds_only(tmp_path, name, text, lines):
    assert read_lines(write(tmp_path / name, text.encode())) == lines


def test_the_error_of_an_invalid_byte_names_file_and_line(tmp_path):
    path = write(tmp_path / 'a.fr.gz', b'\xef\xbb\xbfa\nb\nc\x80d\n')
    with pytest.raises(UserError, match=r'a\.fr\.gz, line 3: byte 0x80 is not UTF-8'):
        read_lines(path)


def test_the_error_of_a_missing_file_suggests_the_most_similar(tmp_path):
    write(tmp_path / 'train.en.gz', b'')
    write(tmp_path / 'val.fr', b'')
    with pytest.raises(UserError, match=r'train\.en: no such file, did you mean .*train\.en\.gz\?'):
        read_lines(tmp_path / 'train.en')
    with pytest.raises(UserError, match=r'nor a folder .*nowhere'):
        read_lines(tmp_path / 'nowhere' / 'x.en')
    with pytest.raises(UserError, match='zzz: no such file$'):
        read_lines(tmp_path / 'zzz')


def test_a_folder_is_not_suggested_for_a_missing_file(tmp_path):
    (tmp_path / 'opt').mkdir()
    with pytest.raises(UserError, match=r'/nope: no such file$'):
        read_lines(tmp_path / 'nope')


@pytest.mark.parametrize('read', [
    corpus.read_text, read_sentence_pairs, lambda path: read_sentence_pairs(path.with_suffix('')),
    lambda path: images.load_npz_images(path, 2, (1, 1, 1)),
])  # fmt: skip
def test_a_pipe_is_refused_as_a_data_file(tmp_path, read):
    os.mkfifo(tmp_path / 'x.en')
    with pytest.raises(UserError, match=r'x.en is a pipe or a device, which can be read only once; expected a file'):
        read(tmp_path / 'x.en')


def test_damaged_archives_and_folders_are_refused(tmp_path):
    whole = gzip.compress(bytes(range(128)) * 99)
    for data in (b'plain', whole[:-9], whole[:20] + b'\xff' * 20 + whole[40:]):
        (tmp_path / 'a.gz').write_bytes(data)
        with pytest.raises(UserError, match=r'a\.gz: cannot be read'):
            read_lines(tmp_path / 'a.gz')
    with pytest.raises(UserError, match='cannot be read'):
        read_lines(tmp_path)


def test_long_lines_are_cut_and_counted(tmp_path, caplog):
    path = write(tmp_path / 'a', ('é' * 1_000_000 + '\nshort\n' + 'x' * 100_001 + '\n' + 'y' * 100_000).encode())
    with caplog.at_level(logging.WARNING):
        lines = read_lines(path)
    assert [len(line) for line in lines] == [100_000, 5, 100_000, 100_000]
    assert [record.getMessage() for record in caplog.records] == [
        f'{path}: 2 lines of more than 100000 characters were cut'
    ]
    assert read_lines(write(tmp_path / 'b', b'abcdef'), limit=4) == ['abcd']


def test_the_result_does_not_depend_on_the_locale(tmp_path):
    path = write(tmp_path / 'été.fr', "L’été à l'œuvre ?\n".encode())
    code = (
        'import sys; from attnlab.data.text import *;'
        'print(ascii([tokenise(normalise(line, "fr")) for line in read_lines(sys.argv[1])]))'
    )
    env = {**os.environ, 'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}
    out = subprocess.run([sys.executable, '-c', code, path], env=env, capture_output=True, check=True, text=True).stdout
    assert out.strip() == ascii([["L'", 'été', 'à', "l'", 'œuvre', SPACE_MARK + '?']])


# Normalisation


@pytest.mark.parametrize(('text', 'french', 'english'), [
    ('  a \t b\u00a0c\u202fd\u3000e\u2028f\x85g\x0b', 'a b c d e f g', 'a b c d e f g'),
    ('l’été lʼété l′été l‘été l\'été', "l'été l'été l'été l'été l'été", "l'été l'été l'été l'été l'été"),
    ('“a” „b‟', '"a" "b"', '"a" "b"'),
    ('a – b — c‑d −1 …', 'a - b - c-d -1 ...', 'a - b - c-d -1 ...'),
    ('co\u00adop\u200bera\ufefftion\u200d e\u200b\u0301\0', 'cooperation é', 'cooperation é'),
    ('ﬁ ² ½ ①', 'ﬁ ² ½ ①', 'ﬁ ² ½ ①'),
    ('Quoi? Non!', 'Quoi ? Non !', 'Quoi? Non!'),
    ('Quoi\u202f? Non\u00a0!', 'Quoi ? Non !', 'Quoi? Non!'),
    ('a;b : c ; d:', 'a;b : c ; d :', 'a;b: c; d:'),
    ('Non!! Quoi ?! Oh...?', 'Non !! Quoi ?! Oh... ?', 'Non!! Quoi?! Oh...?'),
    ('«lent» « vite »', '« lent » « vite »', '«lent» «vite»'),
    ('«\u00a0Où\u202f?\u202f»', '« Où ? »', '«Où?»'),
    *[(text, text, text) for text in ('10:30, http://a.b/c?d;e', ':-) ;) x:y', '&amp; R&lt;', '? (?) "?', 'ÉTÉ ß', '')],
    ('"Où es-tu?" (vrai!), oui!', '"Où es-tu ?" (vrai !), oui !', '"Où es-tu?" (vrai!), oui!'),
])  # fmt: skip
def test_normal_forms(text, french, english):
    assert normalise(text, 'fr') == french
    assert normalise(text, 'en') == english


@pytest.mark.parametrize('language', ['de', '', 'FR'])
def test_an_unknown_language_is_refused(language):
    with pytest.raises(UserError, match=f"language '{language}': expected 'en' or 'fr'"):
        normalise('x', language)


@pytest.mark.parametrize('text', [
    '', ' ', '\n\t', '\u200b', '\ufeff', '\xad', '\0\x1b\x7f', '\u2028\x85\u3000', '\u200d\ufe0f', '\u3164',
    '\U000e0041', '\ufdd0', ' \u200b\u2060 ',
])  # fmt: skip
def test_a_text_without_visible_characters_is_blank(text):
    assert is_blank(text) and not is_blank(text + '.') and not is_blank('a' + text)


@given(TEXTS)
def test_a_text_that_is_not_blank_has_words(text):
    for language in ('en', 'fr'):
        assert is_blank(text) or tokenise(normalise(text, language))


@given(TEXTS)
@example('a?!:»')
@example('! !')
@example('e\u00ad\u0301')
@EXACT
def test_normalising_is_idempotent_and_words_restore_the_text(text):
    for language in ('en', 'fr'):
        normalised = normalise(text, language)
        assert normalise(normalised, language) == normalised == normalised.strip()
        assert unicodedata.is_normalized('NFC', normalised)
        assert not any(character.isspace() and character != ' ' for character in normalised) and '  ' not in normalised
        for form in ('NFC', 'NFD'):
            assert normalise(unicodedata.normalize(form, text), language) == normalised
        words = tokenise(normalised)
        assert detokenise(words) == normalised
        assert ''.join(map(strip_spacing_mark, words)) == normalised.replace(' ', '')
        assert not any(word == '' or ' ' in word for word in words)


@pytest.mark.slow
def test_words_restore_every_real_line(shared):
    lines = marked = 0
    for text, language in real_lines(shared):
        normalised = normalise(text, language)
        words = tokenise(normalised)
        assert normalise(normalised, language) == normalised
        assert detokenise(words) == normalised
        lines += 1
        marked += any(strip_spacing_mark(word) != word for word in words)
    assert lines == 2 * (29_000 + 1_014 + 1_000 + 1_000 + 37 + 447)
    assert marked < lines / 50  # the Hansards are already tokenised, with a space before each full stop


# Words


@pytest.mark.parametrize(('text', 'words'), [
    ("L'homme n'a qu'une pomme d'Adam.", "L' homme n' a qu' une pomme d' Adam ."),
    ("Lorsqu'il dort, jusqu'à midi", "Lorsqu' il dort , jusqu' à midi"),
    ("aujourd'hui quelqu'un prud'homme hors-d'œuvre", "aujourd'hui quelqu'un prud'homme hors-d'œuvre"),
    ("The teacher's dog, it's theirs; they're", "The teacher 's dog , it 's theirs ; they 're"),
    ("the dogs' toys.", "the dogs ' toys ."),
    ("I don't and can't, we'll, I'd, you've, I'm", "I don't and can't , we 'll , I 'd , you 've , I 'm"),
    ("D's T's rock'n'roll o'clock O'Brien", "D 's T 's rock'n'roll o'clock O'Brien"),
    ('a t-shirt at 10:30 for 250,000 (or 1/2)', 'a t-shirt at 10:30 for 250,000 ( or 1/2 )'),
    ('"Hello," he says, "you."', '" Hello , " he says , " you . "'),
    ('Wait... what?! No!!', 'Wait ... what ? ! No !!'),
    ('the U.S. and A&M &amp; more', 'the U.S. and A&M &amp; more'),
    ('', ''),
])  # fmt: skip
def test_words_with_expected_spacing_have_no_mark(text, words):
    assert tokenise(text) == words.split()
    assert detokenise(words.split()) == text


@pytest.mark.parametrize(('text', 'words'), [
    ('Quoi ?', ['Quoi', SPACE_MARK + '?']),
    ('Quoi?Rien', ['Quoi', '?', JOIN_MARK + 'Rien']),
    ('a "b', ['a', '"', 'b']),
    ('a " b', ['a', '"', SPACE_MARK + 'b']),
    ('they \'re', ['they', SPACE_MARK + "'re"]),
    (f'{SPACE_MARK} a{JOIN_MARK} {SPACE_MARK}{SPACE_MARK}',
     [JOIN_MARK + SPACE_MARK, 'a', JOIN_MARK + JOIN_MARK, SPACE_MARK + SPACE_MARK + SPACE_MARK]),
])  # fmt: skip
def test_words_with_unexpected_spacing_have_a_mark(text, words):
    assert tokenise(text) == words
    assert detokenise(words) == text


def test_words_from_elsewhere_get_the_expected_spacing():
    assert detokenise(['l', "l'", 'homme', ',', '<unk>', '.', JOIN_MARK]) == f"l l'homme, <unk>. {JOIN_MARK}"
    assert [strip_spacing_mark(word) for word in (SPACE_MARK + '?', JOIN_MARK + SPACE_MARK, JOIN_MARK, 'a', '')] == [
        '?',
        SPACE_MARK,
        JOIN_MARK,
        'a',
        '',
    ]
