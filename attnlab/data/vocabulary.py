"""Vocabularies of translation models: text to ids and back, by words or sub-words (BPE, Sennrich et al. 2016).

Both kinds encode the words of `tokenise(normalise(text, language))`, so no id spans two words.  Sub-words restore any
normalised text, because characters that are not in the vocabulary become bytes; words restore it if all are known.
"""

import functools
import importlib.metadata
import io
import itertools
import logging
import operator
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnlab import files
from attnlab.data import disk_cache
from attnlab.data.text import detokenise, file_suggestion, normalise, read_lines, strip_spacing_mark, tokenise
from attnlab.errors import UserError

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SPECIAL_TOKENS = ('<pad>', '<unk>', '<s>', '</s>')
VOCABULARY_SUFFIXES = {'words': '.txt', 'subwords': '.model'}
"""File suffix of each kind of vocabulary."""

_MAX_SHOWN = 20  # unknown words named in one warning

# sentencepiece marks the start of a word by `▁`.  A `▁` in the text itself is replaced by U+FDD0, a code point that
# normalised text never has.
_WORD_START, _ESCAPED_WORD_START = '▁', '\ufdd0'
_BYTE = re.compile('<0x[0-9A-F]{2}>')
# The language is appended to the model's protocol buffer as field 200 (bytes), the first number that sentencepiece
# leaves to extensions; this is the key of the field.
_LANGUAGE_TAG = b'\xc2\x0c'


@dataclass(frozen=True)
class Vocabulary:
    """The ids of one language, for words or sub-words.

    kind: 'words' or 'subwords'.  language: 'en' or 'fr'.  tokens: the token of each id; the first four are
    SPECIAL_TOKENS.  model: the serialised sentencepiece model, empty for words.

    Ids outside [0, size) raise ValueError; JAX's indexing would clamp them without an error.
    """

    kind: str
    language: str
    tokens: tuple[str, ...]
    model: bytes = b''

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """Normalise a text and return its ids, without BOS and EOS."""
        return self.encode_batch([text])[0]

    def encode_batch(self, lines: Iterable[str]) -> list[list[int]]:
        """Return the ids of each line, as `encode` does."""
        lines = list(lines)
        key = (self._digest, disk_cache.digest_lines(lines))
        name = f'ids-{self.language}'
        arrays = disk_cache.cached_arrays(name, len(lines), key, lambda: _to_arrays(self._encode_lines(lines)))
        ids, lengths = arrays['ids'].tolist(), arrays['lengths'].tolist()
        ends = itertools.accumulate(lengths)
        return [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def _encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        words = [_words(line, self.language) for line in lines]
        if self.kind == 'words':
            return [[self._ids.get(word, UNK) for word in line] for line in words]
        return self._processor.encode([_spell(line) for line in words], num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids up to EOS, without PAD and BOS; an unknown word becomes `<unk>`."""
        ids = [i for i in itertools.takewhile(lambda i: i != EOS, checked_ids(ids, self.size)) if i not in (PAD, BOS)]
        words = (self._word(ids[start:stop]) for start, stop in self._spans(ids))
        return detokenise(filter(None, words))  # a model may generate a word start without a word

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return a printable label for each id; `▁` marks a sub-word that starts a word, EOS is `</s>`."""
        return [_label(self.tokens[i]) for i in checked_ids(ids, self.size)]

    def words(self, ids: Sequence[int]) -> list[tuple[str, int, int]]:
        """Group ids into words; returns (label, start, stop) of each word, which is ids[start:stop].

        Each special id is a word of its own.  For an encoded text the labels are the words of `tokenise` without their
        spacing marks.
        """
        ids = checked_ids(ids, self.size)
        labels = ((strip_spacing_mark(self._word(ids[start:stop])), start, stop) for start, stop in self._spans(ids))
        return [(label or _WORD_START, start, stop) for label, start, stop in labels]

    def is_unknown(self, ids: Sequence[int]) -> bool:
        """Whether one of the ids of a word was in no training sentence: `<unk>`, or a byte of a sub-word vocabulary.

        A sub-word vocabulary has a piece for each character of the training text, so only other characters become
        bytes.
        """
        has_bytes = self.kind == 'subwords'
        return any(i == UNK or (has_bytes and _BYTE.fullmatch(self.tokens[i])) for i in checked_ids(ids, self.size))

    def unknown_words(self, text: str) -> list[str]:
        """Return the words of a text whose ids are unknown, as they were typed."""
        words, ids = _words(text, self.language), self.encode(text)
        spans = zip(words, self.words(ids), strict=True)
        return [strip_spacing_mark(word) for word, (_, start, stop) in spans if self.is_unknown(ids[start:stop])]

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    @functools.cached_property
    def _digest(self) -> str:
        library = _library_version(self.kind)
        return disk_cache.digest_lines([self.kind, self.language, library, self.model.hex(), *self.tokens])

    @functools.cached_property
    def _processor(self) -> Any:
        return _load_processor(self.model)

    def _spans(self, ids: list[int]) -> list[tuple[int, int]]:
        """Return (start, stop) of each word in a sequence of ids."""

        def starts_word(index: int) -> bool:
            if index == 0 or min(ids[index - 1 : index + 1]) < len(SPECIAL_TOKENS):
                return True
            return self.tokens[ids[index]].startswith(_WORD_START)

        starts = [index for index in range(len(ids)) if self.kind == 'words' or starts_word(index)]
        return list(itertools.pairwise([*starts, len(ids)]))

    def _word(self, ids: list[int]) -> str:
        """Return the word that the ids of one span spell, with its spacing mark."""
        if self.kind == 'words' or ids[0] < len(SPECIAL_TOKENS):
            return self.tokens[ids[0]]
        return self._processor.decode(ids).replace(_ESCAPED_WORD_START, _WORD_START)


def checked_ids(ids: Sequence[int] | np.ndarray, size: int) -> list[int]:
    """Return the ids as a list; raises ValueError for an id outside [0, size), TypeError for one that is not an int."""
    id_list = [operator.index(i) for i in ids]
    for i in id_list:
        if not 0 <= i < size:
            raise ValueError(f'id {i} is outside of the vocabulary: expected 0 to {size - 1}')
    return id_list


def build_vocabulary(kind: str, lines: Iterable[str], size: int, language: str) -> Vocabulary:
    """Build a vocabulary of at most `size` ids from the lines of a training split; it is the same on every machine.

    kind: 'words' takes the most frequent words, and of equally frequent ones those first in the order of code points;
      'subwords' takes the sub-words of byte-pair encoding.

    Raises UserError for an unknown kind, for a size that is too small, and for lines without words.
    """
    return build_shared_vocabulary(kind, [(lines, language)], size)


def build_shared_vocabulary(kind: str, texts: Sequence[tuple[Iterable[str], str]], size: int) -> Vocabulary:
    """Build one vocabulary for several languages, with the arguments of `build_vocabulary`.

    texts: (lines, language) of each language.  The result encodes the first language;
      `dataclasses.replace(vocabulary, language=other)` encodes another one with the same ids.
    """
    if kind not in VOCABULARY_SUFFIXES:
        raise UserError(f'vocabulary {kind!r}: expected one of {", ".join(VOCABULARY_SUFFIXES)}')
    if size <= len(SPECIAL_TOKENS):
        raise UserError(f'vocabulary size {size}: expected at least {len(SPECIAL_TOKENS) + 1}')
    texts = [(list(lines), language) for lines, language in texts]
    digests = [(disk_cache.digest_lines(lines), language) for lines, language in texts]
    key = (kind, size, _library_version(kind), digests)
    count = sum(len(lines) for lines, _ in texts)
    arrays = disk_cache.cached_arrays('vocabulary', count, key, lambda: _compute_vocabulary(kind, texts, size))
    content, language = arrays['content'], texts[0][1]
    if kind == 'words':
        return Vocabulary(kind, language, SPECIAL_TOKENS + tuple(disk_cache.bytes_to_text(content).split('\n')))
    return _from_model(content.tobytes(), language)


def _compute_vocabulary(kind: str, texts: Sequence[tuple[Sequence[str], str]], size: int) -> disk_cache.Arrays:
    """Return the words, one a line, or the serialised sentencepiece model, as bytes in `content`."""
    words = [_words(line, language) for lines, language in texts for line in lines]
    if not any(words):
        raise UserError('no text to build a vocabulary from')
    if kind == 'words':
        counts = Counter(word for line in words for word in line)
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return {'content': disk_cache.text_to_bytes('\n'.join(ranked[: size - len(SPECIAL_TOKENS)]))}
    return {'content': np.frombuffer(_train_sentencepiece(map(_spell, words), size), np.uint8)}


def _to_arrays(sequences: Sequence[Sequence[int]]) -> disk_cache.Arrays:
    ids = np.fromiter(itertools.chain.from_iterable(sequences), np.int32)
    return {'ids': ids, 'lengths': np.fromiter(map(len, sequences), np.int32)}


def _library_version(kind: str) -> str:
    """Version of the library that determines a vocabulary, besides this package; '' for none."""
    return importlib.metadata.version('sentencepiece') if kind == 'subwords' else ''


@functools.lru_cache(maxsize=2**17)  # the lines that a vocabulary is built from are encoded by it afterwards
def _words(line: str, language: str) -> tuple[str, ...]:
    return tuple(map(sys.intern, tokenise(normalise(line, language))))


def warn_of_unknown_words(vocabulary: Vocabulary, lines: Iterable[str]) -> None:
    """Log one warning that lists the words of the lines that are not in the model's training text."""
    words = list(dict.fromkeys(word for line in lines for word in vocabulary.unknown_words(line)))
    if words:
        rest = f' and {len(words) - _MAX_SHOWN} more' if len(words) > _MAX_SHOWN else ''
        shown = ', '.join(words[:_MAX_SHOWN]) + rest
        logging.warning('unknown words, not in the training text of the model: %s', shown)


def save_vocabulary(vocabulary: Vocabulary, path: str | Path) -> Path:
    """Write `path`.txt (a line with kind and language, then one word a line) or `path`.model; returns the path."""
    path = Path(f'{path}{VOCABULARY_SUFFIXES[vocabulary.kind]}')
    if vocabulary.kind == 'words':
        lines = [f'words {vocabulary.language}', *vocabulary.tokens[len(SPECIAL_TOKENS) :]]
        files.write_file(path, ''.join(f'{line}\n' for line in lines))
    else:
        language = vocabulary.language.encode()
        files.write_file(path, vocabulary.model + _LANGUAGE_TAG + bytes([len(language)]) + language)
    return path


def vocabulary_exists(path: str | Path) -> bool:
    """Whether `path`.txt or `path`.model exists, as `save_vocabulary` writes them."""
    return any(Path(f'{path}{suffix}').is_file() for suffix in VOCABULARY_SUFFIXES.values())


def load_vocabulary(path: str | Path) -> Vocabulary:
    """Read the vocabulary that `save_vocabulary` wrote to `path`.txt or `path`.model.

    Raises UserError if neither file exists, or if the file is not a vocabulary.
    """
    word_file, subword_file = Path(f'{path}.txt'), Path(f'{path}.model')
    if word_file.is_file():
        header, *tokens = read_lines(word_file) or ['']
        if not re.fullmatch('words [a-z]+', header):
            raise UserError(f'{word_file}, line 1: {header[:60]!r} is not `words LANGUAGE`')
        return Vocabulary('words', header.split()[1], SPECIAL_TOKENS + tuple(tokens))
    if not subword_file.is_file():
        raise UserError(f'{path}: no such vocabulary, .txt or .model{file_suggestion(subword_file)}')
    match = re.fullmatch(rb'(.+)\xc2\x0c.([a-z]+)', subword_file.read_bytes(), re.DOTALL)
    try:
        if match:
            return _from_model(match[1], match[2].decode())
    except RuntimeError:  # sentencepiece cannot parse the model
        pass
    raise UserError(f'{subword_file}: not a vocabulary of attnlab')


def _from_model(model: bytes, language: str) -> Vocabulary:
    processor = _load_processor(model)
    pieces = processor.id_to_piece(list(range(processor.get_piece_size())))
    return Vocabulary('subwords', language, SPECIAL_TOKENS + tuple(pieces[len(SPECIAL_TOKENS) :]), model)


def _load_processor(model: bytes) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=model)


def _spell(words: Sequence[str]) -> str:
    """Return the words as one line for sentencepiece."""
    return ' '.join(words).replace(_WORD_START, _ESCAPED_WORD_START)


def _train_sentencepiece(lines: Iterable[str], size: int) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, model_type='bpe', vocab_size=size,
            pad_id=PAD, unk_id=UNK, bos_id=BOS, eos_id=EOS,
            pad_piece=SPECIAL_TOKENS[PAD], unk_piece=SPECIAL_TOKENS[UNK],
            bos_piece=SPECIAL_TOKENS[BOS], eos_piece=SPECIAL_TOKENS[EOS],
            normalization_rule_name='identity', byte_fallback=True,
            character_coverage=1.0, hard_vocab_limit=False, split_by_unicode_script=False,
            max_sentence_length=2**30, num_threads=1, minloglevel=2,
        )  # fmt: skip
    except RuntimeError as error:
        required = re.search(r'required_chars\D*\d+\D+(\d+)', str(error))
        reason = f'the characters and bytes of this text alone need {required[1]}' if required else str(error)
        raise UserError(f'vocabulary size {size}: {reason}') from None
    return model.getvalue()


def _label(token: str) -> str:
    start = _WORD_START if token.startswith(_WORD_START) and len(token) > 1 else ''
    return start + strip_spacing_mark(token[len(start) :])
