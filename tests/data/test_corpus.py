"""Text files, their division into splits and documents, tiny Shakespeare, and grammar sentences."""

import gzip
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlab.data import corpus, download, grammar
from attnlab.data.corpus import SourceText, grammar_sentences, load_shakespeare, split_documents, split_text
from attnlab.data.rows import IGNORE_LABEL, consecutive_windows
from attnlab.data.tokenizers import build_tokenizer, encode_document
from attnlab.errors import UserError


def test_a_file_is_read_whole(tmp_path):
    path = tmp_path / 'in.txt'
    long = 'x' * 200_000
    for data in (f'\ufeffA.\r\n\r\n {long}\n', f'A.\n\n {long}'):
        path.write_bytes(data.encode())
        assert corpus.read_text(path) == SourceText(f'A.\n\n {long}\n', str(path), 1)
    (tmp_path / 'in.gz').write_bytes(gzip.compress(b'a\n'))
    assert corpus.read_text(str(tmp_path / 'in.gz')).text == 'a\n'


@pytest.mark.parametrize(('data', 'message'), [
    (b'', 'in.txt: no text'),
    (b'\n\n', 'in.txt: no text'),
    (b'a\nb\x80', 'in.txt, line 2: byte 0x80 is not UTF-8'),
    (None, r'in\.txt: no such file'),
])  # fmt: skip
def test_an_unreadable_file_is_refused(tmp_path, data, message):
    if data is not None:
        (tmp_path / 'in.txt').write_bytes(data)
    with pytest.raises(UserError, match=message):
        corpus.read_text(tmp_path / 'in.txt')


@pytest.mark.slow
@given(st.text('ab\n', min_size=2, max_size=40), st.integers(1, 9))
def test_a_text_is_divided_as_in_nanogpt(text, line):
    train, valid = split_text(SourceText(text, 'x', line))
    assert (train.text, valid.text) == (text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :])
    assert (train.where, train.line, valid.where) == ('x', line, 'x')
    assert valid.line == line + train.text.count('\n')


@pytest.mark.parametrize(('text', 'share'), [('a', 0.9), ('ab', 0.4), ('ab', 1.0), ('', 0.5), ('ab', -0.5)])
def test_a_division_with_an_empty_part_is_refused(text, share):
    with pytest.raises(UserError, match=f'x: {len(text)} characters cannot be divided at'):
        split_text(SourceText(text, 'x'), share)


def test_documents_are_lines_paragraphs_or_separated_by_a_string():
    whole = SourceText('\n\na b\n c\n \t\n\nd\n\n e\n', 'x', 5)
    assert split_documents(whole) == [
        SourceText('a b\n c', 'x', 7),
        SourceText('d', 'x', 11),
        SourceText(' e', 'x', 13),
    ]
    assert split_documents(whole, 'paragraphs') == split_documents(whole)
    lines = [('a b', 7), (' c', 8), ('d', 11), (' e', 13)]
    assert split_documents(whole, 'lines') == [SourceText(text, 'x', line) for text, line in lines]
    assert split_documents(SourceText('a.\n<|e|>\n\nb<|e|>\n', 'x'), '<|e|>') == [
        SourceText('a.', 'x', 1),
        SourceText('b', 'x', 4),
    ]


@given(st.text('a \n', max_size=30).filter(str.strip), st.sampled_from(['lines', 'paragraphs', 'a\n', 'a']))
def test_each_document_has_the_number_of_its_first_line(text, by):
    """The text of the file from that line on starts with the document."""
    whole = SourceText('a\n' + text + '\n', 'x')
    if not (whole.text.replace(by, '') if by in whole.text else 'a').strip():
        return
    for document in split_documents(whole, by):
        lines = whole.text.split('\n')
        at = len('\n'.join(lines[: document.line - 1])) + (document.line > 1)
        assert whole.text.find(document.text, at) in range(at, at + len(lines[document.line - 1]) + 1)
        assert document.text.strip() and not document.text.startswith('\n') and not document.text.endswith('\n')
    if by == 'paragraphs':
        current, paragraphs = [], []
        for line in [*whole.text.split('\n'), '']:
            if line.strip():
                current.append(line)
            elif current:
                paragraphs.append('\n'.join(current))
                current = []
        assert [document.text for document in split_documents(whole, by)] == paragraphs


def test_a_separator_that_the_text_does_not_have_is_refused():
    for by in ('paragraph', '', '<|e|>'):
        with pytest.raises(UserError, match="x: documents by '.*'; expected lines, paragraphs or a string"):
            split_documents(SourceText('a\n\nb', 'x'), by)
    with pytest.raises(UserError, match='x: no documents'):
        split_documents(SourceText(' \n', 'x'), 'lines')


def test_grammar_sentences_are_documents():
    drawn = grammar_sentences('valid', 5, seed=3)
    assert [document.text for document in drawn] == list(grammar.grammar_pairs('valid', 5, 3).source)
    assert drawn[4].where == 'grammar, valid' and drawn[4].line == 5
    made = build_tokenizer('characters', grammar_sentences('train', 300, seed=0), documents=True)
    assert made.decode(encode_document(made, drawn[0])) == drawn[0].text
    with pytest.raises(UserError, match="split 'dev'"):
        grammar_sentences('dev', 1, 0)


# Tiny Shakespeare


def test_shakespeare_is_read_from_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('ATTNLAB_DATA', str(tmp_path))
    monkeypatch.setattr(download, 'download_file', None)
    for folder, text in (('tinyshakespeare', 'a\n'), ('own', 'b\n')):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / 'input.txt').write_text(text)
    assert load_shakespeare().text == 'a\n' and load_shakespeare(tmp_path / 'own').text == 'b\n'
    with pytest.raises(UserError, match=r'nowhere.input\.txt: no such file, nor a folder'):
        load_shakespeare(tmp_path / 'nowhere')


def test_shakespeare_is_downloaded_and_checked(tmp_path, monkeypatch):
    """The URL is a file: address, which urllib reads too; test_parallel_text.py has the network errors."""
    published, cache = tmp_path / 'published.txt', tmp_path / 'attnlab' / 'tinyshakespeare' / 'input.txt'
    monkeypatch.delenv('ATTNLAB_DATA', raising=False)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(corpus, 'SHAKESPEARE_URL', published.as_uri())
    monkeypatch.setattr(corpus, 'SHAKESPEARE_SHA256', hashlib.sha256(b'a\n').hexdigest())
    hint = r'--config\.data\.folder=DIR, or put them in DIR/tinyshakespeare and set ATTNLAB_DATA=DIR'
    with pytest.raises(UserError, match=rf'published\.txt: cannot be downloaded \(.*{hint}'):
        load_shakespeare()
    published.write_text('b\n')
    with pytest.raises(UserError, match=rf'sha256 is [0-9a-f]{{64}}, expected [0-9a-f]{{64}}; .*{hint}'):
        load_shakespeare()
    assert not cache.parent.exists()
    published.write_text('a\n')
    assert load_shakespeare() == SourceText('a\n', str(cache))
    cache.write_text('damaged')
    assert load_shakespeare().text == 'a\n'
    published.unlink()
    assert load_shakespeare().text == 'a\n'
    assert [entry.name for entry in cache.parent.iterdir()] == ['input.txt']
    (tmp_path / 'file').write_text('')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
    published.write_text('a\n')
    with pytest.raises(UserError, match=r'input\.txt: cannot be written \('):
        load_shakespeare()


def test_the_real_shakespeare(shared):
    folder = shared('tinyshakespeare')
    assert hashlib.sha256((folder / 'input.txt').read_bytes()).hexdigest() == corpus.SHAKESPEARE_SHA256
    whole = load_shakespeare(folder)
    assert whole.text == (folder / 'input.txt').read_text('utf-8')
    train, valid = split_text(whole)
    assert (len(train.text), len(valid.text)) == (1_003_854, 111_540)  # the numbers of nanoGPT
    made = build_tokenizer('characters', [train])
    assert made.size == 65
    ids = made.encode(*valid)
    assert made.decode(ids) == valid.text
    assert len(split_documents(whole)) == 7_222
    cut = consecutive_windows(ids, 64)
    assert (cut.labels != IGNORE_LABEL).sum() == 111_539
