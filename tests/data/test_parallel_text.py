"""Sentence pairs from files, and Multi30k from a local server."""

import gzip
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from attnlab.data import download, parallel_text
from attnlab.data.alignments import GoldLinks
from attnlab.data.pairs import SentencePairs
from attnlab.data.parallel_text import load_multi30k, read_sentence_pairs
from attnlab.errors import UserError

FILES = {
    'val.en.gz': gzip.compress(b'A dog.\nA cat?\n', mtime=0),
    'val.fr.gz': gzip.compress('Un chien.\nUn été ?\n'.encode(), mtime=0),
}
PAIRS = SentencePairs(('A dog.', 'A cat?'), ('Un chien.', 'Un été ?'))


def write(folder, **texts):
    for name, text in texts.items():
        path = folder / name.replace('_', '.')
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == '.gz' else text.encode())
    return folder / 'X'


# Files


def test_pairs_are_read_from_two_files_or_from_one_table(tmp_path):
    for name in ('plain', 'zipped', 'mixed', 'table'):
        (tmp_path / name).mkdir()
    english, french = 'A dog.\r\nA cat?\r\n', '\ufeffUn chien.\nUn été ?'
    assert read_sentence_pairs(write(tmp_path / 'plain', X_en=english, X_fr=french)) == PAIRS
    assert read_sentence_pairs(write(tmp_path / 'zipped', X_en_gz=english, X_fr_gz=french)) == PAIRS
    assert read_sentence_pairs(write(tmp_path / 'mixed', X_en_gz=english, X_fr=french)) == PAIRS
    table = write(tmp_path / 'table', X_tsv='\ufeffA dog.\tUn chien.\r\nA cat?\tUn été ?\n', X_tsv_gz='a\tb')
    assert read_sentence_pairs(f'{table}.tsv') == PAIRS
    assert read_sentence_pairs(f'{table}.tsv.gz') == SentencePairs(('a',), ('b',))


def test_text_is_raw_and_nothing_is_dropped(tmp_path):
    path = write(tmp_path, X_fr='’ a\u2028b\n\n', X_en='  x \n\n')
    assert read_sentence_pairs(path, ('fr', 'en')) == SentencePairs(('’ a\u2028b', ''), ('  x ', ''))


@pytest.mark.parametrize(('files', 'message'), [
    ({'X_en': 'a\nb\n', 'X_fr': 'a\n'}, r'X\.en has 2 lines, .*X\.fr has 1: expected equally many'),
    ({'X_en': 'a\n'}, r'X\.fr: no such file, nor with \.gz, did you mean .*X\.en\?'),
    ({'Xx_en': 'a\n', 'Xx_fr': 'a\n'}, r'X\.en: no such file, nor with \.gz, did you mean .*Xx\.en\?'),
    ({'X_en': '', 'X_fr': ''}, 'X: no sentences'),
    ({'X': ''}, 'X: no sentences'),
    ({'X': 'a\tb\na b\n'}, 'X, line 2: 1 columns, expected 2 separated by one tab'),
    ({'X': 'a\tb\tc\n'}, 'X, line 1: 3 columns'),
])  # fmt: skip
def test_wrong_files_are_refused(tmp_path, files, message):
    with pytest.raises(UserError, match=message):
        read_sentence_pairs(write(tmp_path, **files))


def test_sides_of_unequal_length_are_refused():
    empty = GoldLinks(frozenset(), frozenset())
    for sides in ((('a', 'b'), ('c',), None), (('a',), ('b',), (empty, empty)), (('a',), ('b', 'c'), (empty,))):
        with pytest.raises(ValueError, match='expected equal lengths'):
            SentencePairs(*sides)


# Multi30k


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A local server of the published files, an empty cache and no data folder.

    Yields the answers of the server by file name, the list of requested files, and the cache folder.
    """
    answers = dict(FILES)
    requested = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.removeprefix('/raw/')
            requested.append(name)
            data = answers.get(name)
            if data is None:
                return self.send_error(404)
            self.send_response(200)
            self.send_header('Content-Length', str(len(FILES[name])))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format, *args):
            pass

    httpd = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={'poll_interval': 0.01})
    thread.start()
    monkeypatch.setattr(parallel_text, 'MULTI30K_URL', f'http://127.0.0.1:{httpd.server_port}/raw/')
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}
    monkeypatch.setattr(parallel_text, 'MULTI30K_SHA256', parallel_text.MULTI30K_SHA256 | sums)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    monkeypatch.delenv('ATTNLAB_DATA', raising=False)
    yield answers, requested, tmp_path / 'cache' / 'attnlab' / 'multi30k'
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_files_are_downloaded_once(server):
    _, requested, cache = server
    assert load_multi30k('valid') == PAIRS
    assert load_multi30k('valid') == PAIRS
    assert requested == ['val.en.gz', 'val.fr.gz']
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == FILES


def test_a_damaged_file_of_the_cache_is_downloaded_again(server):
    _, requested, cache = server
    load_multi30k('valid')
    (cache / 'val.fr.gz').write_bytes(b'')
    assert load_multi30k('valid') == PAIRS
    assert requested == ['val.en.gz', 'val.fr.gz', 'val.fr.gz']


@pytest.mark.parametrize(('answer', 'message'), [
    (FILES['val.fr.gz'][:-1] + b'x', 'sha256 is [0-9a-f]{64}, expected [0-9a-f]{64}'),
    (None, 'cannot be downloaded .*404'),
    (FILES['val.fr.gz'][:-5], r'cannot be downloaded \(IncompleteRead'),
])  # fmt: skip
def test_a_failed_download_leaves_no_file(server, answer, message):
    answers, _, cache = server
    answers['val.fr.gz'] = answer
    with pytest.raises(UserError, match=rf'val\.fr\.gz: {message}.*config\.data\.folder=DIR.*ATTNLAB_DATA=DIR'):
        load_multi30k('valid')
    assert [path.name for path in cache.iterdir()] == ['val.en.gz']
    answers['val.fr.gz'] = FILES['val.fr.gz']
    assert load_multi30k('valid') == PAIRS


def test_an_unreachable_server_is_an_error_with_a_remedy(server, monkeypatch):
    monkeypatch.setattr(parallel_text, 'MULTI30K_URL', 'http://127.0.0.1:1/')
    with pytest.raises(UserError, match=r'cannot be downloaded .*--config\.data\.folder=DIR, or .* in DIR/multi30k'):
        load_multi30k('valid')
    assert not server[2].exists()


def test_a_silent_server_times_out(server, monkeypatch):
    import socket

    with socket.create_server(('127.0.0.1', 0)) as silent:
        monkeypatch.setattr(parallel_text, 'MULTI30K_URL', f'http://127.0.0.1:{silent.getsockname()[1]}/')
        monkeypatch.setattr(download, 'TIMEOUT_SECONDS', 0.1)
        with pytest.raises(UserError, match=r'cannot be downloaded \(timed out\)'):
            load_multi30k('valid')


def test_an_unwritable_cache_is_an_error_with_a_remedy(server, tmp_path):
    (tmp_path / 'cache').write_text('a file')
    with pytest.raises(UserError, match=r'val\.en\.gz: cannot be written .*config\.data\.folder'):
        load_multi30k('valid')


def test_a_given_folder_is_read_without_download(server, monkeypatch, tmp_path):
    _, requested, cache = server
    (tmp_path / 'multi30k').mkdir()
    (tmp_path / 'own').mkdir()
    write(tmp_path / 'multi30k', val_en_gz='a', val_fr='b')
    write(tmp_path / 'own', val_en='c', val_fr='d')
    monkeypatch.setenv('ATTNLAB_DATA', str(tmp_path))
    assert load_multi30k('valid') == SentencePairs(('a',), ('b',))
    assert load_multi30k('valid', tmp_path / 'own') == SentencePairs(('c',), ('d',))
    with pytest.raises(UserError, match=r'train\.en: no such file'):
        load_multi30k('train')
    with pytest.raises(UserError, match=r'nor a folder .*nowhere'):
        load_multi30k('valid', str(tmp_path / 'nowhere'))
    assert not requested and not cache.exists()


def test_an_unknown_split_is_refused(server):
    with pytest.raises(UserError, match="no split 'val': expected one of train, valid, test_2016, test_2017"):
        load_multi30k('val')


def test_the_published_files(shared):
    folder = shared('multi30k')
    for split, count in (('train', 29_000), ('valid', 1_014), ('test_2016', 1_000), ('test_2017', 1_000)):
        pairs = load_multi30k(split, folder)
        assert len(pairs.source) == len(pairs.target) == count
    for name, checksum in parallel_text.MULTI30K_SHA256.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == checksum
    assert load_multi30k('train', folder).target[0].startswith('Deux jeunes hommes blancs')
