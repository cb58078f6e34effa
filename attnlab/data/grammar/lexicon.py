"""The vocabulary of the grammar: one French word for every sense of an English word, one gender for every noun.

Irregular forms are listed in the tables; regular ones follow from `plural` and the code that parses the tables.
Letters are semantic classes of nouns, which decide what verbs and adjectives a noun may occur with:

p person, a animal, t thing one carries, x text, c clothing, v vehicle, b building or place, n part of a building or
of the landscape, f food one counts, m food one does not count, d drink, i institution;
o can be opened, k can break, r can be repaired, u is built,
h has a door and a roof, s has things on it, w has things inside, g one goes there.
"""

from dataclasses import dataclass

VOWELS = frozenset('aàâeéèêëiîïoôœuùûAÉE')
ASPIRATED = frozenset(('héros', 'hibou', 'hiboux', 'haut', 'hauts', 'haute', 'hautes'))
AN_EXCEPTIONS = frozenset(('useful', 'European'))  # a, although they begin with a vowel letter
AN_SILENT = frozenset(('honest',))  # an, although they begin with a consonant letter


@dataclass(frozen=True, slots=True, eq=False)
class Noun:
    """A noun of both languages; `classes` are the letters of its semantic classes, the main one first."""
    english: tuple[str, str]  # singular, plural
    french: tuple[str, str]  # singular, plural
    feminine: bool
    classes: str


@dataclass(frozen=True, slots=True, eq=False)
class Adjective:
    """An adjective of both languages; `classes` are those of the nouns that it may describe."""
    english: str
    french: tuple[str, str, str, str]  # masculine singular, plural, feminine singular, plural
    liaison: str  # masculine singular before a vowel, as in vieil, bel, nouvel
    before: bool  # precedes its noun in French
    classes: str


@dataclass(frozen=True, slots=True, eq=False)
class Verb:
    """A verb of both languages, and the classes of its subjects and objects."""
    english: tuple[str, str, str]  # base, third person singular, past
    particle: str  # as 'for' in "wait for"; '' for none
    french: tuple[str, str, str, str]  # present: je, il, nous, ils
    participle: str
    être: bool  # passé composé with être
    à: bool  # takes its object with à
    past: bool  # has a past: its English past is not also its present, and is always the French passé composé
    generic: bool  # takes no indefinite objects, because "loves dogs" would be "aime les chiens"
    subjects: str  # classes
    objects: str  # classes; '' for an intransitive verb


@dataclass(frozen=True, slots=True, eq=False)
class Modifier:
    """A noun that modifies another one, as `kitchen` in "kitchen table"; in French, `cuisine` after de.

    heads: the English nouns that it may modify.
    """
    english: str
    french: str
    heads: tuple[str, ...]


def begins_with_vowel(word: str) -> bool:
    """Whether le, de, que... are elided before the French word: it begins with a vowel or a mute h."""
    return word[0] in VOWELS or word[0] == 'h' and word not in ASPIRATED


def indefinite_article(word: str) -> str:
    """Return the English indefinite article, a or an, by the sound of the word that follows."""
    vowel_sound = word[0] in 'aeiouAEIOU' and word not in AN_EXCEPTIONS or word in AN_SILENT
    return 'an' if vowel_sound else 'a'


def plural(french: str) -> str:
    """Return the regular plural of a French word, including -eau/-eaux and -al/-aux."""
    if french[-1] in 'sxz':
        return french
    if french.endswith('eau'):
        return french + 'x'
    return french[:-1] + 'ux' if french.endswith('al') else french + 's'


def _english_plural(noun: str) -> str:
    if noun.endswith(('s', 'x', 'ch', 'sh')):
        return noun + 'es'
    return noun[:-1] + 'ies' if noun.endswith('y') and noun[-2] not in 'aeiou' else noun + 's'


def _nouns(classes: str, table: str) -> list[Noun]:
    """Parse a table of nouns: `english[/plural] french[/plural] gender[+classes]`, separated by commas."""
    nouns = []
    for entry in filter(None, map(str.strip, table.split(','))):
        english, french, gender = entry.split()
        gender, _, more_classes = gender.partition('+')
        singular, _, plural_form = english.partition('/')
        french_singular, _, french_plural = french.partition('/')
        nouns.append(Noun(
            (singular, plural_form or _english_plural(singular)),
            (french_singular, french_plural or plural(french_singular)), gender == 'f', classes + more_classes))
    return nouns


def _adjectives(classes: str, table: str, before: bool = False) -> list[Adjective]:
    """Parse a table of adjectives: `english masculine[/feminine[/liaison]]`, separated by commas; `=`: invariable."""
    adjectives = []
    for entry in filter(None, map(str.strip, table.split(','))):
        english, forms = entry.split()
        masculine, feminine, liaison = (forms.removesuffix('=').split('/') + ['', ''])[:3]
        feminine = feminine or (masculine if masculine.endswith('e') else masculine + 'e')
        french = (masculine, plural(masculine), feminine, feminine + 's')
        if forms.endswith('='):
            french = (masculine, masculine, masculine, masculine)
        adjectives.append(Adjective(english, french, liaison or masculine, before, classes))
    return adjectives


def _verbs(table: str) -> tuple[Verb, ...]:
    """Parse a table of verbs, one a line: `base third past [particle] | je il nous ils participle | classes | flags`.

    classes: those of subjects and objects.  flags: e être, a takes à, g generic, n no past.
    """
    verbs = []
    for line in filter(None, map(str.strip, table.splitlines())):
        english, french, classes, flags = (part.strip() for part in line.split('|'))
        base, third, past, *particle = english.split()
        je, il, nous, ils, participle = french.split()
        subjects, *objects = classes.split()
        verbs.append(Verb((base, third, past), ''.join(particle), (je, il, nous, ils), participle, 'e' in flags,
                          'a' in flags, 'n' not in flags, 'g' in flags, subjects, ''.join(objects)))
    return tuple(verbs)


NOUNS = (
    *_nouns('p', '''man/men homme m, woman/women femme f, boy garçon m, girl fille f, child/children enfant m,
        king roi m, queen reine f, prince prince m, princess princesse f, father père m, mother mère f,
        brother frère m, sister sœur f, uncle oncle m, aunt tante f, teacher professeur m, doctor médecin m,
        student étudiant m, actress actrice f, waiter serveur m, nurse infirmière f, hero/heroes héros m,
        neighbour voisin m, friend ami m, writer écrivain m, lawyer avocat m, minister ministre m,
        journalist journaliste m, soldier soldat m, judge juge m, president président m, engineer ingénieur m'''),
    *_nouns('a', '''dog chien m, cat chat m, horse cheval m, bird oiseau m, cow vache f, wolf/wolves loup m,
        fox renard m, goat chèvre f, rabbit lapin m, bear ours m, mouse/mice souris f, owl hibou/hiboux m,
        elephant éléphant m, animal animal m'''),
    *_nouns('x', '''book livre m+t, letter lettre f+t, newspaper journal m+t, story histoire f, poem poème m,
        report rapport m+t, article article m, novel roman m+t'''),
    *_nouns('t', '''table table f+srk, chair chaise f+srk, lamp lampe f+rk, key clé f, box boîte f+o, bag sac m+o,
        knife/knives couteau m, glass verre m+k, cup tasse f+k, plate assiette f+k, clock horloge f+rk,
        mirror miroir m+k, bottle bouteille f+ok, toy jouet m+rk, jewel bijou/bijoux m, umbrella parapluie m+or,
        bed lit m+sr, tool outil m+r, flower fleur f, painting tableau m, gift cadeau m'''),
    *_nouns('c', '''dress robe f, coat manteau m, hat chapeau m, shirt chemise f, shoe chaussure f, jacket veste f,
        skirt jupe f, tie cravate f'''),
    *_nouns('v', '''car voiture f+r, bicycle vélo m+r, boat bateau m+ru, train train m, truck camion m+r,
        plane avion m+r'''),
    *_nouns('b', '''house maison f+owuh, church église f+owguh, school école f+owguh, garden jardin m+w,
        market marché m+g, hotel hôtel m+owguh, hospital hôpital m+owguh, castle château m+owuh,
        village village m+wg, city ville f+w, park parc m+wg, forest forêt f+w, museum musée m+owguh,
        shop magasin m+owg, theatre théâtre m+owguh, library bibliothèque f+owguh, kitchen cuisine f+w,
        station gare f+wgu, office bureau m+owg'''),
    *_nouns('n', '''door porte f+or, window fenêtre f+ork, wall mur m+ru, roof toit m+rs, tree arbre m,
        mountain montagne f, bridge pont m+rsu, tower tour f+ru, road route f+ru'''),
    *_nouns('f', 'apple pomme f, orange orange f, egg œuf m, cake gâteau m'),
    *_nouns('m', 'bread pain m, cheese fromage m, meat viande f, soup soupe f'),
    *_nouns('d', 'water eau f, coffee café m, tea thé m, milk lait m, wine vin m, beer bière f, juice jus m'),
)
INSTITUTIONS = (*_nouns('i', '''Area zone f, Union union f, Commission commission f, Community communauté f,
    Council conseil m, Court cour f, Agency agence f, Committee comité m, Bank banque f'''),)

MASS = 'md'  # classes of uncountable nouns
ADJECTIVES = (
    *_adjectives('patxcvbn', 'small petit, beautiful beau/belle/bel, old vieux/vieille/vieil', before=True),
    *_adjectives('atcvbn', 'big grand', before=True),
    *_adjectives('xcvbt', 'new nouveau/nouvelle/nouvel', before=True),
    *_adjectives('pa', 'young jeune', before=True),
    *_adjectives('pxfmd', 'good bon/bonne', before=True),
    *_adjectives('pxfmd', 'bad mauvais', before=True),
    *_adjectives('cbx', 'pretty joli', before=True),
    *_adjectives('x', 'long long/longue', before=True),
    *_adjectives('n', 'high haut', before=True),
    *_adjectives('atcvn', 'white blanc/blanche, black noir, grey gris, brown marron='),
    *_adjectives('tcvn', 'red rouge, green vert, blue bleu, yellow jaune, orange orange='),
    *_adjectives('p', '''intelligent intelligent, happy heureux/heureuse, rich riche, famous célèbre,
        kind gentil/gentille, proud fier/fière, jealous jaloux/jalouse, honest honnête, serious sérieux/sérieuse,
        discreet discret/discrète, loyal loyal, creative créatif/créative, worried inquiet/inquiète, polite poli'''),
    *_adjectives('pa', 'sad triste, tired fatigué, strong fort, lazy paresseux/paresseuse, cruel cruel/cruelle'),
    *_adjectives('pxcvbfmd', '''French français, English anglais, Italian italien/italienne, German allemand,
        Spanish espagnol, Canadian canadien/canadienne, American américain, Greek grec/grecque, Japanese japonais'''),
    *_adjectives('pxvb', 'European européen/européenne, African africain'),
    *_adjectives('xb', 'national national, royal royal, medieval médiéval'),
    *_adjectives('tcv', 'heavy lourd'),
    *_adjectives('tcvfmd', 'expensive cher/chère'),
    *_adjectives('tcvbn', 'dirty sale, clean propre'),
    *_adjectives('tcvbx', 'modern moderne, strange étrange'),
    *_adjectives('x', '''secret secret/secrète, official officiel/officielle, interesting intéressant,
        boring ennuyeux/ennuyeuse'''),
    *_adjectives('tv', 'useful utile'),
    *_adjectives('b', 'public public/publique, central central, quiet tranquille'),
    *_adjectives('fmd', 'fresh frais/fraîche, cold froid, hot chaud, delicious délicieux/délicieuse'),
)
DOMAINS = (*_adjectives('i', '''Economic économique, Political politique, Commercial commercial, Military militaire,
    Cultural culturel/culturelle, Scientific scientifique, Financial financier/financière'''),)
ORIGINS = (*(a for a in ADJECTIVES if a.english in ('European', 'African', 'American')),
           *_adjectives('i', 'International international, Asian asiatique, Arab arabe'))

VERBS = _verbs('''
    see sees saw | vois voit voyons voient vu | pa patxcvbn |
    hear hears heard | entends entend entendons entendent entendu | pa pav |
    find finds found | trouve trouve trouvons trouvent trouvé | p atxcv |
    buy buys bought | achète achète achetons achètent acheté | p atxcvfmd |
    sell sells sold | vends vend vendons vendent vendu | p atxcvfmd |
    read reads read | lis lit lisons lisent lu | p x | n
    write writes wrote | écris écrit écrivons écrivent écrit | p x |
    eat eats ate | mange mange mangeons mangent mangé | pa fm |
    drink drinks drank | bois boit buvons boivent bu | p d |
    open opens opened | ouvre ouvre ouvrons ouvrent ouvert | p o |
    close closes closed | ferme ferme fermons ferment fermé | p o |
    wear wears wore | porte porte portons portent porté | p c |
    carry carries carried | porte porte portons portent porté | p t |
    wash washes washed | lave lave lavons lavent lavé | p cva |
    build builds built | construis construit construisons construisent construit | p u |
    visit visits visited | visite visite visitons visitent visité | p b |
    follow follows followed | suis suit suivons suivent suivi | pa pav |
    help helps helped | aide aide aidons aident aidé | p p |
    admire admires admired | admire admire admirons admirent admiré | p pxvbc | g
    choose chooses chose | choisis choisit choisissons choisissent choisi | p xtcv |
    lose loses lost | perds perd perdons perdent perdu | p txca |
    hide hides hid | cache cache cachons cachent caché | p txc |
    draw draws drew | dessine dessine dessinons dessinent dessiné | p pabn |
    break breaks broke | casse casse cassons cassent cassé | p k |
    repair repairs repaired | répare répare réparons réparent réparé | p r |
    describe describes described | décris décrit décrivons décrivent décrit | p pabx |
    protect protects protected | protège protège protégeons protègent protégé | pi pai |
    love loves loved | aime aime aimons aiment aimé | p pabxcd | gn
    hate hates hated | déteste déteste détestons détestent détesté | p pabx | gn
    know knows knew | connais connaît connaissons connaissent connu | p pb | gn
    support supports supported | soutiens soutient soutenons soutiennent soutenu | pi pi | g
    criticise criticises criticised | critique critique critiquons critiquent critiqué | pi pix | g
    invite invites invited | invite invite invitons invitent invité | pi p |
    wait waits waited for | attends attend attendons attendent attendu | pa pv |
    look looks looked for | cherche cherche cherchons cherchent cherché | pa patxc |
    look looks looked at | regarde regarde regardons regardent regardé | pa patxcvbn |
    listen listens listened to | écoute écoute écoutons écoutent écouté | p p | g
    talk talks talked to | parle parle parlons parlent parlé | p pa | a
    obey obeys obeyed | obéis obéit obéissons obéissent obéi | p p | ag
''')
INTRANSITIVES = _verbs('''
    sleep sleeps slept | dors dort dormons dorment dormi | pa |
    work works worked | travaille travaille travaillons travaillent travaillé | p |
    dance dances danced | danse danse dansons dansent dansé | p |
    sing sings sang | chante chante chantons chantent chanté | p |
    run runs ran | cours court courons courent couru | pa |
    laugh laughs laughed | ris rit rions rient ri | p |
    walk walks walked | marche marche marchons marchent marché | pa |
    live lives lived | habite habite habitons habitent habité | p | n
    arrive arrives arrived | arrive arrive arrivons arrivent arrivé | pav | e
    fall falls fell | tombe tombe tombons tombent tombé | pa | e
    stay stays stayed | reste reste restons restent resté | pa | e
''')
GIVING = _verbs('''
    give gives gave | donne donne donnons donnent donné | p txcf |
    show shows showed | montre montre montrons montrent montré | p txcvb |
    send sends sent | envoie envoie envoyons envoient envoyé | pi tx |
''')
GOING, = _verbs('go goes went | vais va allons vont allé | p | e')

MODIFIERS = tuple(Modifier(english, french, tuple(heads)) for english, french, *heads in map(str.split, '''
    kitchen cuisine table knife chair
    garden jardin chair table
    office bureau chair lamp
    winter hiver coat dress shoe
    summer été dress shirt hat
    history histoire book teacher
    music musique teacher school
    art art book museum school
    dance danse school teacher
    village village church school doctor
    country campagne house doctor road
    travel voyage bag book story
    police police car
    fishing pêche boat
    goat chèvre cheese
    apple pomme juice
    orange orange juice
    fish poisson soup
    wedding mariage gift cake
    birthday anniversaire gift cake
    love amour letter story poem
    war guerre hero novel story
    sports sport car
    adventure aventures novel story
    newspaper journal article
    stone pierre bridge wall tower
    farm ferme animal dog
    evening soirée dress
'''.strip().splitlines()))
DOMAIN_NOUNS = tuple(Modifier(english, french, ()) for english, french in (
    ('Security', 'sécurité'), ('Defence', 'défense'), ('Health', 'santé'), ('Peace', 'paix'),
    ('Development', 'développement'), ('Research', 'recherche'), ('Justice', 'justice')))

# Names, and whether they are feminine.
NAMES = {'Paul': False, 'Simon': False, 'Arthur': False, 'Marie': True, 'Anne': True, 'Alice': True}
NUMBERS = {'two': 'deux', 'three': 'trois', 'four': 'quatre'}
POSSESSIVES = {'my': ('mon', 'ma', 'mes'), 'his': ('son', 'sa', 'ses'), 'her': ('son', 'sa', 'ses'),
               'our': ('notre', 'notre', 'nos')}
ADVERBS = {'often': 'souvent', 'always': 'toujours', 'rarely': 'rarement', 'sometimes': 'parfois'}
DEGREES = {'very': 'très', 'too': 'trop'}
CONJUNCTIONS = {'and': ('et',), 'but': ('mais',), 'because': ('parce', 'que'), 'when': ('quand',), 'if': ('si',)}
# Prepositions: the French one, and the classes of the nouns that may follow.
PREPOSITIONS = {'in': ('dans', 'w'), 'near': ('près', 'bn'), 'behind': ('derrière', 'bn'), 'under': ('sous', 's'),
                'on': ('sur', 's'), 'with': ('avec', 'p'), 'in front of': ('devant', 'bn')}
# Parts, with the classes of the wholes that they may belong to.
PARTS = {'door': 'h', 'window': 'h', 'wall': 'h', 'roof': 'h', 'key': 'h', 'story': 'p', 'president': 'i'}
# Nouns without a possessive or an owner: "my girl" would be ma fille, which is "my daughter".
UNOWNED = frozenset('''man woman boy girl prince princess actress waiter nurse hero writer minister journalist soldier
    judge president engineer wolf fox bear owl elephant forest station mountain road market city hospital museum tree
    theatre'''.split())
# Adjectives that a noun does not occur with: belle-mère is a mother-in-law, bonhomme a fellow; a high tree is grand.
CLASHES = frozenset((
    ('beautiful', 'mother'), ('beautiful', 'father'), ('beautiful', 'sister'), ('beautiful', 'brother'),
    ('good', 'man'), ('high', 'road'), ('high', 'tree'), ('high', 'door')))
# Adjectives that take no degree (very, too).
UNGRADED = frozenset('''medieval national royal public central secret official delicious useful white black grey brown
    red green blue yellow orange'''.split())
