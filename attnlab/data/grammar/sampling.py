"""Random structures of sentences: which words may be combined, and how often each construction is drawn.

Constructions that would make the French ambiguous are never drawn: it, you and they; a relative clause of a
coordination; a past with être after I or we, and a past with the object pronouns me, us or them, because the participle
would show their gender.

In all functions, `held_out=True` makes half of the draws of adjectives choose from the pairs of adjective and noun that
are held out for test_combinations.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from random import Random
from zlib import crc32

from attnlab.data.grammar import lexicon
from attnlab.data.grammar.lexicon import Adjective, Modifier, Noun, Verb
from attnlab.data.grammar.rules import Both, Clause, Gap, Name, Phrase, Pronoun, Sentence

HELD_OUT_FRACTION = 10  # one of so many pairs of adjective and noun is held out for test_combinations
PERSON_VERBS = tuple(v for v in lexicon.VERBS if 'p' in v.subjects)
INSTITUTIONAL = tuple(v for v in lexicon.VERBS if 'i' in v.subjects)
PLAIN_ADVERBS, NEGATED_ADVERBS = tuple(lexicon.ADVERBS), ('often', 'always')
NAMES, NUMBERS, SUBJECTS = tuple(lexicon.NAMES), tuple(lexicon.NUMBERS), ('him', 'her', 'him', 'her', 'me', 'us')
COORDINATES, SUBORDINATES = ('and', 'but'), ('because', 'when', 'if')
SETTINGS = ('in', 'in', 'near', 'with', 'behind', 'in front of', 'on', 'under')
TEMPERS = tuple(a for a in lexicon.ADJECTIVES if a.classes == 'p')


def is_held_out(adjective: Adjective, noun: Noun) -> bool:
    """Whether a pair of adjective and noun may occur in `test_combinations` only."""
    return crc32(f'{adjective.english} {noun.english[0]}'.encode()) % HELD_OUT_FRACTION == 0


def adjective_noun_pairs(part: object) -> Iterator[tuple[Adjective, Noun]]:
    """Yield each adjective of a structure with the noun that it describes, in a noun phrase or after be."""
    match part:
        case Phrase(noun, adjectives=phrase_adjectives, owner=owner, of=of, relative=relative):
            for item in phrase_adjectives:  # an adjective, or two joined by and
                yield from ((a, noun) for a in (item if isinstance(item, tuple) else (item,)))
            parts = owner, of, relative
        case Sentence(clauses):
            parts = clauses
        case Both(first, second):
            parts = first, second
        case Clause(subject=subject, object=object_phrase, recipient=recipient, place=place, quality=quality):
            if quality and isinstance(subject, Phrase):
                yield quality, subject.noun
            parts = subject, object_phrase, recipient, place and place[1]
        case None | Name() | Pronoun() | Gap():
            parts = ()
        case _:
            raise TypeError(f'not a part of a sentence: {part!r}')
    for inner in parts:
        yield from adjective_noun_pairs(inner)


def choose(rng: Random, choices):
    """Return one of the choices, each with the same probability."""
    return choices[int(rng.random() * len(choices))]


@cache
def nouns_of_classes(classes: str) -> tuple[Noun, ...]:
    """Return the nouns of any of the classes, each once."""
    return tuple(n for n in lexicon.NOUNS if set(classes) & set(n.classes))


@cache
def fitting_adjectives(noun: Noun, held_out: bool, before: bool | None = None) -> tuple[Adjective, ...]:
    """Return the adjectives that may describe a noun.

    held_out: those whose pair with the noun is held out, or those whose pair is not.
    before: those that precede or that follow their noun in French; None: both.
    """
    source = lexicon.DOMAINS + lexicon.ORIGINS if noun in lexicon.INSTITUTIONS else lexicon.ADJECTIVES
    return tuple(a for a in source if is_held_out(a, noun) == held_out and before in (None, a.before)
                 and (noun in lexicon.INSTITUTIONS or noun.classes[0] in a.classes)
                 and (a.english, noun.english[0]) not in lexicon.CLASHES)


@cache
def modifiers_of(noun: Noun) -> tuple[Modifier, ...]:
    """Return the nouns that may modify a noun."""
    return tuple(m for m in lexicon.MODIFIERS if noun.english[0] in m.heads)


@cache
def part_nouns(classes: str) -> tuple[Noun, ...]:
    """Return the nouns of the classes that may be a part of a whole, as in "the door of the house"."""
    return tuple(n for n in lexicon.NOUNS if n.english[0] in lexicon.PARTS and set(classes) & set(n.classes))


@cache
def compound_nouns(classes: str) -> tuple[Noun, ...]:
    """Return the nouns of the classes that may have a modifier."""
    return tuple(n for n in nouns_of_classes(classes) if modifiers_of(n))


def draw_adjective(rng: Random, held_out: bool, noun: Noun, before: bool | None = None) -> Adjective | None:
    """Draw an adjective for a noun; None if there is none."""
    choices = held_out and rng.random() < 0.5 and fitting_adjectives(noun, True, before)
    choices = choices or fitting_adjectives(noun, False, before)
    return choose(rng, choices) if choices else None


def draw_adjectives(rng: Random, held_out: bool, noun: Noun, plural: bool) -> tuple:
    """Draw no adjective, one, one before and one after, two that follow, or two of one kind that are joined by and."""
    chance = rng.random()
    if chance < 0.4:
        return ()
    if chance < 0.8:
        single = draw_adjective(rng, held_out, noun)
        return (single,) if single else ()
    after = draw_adjective(rng, held_out, noun, before=False)
    if not after:
        return ()
    if chance < 0.9:
        first = draw_adjective(rng, held_out, noun, before=True)
        return (first, after) if first else (after,)
    other = draw_adjective(rng, held_out, noun, before=False)
    if after is other or not other:
        return (after,)
    if after.english[0].islower() and other.english[0].isupper():
        return after, other  # a black Italian dress: une robe italienne noire
    joint = after.classes == other.classes and (plural or after.english[0].islower())  # English and French ministers
    return ((after, other),) if joint else (after,)


def draw_institution(rng: Random, held_out: bool) -> Phrase:
    """Draw an institution: the European Economic Area, the United Nations Security Council, and the like."""
    noun = choose(rng, lexicon.INSTITUTIONS)
    nations = rng.random() < 0.25
    choices = held_out and rng.random() < 0.5 and fitting_adjectives(noun, True) or fitting_adjectives(noun, False)
    origins = () if nations else tuple(a for a in choices if a in lexicon.ORIGINS)
    domains = tuple(a for a in choices if a in lexicon.DOMAINS)
    origin = (choose(rng, origins),) if origins else ()
    if rng.random() < 0.5 or not domains:
        return Phrase(noun, adjectives=origin, modifier=choose(rng, lexicon.DOMAIN_NOUNS), nations=nations)
    return Phrase(noun, adjectives=(*origin, choose(rng, domains)), nations=nations)


def draw_noun_phrase(rng: Random, held_out: bool, classes: str, indefinite: bool = True, depth: int = 0,
                     bare: bool = False, negated: bool = False) -> Phrase | Name:
    """Draw a noun phrase with a noun of one of the classes, a name or an institution.

    indefinite: it may be indefinite.  depth: 1 if it may have an owner, an of or a relative clause.
    bare: it may have no determiner.  negated: it is the object of a negated verb.
    """
    if classes == 'i' or 'i' in classes and rng.random() < 0.4:
        return draw_institution(rng, held_out)
    chance = rng.random()
    if 'p' in classes and chance < 0.08:
        return Name(choose(rng, NAMES))
    if chance > 0.92 and depth and (parts := part_nouns(classes)):
        noun = choose(rng, parts)
        whole = lexicon.PARTS[noun.english[0]]
        plural = rng.random() < 0.2
        if whole == 'i':
            return Phrase(noun, plural=plural, of=draw_institution(rng, held_out))
        return Phrase(noun, plural=plural, of=_draw_plain_phrase(rng, held_out, choose(rng, nouns_of_classes(whole))))
    compounds = compound_nouns(classes) if 0.8 < chance < 0.9 else ()
    noun = choose(rng, compounds or nouns_of_classes(classes))
    phrase = _draw_plain_phrase(rng, held_out, noun, indefinite, bare, negated)
    chance = rng.random()
    if depth and chance < 0.16 and noun.english[0] not in lexicon.UNOWNED:
        return replace(phrase, determiner='the', owner=draw_owner(rng, held_out))
    # The relative clause of an indefinite object of a negated verb would need the subjunctive.
    no_relative = phrase.determiner in lexicon.POSSESSIVES or negated and phrase.determiner in ('a', 'bare')
    if depth and chance > 0.84 and not no_relative:
        return replace(phrase, relative=draw_relative_clause(rng, held_out, noun, phrase.plural))
    return phrase


def _draw_plain_phrase(rng: Random, held_out: bool, noun: Noun, indefinite: bool = False, bare: bool = False,
                       negated: bool = False) -> Phrase:
    """Draw determiner, adjectives, modifier and noun, without owner, of and relative clause."""
    fitting = modifiers_of(noun)
    modifier = choose(rng, fitting) if fitting and rng.random() < 0.5 else None
    mass = noun.classes[0] in lexicon.MASS
    plural = not mass and noun.english[0] not in ('father', 'mother') and rng.random() < 0.3
    determiner = draw_determiner(rng, noun, plural, indefinite, bare, negated)
    return Phrase(noun, determiner, plural, draw_adjectives(rng, held_out, noun, plural), modifier)


def draw_owner(rng: Random, held_out: bool) -> Phrase | Name:
    """Draw an owner, which has no of and no relative clause, but may have an owner: my sister's friend's dog."""
    owner = draw_noun_phrase(rng, held_out, 'p', False, depth=0)
    if isinstance(owner, Phrase) and rng.random() < 0.15 and owner.noun.english[0] not in lexicon.UNOWNED:
        return replace(owner, determiner='the', owner=draw_noun_phrase(rng, held_out, 'p', False, depth=0))
    return owner


def draw_determiner(rng: Random, noun: Noun, plural: bool, indefinite: bool, bare: bool, negated: bool) -> str:
    """Draw a determiner; the object of a negated verb never has some or a number, whose scope would be ambiguous."""
    chance = rng.random()
    if chance < 0.48:
        return 'the'
    if chance < 0.56:
        return 'this'
    if chance < 0.7 or not indefinite:
        return 'the' if noun.english[0] in lexicon.UNOWNED else choose(rng, ('my', 'his', 'her', 'our'))
    if noun.classes[0] in lexicon.MASS:
        return 'bare' if bare else 'the'
    if not plural:
        return 'a'
    if bare and (negated or chance < 0.82):
        return 'bare'
    return 'the' if negated else 'some' if chance < 0.92 else choose(rng, NUMBERS)


@cache
def verbs_with_subject(classes: str) -> tuple[Verb, ...]:
    """Return the verbs that may have a subject of the first of the classes."""
    return tuple(v for v in lexicon.VERBS if classes[0] in v.subjects)


@cache
def verbs_with_object(classes: str) -> tuple[Verb, ...]:
    """Return the verbs that may have a person as subject and an object of the classes, without à in French."""
    return tuple(v for v in lexicon.VERBS if set(classes) & set(v.objects) and 'p' in v.subjects and not v.à)


def draw_relative_clause(rng: Random, held_out: bool, noun: Noun, plural: bool) -> Clause | None:
    """Draw a relative clause of a noun, as its subject or its object; None if the draw is a coordination."""
    if noun.classes[0] in 'pa' and rng.random() < 0.5:
        return draw_predicate(rng, held_out, None, noun.classes[0], 0)
    verb = choose(rng, verbs_with_object(noun.classes))
    subject = draw_subject(rng, held_out, 'p', 0, verb)
    if isinstance(subject, Both):
        return None
    past = verb.past and rng.random() < 0.4
    return Clause(subject, verb, Gap((3, plural, noun.feminine)), past)


def draw_subject(rng: Random, held_out: bool, classes: str, depth: int, verb: Verb | None):
    """Draw a subject; I and we only if no participle shows their gender.  verb: None for the copula."""
    chance = rng.random()
    if 'p' in classes and chance < 0.25:
        return Pronoun(choose(rng, SUBJECTS if verb and not verb.être else SUBJECTS[:4]))
    if chance < 0.31 and verb and 'i' not in classes:
        return Both(draw_noun_phrase(rng, held_out, classes, False), draw_noun_phrase(rng, held_out, classes, False))
    return draw_noun_phrase(rng, held_out, classes, verb is not None, depth)


def draw_negation(rng: Random) -> str:
    """Draw not, never or '' for none."""
    chance = rng.random()
    return 'not' if chance < 0.2 else 'never' if chance < 0.25 else ''


def draw_adverb(rng: Random, negated: str) -> str:
    """Draw an adverb of frequency or '' for none.  negated: not, never or ''."""
    if negated == 'never' or rng.random() > 0.12:
        return ''
    return choose(rng, NEGATED_ADVERBS if negated else PLAIN_ADVERBS)


def draw_clause(rng: Random, held_out: bool, depth: int) -> Clause:
    """Draw a main clause."""
    chance = rng.random()
    if chance < 0.12:
        return draw_state(rng, held_out, depth)
    if chance < 0.24:
        classes, verbs = 'p', lexicon.INTRANSITIVES + lexicon.GIVING + (lexicon.GOING,) * 3
    elif chance < 0.36:
        classes, verbs = 'i', INSTITUTIONAL
    elif chance < 0.44:
        classes, verbs = 'a', tuple(v for v in verbs_with_subject('a') if v.objects)
    else:
        classes, verbs = 'p', PERSON_VERBS
    verb = choose(rng, verbs)
    return draw_predicate(rng, held_out, draw_subject(rng, held_out, classes, depth, verb), classes, depth, verb)


def draw_state(rng: Random, held_out: bool, depth: int) -> Clause:
    """Draw a clause with the copula: the old house is not very clean."""
    subject = draw_subject(rng, held_out, choose(rng, ('p', 'p', 'a', 'b', 'cv', 'xt')), depth, None)
    if isinstance(subject, Phrase):
        quality = draw_adjective(rng, held_out, subject.noun)
        if quality in subject.adjectives or quality and quality.english[0].isupper():  # no "French men are Greek"
            subject = replace(subject, adjectives=())
    else:
        quality = choose(rng, TEMPERS)
    assert quality  # every noun has adjectives
    negation = draw_negation(rng)
    graded = quality.english[0].islower() and quality.english not in lexicon.UNGRADED
    degree = choose(rng, ('very', 'too')) if graded and rng.random() < 0.3 else ''
    temporary = graded and not degree and quality.classes in ('p', 'pa') and not quality.before
    adverb = draw_adverb(rng, negation) if temporary else ''
    return Clause(subject, None, None, rng.random() < 0.4, negation, adverb, quality=quality, degree=degree)


def draw_predicate(rng: Random, held_out: bool, subject, classes: str, depth: int, verb: Verb | None = None,
                   shared: Pronoun | None = None) -> Clause:
    """Draw verb, object, recipient and place for a subject.

    subject: the subject; None in a relative clause, and in a clause that has the subject of the one before.
    shared: the pronoun of that subject, if it is one.
    """
    verb = verb or choose(rng, verbs_with_subject(classes))
    negation = draw_negation(rng)
    past = verb.past and rng.random() < 0.4
    adverb = '' if verb.generic and not verb.past else draw_adverb(rng, negation)  # a state has no frequency
    if verb is lexicon.GOING:
        place = draw_noun_phrase(rng, held_out, 'g', False)
        return Clause(subject, verb, None, past, negation, adverb, place=('to', place))
    if not verb.objects:
        settled = verb.english[0] in ('live', 'arrive')
        if verb.english[0] != 'live' and rng.random() < 0.3:
            return Clause(subject, verb, None, past, negation, adverb)
        preposition = choose(rng, SETTINGS[:6] if settled else SETTINGS)
        place_classes = lexicon.PREPOSITIONS[preposition][1]
        place = draw_noun_phrase(rng, held_out, place_classes, preposition == 'in', depth)
        return Clause(subject, verb, None, past, negation, '' if settled else adverb, place=(preposition, place))
    subject_pronoun = shared or (subject if isinstance(subject, Pronoun) else None)
    if verb in lexicon.GIVING:
        if rng.random() < 0.5:  # not bare: "gives her shoes" would have two readings
            object_phrase = draw_noun_phrase(rng, held_out, verb.objects, not negation)
            recipient = draw_object_pronoun(rng, subject_pronoun, False)
        else:
            object_phrase = draw_noun_phrase(rng, held_out, verb.objects, not negation, bare=not negation)
            recipient = draw_noun_phrase(rng, held_out, 'p', False)
        return Clause(subject, verb, object_phrase, past, negation, adverb, recipient=recipient)
    if 'p' in verb.objects and rng.random() < 0.35:
        pronoun = draw_object_pronoun(rng, subject_pronoun, past and not verb.à)
        return Clause(subject, verb, pronoun, past, negation, adverb)
    indefinite = not verb.generic and not (negation and verb.à)
    bare = indefinite and not verb.à
    if rng.random() < 0.1 and not negation:
        first, second = (draw_noun_phrase(rng, held_out, verb.objects, indefinite, bare=bare) for _ in range(2))
        if isinstance(second, Phrase) and second.determiner == 'bare' and not (
                isinstance(first, Phrase) and first.determiner == 'bare' and not first.adjectives):
            second = replace(second, determiner='the')  # "the cups and glasses" would have two readings
        return Clause(subject, verb, Both(first, second), past, negation, adverb)
    object_phrase = draw_noun_phrase(rng, held_out, verb.objects, indefinite, depth, bare, bool(negation))
    return Clause(subject, verb, object_phrase, past, negation, adverb)


def draw_object_pronoun(rng: Random, subject_pronoun: Pronoun | None, gendered: bool) -> Pronoun:
    """Draw an object pronoun; never I ... me or we ... us.

    gendered: never me, us or them, because a participle would show the gender.
    """
    choices = ('him', 'her') if gendered else ('him', 'her', 'him', 'her', 'them', 'me', 'us')
    pronoun = choose(rng, choices)
    first_person = subject_pronoun and subject_pronoun.english in ('me', 'us')
    return Pronoun('him' if first_person and pronoun in ('me', 'us') else pronoun)


def draw_conjunction(rng: Random, first: Clause, second: Clause) -> str:
    """Draw a subordinating conjunction.

    When needs the same tense in both clauses, and if needs the present: their past would be the imparfait.
    """
    choice = choose(rng, SUBORDINATES)
    past = first.past or second.past
    return 'because' if choice == 'if' and past or choice == 'when' and first.past != second.past else choice


def draw_sentence(rng: Random, held_out: bool, long: bool) -> Sentence:
    """Draw a sentence; long: of two or three clauses, whose noun phrases may have owners and relative clauses."""
    chance = rng.random()
    if long and chance < 0.5:
        first, second, third = (draw_clause(rng, held_out, 1) for _ in range(3))
        return Sentence((first, second, third), (choose(rng, COORDINATES), draw_conjunction(rng, second, third)))
    if long or chance < 0.15:
        first, second = (draw_clause(rng, held_out, int(long)) for _ in range(2))
        joint = choose(rng, COORDINATES) if rng.random() < 0.4 else draw_conjunction(rng, first, second)
        return Sentence((first, second), (joint,))
    if chance < 0.25:
        first = draw_clause(rng, held_out, 0)
        if isinstance(first.subject, (Pronoun, Name)) and first.verb:
            shared = first.subject if isinstance(first.subject, Pronoun) else None
            return Sentence((first, draw_predicate(rng, held_out, None, 'p', 0, shared=shared)), ('and',))
    return Sentence((draw_clause(rng, held_out, 1),))
