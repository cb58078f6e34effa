"""An English-French grammar of ours: unlimited sentence pairs with gold word alignments, nothing to download.

    >>> pair = example('train', seed=0, index=19)  # a pure function of its arguments
    >>> pair.source, pair.target, pair.links

Phenomena: agreement in gender and number; adjectives after the noun, the few before it, and both at once; elision and
contraction; compounds that reverse whole; ne ... pas, ne ... jamais, and the de of a negated indefinite; object
pronouns before the verb; possessives that invert; adverbs behind the verb; passé composé with the agreement of its
participle; coordination, relative and subordinate clauses.

The English determines the French.  Every sense of an English word has one French word, every noun one gender (a teacher
is un professeur, a friend un ami); it, you, they, and whatever would leave a gender or a number open, do not occur; the
English past is the passé composé (was: the imparfait); states (love, know, live) and read, whose past looks like its
present, have none.
Sentences begin in lower case and end in a period; capitals belong to names, to English adjectives of origin, and to
the English names of institutions, which French writes here as the common nouns they are made of.

Splits: train, valid, test are one distribution of sentences of at most 16 English words, kept apart by a hash of the
English text.  test_combinations holds, in every sentence, an adjective with a noun that it never meets in those three
(a tenth of all pairs, by hash, predicates included); test_lengths holds sentences of 18 to 30 English words.

Guide to the links
------------------
Links are sure (S) or possible (P), as in Och and Ney 2003, "A Systematic Comparison of Various Statistical Alignment
Models": S where the link is beyond doubt, P where it is not, above all for function words that the other language lacks
and for the parts of a longer expression.  S is a subset of P.  Every French word has at least one link and at most one
S link; an English word may have several.

- Content words, names, pronouns, conjunctions, adverbs, the comma before but, the final period: S to their translation.
- Determiners: S to theirs (the-le, a-un, some-des, my-mon).  A French article without an English one (des, du, de la,
  de before a bare noun: drinks water, boit de l'eau) is P to the noun.  De for a negated a: S to a, whose place it has.
- Elided forms (l', d', qu') are words and keep the links of the full form.
- Contractions (du, des, au, aux) hold a preposition and an article.  S to the English preposition (of, to, 's), P to
  the article; S to the article where the preposition has no sure link of its own.
- Negation: pas-not and jamais-never S; ne P to the English negation, and to do.  The do of a negation has no
  translation: P to ne and to the finite French verb, whose tense and number it shows.
- Passé composé: the participle is S to the English verb; the auxiliary is P to it, and to did.
- Verb and particle (looks at, waits for): the French verb is S to the verb, P to the particle.
- Object pronouns: S to theirs, wherever they stand; lui for "to him" is also P to the to.  A verb that takes à in
  French alone (obeys the king, obéit au roi): à is P to the verb.
- Possessives: de is S to 's (or '); the article of the owned noun, which English does not have, is P to 's, to the
  owned noun, and to an initial the.
- Compounds: each noun S to its translation; the de between them P to both English nouns.  United Nations: unies-United
  and Nations-Nations S, des P to both.
- near: près S, its de P.  in front of: devant S to front, P to in and of.  because: parce S, que P.
- Relative pronouns: S (who-qui, that-que).
"""

from dataclasses import dataclass
from random import Random
from zlib import crc32

import numpy as np

from attnlab.data import kept
from attnlab.data.alignments import GoldLinks
from attnlab.data.grammar.rules import Sentence, Word, sentence
from attnlab.data.grammar.sampling import combinations, held_out, structure
from attnlab.data.pairs import SentencePairs
from attnlab.data.text import detokenise
from attnlab.errors import UserError

GRAMMAR_SPLITS = ('train', 'valid', 'test', 'test_combinations', 'test_lengths')
LONGEST, LONG = 16, (18, 30)  # English words, the period included


@dataclass(frozen=True, slots=True)
class GrammarExample:
    """A sentence pair.  The words are those of `tokenise(normalise(text, language))`; links are (source, target)."""
    source_words: tuple[str, ...]
    target_words: tuple[str, ...]
    links: GoldLinks
    inverted: tuple[tuple[int, int], ...]  # adjectives that precede their noun in English and follow it in French
    source: str
    target: str


def grammar_example(split: str, seed: int, index: int) -> GrammarExample:
    """The example at `index` of the split drawn by `seed`: a pure function of its arguments."""
    if split not in GRAMMAR_SPLITS:
        raise UserError(f'split {split!r}: expected one of {", ".join(GRAMMAR_SPLITS)}')
    rng = Random(f'{split} {seed} {index}')
    while True:
        drawn = structure(rng, split == 'test_combinations', split == 'test_lengths')
        english, words = sentence(drawn)
        source = detokenise(english)
        if _belongs(split, source, len(english), drawn):
            return _example(english, words, source)


def example_of_structure(drawn: Sentence) -> GrammarExample:
    """The example of a structure: what the grammar makes of it."""
    english, words = sentence(drawn)
    return _example(english, words, detokenise(english))


def grammar_examples(split: str, count: int, seed: int) -> list[GrammarExample]:
    """The first `count` of a split."""
    return [grammar_example(split, seed, index) for index in range(count)]


def grammar_pairs(split: str, count: int, seed: int, linked: bool = True) -> SentencePairs:
    """The first `count` of a split as text and, if linked, gold links."""
    made = kept.kept(f'grammar-{split}', count, (seed,), lambda: _packed(grammar_examples(split, count, seed)))
    source, target = (tuple(kept.to_text(made[side]).split('\n')[:count]) for side in ('source', 'target'))
    if not linked:
        return SentencePairs(source, target)
    sure, possible = (_links(made[name], count) for name in ('sure', 'possible'))
    return SentencePairs(source, target, tuple(map(GoldLinks, sure, possible)))


def _packed(drawn: list[GrammarExample]) -> dict[str, np.ndarray]:
    """Text as bytes, a line each; links as rows (example, source, target)."""
    text = lambda lines: kept.from_text('\n'.join(lines))
    rows = lambda each: np.array([(n, *link) for n, links in enumerate(each) for link in sorted(links)], int)
    return {
        'source': text(e.source for e in drawn), 'target': text(e.target for e in drawn),
        'sure': rows(e.links.sure for e in drawn), 'possible': rows(e.links.possible for e in drawn),
    }  # fmt: skip


def _links(rows: np.ndarray, count: int) -> list[frozenset[tuple[int, int]]]:
    found: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for n, i, j in rows.tolist():
        found[n].append((i, j))
    return list(map(frozenset, found))


def _belongs(split: str, source: str, length: int, drawn: Sentence) -> bool:
    """The hash of its English puts every sentence in train, valid or test: no sentence stands in two of them."""
    match split:
        case 'test_lengths':
            return LONG[0] <= length <= LONG[1]
        case 'test_combinations':
            return length <= LONGEST and any(held_out(*pair) for pair in combinations(drawn))
        case _:
            family = crc32(source.encode()) % 8
            return length <= LONGEST and split == ('valid' if family == 0 else 'test' if family == 1 else 'train')


def _example(english: list[str], words: list[Word], source: str) -> GrammarExample:
    sure, possible, inverted = [], [], []
    for j, (_, at, maybe, turned) in enumerate(words):
        if at >= 0:
            sure.append((at, j))
            if turned:
                inverted.append((at, j))
        possible += [(i, j) for i in maybe if i >= 0]
    french = tuple(word.text for word in words)
    links = GoldLinks(frozenset(sure), frozenset(sure + possible))
    return GrammarExample(tuple(english), french, links, tuple(inverted), source, detokenise(french))
