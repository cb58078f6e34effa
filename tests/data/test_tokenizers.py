"""Tokenizers: encoding, decoding, document marks, files and errors."""

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
    tokenizer = build_tokenizer('characters', [SourceText('hello ', 'a'), SourceText('é\n', 'b')])
    assert tokenizer == CharacterTokenizer('\n ehloé') and tokenizer.size == 7 and tokenizer.marks is None
    ids = tokenizer.encode('olé\n')
    assert ids.dtype == np.int32 and ids.tolist() == [5, 4, 6, 0]
    assert tokenizer.encode('').tolist() == []


def test_byte_ids_are_the_bytes_of_utf8():
    assert ByteTokenizer().size == 256
    assert ByteTokenizer().encode('aé☃').tolist() == list('aé☃'.encode())
    assert ByteTokenizer().decode(list('é☃'.encode()[:-1])) == 'é\ufffd'


@pytest.mark.parametrize('tokenizer', ALL)
def test_decoding_restores_the_text(tokenizer):
    ids = tokenizer.encode(PLAY)
    assert ids.dtype == np.int32 and 0 <= ids.min() <= ids.max() < tokenizer.size
    lines = [normalise(line, 'fr') for line in PLAY.split('\n')]
    assert tokenizer.decode(ids) == ('\n'.join(lines) if tokenizer is SUBWORDS else PLAY)
    assert len(tokenizer.pieces(ids)) == len(ids)
    labels = tokenizer.pieces(ids)
    assert '\\n' in labels and all(label.isprintable() and label.strip() for label in labels)


@given(st.text(st.characters(exclude_categories=['Cs'])))
@example('\n\na\n')
@settings(max_examples=100)
def test_decoding_restores_any_text(text):
    assert ByteTokenizer(True).decode(ByteTokenizer(True).encode(text)) == text
    if text:
        tokenizer = build_tokenizer('characters', [SourceText(text, 'x')])
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and [tokenizer.characters[i] for i in ids] == list(text)
    assert SUBWORDS.decode(SUBWORDS.encode(text)) == '\n'.join(normalise(line, 'fr') for line in text.split('\n'))


@pytest.mark.parametrize('tokenizer', [CharacterTokenizer('abc', True), ByteTokenizer(True), SUBWORDS])
def test_a_document_is_enclosed_by_its_marks(tokenizer):
    front, behind = tokenizer.marks
    ids = encode_document(tokenizer, SourceText('ab', 'x'))
    assert ids.dtype == np.int32 and ids.tolist() == [front, *tokenizer.encode('ab'), behind]
    assert tokenizer.size > max(front, behind) and not {front, behind} & set(tokenizer.encode('abcabc'))
    assert tokenizer.decode(ids) == 'ab' and tokenizer.decode(np.concatenate([ids, ids])) == 'ab'
    assert tokenizer.decode([front]) == tokenizer.decode([behind]) == ''
    assert tokenizer.pieces(ids)[-1] == '</s>'


def test_characters_out_of_order_are_refused():
    for wrong in ('', 'ba', 'aa'):
        with pytest.raises(ValueError, match='characters are .*; expected at least one, in order, each once'):
            CharacterTokenizer(wrong)


def test_encode_document_needs_marks():
    with pytest.raises(ValueError, match='the tokenizer has no start and end tokens'):
        encode_document(ByteTokenizer(), SourceText('a', 'x'))


@pytest.mark.parametrize('tokenizer', ALL)
@pytest.mark.parametrize('method', ['decode', 'pieces'])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, method):
    for wrong in (-1, tokenizer.size, 10**9):
        message = f'id {wrong} is outside of the vocabulary: expected 0 to {tokenizer.size - 1}'
        with pytest.raises(ValueError, match=message):
            getattr(tokenizer, method)(np.array([0, wrong]))
    assert len(getattr(tokenizer, method)([tokenizer.size - 1])) <= 12


def test_the_error_of_an_unknown_character_names_its_line():
    tokenizer = CharacterTokenizer('\nab')
    message = r"in\.txt, line 7: character 'é' \(U\+00E9\) is not one of the 3 of the training text; bytes and subwords"
    with pytest.raises(UserError, match=message):
        tokenizer.encode(*SourceText('ab\n\nabéz', 'in.txt', 5))
    for text, shown in (('z', "'z'"), ('\t', r"'\\t'"), (' ', "' '"), ('\udc80', r"'\\udc80'"), ('😀', "'😀'")):
        with pytest.raises(UserError, match=f'prompt, line 1: character {shown}'):
            tokenizer.encode('ab' + text, 'prompt')


@pytest.mark.parametrize('tokenizer', [ByteTokenizer(), SUBWORDS])
def test_lone_surrogates_are_refused(tokenizer):
    with pytest.raises(UserError, match=r"prompt, line 2: character '\\udcff' \(U\+DCFF\) is not UTF-8"):
        tokenizer.encode('a\nb\udcff', 'prompt')


@pytest.mark.parametrize(('kind', 'text', 'size', 'message'), [
    ('char', 'a', 0, "vocabulary 'char': expected one of characters, bytes, subwords"),
    ('characters', '', 0, 'no text to build a vocabulary from'),
    ('characters', 'a', 9, 'vocabulary size 9: the size of characters is fixed; expected 0'),
    ('bytes', 'a', 256, 'vocabulary size 256: the size of bytes is fixed'),
    ('subwords', 'a', 0, 'vocabulary size 0: expected at least 5'),
    ('subwords', '\n', 300, 'no text'),
])  # fmt: skip
def test_wrong_arguments_of_build_are_refused(kind, text, size, message):
    with pytest.raises(UserError, match=message):
        build_tokenizer(kind, [SourceText(text, 'x')], size)


@pytest.mark.parametrize('tokenizer', [*ALL, CharacterTokenizer('\n\r"\\aé\u2028\U0001f600')])
def test_a_saved_tokenizer_is_loaded(tokenizer, tmp_path):
    path = save_tokenizer(tokenizer, tmp_path / 'tokens.v1')
    assert path == tmp_path / f'tokens.v1.{"model" if isinstance(tokenizer, SubwordTokenizer) else "json"}'
    assert load_tokenizer(tmp_path / 'tokens.v1') == tokenizer
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_files_that_are_not_a_tokenizer_are_refused(tmp_path):
    with pytest.raises(UserError, match=r'tokens: no vocabulary, neither a \.json nor a \.model file'):
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
