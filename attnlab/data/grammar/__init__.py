"""An English-French grammar that generates sentence pairs with gold word alignments; nothing is downloaded.

    >>> pair = grammar_example('train', seed=0, index=19)  # a function of its arguments alone
    >>> pair.source, pair.target, pair.links

Phenomena: agreement in gender and number; adjectives after the noun, the few before it, and both at once; elision and
contraction; compounds whose words are in reverse order; ne ... pas, ne ... jamais, and de in place of a negated
indefinite article; object pronouns before the verb; possessives in reverse order; adverbs after the verb; passé composé
with the agreement of its participle; coordination, relative and subordinate clauses.

Each English sentence has exactly one French translation.  Every sense of an English word has one French word, and every
noun one gender (a teacher is un professeur, a friend un ami).  It, you, they, and other words that would leave a gender
or a number open do not occur.  The English past is the passé composé (was: the imparfait); states (love, know, live)
and read, whose past looks like its present, have no past.
Sentences begin in lower case and end in a period.  Names, English adjectives of origin and the English names of
institutions are capitalised; in French, the names of institutions are common nouns in lower case.

Splits: train, valid and test have the same distribution, of sentences of at most 16 English words; a hash of the
English text assigns each sentence to one of them.  Each sentence of test_combinations has a pair of adjective and noun
that is in none of these three splits (a tenth of all pairs, chosen by a hash, predicates included).  test_lengths has
sentences of 18 to 30 English words.

Guide to the links
------------------
Links are sure (S) or possible (P), as in Och and Ney 2003, "A Systematic Comparison of Various Statistical Alignment
Models".  S: the link is unambiguous.  P: it is ambiguous, mostly for function words that the other language does not
have and for the parts of a longer expression.  S is a subset of P.  Every French word has at least one link and at most
one S link; an English word may have several.

- Content words, names, pronouns, conjunctions, adverbs, the comma before but, the final period: S to their translation.
- Determiners: S to their translation (the-le, a-un, some-des, my-mon).  A French article without an English one (des,
  du, de la, de before a bare noun: drinks water, boit de l'eau) is P to the noun.  De for a negated a: S to a.
- Elided forms (l', d', qu') are words and keep the links of the full form.
- Contractions (du, des, au, aux) hold a preposition and an article.  S to the English preposition (of, to, 's), P to
  the article; S to the article where the preposition has no sure link of its own.
- Negation: pas-not and jamais-never S; ne P to the English negation, and to do.  The do of a negation has no
  translation: P to ne and to the finite French verb, whose tense and number it shows.
- Passé composé: the participle is S to the English verb; the auxiliary is P to it, and to did.
- Verb and particle (looks at, waits for): the French verb is S to the verb, P to the particle.
- Object pronouns: S to their translation, in any position; lui for "to him" is also P to the to.  A verb that takes à
  only in French (obeys the king, obéit au roi): à is P to the verb.
- Possessives: de is S to 's (or '); the article of the owned noun, which English does not have, is P to 's, to the
  owned noun, and to an initial the.
- Compounds: each noun S to its translation; the de between them P to both English nouns.  United Nations: unies-United
  and Nations-Nations S, des P to both.
- near: près S, its de P.  in front of: devant S to front, P to in and of.  because: parce S, que P.
- Relative pronouns: S (who-qui, that-que).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from zlib import crc32

import numpy as np

from attnlab.data import disk_cache
from attnlab.data.alignments import GoldLinks, Link
from attnlab.data.grammar.rules import Sentence, Word, write_sentence
from attnlab.data.grammar.sampling import adjective_noun_pairs, draw_sentence, is_held_out
from attnlab.data.pairs import SentencePairs
from attnlab.data.text import detokenise
from attnlab.errors import UserError

GRAMMAR_SPLITS = ('train', 'valid', 'test', 'test_combinations', 'test_lengths')
MAX_LENGTH = 16
"""Most English words of a sentence, period included, in all splits except test_lengths."""
LONG_LENGTHS = (18, 30)
"""Fewest and most English words of a sentence of test_lengths, period included."""


@dataclass(frozen=True, slots=True)
class GrammarExample:
    """A sentence pair with its alignment.

    source_words, target_words: the words `tokenise(normalise(text, language))` of each side.
    links: the gold links (source, target).
    inverted: the links of adjectives that precede their noun in English and follow it in French.
    source, target: the text of each side.
    """
    source_words: tuple[str, ...]
    target_words: tuple[str, ...]
    links: GoldLinks
    inverted: tuple[tuple[int, int], ...]
    source: str
    target: str


def grammar_example(split: str, seed: int, index: int) -> GrammarExample:
    """Return the example at `index` of a split; it is a function of the arguments alone.

    Raises UserError for an unknown split.
    """
    if split not in GRAMMAR_SPLITS:
        raise UserError(f'split {split!r}: expected one of {", ".join(GRAMMAR_SPLITS)}')
    rng = Random(f'{split} {seed} {index}')
    while True:
        sentence = draw_sentence(rng, split == 'test_combinations', split == 'test_lengths')
        english, french = write_sentence(sentence)
        source = detokenise(english)
        if _belongs_to(split, source, len(english), sentence):
            return _to_example(english, french, source)


def example_of_structure(sentence: Sentence) -> GrammarExample:
    """Return the English, the French and the links of the structure of a sentence."""
    english, french = write_sentence(sentence)
    return _to_example(english, french, detokenise(english))


def grammar_examples(split: str, count: int, seed: int) -> list[GrammarExample]:
    """Return the first `count` examples of a split."""
    return [grammar_example(split, seed, index) for index in range(count)]


def grammar_pairs(split: str, count: int, seed: int, linked: bool = True) -> SentencePairs:
    """Return the text of the first `count` examples of a split and, if `linked`, their gold links."""
    arrays = disk_cache.cached_arrays(
        f'grammar-{split}', count, (seed,), lambda: _to_arrays(grammar_examples(split, count, seed))
    )
    texts = (disk_cache.bytes_to_text(arrays[side]) for side in ('source', 'target'))
    source, target = (tuple(text.split('\n')[:count]) for text in texts)
    if not linked:
        return SentencePairs(source, target)
    sure, possible = (_from_link_rows(arrays[name], count) for name in ('sure', 'possible'))
    return SentencePairs(source, target, tuple(map(GoldLinks, sure, possible)))


def _to_arrays(examples: list[GrammarExample]) -> disk_cache.Arrays:
    """Return text as bytes, one sentence a line, and links as rows (example, source, target)."""

    def text(lines: Iterable[str]) -> np.ndarray:
        return disk_cache.text_to_bytes('\n'.join(lines))

    def link_rows(links: Iterable[frozenset[Link]]) -> np.ndarray:
        return np.array([(n, *link) for n, example_links in enumerate(links) for link in sorted(example_links)], int)

    return {
        'source': text(e.source for e in examples), 'target': text(e.target for e in examples),
        'sure': link_rows(e.links.sure for e in examples), 'possible': link_rows(e.links.possible for e in examples),
    }  # fmt: skip


def _from_link_rows(rows: np.ndarray, count: int) -> list[frozenset[Link]]:
    links: list[list[Link]] = [[] for _ in range(count)]
    for n, i, j in rows.tolist():
        links[n].append((i, j))
    return list(map(frozenset, links))


def _belongs_to(split: str, source: str, length: int, sentence: Sentence) -> bool:
    """Whether a sentence is in a split; a hash of the English assigns it to exactly one of train, valid and test."""
    match split:
        case 'test_lengths':
            return LONG_LENGTHS[0] <= length <= LONG_LENGTHS[1]
        case 'test_combinations':
            return length <= MAX_LENGTH and any(is_held_out(*pair) for pair in adjective_noun_pairs(sentence))
        case _:
            bucket = crc32(source.encode()) % 8
            assigned = 'valid' if bucket == 0 else 'test' if bucket == 1 else 'train'
            return length <= MAX_LENGTH and split == assigned


def _to_example(english: list[str], french: list[Word], source: str) -> GrammarExample:
    sure, possible, inverted = [], [], []
    for j, word in enumerate(french):
        if word.sure >= 0:
            sure.append((word.sure, j))
            if word.inverted:
                inverted.append((word.sure, j))
        possible += [(i, j) for i in word.possible if i >= 0]
    texts = tuple(word.text for word in french)
    links = GoldLinks(frozenset(sure), frozenset(sure + possible))
    return GrammarExample(tuple(english), texts, links, tuple(inverted), source, detokenise(texts))
