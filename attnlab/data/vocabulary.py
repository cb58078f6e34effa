"""From text to ids and back, by words or by sub-words (byte-pair encoding, Sennrich et al. 2016).

Both kinds cut the words of `tokenise(normalise(text, language))`, so that no id spans two words, and both give the
normalised text back; sub-words do so for any text (unseen characters become bytes), words where all are known.
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
from attnlab.data import kept
from attnlab.data.text import detokenise, file_suggestion, normalise, read_lines, strip_spacing_mark, tokenise
from attnlab.errors import UserError

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SPECIAL_TOKENS = ('<pad>', '<unk>', '<s>', '</s>')
_SHOWN = 20  # unknown words named in one line
VOCABULARY_SUFFIXES = {'words': '.txt', 'subwords': '.model'}

# sentencepiece writes `▁` for the start of a word: one in the text goes in as a code point that normalised text lacks.
_START, _LITERAL_START = '▁', '\ufdd0'
_BYTE = re.compile('<0x[0-9A-F]{2}>')
_LANGUAGE_TAG = b'\xc2\x0c'  # key of field 200, of bytes: the first that a sentencepiece model leaves to others


@dataclass(frozen=True)
class Vocabulary:
    """`tokens[i]` is the token of id i, the first four SPECIAL; `model` is sentencepiece's file, empty for words.

    An id outside of 0 to size - 1 raises ValueError, before an array's indexing could clamp it in silence.
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
        """The ids of a text, which is normalised first; neither BOS nor EOS."""
        return self.encode_batch([text])[0]

    def encode_batch(self, lines: Iterable[str]) -> list[list[int]]:
        """`encode` of each line."""
        lines = list(lines)
        key = (self._digest, kept.digest(lines))
        found = kept.kept(f'ids-{self.language}', len(lines), key, lambda: _packed(self._encode_all(lines)))
        ids, lengths = found['ids'].tolist(), found['lengths'].tolist()
        ends = itertools.accumulate(lengths)
        return [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def _encode_all(self, lines: Sequence[str]) -> list[list[int]]:
        words = [_words(line, self.language) for line in lines]
        if self.kind == 'words':
            return [[self._ids.get(word, UNK) for word in line] for line in words]
        return self._processor.encode([_spell(line) for line in words], num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        """The text up to EOS, without PAD and BOS; an unknown word reads `<unk>`."""
        ids = [i for i in itertools.takewhile(lambda i: i != EOS, checked_ids(ids, self.size)) if i not in (PAD, BOS)]
        words = (self._word(ids[start:stop]) for start, stop in self._spans(ids))
        return detokenise(filter(None, words))  # a model may write a word's start and nothing behind it

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One readable label an id; a sub-word that starts a word has `▁` in front, EOS is `</s>`."""
        return [_label(self.tokens[i]) for i in checked_ids(ids, self.size)]

    def words(self, ids: Sequence[int]) -> list[tuple[str, int, int]]:
        """The words of all ids, (label, start, stop): word w is ids[start:stop]; each special id is a word of its own.

        The labels of an encoded text are the bare words of `tokenise`.
        """
        ids = checked_ids(ids, self.size)
        return [
            (strip_spacing_mark(self._word(ids[start:stop])) or _START, start, stop) for start, stop in self._spans(ids)
        ]

    def is_unknown(self, ids: Sequence[int]) -> bool:
        """Whether the ids of a word hold one that no training sentence had: `<unk>`, or a byte in sub-words.

        Sub-words have a piece for each character of the training text, and bytes for those of no other.
        """
        bytewise = self.kind == 'subwords'
        return any(i == UNK or (bytewise and _BYTE.fullmatch(self.tokens[i])) for i in checked_ids(ids, self.size))

    def unknown_words(self, text: str) -> list[str]:
        """The words of a text whose ids are unknown, as they were typed."""
        words, ids = _words(text, self.language), self.encode(text)
        spans = zip(words, self.words(ids), strict=True)
        return [strip_spacing_mark(word) for word, (_, start, stop) in spans if self.is_unknown(ids[start:stop])]

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    @functools.cached_property
    def _digest(self) -> str:
        return kept.digest([self.kind, self.language, _library(self.kind), self.model.hex(), *self.tokens])

    @functools.cached_property
    def _processor(self) -> Any:
        return _load_processor(self.model)

    def _spans(self, ids: list[int]) -> list[tuple[int, int]]:
        def starts(position: int) -> bool:
            around = ids[max(position - 1, 0) : position + 1]
            return position == 0 or min(around) < len(SPECIAL_TOKENS) or self.tokens[ids[position]].startswith(_START)

        whole = self.kind == 'words'
        edges = [position for position in range(len(ids)) if whole or starts(position)] + [len(ids)]
        return list(itertools.pairwise(edges))

    def _word(self, ids: list[int]) -> str:
        """The token that a span of ids spells, with its mark."""
        if self.kind == 'words' or ids[0] < len(SPECIAL_TOKENS):
            return self.tokens[ids[0]]
        return self._processor.decode(ids).replace(_LITERAL_START, _START)


def checked_ids(ids: Sequence[int] | np.ndarray, size: int) -> list[int]:
    """The ids as a list; ValueError for one outside of 0 to size - 1."""
    listed = [operator.index(i) for i in ids]
    for i in listed:
        if not 0 <= i < size:
            raise ValueError(f'id {i} is outside of the vocabulary: expected 0 to {size - 1}')
    return listed


def build_vocabulary(kind: str, lines: Iterable[str], size: int, language: str) -> Vocabulary:
    """A vocabulary of at most `size` ids from the lines of a training split, the same on every machine.

    Words: the most frequent, equally frequent ones in the order of their code points.  Sub-words: byte-pair encoding.
    """
    return build_shared_vocabulary(kind, [(lines, language)], size)


def build_shared_vocabulary(kind: str, texts: Sequence[tuple[Iterable[str], str]], size: int) -> Vocabulary:
    """`build_vocabulary` from the lines of several languages, (lines, language) each; it encodes the first one.

    `dataclasses.replace(..., language=other)` encodes another with the same ids.
    """
    if kind not in VOCABULARY_SUFFIXES:
        raise UserError(f'vocabulary {kind!r}: expected one of {", ".join(VOCABULARY_SUFFIXES)}')
    if size <= len(SPECIAL_TOKENS):
        raise UserError(f'vocabulary size {size}: expected at least {len(SPECIAL_TOKENS) + 1}')
    texts = [(list(lines), language) for lines, language in texts]
    key = (kind, size, _library(kind), [(kept.digest(lines), language) for lines, language in texts])
    count = sum(len(lines) for lines, _ in texts)
    file, language = kept.kept('vocabulary', count, key, lambda: _built(kind, texts, size))['made'], texts[0][1]
    if kind == 'words':
        return Vocabulary(kind, language, SPECIAL_TOKENS + tuple(kept.to_text(file).split('\n')))
    return _subwords(file.tobytes(), language)


def _built(kind: str, texts: Sequence[tuple[Sequence[str], str]], size: int) -> kept.Arrays:
    """The words, a line each, or sentencepiece's model."""
    words = [_words(line, language) for lines, language in texts for line in lines]
    if not any(words):
        raise UserError('no text to build a vocabulary from')
    if kind == 'words':
        counts = Counter(word for line in words for word in line)
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return {'made': kept.from_text('\n'.join(ranked[: size - len(SPECIAL_TOKENS)]))}
    return {'made': np.frombuffer(_train(map(_spell, words), size), np.uint8)}


def _packed(sequences: Sequence[Sequence[int]]) -> kept.Arrays:
    ids = np.fromiter(itertools.chain.from_iterable(sequences), np.int32)
    return {'ids': ids, 'lengths': np.fromiter(map(len, sequences), np.int32)}


def _library(kind: str) -> str:
    """The version of what has a say in it, beside this package."""
    return importlib.metadata.version('sentencepiece') if kind == 'subwords' else ''


@functools.lru_cache(maxsize=2**17)  # a vocabulary is built from the lines that it then encodes
def _words(line: str, language: str) -> tuple[str, ...]:
    return tuple(map(sys.intern, tokenise(normalise(line, language))))


def warn_of_unknown_words(vocabulary: Vocabulary, lines: Iterable[str]) -> None:
    """Logs one line that names the words of all lines that a model with this vocabulary was not trained on."""
    words = list(dict.fromkeys(word for line in lines for word in vocabulary.unknown_words(line)))
    if words:
        shown = ', '.join(words[:_SHOWN]) + (f' and {len(words) - _SHOWN} more' if len(words) > _SHOWN else '')
        logging.warning('unknown to the model, as its training text lacks them: %s', shown)


def save_vocabulary(vocabulary: Vocabulary, path: str | Path) -> Path:
    """Writes `path`.txt (a line of kind and language, then one word a line) or `path`.model, and returns which."""
    path = Path(f'{path}{VOCABULARY_SUFFIXES[vocabulary.kind]}')
    if vocabulary.kind == 'words':
        lines = [f'words {vocabulary.language}', *vocabulary.tokens[len(SPECIAL_TOKENS) :]]
        files.write_file(path, ''.join(f'{line}\n' for line in lines))
    else:
        language = vocabulary.language.encode()
        files.write_file(path, vocabulary.model + _LANGUAGE_TAG + bytes([len(language)]) + language)
    return path


def vocabulary_exists(path: str | Path) -> bool:
    """Whether there is what `save_vocabulary` writes to `path` + .txt or .model."""
    return any(Path(f'{path}{suffix}').is_file() for suffix in VOCABULARY_SUFFIXES.values())


def load_vocabulary(path: str | Path) -> Vocabulary:
    """What `save_vocabulary` wrote to `path` + .txt or .model; a missing or foreign file raises UserError."""
    words, subwords = Path(f'{path}.txt'), Path(f'{path}.model')
    if words.is_file():
        header, *tokens = read_lines(words) or ['']
        if not re.fullmatch('words [a-z]+', header):
            raise UserError(f'{words}, line 1: {header[:60]!r} is not `words LANGUAGE`')
        return Vocabulary('words', header.split()[1], SPECIAL_TOKENS + tuple(tokens))
    if not subwords.is_file():
        raise UserError(f'{path}: no such vocabulary, .txt or .model{file_suggestion(subwords)}')
    match = re.fullmatch(rb'(.+)\xc2\x0c.([a-z]+)', subwords.read_bytes(), re.DOTALL)
    try:
        if match:
            return _subwords(match[1], match[2].decode())
    except RuntimeError:  # sentencepiece cannot parse it
        pass
    raise UserError(f'{subwords}: not a vocabulary of attnlab')


def _subwords(model: bytes, language: str) -> Vocabulary:
    processor = _load_processor(model)
    pieces = processor.id_to_piece(list(range(processor.get_piece_size())))
    return Vocabulary('subwords', language, SPECIAL_TOKENS + tuple(pieces[len(SPECIAL_TOKENS) :]), model)


def _load_processor(model: bytes) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=model)


def _spell(words: Sequence[str]) -> str:
    return ' '.join(words).replace(_START, _LITERAL_START)


def _train(lines: Iterable[str], size: int) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, model_type='bpe', vocab_size=size,
            pad_id=PAD, unk_id=UNK, bos_id=BOS, eos_id=EOS, pad_piece=SPECIAL_TOKENS[PAD], unk_piece=SPECIAL_TOKENS[UNK],
            bos_piece=SPECIAL_TOKENS[BOS], eos_piece=SPECIAL_TOKENS[EOS], normalization_rule_name='identity', byte_fallback=True,
            character_coverage=1.0, hard_vocab_limit=False, split_by_unicode_script=False,
            max_sentence_length=2**30, num_threads=1, minloglevel=2,
        )  # fmt: skip
    except RuntimeError as error:
        required = re.search(r'required_chars\D*\d+\D+(\d+)', str(error))
        reason = f'the characters and bytes of this text alone need {required[1]}' if required else str(error)
        raise UserError(f'vocabulary size {size}: {reason}') from None
    return model.getvalue()


def _label(token: str) -> str:
    start = _START if token.startswith(_START) and len(token) > 1 else ''
    return start + strip_spacing_mark(token[len(start) :])
