"""Text as ids and back, against plain loops."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attnlab.data.corpus import SourceText
from attnlab.data.text import normalise
from attnlab.data.tokenizers import (
    ByteTokenizer,
    CharacterTokenizer,
    SubwordTokenizer,
    build_tokenizer,
    encode_document,
    load_tokenizer,
    save_tokenizer,
)
from attnlab.errors import UserError

PLAY = 'First Citizen:\nSpeak, speak.\n\nAll:\n  Où?\tÉté ☃!\n'
SUBWORDS = build_tokenizer('subwords', [SourceText(PLAY, 'play')], 300, 'fr')
ALL = [
    CharacterTokenizer(''.join(sorted(set(PLAY)))),
    CharacterTokenizer(''.join(sorted(set(PLAY))), True),
    ByteTokenizer(),
    ByteTokenizer(True),
]
ALL = [pytest.param(one, id=f'{type(one).__name__}{one.size}') for one in [*ALL, SUBWORDS]]


def test_characters_are_numbered_by_code_point():
    made = build_tokenizer('characters', [SourceText('hello ', 'a'), SourceText('é\n', 'b')])
    assert made == CharacterTokenizer('\n ehloé') and made.size == 7 and made.marks is None
    ids = made.encode('olé\n')
    assert ids.dtype == np.int32 and ids.tolist() == [5, 4, 6, 0]
    assert made.encode('').tolist() == []


def test_bytes_are_those_of_utf8():
    assert ByteTokenizer().size == 256
    assert ByteTokenizer().encode('aé☃').tolist() == list('aé☃'.encode())
    assert ByteTokenizer().decode(list('é☃'.encode()[:-1])) == 'é\ufffd'


@pytest.mark.parametrize('kind', ALL)
def test_text_comes_back(kind):
    ids = kind.encode(PLAY)
    assert ids.dtype == np.int32 and 0 <= ids.min() <= ids.max() < kind.size
    lines = [normalise(line, 'fr') for line in PLAY.split('\n')]
    assert kind.decode(ids) == ('\n'.join(lines) if kind is SUBWORDS else PLAY)
    assert len(kind.pieces(ids)) == len(ids)
    assert '\\n' in kind.pieces(ids) and all(label.isprintable() and label.strip() for label in kind.pieces(ids))


@given(st.text(st.characters(exclude_categories=['Cs'])))
@example('\n\na\n')
@settings(max_examples=100)
def test_any_text_comes_back(text):
    assert ByteTokenizer(True).decode(ByteTokenizer(True).encode(text)) == text
    if text:
        made = build_tokenizer('characters', [SourceText(text, 'x')])
        ids = made.encode(text)
        assert made.decode(ids) == text and [made.characters[i] for i in ids] == list(text)
    assert SUBWORDS.decode(SUBWORDS.encode(text)) == '\n'.join(normalise(line, 'fr') for line in text.split('\n'))


@pytest.mark.parametrize('kind', [CharacterTokenizer('abc', True), ByteTokenizer(True), SUBWORDS])
def test_a_document_stands_between_its_marks(kind):
    front, behind = kind.marks
    ids = encode_document(kind, SourceText('ab', 'x'))
    assert ids.dtype == np.int32 and ids.tolist() == [front, *kind.encode('ab'), behind]
    assert kind.size > max(front, behind) and not {front, behind} & set(kind.encode('abcabc'))
    assert kind.decode(ids) == 'ab' and kind.decode(np.concatenate([ids, ids])) == 'ab'
    assert kind.decode([front]) == kind.decode([behind]) == ''
    assert kind.pieces(ids)[-1] == '</s>'


def test_characters_in_another_order_are_no_vocabulary():
    for wrong in ('', 'ba', 'aa'):
        with pytest.raises(ValueError, match='characters are .*; expected at least one, in order, each once'):
            CharacterTokenizer(wrong)


def test_a_stream_has_no_marks():
    with pytest.raises(ValueError, match='the tokenizer has no document marks'):
        encode_document(ByteTokenizer(), SourceText('a', 'x'))


@pytest.mark.parametrize('kind', ALL)
@pytest.mark.parametrize('method', ['decode', 'pieces'])
def test_ids_outside_of_the_table_raise(kind, method):
    for wrong in (-1, kind.size, 10**9):
        with pytest.raises(ValueError, match=f'id {wrong} is outside of the vocabulary: expected 0 to {kind.size - 1}'):
            getattr(kind, method)(np.array([0, wrong]))
    assert len(getattr(kind, method)([kind.size - 1])) <= 12


def test_an_unknown_character_is_named_with_its_line():
    made = CharacterTokenizer('\nab')
    message = r"in\.txt, line 7: character 'é' \(U\+00E9\) is not one of the 3 of the training text; bytes and subwords"
    with pytest.raises(UserError, match=message):
        made.encode(*SourceText('ab\n\nabéz', 'in.txt', 5))
    for text, shown in (('z', "'z'"), ('\t', r"'\\t'"), (' ', "' '"), ('\udc80', r"'\\udc80'"), ('😀', "'😀'")):
        with pytest.raises(UserError, match=f'prompt, line 1: character {shown}'):
            made.encode('ab' + text, 'prompt')


@pytest.mark.parametrize('kind', [ByteTokenizer(), SUBWORDS])
def test_an_argument_that_is_no_utf8_is_refused(kind):
    with pytest.raises(UserError, match=r"prompt, line 2: character '\\udcff' \(U\+DCFF\) is not UTF-8"):
        kind.encode('a\nb\udcff', 'prompt')


@pytest.mark.parametrize(('kind', 'text', 'size', 'message'), [
    ('char', 'a', 0, "vocabulary 'char': expected one of characters, bytes, subwords"),
    ('characters', '', 0, 'no text to build a vocabulary from'),
    ('characters', 'a', 9, 'vocabulary size 9: the size of characters is fixed; expected 0'),
    ('bytes', 'a', 256, 'vocabulary size 256: the size of bytes is fixed'),
    ('subwords', 'a', 0, 'vocabulary size 0: expected at least 5'),
    ('subwords', '\n', 300, 'no text'),
])  # fmt: skip
def test_what_cannot_be_built(kind, text, size, message):
    with pytest.raises(UserError, match=message):
        build_tokenizer(kind, [SourceText(text, 'x')], size)


@pytest.mark.parametrize('kind', [*ALL, CharacterTokenizer('\n\r"\\aé\u2028\U0001f600')])
def test_save_and_load(kind, tmp_path):
    path = save_tokenizer(kind, tmp_path / 'tokens.v1')
    assert path == tmp_path / f'tokens.v1.{"model" if isinstance(kind, SubwordTokenizer) else "json"}'
    assert load_tokenizer(tmp_path / 'tokens.v1') == kind
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_files_that_are_no_vocabulary(tmp_path):
    with pytest.raises(UserError, match=r'tokens: no such vocabulary, \.json or \.model'):
        load_tokenizer(tmp_path / 'tokens')
    bad = [{'kind': 'words'}, {'kind': 'bytes'}, [], {'kind': 'characters', 'documents': False, 'characters': 'ba'}]
    bad += [{'kind': 'characters', 'documents': False, 'characters': chars} for chars in ('', 'aa', ['a'])]
    for data in (b'', b'{', b'\xff\xfe', *(json.dumps(fields).encode() for fields in bad)):
        (tmp_path / 'tokens.json').write_bytes(data)
        with pytest.raises(UserError, match=r'tokens\.json: not a vocabulary of attnlab'):
            load_tokenizer(tmp_path / 'tokens')
    (tmp_path / 'tokens.json').unlink()
    (tmp_path / 'tokens.model').write_bytes(b'x')
    with pytest.raises(UserError, match=r'tokens\.model: not a vocabulary of attnlab'):
        load_tokenizer(tmp_path / 'tokens')
