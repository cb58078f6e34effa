"""Parallel text in files: two aligned text files, a tab-separated file, or Multi30k.

Multi30k (Elliott et al. 2016, 2017) is read from a folder, or downloaded once into the user's cache and checked.
"""

from pathlib import Path

from attnlab.data import download
from attnlab.data.pairs import SentencePairs
from attnlab.data.text import check_regular_file, file_suggestion, read_lines
from attnlab.errors import UserError

MULTI30K_URL = 'https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/'
MULTI30K_SPLITS = {'train': 'train', 'valid': 'val', 'test_2016': 'test_2016_flickr', 'test_2017': 'test_2017_flickr'}
MULTI30K_SHA256 = {
    'train.en.gz': 'd79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f',
    'train.fr.gz': '622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c',
    'val.en.gz': '14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28',
    'val.fr.gz': 'ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9',
    'test_2016_flickr.en.gz': '611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9',
    'test_2016_flickr.fr.gz': '6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90',
    'test_2017_flickr.en.gz': '76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074',
    'test_2017_flickr.fr.gz': '3ba671ceb2299f3304ffafefea7a833d08632fbaf0ba18546f8a2ec2391af496',
}


def read_sentence_pairs(path: str | Path, languages: tuple[str, str] = ('en', 'fr')) -> SentencePairs:
    """Read sentence pairs from the files `path`.en and `path`.fr, plain or .gz, or from one tab-separated file `path`.

    languages: the suffixes of the two files, source first.

    The text is not changed, and blank sentences are kept.  Raises UserError for missing or empty files, for files with
    different numbers of lines, and for lines of a table that do not have two columns.
    """
    path = Path(path)
    check_regular_file(path)
    if path.is_file():
        source, target = _read_table(path)
    else:
        source_path, target_path = (_language_file(path, language) for language in languages)
        source, target = tuple(read_lines(source_path)), tuple(read_lines(target_path))
        if len(source) != len(target):
            raise UserError(
                f'{source_path} has {len(source)} lines, {target_path} has {len(target)}: expected equally many'
            )
    if not source:
        raise UserError(f'{path}: no sentences')
    return SentencePairs(source, target)


def load_multi30k(split: str, folder: str | Path = '') -> SentencePairs:
    """Load English-French pairs of train (29,000), valid (1,014), test_2016 or test_2017 (1,000 each).

    The files are read from `folder` if given, else from $ATTNLAB_DATA/multi30k if ATTNLAB_DATA is set, both without
    a check of their content.  Else they are read from the cache ($XDG_CACHE_HOME or ~/.cache, attnlab/multi30k), where
    a file is downloaded if it is missing or has the wrong checksum.
    """
    if split not in MULTI30K_SPLITS:
        raise UserError(f'Multi30k has no split {split!r}: expected one of {", ".join(MULTI30K_SPLITS)}')
    names = [f'{MULTI30K_SPLITS[split]}.{language}.gz' for language in ('en', 'fr')]
    published = {name: (MULTI30K_URL + name, MULTI30K_SHA256[name]) for name in names}
    return read_sentence_pairs(download.data_folder('multi30k', folder, published) / MULTI30K_SPLITS[split])


def _read_table(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    rows = [line.split('\t') for line in read_lines(path)]
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise UserError(f'{path}, line {number}: {len(row)} columns, expected 2 separated by one tab')
    return tuple(row[0] for row in rows), tuple(row[1] for row in rows)


def _language_file(path: Path, language: str) -> Path:
    plain, zipped = Path(f'{path}.{language}'), Path(f'{path}.{language}.gz')
    check_regular_file(plain)
    if not plain.is_file() and not zipped.is_file():
        raise UserError(f'{plain}: no such file, nor with .gz{file_suggestion(plain)}')
    return plain if plain.is_file() else zipped
