"""From the structure of a sentence to its English, its French and the links between them.

Every rule writes its English words onto `english` and returns its French words, which point at the English by index;
so a rule reads like the sentence it makes.  `joined` then elides and contracts the French: le homme, l'homme;
de le roi, du roi.
"""

from dataclasses import dataclass
from typing import NamedTuple

from attnlab.data.grammar import lexicon
from attnlab.data.grammar.lexicon import Adjective, Modifier, Noun, Verb, begins_with_vowel


class Word(NamedTuple):
    """One French word: the English word it is surely linked to (-1: none), and the possible ones."""
    text: str
    sure: int
    possible: tuple[int, ...] = ()
    inverted: bool = False


@dataclass(frozen=True, slots=True)
class Phrase:
    """A noun phrase.  Adjectives stand in English order; a pair of adjectives is joined by and."""
    noun: Noun
    determiner: str = 'the'  # the, a, some, this, bare, a possessive, a number
    plural: bool = False
    adjectives: tuple['Adjective | tuple[Adjective, Adjective]', ...] = ()
    modifier: Modifier | None = None
    nations: bool = False  # "United Nations" before an institution
    owner: 'Phrase | Name | None' = None  # with 's, in place of the determiner
    of: 'Phrase | None' = None
    relative: 'Clause | None' = None  # its subject is None, or its object is GAP

    @property
    def agreement(self) -> tuple[int, bool, bool]:
        return 3, self.plural, self.noun.feminine


@dataclass(frozen=True, slots=True)
class Name:
    text: str

    @property
    def agreement(self) -> tuple[int, bool, bool]:
        return 3, False, lexicon.NAMES[self.text]


@dataclass(frozen=True, slots=True)
class Pronoun:
    """English object form: me, him, her, us, them; as a subject it is I, he, she, we."""
    english: str

    @property
    def agreement(self) -> tuple[int, bool, bool]:
        return PERSONS[self.english]


@dataclass(frozen=True, slots=True)
class Both:
    first: 'Phrase | Name'
    second: 'Phrase | Name'

    @property
    def agreement(self) -> tuple[int, bool, bool]:
        """The masculine wins."""
        return 3, True, self.first.agreement[2] and self.second.agreement[2]


@dataclass(frozen=True, slots=True)
class Gap:
    """The object that a relative pronoun stands for."""
    agreement: tuple[int, bool, bool]


@dataclass(frozen=True, slots=True)
class Clause:
    """Subject, verb, object, to a recipient, at a place.  No subject: that of the clause before, or of the relative."""
    subject: 'Phrase | Name | Pronoun | Both | None'
    verb: Verb | None  # None: the copula, with `quality`
    object: 'Phrase | Name | Pronoun | Both | Gap | None' = None
    past: bool = False
    negation: str = ''  # not, never
    adverb: str = ''
    recipient: 'Phrase | Name | Pronoun | None' = None
    place: 'tuple[str, Phrase | Name] | None' = None
    quality: Adjective | None = None
    degree: str = ''


@dataclass(frozen=True, slots=True)
class Sentence:
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


def joined(words: list[Word]) -> list[Word]:
    """Elides before a vowel, then contracts; a contraction carries the preposition's sure link, if it has one."""
    out: list[Word] = []
    following = '.'
    for word in reversed(words):
        text = word.text
        if text in ELIDED and begins_with_vowel(following):
            word = word._replace(text=ELIDED[text])
        elif text == 'si' and following == 'il':
            word = word._replace(text="s'")
        elif (text, following) in CONTRACTED:
            article = out.pop()
            sure = word.sure if word.sure >= 0 else article.sure
            word = Word(CONTRACTED[text, following], sure, word.possible + article.possible + (word.sure, article.sure))
        following = word.text
        out.append(word)
    return out[::-1]


def add(english: list[str], word: str) -> int:
    """Writes one English word; returns its index."""
    english.append(word)
    return len(english) - 1


def determiner(name: str, feminine: bool, plural: bool, following: str, at: int) -> Word:
    """The French article or possessive before the word `following`, surely linked to `at`."""
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
    return Word(text, at)


def adjective_form(adjective: Adjective, feminine: bool, plural: bool, following: str) -> str:
    if not feminine and not plural and begins_with_vowel(following):
        return adjective.liaison
    return adjective.french[2 * feminine + plural]


def noun_phrase(english: list[str], phrase: 'Phrase | Name | Both', negated: bool = False) -> list[Word]:
    """`negated`: the direct object of a negated verb, whose indefinite article is de."""
    match phrase:
        case Name(text):
            return [Word(text, add(english, text))]
        case Both(first, second):
            words = noun_phrase(english, first)
            words.append(Word('et', add(english, 'and')))
            return words + noun_phrase(english, second)
        case Phrase():
            words = simple_phrase(english, phrase, negated)
        case _:
            raise TypeError(f'not a noun phrase: {phrase!r}')
    if phrase.relative:
        gap = isinstance(phrase.relative.object, Gap)
        who = 'who' if phrase.noun.classes[0] == 'p' and not gap else 'that'
        words.append(Word('que' if gap else 'qui', add(english, who)))
        words += clause(english, phrase.relative, phrase.agreement)
    return words


def simple_phrase(english: list[str], phrase: Phrase, negated: bool) -> list[Word]:
    """English: determiner or owner's, adjectives, modifier, noun, of a whole.

    French: determiner, the few adjectives before, noun, de modifier, the others from the last, de owner or whole.
    """
    noun, plural, feminine, modifier = phrase.noun, phrase.plural, phrase.noun.feminine, phrase.modifier
    start = len(english)
    behind = opening(english, phrase)
    mark = len(english) - 1
    united = len(english)
    if phrase.nations:
        english += ['United', 'Nations']
        behind = [Word('de', -1, (united, united + 1)), Word('les', -1, (united, united + 1)),
                  Word('Nations', united + 1), Word('unies', united, (), True)]
    places, joint = described(english, phrase.adjectives)
    modified = add(english, modifier.english) if modifier else -1
    head = add(english, noun.english[plural])
    if phrase.determiner == 'a':
        english[start] = lexicon.article(english[start + 1])

    words = [Word(noun.french[plural], head)]
    for adjective, at in reversed(places):
        if adjective.before:
            words.insert(0, Word(adjective_form(adjective, feminine, plural, words[0].text), at))
    if phrase.owner:  # the owner makes it definite: 's and an initial the stand for the French article
        hints = (mark, head, start) if english[start] == 'the' else (mark, head)
        words.insert(0, determiner('the', feminine, plural, words[0].text, -1)._replace(possible=hints))
    else:
        words = articles(phrase, negated, words, start, head) + words
    if modifier:
        words += [Word('de', -1, (modified, head)), Word(modifier.french, modified)]
    after = [Word(a.french[2 * feminine + plural], at, (), True) for a, at in places if not a.before]
    words += [after[0], Word('et', joint), after[1]] if joint else after[::-1]
    if phrase.of:
        words.append(Word('de', add(english, 'of')))
        words += noun_phrase(english, phrase.of)
    return words + behind


def opening(english: list[str], phrase: Phrase) -> list[Word]:
    """Writes the determiner or the owner; returns the French of the owner."""
    if phrase.owner:
        words = noun_phrase(english, phrase.owner)
        regular = phrase.owner.agreement[1] and english[-1].endswith('s')
        return [Word('de', add(english, "'" if regular else "'s")), *words]
    if phrase.determiner != 'bare':
        english.append('these' if phrase.determiner == 'this' and phrase.plural else phrase.determiner)
    return []


def described(english: list[str], adjectives: tuple) -> tuple[list[tuple[Adjective, int]], int]:
    """Writes the adjectives; returns each with its place, and the place of the and between two (0: none)."""
    places: list[tuple[Adjective, int]] = []
    joint = 0
    for adjective in adjectives:
        one, *other = adjective if isinstance(adjective, tuple) else (adjective,)
        places.append((one, add(english, one.english)))
        if other:
            joint = add(english, 'and')
            places.append((other[0], add(english, other[0].english)))
    return places, joint


def articles(phrase: Phrase, negated: bool, words: list[Word], start: int, head: int) -> list[Word]:
    """What stands before `words`, the noun and the adjectives before it."""
    name = phrase.determiner
    if negated and name == 'a':
        return [Word('de', start)]
    if negated and name == 'bare':
        return [Word('de', -1, (head,))]
    if name == 'bare' and not phrase.plural:  # partitive: de l'eau, du pain
        return [Word('de', -1, (head,)),
                determiner('the', phrase.noun.feminine, False, words[0].text, -1)._replace(possible=(head,))]
    if name in ('bare', 'some'):  # de petites maisons, but des maisons blanches
        text = 'de' if len(words) > 1 else 'des'
        return [Word(text, start) if name == 'some' else Word(text, -1, (head,))]
    return [determiner(name, phrase.noun.feminine, phrase.plural, words[0].text, start)]


def clause(english: list[str], c: Clause, inherited: tuple[int, bool, bool]) -> list[Word]:
    """`inherited`: person, plural, feminine of the subject that the clause shares or relates to."""
    words: list[Word] = []
    agreement = inherited
    if c.subject:
        agreement = c.subject.agreement
        if isinstance(c.subject, Pronoun):
            text, french = SUBJECTS[c.subject.english]
            words = [Word(french, add(english, text))]
        else:
            words = noun_phrase(english, c.subject)
    if c.verb is None:
        return words + copula(english, c, agreement)
    verb = c.verb
    person, plural, feminine = agreement
    form = 2 * plural + (person == 3)

    # English: does not often look for, never looked at
    auxiliary = negation = -1
    if c.negation == 'not':
        auxiliary = add(english, 'did' if c.past else 'does' if form == 1 else 'do')
        negation = add(english, 'not')
    elif c.negation == 'never':
        negation = add(english, 'never')
    adverb = add(english, c.adverb) if c.adverb else -1
    at = add(english, verb.english[0 if auxiliary >= 0 else 2 if c.past else form == 1])
    helpers = (auxiliary,) if auxiliary >= 0 else ()
    particle = add(english, verb.particle) if verb.particle else -1
    with_particle = (particle,) if particle >= 0 and not verb.à else ()

    # French: ne pronoun verb pas adverb, or ne pronoun auxiliary pas adverb participle
    if negation >= 0:
        words.append(Word('ne', -1, (negation, *helpers)))
    moved = c.recipient if isinstance(c.recipient, Pronoun) else c.object if isinstance(c.object, Pronoun) else None
    if moved:
        dative = verb.à or c.recipient is moved
        extra = (particle,) if verb.à and particle >= 0 else ()
        words.append(Word((DATIVES if dative else OBJECTS)[moved.english], add(english, moved.english), extra))
    if c.past:
        words.append(Word((ÊTRE if verb.être else AVOIR)[form], -1, (at, *helpers)))
    else:
        words.append(Word(verb.french[form], at, helpers + with_particle))
    if negation >= 0:
        words.append(Word('pas' if c.negation == 'not' else 'jamais', negation))
    if c.adverb:
        words.append(Word(lexicon.ADVERBS[c.adverb], adverb))
    if c.past:
        preceding = c.object if isinstance(c.object, Gap) or moved and not dative else None
        _, many, her = agreement if verb.être else preceding.agreement if preceding else (3, False, False)
        words.append(Word(verb.participle + 'e' * her + 's' * many, at, with_particle))

    return words + complements(english, c, at, particle)


def complements(english: list[str], c: Clause, at: int, particle: int) -> list[Word]:
    """Object, to a recipient, place: what stands behind the verb in both languages.  `at`: the English verb."""
    words: list[Word] = []
    if c.object and c.verb and not isinstance(c.object, (Pronoun, Gap)):
        if c.verb.à:
            words.append(Word('à', particle) if particle >= 0 else Word('à', -1, (at,)))
        words += noun_phrase(english, c.object, bool(c.negation) and not c.verb.à)
    if c.recipient and not isinstance(c.recipient, Pronoun):
        words.append(Word('à', add(english, 'to')))
        words += noun_phrase(english, c.recipient)
    return words + (place(english, *c.place) if c.place else [])


def copula(english: list[str], c: Clause, agreement: tuple[int, bool, bool]) -> list[Word]:
    """is not very old: n'est pas très vieille; was: the imparfait, était."""
    assert c.quality
    person, plural, feminine = agreement
    form = 2 * plural + (person == 3)
    at = add(english, (('was', 'was', 'were', 'were') if c.past else ('am', 'is', 'are', 'are'))[form])
    words = [Word((WAS if c.past else ÊTRE)[form], at)]
    if c.negation:
        negation = add(english, c.negation)
        words.insert(0, Word('ne', -1, (negation,)))
        words.append(Word('pas' if c.negation == 'not' else 'jamais', negation))
    if c.adverb:
        words.append(Word(lexicon.ADVERBS[c.adverb], add(english, c.adverb)))
    if c.degree:
        words.append(Word(lexicon.DEGREES[c.degree], add(english, c.degree)))
    words.append(Word(c.quality.french[2 * feminine + plural], add(english, c.quality.english)))
    return words


def place(english: list[str], preposition: str, phrase: 'Phrase | Name') -> list[Word]:
    """behind the house: derrière la maison; near: près de; in front of: devant; to: à."""
    match preposition:
        case 'to':
            words = [Word('à', add(english, 'to'))]
        case 'near':
            at = add(english, 'near')
            words = [Word('près', at), Word('de', -1, (at,))]
        case 'in front of':
            at = len(english)
            english += ['in', 'front', 'of']
            words = [Word('devant', at + 1, (at, at + 2))]
        case _:
            words = [Word(lexicon.PREPOSITIONS[preposition][0], add(english, preposition))]
    return words + noun_phrase(english, phrase)


def sentence(structure: Sentence) -> tuple[list[str], list[Word]]:
    """English and French words of the whole, the final period included."""
    english: list[str] = []
    words: list[Word] = []
    inherited = (3, False, False)
    for i, c in enumerate(structure.clauses):
        if i:
            if structure.conjunctions[i - 1] == 'but':
                words.append(Word(',', add(english, ',')))
            at = add(english, structure.conjunctions[i - 1])
            first, *rest = lexicon.CONJUNCTIONS[english[at]]
            words.append(Word(first, at))
            words += [Word(text, -1, (at,)) for text in rest]
        words += clause(english, c, inherited)
        inherited = c.subject.agreement if c.subject else inherited
    words.append(Word('.', add(english, '.')))
    return english, joined(words)
