"""Random structures: which words go together, and how often each construction comes.

What a structure may not hold is left out here, so that the English always determines the French: no it, you or they;
no relative clause on a coordination; no past of être with I or we, no past with a moved me, us or them, whose gender
the participle would show.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from random import Random
from zlib import crc32

from attnlab.data.grammar import lexicon
from attnlab.data.grammar.lexicon import Adjective, Modifier, Noun, Verb
from attnlab.data.grammar.rules import Both, Clause, Gap, Name, Phrase, Pronoun, Sentence

HELD_OUT = 10  # one adjective-noun pair in so many is kept for test_combinations
COMMON_VERBS = tuple(v for v in lexicon.VERBS if 'p' in v.subjects)
INSTITUTIONAL = tuple(v for v in lexicon.VERBS if 'i' in v.subjects)
PLAIN_ADVERBS, NEGATED_ADVERBS = tuple(lexicon.ADVERBS), ('often', 'always')
NAMES, NUMBERS, SUBJECTS = tuple(lexicon.NAMES), tuple(lexicon.NUMBERS), ('him', 'her', 'him', 'her', 'me', 'us')
COORDINATES, SUBORDINATES = ('and', 'but'), ('because', 'when', 'if')
SETTINGS = ('in', 'in', 'near', 'with', 'behind', 'in front of', 'on', 'under')
TEMPERS = tuple(a for a in lexicon.ADJECTIVES if a.classes == 'p')


def held_out(adjective: Adjective, noun: Noun) -> bool:
    """Whether the pair may appear in `test_combinations` only."""
    return crc32(f'{adjective.english} {noun.english[0]}'.encode()) % HELD_OUT == 0


def combinations(part: object) -> Iterator[tuple[Adjective, Noun]]:
    """Every adjective of a structure with the noun it is said of, in a noun phrase or after be."""
    match part:
        case Phrase(noun, adjectives=described_by, owner=owner, of=of, relative=relative):
            for one in described_by:
                yield from ((a, noun) for a in (one if isinstance(one, tuple) else (one,)))
            parts = owner, of, relative
        case Sentence(clauses):
            parts = clauses
        case Both(first, second):
            parts = first, second
        case Clause(subject=who, object=what, recipient=whom, place=where, quality=quality):
            if quality and isinstance(who, Phrase):
                yield quality, who.noun
            parts = who, what, whom, where and where[1]
        case None | Name() | Pronoun() | Gap():
            parts = ()
        case _:
            raise TypeError(f'not a part of a sentence: {part!r}')
    for inner in parts:
        yield from combinations(inner)


def pick(rng: Random, choices):
    return choices[int(rng.random() * len(choices))]


@cache
def nouns(classes: str) -> tuple[Noun, ...]:
    """Those of any of the classes, each as often as the others."""
    return tuple(n for n in lexicon.NOUNS if set(classes) & set(n.classes))


@cache
def adjectives(noun: Noun, held: bool, before: bool | None = None) -> tuple[Adjective, ...]:
    source = lexicon.DOMAINS + lexicon.ORIGINS if noun in lexicon.INSTITUTIONS else lexicon.ADJECTIVES
    return tuple(a for a in source if held_out(a, noun) == held and before in (None, a.before)
                 and (noun in lexicon.INSTITUTIONS or noun.classes[0] in a.classes)
                 and (a.english, noun.english[0]) not in lexicon.CLASHES)


@cache
def modifiers(noun: Noun) -> tuple[Modifier, ...]:
    return tuple(m for m in lexicon.MODIFIERS if noun.english[0] in m.heads)


@cache
def owned(classes: str) -> tuple[Noun, ...]:
    return tuple(n for n in lexicon.NOUNS if n.english[0] in lexicon.PARTS and set(classes) & set(n.classes))


@cache
def compounds(classes: str) -> tuple[Noun, ...]:
    return tuple(n for n in nouns(classes) if modifiers(n))


def adjective(rng: Random, seek: bool, noun: Noun, before: bool | None = None) -> Adjective | None:
    choices = seek and rng.random() < 0.5 and adjectives(noun, True, before) or adjectives(noun, False, before)
    return pick(rng, choices) if choices else None


def described(rng: Random, seek: bool, noun: Noun, plural: bool) -> tuple:
    """No adjective, one, one on either side, two that follow, or two joined by and, of one kind."""
    chance = rng.random()
    if chance < 0.4:
        return ()
    if chance < 0.8:
        one = adjective(rng, seek, noun)
        return (one,) if one else ()
    after = adjective(rng, seek, noun, before=False)
    if not after:
        return ()
    if chance < 0.9:
        first = adjective(rng, seek, noun, before=True)
        return (first, after) if first else (after,)
    other = adjective(rng, seek, noun, before=False)
    if after is other or not other:
        return (after,)
    if after.english[0].islower() and other.english[0].isupper():
        return after, other  # a black Italian dress: une robe italienne noire
    joint = after.classes == other.classes and (plural or after.english[0].islower())  # English and French ministers
    return ((after, other),) if joint else (after,)


def institution(rng: Random, seek: bool) -> Phrase:
    """the European Economic Area, the Arab Research Council, the United Nations Security Council."""
    noun = pick(rng, lexicon.INSTITUTIONS)
    nations = rng.random() < 0.25
    choices = seek and rng.random() < 0.5 and adjectives(noun, True) or adjectives(noun, False)
    origins = () if nations else tuple(a for a in choices if a in lexicon.ORIGINS)
    domains = tuple(a for a in choices if a in lexicon.DOMAINS)
    origin = (pick(rng, origins),) if origins else ()
    if rng.random() < 0.5 or not domains:
        return Phrase(noun, adjectives=origin, modifier=pick(rng, lexicon.DOMAIN_NOUNS), nations=nations)
    return Phrase(noun, adjectives=(*origin, pick(rng, domains)), nations=nations)


def noun_phrase(rng: Random, seek: bool, classes: str, indefinite: bool = True, depth: int = 0, bare: bool = False,
                negated: bool = False) -> Phrase | Name:
    """`depth`: 1 where an owner, an of or a relative clause may hang on it; `bare`: where it may lack a determiner."""
    if classes == 'i' or 'i' in classes and rng.random() < 0.4:
        return institution(rng, seek)
    chance = rng.random()
    if 'p' in classes and chance < 0.08:
        return Name(pick(rng, NAMES))
    if chance > 0.92 and depth and (parts := owned(classes)):
        noun = pick(rng, parts)
        whole = lexicon.PARTS[noun.english[0]]
        return Phrase(noun, plural=rng.random() < 0.2, of=_common(rng, seek, pick(rng, nouns(whole))) if whole != 'i'
                      else institution(rng, seek))
    noun = pick(rng, compounds(classes) or nouns(classes)) if 0.8 < chance < 0.9 else pick(rng, nouns(classes))
    phrase = _common(rng, seek, noun, indefinite, bare, negated)
    chance = rng.random()
    if depth and chance < 0.16 and noun.english[0] not in lexicon.UNOWNED:
        return replace(phrase, determiner='the', owner=owner(rng, seek))
    # A noun that the verb denies would ask for the subjunctive in its relative clause.
    closed = phrase.determiner in lexicon.POSSESSIVES or negated and phrase.determiner in ('a', 'bare')
    if depth and chance > 0.84 and not closed:
        return replace(phrase, relative=relative_clause(rng, seek, noun, phrase.plural))
    return phrase


def _common(rng: Random, seek: bool, noun: Noun, indefinite: bool = False, bare: bool = False,
            negated: bool = False) -> Phrase:
    """Determiner, adjectives, modifier, noun: nothing that hangs behind."""
    fitting = modifiers(noun)
    modifier = pick(rng, fitting) if fitting and rng.random() < 0.5 else None
    mass = noun.classes[0] in lexicon.MASS
    plural = not mass and noun.english[0] not in ('father', 'mother') and rng.random() < 0.3
    name = determiner(rng, noun, plural, indefinite, bare, negated)
    return Phrase(noun, name, plural, described(rng, seek, noun, plural), modifier)


def owner(rng: Random, seek: bool) -> Phrase | Name:
    """Nothing hangs behind an owner, but it may have its own: my sister's friend's dog."""
    who = noun_phrase(rng, seek, 'p', False, depth=0)
    if isinstance(who, Phrase) and rng.random() < 0.15 and who.noun.english[0] not in lexicon.UNOWNED:
        return replace(who, determiner='the', owner=noun_phrase(rng, seek, 'p', False, depth=0))
    return who


def determiner(rng: Random, noun: Noun, plural: bool, indefinite: bool, bare: bool, negated: bool) -> str:
    """`negated`: the object of a negated verb is never some or a number, whose scope would be open."""
    chance = rng.random()
    if chance < 0.48:
        return 'the'
    if chance < 0.56:
        return 'this'
    if chance < 0.7 or not indefinite:
        return 'the' if noun.english[0] in lexicon.UNOWNED else pick(rng, ('my', 'his', 'her', 'our'))
    if noun.classes[0] in lexicon.MASS:
        return 'bare' if bare else 'the'
    if not plural:
        return 'a'
    if bare and (negated or chance < 0.82):
        return 'bare'
    return 'the' if negated else 'some' if chance < 0.92 else pick(rng, NUMBERS)


@cache
def verbs_of(classes: str) -> tuple[Verb, ...]:
    """Those whose subject the class may be."""
    return tuple(v for v in lexicon.VERBS if classes[0] in v.subjects)


@cache
def verbs_on(classes: str) -> tuple[Verb, ...]:
    """Those that people do to the class, without a preposition in French."""
    return tuple(v for v in lexicon.VERBS if set(classes) & set(v.objects) and 'p' in v.subjects and not v.à)


def relative_clause(rng: Random, seek: bool, noun: Noun, plural: bool) -> Clause | None:
    if noun.classes[0] in 'pa' and rng.random() < 0.5:
        return predicate(rng, seek, None, noun.classes[0], 0)
    verb = pick(rng, verbs_on(noun.classes))
    who = subject(rng, seek, 'p', 0, verb)
    if isinstance(who, Both):
        return None
    past = verb.past and rng.random() < 0.4
    return Clause(who, verb, Gap((3, plural, noun.feminine)), past)


def subject(rng: Random, seek: bool, classes: str, depth: int, verb: Verb | None):
    """I and we only where nothing shows their gender."""
    chance = rng.random()
    if 'p' in classes and chance < 0.25:
        return Pronoun(pick(rng, SUBJECTS if verb and not verb.être else SUBJECTS[:4]))
    if chance < 0.31 and verb and 'i' not in classes:
        return Both(noun_phrase(rng, seek, classes, False), noun_phrase(rng, seek, classes, False))
    return noun_phrase(rng, seek, classes, verb is not None, depth)


def negation(rng: Random) -> str:
    chance = rng.random()
    return 'not' if chance < 0.2 else 'never' if chance < 0.25 else ''


def adverb(rng: Random, negated: str) -> str:
    return '' if negated == 'never' or rng.random() > 0.12 else pick(rng, NEGATED_ADVERBS if negated else PLAIN_ADVERBS)


def clause(rng: Random, seek: bool, depth: int) -> Clause:
    chance = rng.random()
    if chance < 0.12:
        return state(rng, seek, depth)
    if chance < 0.24:
        classes, verbs = 'p', lexicon.INTRANSITIVES + lexicon.GIVING + (lexicon.GOING,) * 3
    elif chance < 0.36:
        classes, verbs = 'i', INSTITUTIONAL
    elif chance < 0.44:
        classes, verbs = 'a', tuple(v for v in verbs_of('a') if v.objects)
    else:
        classes, verbs = 'p', COMMON_VERBS
    verb = pick(rng, verbs)
    return predicate(rng, seek, subject(rng, seek, classes, depth, verb), classes, depth, verb)


def state(rng: Random, seek: bool, depth: int) -> Clause:
    """The old house is not very clean."""
    who = subject(rng, seek, pick(rng, ('p', 'p', 'a', 'b', 'cv', 'xt')), depth, None)
    if isinstance(who, Phrase):
        quality = adjective(rng, seek, who.noun)
        if quality in who.adjectives or quality and quality.english[0].isupper():  # no "French men are Greek"
            who = replace(who, adjectives=())
    else:
        quality = pick(rng, TEMPERS)
    assert quality  # every noun has adjectives
    no = negation(rng)
    graded = quality.english[0].islower() and quality.english not in lexicon.UNGRADED
    degree = pick(rng, ('very', 'too')) if graded and rng.random() < 0.3 else ''
    often = adverb(rng, no) if graded and not degree and quality.classes in ('p', 'pa') and not quality.before else ''
    return Clause(who, None, None, rng.random() < 0.4, no, often, quality=quality, degree=degree)


def predicate(rng: Random, seek: bool, who, classes: str, depth: int, verb: Verb | None = None,
              shared: Pronoun | None = None) -> Clause:
    """Verb, object, recipient and place for a subject; `who` None: that of a relative, or the `shared` one."""
    verb = verb or pick(rng, verbs_of(classes))
    no = negation(rng)
    past = verb.past and rng.random() < 0.4
    often = '' if verb.generic and not verb.past else adverb(rng, no)  # nobody sometimes loves
    if verb is lexicon.GOING:
        return Clause(who, verb, None, past, no, often, place=('to', noun_phrase(rng, seek, 'g', False)))
    if not verb.objects:
        settled = verb.english[0] in ('live', 'arrive')
        if verb.english[0] != 'live' and rng.random() < 0.3:
            return Clause(who, verb, None, past, no, often)
        how = pick(rng, SETTINGS[:6] if settled else SETTINGS)
        where = noun_phrase(rng, seek, lexicon.PREPOSITIONS[how][1], how == 'in', depth)
        return Clause(who, verb, None, past, no, '' if settled else often, place=(how, where))
    subject_pronoun = shared or (who if isinstance(who, Pronoun) else None)
    if verb in lexicon.GIVING:
        if rng.random() < 0.5:  # not bare: "gives her shoes" would have two readings
            what, whom = noun_phrase(rng, seek, verb.objects, not no), moved(rng, subject_pronoun, False)
        else:
            what = noun_phrase(rng, seek, verb.objects, not no, bare=not no)
            whom = noun_phrase(rng, seek, 'p', False)
        return Clause(who, verb, what, past, no, often, recipient=whom)
    if 'p' in verb.objects and rng.random() < 0.35:
        return Clause(who, verb, moved(rng, subject_pronoun, past and not verb.à), past, no, often)
    indefinite = not verb.generic and not (no and verb.à)
    bare = indefinite and not verb.à
    if rng.random() < 0.1 and not no:
        first, second = (noun_phrase(rng, seek, verb.objects, indefinite, bare=bare) for _ in range(2))
        if isinstance(second, Phrase) and second.determiner == 'bare' and not (
                isinstance(first, Phrase) and first.determiner == 'bare' and not first.adjectives):
            second = replace(second, determiner='the')  # "the cups and glasses" would have two readings
        return Clause(who, verb, Both(first, second), past, no, often)
    what = noun_phrase(rng, seek, verb.objects, indefinite, depth, bare, bool(no))
    return Clause(who, verb, what, past, no, often)


def moved(rng: Random, subject_pronoun: Pronoun | None, gendered: bool) -> Pronoun:
    """An object pronoun; never I ... me, we ... us, nor, where a participle would show its gender, me, us, them."""
    choices = ('him', 'her') if gendered else ('him', 'her', 'him', 'her', 'them', 'me', 'us')
    pronoun = pick(rng, choices)
    first_person = subject_pronoun and subject_pronoun.english in ('me', 'us')
    return Pronoun('him' if first_person and pronoun in ('me', 'us') else pronoun)


def conjunction(rng: Random, first: Clause, second: Clause) -> str:
    """When needs one tense in both clauses, if the present: the past would be the imparfait."""
    choice = pick(rng, SUBORDINATES)
    past = first.past or second.past
    return 'because' if choice == 'if' and past or choice == 'when' and first.past != second.past else choice


def structure(rng: Random, seek: bool, long: bool) -> Sentence:
    """One sentence; `long`: of two or three clauses with all that may hang on them."""
    chance = rng.random()
    if long and chance < 0.5:
        first, second, third = (clause(rng, seek, 1) for _ in range(3))
        return Sentence((first, second, third), (pick(rng, COORDINATES), conjunction(rng, second, third)))
    if long or chance < 0.15:
        first, second = (clause(rng, seek, int(long)) for _ in range(2))
        joint = pick(rng, COORDINATES) if rng.random() < 0.4 else conjunction(rng, first, second)
        return Sentence((first, second), (joint,))
    if chance < 0.25:
        first = clause(rng, seek, 0)
        if isinstance(first.subject, (Pronoun, Name)) and first.verb:
            shared = first.subject if isinstance(first.subject, Pronoun) else None
            return Sentence((first, predicate(rng, seek, None, 'p', 0, shared=shared)), ('and',))
    return Sentence((clause(rng, seek, 1),))
