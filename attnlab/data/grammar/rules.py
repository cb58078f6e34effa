"""From the structure of a sentence to its English, its French and the links between them.

Each `write_` function appends the English words of its part to `english` and returns the French words, which refer to
English words by index.  `elide_and_contract` then joins French words: le homme becomes l'homme, de le roi du roi.
"""

from dataclasses import dataclass
from typing import NamedTuple

from attnlab.data.grammar import lexicon
from attnlab.data.grammar.lexicon import Adjective, Modifier, Noun, Verb, begins_with_vowel


class Word(NamedTuple):
    """One French word with its links.

    sure: the index of the English word of its sure link, -1 for none.  possible: those of its other possible links.
    inverted: it is an adjective that precedes its noun in English and follows it in French.
    """
    text: str
    sure: int
    possible: tuple[int, ...] = ()
    inverted: bool = False


@dataclass(frozen=True, slots=True)
class Phrase:
    """A noun phrase.  Adjectives are in English order; a pair of adjectives is joined by and."""
    noun: Noun
    determiner: str = 'the'  # the, a, some, this, bare, a possessive, a number
    plural: bool = False
    adjectives: tuple['Adjective | tuple[Adjective, Adjective]', ...] = ()
    modifier: Modifier | None = None
    nations: bool = False  # "United Nations" before an institution
    owner: 'Phrase | Name | None' = None  # with 's, in place of the determiner
    of: 'Phrase | None' = None  # the whole that the noun is a part of
    relative: 'Clause | None' = None  # its subject is None, or its object is a Gap

    @property
    def agreement(self) -> tuple[int, bool, bool]:
        """(person, plural, feminine)."""
        return 3, self.plural, self.noun.feminine


@dataclass(frozen=True, slots=True)
class Name:
    """A given name."""
    text: str

    @property
    def agreement(self) -> tuple[int, bool, bool]:
        """(person, plural, feminine)."""
        return 3, False, lexicon.NAMES[self.text]


@dataclass(frozen=True, slots=True)
class Pronoun:
    """A pronoun by its English object form: me, him, her, us, them; as a subject it is written I, he, she, we."""
    english: str

    @property
    def agreement(self) -> tuple[int, bool, bool]:
        """(person, plural, feminine)."""
        return PERSONS[self.english]


@dataclass(frozen=True, slots=True)
class Both:
    """Two noun phrases joined by and."""
    first: 'Phrase | Name'
    second: 'Phrase | Name'

    @property
    def agreement(self) -> tuple[int, bool, bool]:
        """(person, plural, feminine); the masculine prevails."""
        return 3, True, self.first.agreement[2] and self.second.agreement[2]


@dataclass(frozen=True, slots=True)
class Gap:
    """The missing object of a relative clause, which the relative pronoun replaces."""
    agreement: tuple[int, bool, bool]  # person, plural, feminine


@dataclass(frozen=True, slots=True)
class Clause:
    """A clause: subject, verb, object, recipient and place.

    Without a subject, it has that of the clause before or, if it is a relative clause, the noun that it describes.
    """
    subject: 'Phrase | Name | Pronoun | Both | None'
    verb: Verb | None  # None: the copula, with `quality`
    object: 'Phrase | Name | Pronoun | Both | Gap | None' = None
    past: bool = False
    negation: str = ''  # not, never
    adverb: str = ''
    recipient: 'Phrase | Name | Pronoun | None' = None
    place: 'tuple[str, Phrase | Name] | None' = None
    quality: Adjective | None = None  # predicate of the copula
    degree: str = ''  # very, too, before the quality


@dataclass(frozen=True, slots=True)
class Sentence:
    """The structure of a sentence."""
    clauses: tuple[Clause, ...]
    conjunctions: tuple[str, ...] = ()  # one fewer than clauses


PERSONS = {'me': (1, False, False), 'him': (3, False, False), 'her': (3, False, True), 'us': (1, True, False),
           'them': (3, True, False)}
SUBJECTS = {'me': ('I', 'je'), 'him': ('he', 'il'), 'her': ('she', 'elle'), 'us': ('we', 'nous')}
OBJECTS = {'me': 'me', 'him': 'le', 'her': 'la', 'us': 'nous', 'them': 'les'}
DATIVES = {'me': 'me', 'him': 'lui', 'her': 'lui', 'us': 'nous', 'them': 'leur'}
AVOIR, ÊTRE = ('ai', 'a', 'avons', 'ont'), ('suis', 'est', 'sommes', 'sont')
WAS = ('étais', 'était', 'étions', 'étaient')
ELIDED = {'le': "l'", 'la': "l'", 'de': "d'", 'ne': "n'", 'que': "qu'", 'je': "j'", 'me': "m'"}
CONTRACTED = {('de', 'le'): 'du', ('de', 'les'): 'des', ('à', 'le'): 'au', ('à', 'les'): 'aux'}


def elide_and_contract(words: list[Word]) -> list[Word]:
    """Elide before vowels, and contract preposition and article; the preposition's sure link comes first."""
    joined: list[Word] = []
    following = '.'
    for word in reversed(words):
        text = word.text
        if text in ELIDED and begins_with_vowel(following):
            word = word._replace(text=ELIDED[text])
        elif text == 'si' and following == 'il':
            word = word._replace(text="s'")
        elif (text, following) in CONTRACTED:
            article = joined.pop()
            sure = word.sure if word.sure >= 0 else article.sure
            word = Word(CONTRACTED[text, following], sure, word.possible + article.possible + (word.sure, article.sure))
        following = word.text
        joined.append(word)
    return joined[::-1]


def append_word(english: list[str], word: str) -> int:
    """Append one English word and return its index."""
    english.append(word)
    return len(english) - 1


def french_determiner(name: str, feminine: bool, plural: bool, following: str, sure: int) -> Word:
    """Return the French article, possessive or number before the word `following`; `sure`: index of its sure link."""
    vowel = begins_with_vowel(following)
    match name:
        case 'the':
            text = 'les' if plural else 'la' if feminine else 'le'
        case 'a':
            text = 'une' if feminine else 'un'
        case 'this':
            text = 'ces' if plural else 'cette' if feminine else 'cet' if vowel else 'ce'
        case _ if name in lexicon.POSSESSIVES:
            text = lexicon.POSSESSIVES[name][2 if plural else feminine and not vowel]
        case _:
            text = lexicon.NUMBERS[name]
    return Word(text, sure)


def adjective_form(adjective: Adjective, feminine: bool, plural: bool, following: str) -> str:
    """Return the French form of an adjective before the word `following`."""
    if not feminine and not plural and begins_with_vowel(following):
        return adjective.liaison
    return adjective.french[2 * feminine + plural]


def write_noun_phrase(english: list[str], phrase: 'Phrase | Name | Both', negated: bool = False) -> list[Word]:
    """Write a noun phrase.  negated: it is the direct object of a negated verb, so its indefinite article is de."""
    match phrase:
        case Name(text):
            return [Word(text, append_word(english, text))]
        case Both(first, second):
            words = write_noun_phrase(english, first)
            words.append(Word('et', append_word(english, 'and')))
            return words + write_noun_phrase(english, second)
        case Phrase():
            words = write_simple_phrase(english, phrase, negated)
        case _:
            raise TypeError(f'not a noun phrase: {phrase!r}')
    if phrase.relative:
        gap = isinstance(phrase.relative.object, Gap)
        who = 'who' if phrase.noun.classes[0] == 'p' and not gap else 'that'
        words.append(Word('que' if gap else 'qui', append_word(english, who)))
        words += write_clause(english, phrase.relative, phrase.agreement)
    return words


def write_simple_phrase(english: list[str], phrase: Phrase, negated: bool) -> list[Word]:
    """Write a noun phrase without its relative clause.

    English: determiner or owner's, adjectives, modifier, noun, of whole.  French: determiner, the few adjectives that
    precede, noun, de modifier, the other adjectives from the last to the first, de owner or whole.
    """
    noun, plural, feminine, modifier = phrase.noun, phrase.plural, phrase.noun.feminine, phrase.modifier
    start = len(english)
    suffix = write_determiner_or_owner(english, phrase)  # French words at the end of the phrase
    possessive = len(english) - 1  # index of 's, if there is an owner
    united = len(english)
    if phrase.nations:
        english += ['United', 'Nations']
        suffix = [Word('de', -1, (united, united + 1)), Word('les', -1, (united, united + 1)),
                  Word('Nations', united + 1), Word('unies', united, (), True)]
    indexed, conjunction = write_adjectives(english, phrase.adjectives)
    modifier_index = append_word(english, modifier.english) if modifier else -1
    head = append_word(english, noun.english[plural])
    if phrase.determiner == 'a':
        english[start] = lexicon.indefinite_article(english[start + 1])

    words = [Word(noun.french[plural], head)]
    for adjective, index in reversed(indexed):
        if adjective.before:
            words.insert(0, Word(adjective_form(adjective, feminine, plural, words[0].text), index))
    if phrase.owner:  # the French article is definite; it is linked to 's, to the noun and to an initial the
        possible = (possessive, head, start) if english[start] == 'the' else (possessive, head)
        words.insert(0, french_determiner('the', feminine, plural, words[0].text, -1)._replace(possible=possible))
    else:
        words = french_articles(phrase, negated, words, start, head) + words
    if modifier:
        words += [Word('de', -1, (modifier_index, head)), Word(modifier.french, modifier_index)]
    after = [Word(a.french[2 * feminine + plural], index, (), True) for a, index in indexed if not a.before]
    words += [after[0], Word('et', conjunction), after[1]] if conjunction else after[::-1]
    if phrase.of:
        words.append(Word('de', append_word(english, 'of')))
        words += write_noun_phrase(english, phrase.of)
    return words + suffix


def write_determiner_or_owner(english: list[str], phrase: Phrase) -> list[Word]:
    """Write the determiner or the owner; returns the French words of the owner, which follow the noun."""
    if phrase.owner:
        words = write_noun_phrase(english, phrase.owner)
        plural_in_s = phrase.owner.agreement[1] and english[-1].endswith('s')
        return [Word('de', append_word(english, "'" if plural_in_s else "'s")), *words]
    if phrase.determiner != 'bare':
        english.append('these' if phrase.determiner == 'this' and phrase.plural else phrase.determiner)
    return []


def write_adjectives(english: list[str], adjectives: tuple) -> tuple[list[tuple[Adjective, int]], int]:
    """Write the adjectives; return (adjective, index) pairs, and the index of the word 'and' between two (0: none)."""
    indexed: list[tuple[Adjective, int]] = []
    conjunction = 0
    for adjective in adjectives:
        first, *second = adjective if isinstance(adjective, tuple) else (adjective,)
        indexed.append((first, append_word(english, first.english)))
        if second:
            conjunction = append_word(english, 'and')
            indexed.append((second[0], append_word(english, second[0].english)))
    return indexed, conjunction


def french_articles(phrase: Phrase, negated: bool, words: list[Word], start: int, head: int) -> list[Word]:
    """Return the French words before `words`, the noun and the adjectives that precede it.

    start, head: indices of the English determiner and noun.
    """
    name = phrase.determiner
    if negated and name == 'a':
        return [Word('de', start)]
    if negated and name == 'bare':
        return [Word('de', -1, (head,))]
    if name == 'bare' and not phrase.plural:  # partitive: de l'eau, du pain
        return [Word('de', -1, (head,)),
                french_determiner('the', phrase.noun.feminine, False, words[0].text, -1)._replace(possible=(head,))]
    if name in ('bare', 'some'):  # de petites maisons, but des maisons blanches
        text = 'de' if len(words) > 1 else 'des'
        return [Word(text, start) if name == 'some' else Word(text, -1, (head,))]
    return [french_determiner(name, phrase.noun.feminine, phrase.plural, words[0].text, start)]


def write_clause(english: list[str], c: Clause, inherited: tuple[int, bool, bool]) -> list[Word]:
    """Write a clause; inherited: (person, plural, feminine) of the subject if the clause has none of its own."""
    words: list[Word] = []
    agreement = inherited
    if c.subject:
        agreement = c.subject.agreement
        if isinstance(c.subject, Pronoun):
            text, french = SUBJECTS[c.subject.english]
            words = [Word(french, append_word(english, text))]
        else:
            words = write_noun_phrase(english, c.subject)
    if c.verb is None:
        return words + write_copula(english, c, agreement)
    verb = c.verb
    person, plural, feminine = agreement
    form = 2 * plural + (person == 3)

    # English: does not often look for, never looked at
    auxiliary = negation = -1
    if c.negation == 'not':
        auxiliary = append_word(english, 'did' if c.past else 'does' if form == 1 else 'do')
        negation = append_word(english, 'not')
    elif c.negation == 'never':
        negation = append_word(english, 'never')
    adverb = append_word(english, c.adverb) if c.adverb else -1
    verb_index = append_word(english, verb.english[0 if auxiliary >= 0 else 2 if c.past else form == 1])
    auxiliaries = (auxiliary,) if auxiliary >= 0 else ()
    particle = append_word(english, verb.particle) if verb.particle else -1
    with_particle = (particle,) if particle >= 0 and not verb.à else ()

    # French: ne pronoun verb pas adverb, or ne pronoun auxiliary pas adverb participle
    if negation >= 0:
        words.append(Word('ne', -1, (negation, *auxiliaries)))
    object_pronoun = next((part for part in (c.recipient, c.object) if isinstance(part, Pronoun)), None)
    if object_pronoun:
        dative = verb.à or c.recipient is object_pronoun
        possible = (particle,) if verb.à and particle >= 0 else ()
        text = (DATIVES if dative else OBJECTS)[object_pronoun.english]
        words.append(Word(text, append_word(english, object_pronoun.english), possible))
    if c.past:
        words.append(Word((ÊTRE if verb.être else AVOIR)[form], -1, (verb_index, *auxiliaries)))
    else:
        words.append(Word(verb.french[form], verb_index, auxiliaries + with_particle))
    if negation >= 0:
        words.append(Word('pas' if c.negation == 'not' else 'jamais', negation))
    if c.adverb:
        words.append(Word(lexicon.ADVERBS[c.adverb], adverb))
    if c.past:
        preceding = c.object if isinstance(c.object, Gap) or object_pronoun and not dative else None
        # With être the participle agrees with the subject, with avoir with an object that precedes it.
        agrees_with = agreement if verb.être else preceding.agreement if preceding else (3, False, False)
        participle = verb.participle + 'e' * agrees_with[2] + 's' * agrees_with[1]
        words.append(Word(participle, verb_index, with_particle))

    return words + write_complements(english, c, verb_index, particle)


def write_complements(english: list[str], c: Clause, verb_index: int, particle: int) -> list[Word]:
    """Write the object, the recipient and the place, which follow the verb in both languages.

    verb_index, particle: indices of the English verb and its particle (-1: none).
    """
    words: list[Word] = []
    if c.object and c.verb and not isinstance(c.object, (Pronoun, Gap)):
        if c.verb.à:
            words.append(Word('à', particle) if particle >= 0 else Word('à', -1, (verb_index,)))
        words += write_noun_phrase(english, c.object, bool(c.negation) and not c.verb.à)
    if c.recipient and not isinstance(c.recipient, Pronoun):
        words.append(Word('à', append_word(english, 'to')))
        words += write_noun_phrase(english, c.recipient)
    return words + (write_place(english, *c.place) if c.place else [])


def write_copula(english: list[str], c: Clause, agreement: tuple[int, bool, bool]) -> list[Word]:
    """Write the copula, its adverbs and the quality: is not very old, n'est pas très vieille; was is the imparfait."""
    assert c.quality
    person, plural, feminine = agreement
    form = 2 * plural + (person == 3)
    verb_index = append_word(english, (('was', 'was', 'were', 'were') if c.past else ('am', 'is', 'are', 'are'))[form])
    words = [Word((WAS if c.past else ÊTRE)[form], verb_index)]
    if c.negation:
        negation = append_word(english, c.negation)
        words.insert(0, Word('ne', -1, (negation,)))
        words.append(Word('pas' if c.negation == 'not' else 'jamais', negation))
    if c.adverb:
        words.append(Word(lexicon.ADVERBS[c.adverb], append_word(english, c.adverb)))
    if c.degree:
        words.append(Word(lexicon.DEGREES[c.degree], append_word(english, c.degree)))
    words.append(Word(c.quality.french[2 * feminine + plural], append_word(english, c.quality.english)))
    return words


def write_place(english: list[str], preposition: str, phrase: 'Phrase | Name') -> list[Word]:
    """Write a preposition and its noun phrase: behind the house, derrière la maison; near: près de; to: à."""
    match preposition:
        case 'to':
            words = [Word('à', append_word(english, 'to'))]
        case 'near':
            at = append_word(english, 'near')
            words = [Word('près', at), Word('de', -1, (at,))]
        case 'in front of':
            at = len(english)
            english += ['in', 'front', 'of']
            words = [Word('devant', at + 1, (at, at + 2))]
        case _:
            words = [Word(lexicon.PREPOSITIONS[preposition][0], append_word(english, preposition))]
    return words + write_noun_phrase(english, phrase)


def write_sentence(structure: Sentence) -> tuple[list[str], list[Word]]:
    """Return the English and the French words of a sentence, including the final period."""
    english: list[str] = []
    words: list[Word] = []
    inherited = (3, False, False)
    for i, c in enumerate(structure.clauses):
        if i:
            if structure.conjunctions[i - 1] == 'but':
                words.append(Word(',', append_word(english, ',')))
            at = append_word(english, structure.conjunctions[i - 1])
            first, *rest = lexicon.CONJUNCTIONS[english[at]]
            words.append(Word(first, at))
            words += [Word(text, -1, (at,)) for text in rest]
        words += write_clause(english, c, inherited)
        inherited = c.subject.agreement if c.subject else inherited
    words.append(Word('.', append_word(english, '.')))
    return english, elide_and_contract(words)
