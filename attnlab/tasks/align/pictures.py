"""What one looks at: heat maps of a run's own translations, on paper and on the screen."""

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.data.pairs import Pairs
from attnlab.data.text import bare, normalise, tokenise
from attnlab.data.vocabulary import EOS, SPECIAL, Vocabulary
from attnlab.tasks import heatmap
from attnlab.tasks.align.alignment import join, links, reversals
from attnlab.tasks.align.translator import Translation

SAMPLES = 10


def labelled(
    sentence: str,
    source: Sequence[int],
    translation: Translation,
    vocabularies: tuple[Vocabulary, Vocabulary],
    joined: bool,
) -> tuple[np.ndarray, list[str], list[str]]:
    """(weights, rows, columns) of one translation: rows are the produced tokens, columns those of the source.

    joined: words instead of sub-words, by the sum over a source word and the mean over a produced one.
    """
    # The source's words as they were typed: an id may know one only as unknown.
    words = [*(bare(word) for word in tokenise(normalise(sentence, vocabularies[0].language))), SPECIAL[EOS]]
    if not joined:
        columns = words if vocabularies[0].kind == 'words' else vocabularies[0].pieces(source)
        return translation.weights, vocabularies[1].pieces(translation.target), columns
    rows, columns = vocabularies[1].words(translation.target), vocabularies[0].words(source)
    return join(translation.weights, rows, columns), [row[0] for row in rows], words


def write_samples(
    path: Path,
    pairs: Pairs,
    outputs: Sequence[str],
    source: Sequence[Sequence[int]],
    translations: Sequence[Translation],
    vocabularies: tuple[Vocabulary, Vocabulary],
) -> None:
    """For the page: the translations that turn the most neighbours round, in the order of the split.

    Without attention there is nothing to turn, and these are the first ones.
    """
    attends = [t.weights.size > 0 and len(t.target) > 1 for t in translations]

    def turned(i: int) -> int:
        if not attends[i]:
            return 0
        spans = vocabularies[1].words(translations[i].target), vocabularies[0].words(source[i])
        return reversals(links(translations[i].weights, *spans, shift=0))

    chosen = sorted(sorted(range(len(outputs)), key=lambda i: (-turned(i), i))[:SAMPLES])
    samples = [_sample(i, pairs, outputs[i], source[i], translations[i], vocabularies, attends[i]) for i in chosen]
    path.write_text(json.dumps(samples, ensure_ascii=False) + '\n', encoding='utf-8')


def _sample(
    i: int,
    pairs: Pairs,
    output: str,
    source: Sequence[int],
    translation: Translation,
    vocabularies: tuple[Vocabulary, Vocabulary],
    attends: bool,
) -> dict[str, Any]:
    sample = {'source': pairs.source[i], 'reference': pairs.target[i], 'output': output, 'gold': None}
    if not attends:
        return sample | {'rows': [], 'columns': [], 'weights': None}
    weights, rows, columns = labelled(pairs.source[i], source, translation, vocabularies, joined=True)
    # Gold links speak of the reference's words: they fit the picture where the output is the reference.
    if pairs.links is not None and output == normalise(pairs.target[i], vocabularies[1].language):
        gold = pairs.links[i]
        sample['gold'] = {'sure': sorted(gold.sure), 'possible': sorted(gold.possible)}
    return sample | {'rows': rows, 'columns': columns, 'weights': weights.round(4).tolist()}


def show(
    workdir: Path,
    sentence: str,
    source: Sequence[int],
    translation: Translation,
    vocabularies: tuple[Vocabulary, Vocabulary],
    joined: bool,
) -> None:
    """Prints a translation; on a terminal, or in a file and an array, the alignment that came with it."""
    output = vocabularies[1].decode(translation.target)
    print(output)
    if translation.weights.size == 0:
        return
    weights, rows, columns = labelled(sentence, source, translation, vocabularies, joined)
    path = Path(workdir) / 'figures' / f'translate-{_slug(sentence)}'
    path.parent.mkdir(exist_ok=True)
    heatmap.draw(path.with_suffix('.png'), weights, rows, columns, title=output)
    heatmap.save(path.with_suffix('.npz'), weights, rows, columns)
    colour = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns
    # The French alone goes to a pipe, so that it can be piped on.
    screen = sys.stdout if colour else sys.stderr
    print(heatmap.text(weights, rows, columns, width, colour), file=screen)
    print(f'{path}.png  {path}.npz', file=screen)


def _slug(sentence: str) -> str:
    """A file name that tells the sentence and is its own: two sentences never share a file."""
    words = re.sub(r'[^a-z0-9]+', '-', sentence.lower()).strip('-')[:40].strip('-')
    return f'{words}-{hashlib.sha256(sentence.encode()).hexdigest()[:6]}'
