"""Vocabularies: encoding, decoding, word spans, files and errors."""

import os
import subprocess
import sys
import unicodedata
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attnlab.data.parallel_text import load_multi30k
from attnlab.data.text import JOIN_MARK, SPACE_MARK, normalise, strip_spacing_mark, tokenise
from attnlab.data.vocabulary import (
    BOS,
    EOS,
    PAD,
    SPECIAL_TOKENS,
    UNK,
    Vocabulary,
    build_vocabulary,
    load_vocabulary,
    save_vocabulary,
    warn_of_unknown_words,
)
from attnlab.errors import UserError

LINES = ["L'homme a vu l'homme.", "L'été, l'homme a soif ?", 'Une femme boit. Elle a vu la mer.', 'Où ? À Sète !', '']
KINDS = ('words', 'subwords')


@pytest.fixture(scope='module', params=KINDS)
def small(request):
    """A vocabulary of a few lines."""
    return build_vocabulary(request.param, LINES, 320, 'fr')


@pytest.fixture(scope='module')
def real(shared):
    """(vocabulary of the training split, validation lines) for each language and kind."""
    folder = shared('multi30k')
    train, valid = load_multi30k('train', folder), load_multi30k('valid', folder)
    sides = (('en', train.source, valid.source), ('fr', train.target, valid.target))
    return [
        (build_vocabulary(kind, lines, 6000, language), valid) for language, lines, valid in sides for kind in KINDS
    ]


def test_words_are_ordered_by_frequency_then_code_points():
    vocabulary = build_vocabulary('words', ['b a c é z', 'c é Z b b'], 9, 'fr')
    assert vocabulary.tokens == ('<pad>', '<unk>', '<s>', '</s>', 'b', 'c', 'é', 'Z', 'a')
    assert vocabulary.size == 9
    assert vocabulary.encode('a z É b') == [8, UNK, UNK, 4]
    assert build_vocabulary('words', ['b a'], 100, 'fr').size == 6


@pytest.mark.slow
def test_words_of_the_training_split(real):
    for vocabulary, _ in real:
        assert vocabulary.size == 6000
    vocabulary, lines = real[0]
    assert vocabulary.tokens[4:6] == ('a', '.')
    known = set(vocabulary.tokens)
    for line in lines[:200]:
        words = tokenise(normalise(line, 'en'))
        assert [i == UNK for i in vocabulary.encode(line)] == [word not in known for word in words]


def test_unknown_words_are_named_in_a_warning(small, caplog):
    lines = ["L'homme a vu 日本.", 'Une ñandou boit.', 'É日 日本']
    assert [small.unknown_words(line) for line in lines] == [['日本'], ['ñandou'], ['É日', '日本']]
    warn_of_unknown_words(small, lines)
    assert caplog.messages == ['unknown words, not in the training text of the model: 日本, ñandou, É日']
    warn_of_unknown_words(small, LINES)
    assert len(caplog.messages) == 1
    warn_of_unknown_words(small, ['日' * count for count in range(1, 31)])
    assert caplog.messages[1].endswith('日 and 10 more')
    assert build_vocabulary('words', ['b'], 9, 'fr').unknown_words('a b, <0x41>') == ['a', ',', '<', '0x41', '>']


@given(text=st.text(st.characters(exclude_categories=['Cs']), max_size=20))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_each_word_of_any_text_is_known_or_unknown(small, text):
    assert set(small.unknown_words(text)) <= set(map(strip_spacing_mark, tokenise(normalise(text, 'fr'))))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('kind', KINDS)
def test_a_vocabulary_is_the_same_in_every_process(kind):
    code = (
        'import hashlib, sys; from attnlab.data.vocabulary import build_vocabulary;'
        f'v = build_vocabulary({kind!r}, {LINES!r}, 320, "fr");'
        'print(hashlib.sha256(repr((v.tokens, v.model)).encode()).hexdigest())'
    )
    digests = set()
    for locale, seed in (('C', '1'), ('C.UTF-8', '2')):
        env = {**os.environ, 'LC_ALL': locale, 'PYTHONHASHSEED': seed}
        run = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, check=True, text=True)
        assert run.stderr == ''
        digests.add(run.stdout)
    assert len(digests) == 1
    first, second = (build_vocabulary(kind, LINES, 320, 'fr') for _ in range(2))
    assert first == second and first.model == second.model


def test_special_ids(small):
    assert (PAD, UNK, BOS, EOS) == (0, 1, 2, 3)
    assert small.tokens[:4] == SPECIAL_TOKENS
    assert small.pieces([PAD, UNK, BOS, EOS]) == ['<pad>', '<unk>', '<s>', '</s>']
    ids = small.encode('<s> </s> <pad> <unk>')
    assert not {PAD, BOS, EOS} & set(ids)
    ids = small.encode("L'homme a soif ?")
    assert min(ids) > EOS
    assert small.decode([BOS, *ids[:2], PAD, *ids[2:], PAD, EOS, *ids, EOS]) == "L'homme a soif ?"
    assert small.decode([]) == small.decode([EOS]) == small.decode([PAD]) == ''
    assert small.decode([UNK, ids[0]]).startswith('<unk> L')
    spans = small.words([BOS, *ids, UNK, UNK, EOS, PAD])
    labels = ['<s>', "L'", 'homme', 'a', 'soif', '?', '<unk>', '<unk>', '</s>', '<pad>']
    assert [label for label, _, _ in spans] == labels
    assert [start for _, start, _ in spans] + [len(ids) + 5] == [0] + [stop for _, _, stop in spans]
    assert small.words([]) == []


def test_pieces_are_readable(small):
    ids = small.encode("L'homme ?")
    mark = '▁' if small.kind == 'subwords' else ''
    assert small.pieces(ids) == [mark + "L'", mark + 'homme', mark + '?']


@pytest.mark.parametrize('wrong', [-1, 320, 10**9])
@pytest.mark.parametrize('method', ['decode', 'pieces', 'words'])
def test_ids_outside_the_vocabulary_are_refused(small, method, wrong):
    with pytest.raises(ValueError, match=rf'id {wrong} is outside of the vocabulary: expected 0 to {small.size - 1}'):
        getattr(small, method)([4, wrong])
    with pytest.raises(ValueError, match=rf'id {wrong} is'):
        getattr(small, method)(np.asarray([EOS, wrong], np.int32))
    assert getattr(small, method)([small.size - 1]) is not None
    with pytest.raises(TypeError):
        getattr(small, method)([4.5])


def test_look_alikes_have_the_same_ids(small):
    plain = small.encode("L'été, Où ?")
    assert UNK not in plain[:2]
    for text in ('\ufeffL’été, Où\u202f?', 'L\u200bʼété,\u00a0Où\u00a0?', unicodedata.normalize('NFD', "L'été, Où ?")):
        assert small.encode(text) == plain
    assert small.encode_batch(["L'été, Où?", 'mer', '']) == [plain, small.encode('mer'), []]


def test_decoding_restores_every_real_line(real):
    """Sub-words restore each line of the validation split and its words; words do so if all are known."""
    for vocabulary, lines in real:
        exact = 0
        for line, ids in zip(lines, vocabulary.encode_batch(lines), strict=True):
            normalised = normalise(line, vocabulary.language)
            words = [strip_spacing_mark(word) for word in tokenise(normalised)]
            if vocabulary.kind == 'subwords' or UNK not in ids:
                exact += 1
                assert vocabulary.decode([*ids, EOS]) == normalised
                assert [label for label, _, _ in vocabulary.words([*ids, EOS])] == [*words, '</s>']
            assert len(vocabulary.pieces(ids)) == len(ids)
            assert ids == vocabulary.encode(line)
        assert exact > len(lines) / 2


SUBWORDS = build_vocabulary('subwords', LINES, 320, 'fr')


FREQUENT = st.sampled_from('aé l\'".?▁<>/s\ufdd0' + JOIN_MARK + SPACE_MARK)


@example('▁a▁ ▁ \ufdd0')
@given(st.text(st.one_of(FREQUENT, st.characters(exclude_categories=['Cs']))))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_subwords_restore_any_text(text):
    normalised = normalise(text, 'fr')
    ids = SUBWORDS.encode(text)
    assert min(ids, default=4) > EOS
    assert SUBWORDS.decode(ids) == normalised
    assert [label for label, _, _ in SUBWORDS.words(ids)] == [strip_spacing_mark(word) for word in tokenise(normalised)]


@given(st.lists(st.integers(0, SUBWORDS.size - 1)))
@example([UNK, *[SUBWORDS.tokens.index('▁')] * 3])
@example([BOS, SUBWORDS.tokens.index('h'), EOS, SUBWORDS.tokens.index('h')])
@settings(max_examples=300, derandomize=True, deadline=None)
def test_any_ids_decode_to_text(ids):
    assert isinstance(SUBWORDS.decode(ids), str)
    spans = SUBWORDS.words(ids)
    assert [0] * bool(ids) + [stop for _, _, stop in spans] == [start for _, start, _ in spans] + [len(ids)] * bool(ids)
    assert all(label for label, _, _ in spans)
    assert all(stop - start == 1 for _, start, stop in spans if min(ids[start:stop]) <= EOS)
    assert len(SUBWORDS.pieces(ids)) == len(ids)


def test_a_saved_vocabulary_is_loaded(small, tmp_path):
    path = save_vocabulary(small, tmp_path / 'source.v1')
    assert path == tmp_path / ('source.v1.txt' if small.kind == 'words' else 'source.v1.model')
    loaded = load_vocabulary(tmp_path / 'source.v1')
    assert loaded == small and loaded.language == 'fr'
    assert loaded.encode(LINES[1]) == small.encode(LINES[1])


def test_the_file_of_words_has_one_word_a_line(tmp_path):
    odd = ['#', '"', '\\', "'", '""', 'words', 'é', JOIN_MARK + JOIN_MARK, '▁', '<pad>x', '\U0001f600']
    vocabulary = Vocabulary('words', 'en', SPECIAL_TOKENS + tuple(odd))
    save_vocabulary(vocabulary, tmp_path / 'a')
    assert (tmp_path / 'a.txt').read_bytes() == '\n'.join(['words en', *odd, '']).encode()
    assert load_vocabulary(tmp_path / 'a') == vocabulary


def test_sentencepiece_reads_the_saved_model(tmp_path):
    import sentencepiece

    path = save_vocabulary(SUBWORDS, tmp_path / 'a')
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert processor.encode('femme boit') == SUBWORDS.encode('femme boit')
    assert [processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id()] == [0, 1, 2, 3]


@pytest.mark.parametrize(('kind', 'lines', 'size', 'language', 'message'), [
    ('word', LINES, 100, 'fr', "vocabulary 'word': expected one of words, subwords"),
    ('words', LINES, 4, 'fr', 'vocabulary size 4: expected at least 5'),
    ('subwords', LINES, -1, 'fr', 'vocabulary size -1: expected at least 5'),
    ('subwords', ['un homme ☃'], 267, 'fr', 'vocabulary size 267: the characters .* alone need 268'),
    ('words', ['', ' \u00a0'], 100, 'fr', 'no text'),
    ('subwords', [], 1000, 'fr', 'no text'),
    ('words', LINES, 100, 'xx', "language 'xx'"),
])  # fmt: skip
def test_wrong_arguments_of_build_are_refused(kind, lines, size, language, message):
    with pytest.raises(UserError, match=message):
        build_vocabulary(kind, lines, size, language)


def test_files_that_are_not_a_vocabulary_are_refused(tmp_path):
    with pytest.raises(UserError, match=r'target: no such vocabulary, \.txt or \.model'):
        load_vocabulary(tmp_path / 'target')
    for data in (b'', b'a\nb\n', b'words\n'):
        (tmp_path / 'a.txt').write_bytes(data)
        with pytest.raises(UserError, match=r"a\.txt, line 1: '.*' is not `words LANGUAGE`"):
            load_vocabulary(tmp_path / 'a')
    for data in (b'', b'junk', SUBWORDS.model, SUBWORDS.model[:100] + b'\xc2\x0c\x02fr'):
        (tmp_path / 'b.model').write_bytes(data)
        with pytest.raises(UserError, match=r'b\.model: not a vocabulary of attnlab'):
            load_vocabulary(tmp_path / 'b')


def test_subwords_are_learned_from_long_lines_too(capfd):
    """By default sentencepiece skips lines of more than 4,192 bytes, and writes to stderr."""
    vocabulary = build_vocabulary('subwords', ['abracadabra ' * 1000], 300, 'en')
    assert vocabulary.pieces(vocabulary.encode('abracadabra')) == ['▁abracadabra']
    assert capfd.readouterr() == ('', '')


def test_words_are_counted_after_normalising():
    lines = ['l’été', "l'été", unicodedata.normalize('NFD', "l'été")]
    assert Counter(build_vocabulary('words', lines, 100, 'fr').tokens[4:]) == {"l'": 1, 'été': 1}
