"""What one looks at: heat maps of a run's own translations, on paper and on the screen."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attnlab import files
from attnlab.data.pairs import Pairs
from attnlab.data.text import bare, normalise, tokenise
from attnlab.data.vocabulary import BOS, EOS, SPECIAL, UNK, Vocabulary
from attnlab.tasks import heatmap
from attnlab.tasks.align.alignment import join, links, reversals
from attnlab.tasks.align.models import Model
from attnlab.tasks.align.translator import Translation
from attnlab.tasks.headmaps import slug, write
from attnlab.tasks.task import Params

SAMPLES = 10


def labelled(
    sentence: str,
    source: Sequence[int],
    translation: Translation,
    vocabularies: tuple[Vocabulary, Vocabulary],
    joined: bool,
    shift: int = 0,
) -> tuple[np.ndarray, list[str], list[str]]:
    """(weights, rows, columns) of one translation: rows are the produced tokens, columns those of the source.

    joined: words instead of sub-words, by the sum over a source word and the mean over a produced one.
    shift: 1 reads a token at the step that it feeds, one after it was made; the last one, EOS, feeds none.
    """
    words = source_words(sentence, source, vocabularies[0])
    weights, target = translation.weights[shift:], translation.target[: len(translation.target) - shift]
    if not joined:
        columns = words if vocabularies[0].kind == 'words' else vocabularies[0].pieces(source)
        return weights, vocabularies[1].pieces(target), columns
    rows, columns = vocabularies[1].words(target), vocabularies[0].words(source)
    return join(weights, rows, columns), [row[0] for row in rows], words


def source_words(sentence: str, source: Sequence[int], vocabulary: Vocabulary) -> list[str]:
    """The words of a sentence as they were typed, `<unk>` behind those that the model does not know, and EOS."""
    spans = vocabulary.words(source)
    words = [bare(word) for word in tokenise(normalise(sentence, vocabulary.language))]
    words = [*words[: len(spans) - 1], SPECIAL[EOS]]  # evaluation cuts long sentences
    unknown = f' {SPECIAL[UNK]}'
    return [
        word + unknown * vocabulary.is_unknown(source[start:stop])
        for word, (_, start, stop) in zip(words, spans, strict=True)
    ]


def write_samples(
    path: Path,
    pairs: Pairs,
    outputs: Sequence[str],
    source: Sequence[Sequence[int]],
    translations: Sequence[Translation],
    vocabularies: tuple[Vocabulary, Vocabulary],
    shift: int,
) -> None:
    """For the page: the translations that turn the most neighbours round, in the order of the split.

    Without attention there is nothing to turn, and these are the first ones.
    """
    attends = [t.weights.size > 0 and len(t.target) > 1 for t in translations]

    def turned(i: int) -> int:
        if not attends[i]:
            return 0
        spans = vocabularies[1].words(translations[i].target), vocabularies[0].words(source[i])
        return reversals(links(translations[i].weights, *spans, shift))

    chosen = sorted(sorted(range(len(outputs)), key=lambda i: (-turned(i), i))[:SAMPLES])
    samples = [
        _sample(i, pairs, outputs[i], source[i], translations[i], vocabularies, shift, attends[i]) for i in chosen
    ]
    path.write_text(json.dumps(samples, ensure_ascii=False) + '\n', encoding='utf-8')


def _sample(
    i: int,
    pairs: Pairs,
    output: str,
    source: Sequence[int],
    translation: Translation,
    vocabularies: tuple[Vocabulary, Vocabulary],
    shift: int,
    attends: bool,
) -> dict[str, Any]:
    sample = {'source': pairs.source[i], 'reference': pairs.target[i], 'output': output, 'gold': None}
    if not attends:
        return sample | {'rows': [], 'columns': [], 'weights': None}
    weights, rows, columns = labelled(pairs.source[i], source, translation, vocabularies, True, shift)
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
    shift: int,
) -> None:
    """Prints a translation; on a terminal, or in a file and an array, the alignment that came with it."""
    output = vocabularies[1].decode(translation.target)
    print(output)
    if translation.weights.size == 0 or len(translation.target) <= shift:
        return
    weights, rows, columns = labelled(sentence, source, translation, vocabularies, joined, shift)
    path = Path(workdir) / 'figures' / f'translate-{slug(sentence)}'
    written = ''
    with files.optional(workdir):
        path.parent.mkdir(exist_ok=True)
        heatmap.draw(path.with_suffix('.png'), weights, rows, columns, title=output)
        heatmap.save(path.with_suffix('.npz'), weights, rows, columns)
        written = f'{path}.png  {path}.npz'
    terminal = sys.stdout.isatty()
    colour = terminal and not os.environ.get('NO_COLOR') and os.environ.get('TERM') != 'dumb'
    width = shutil.get_terminal_size().columns
    # The French alone goes to a pipe, so that it can be piped on.
    screen = sys.stdout if terminal else sys.stderr
    print(heatmap.text(weights, rows, columns, width, colour), file=screen)
    if written:
        print(written, file=screen)


def attend(
    workdir: Path,
    model: Model,
    params: Params,
    vocabularies: tuple[Vocabulary, Vocabulary],
    sentence: str,
    source: Sequence[int],
    target: Sequence[int],
    layer: int | None,
    head: int | None,
) -> None:
    """Draws every attention of the model while it reads a sentence and its own translation; prints the files."""
    inputs = np.array([[BOS, *target[:-1]]])
    maps = jax.device_get(jax.jit(model.maps)(params, np.array([source]), inputs))
    read, made = vocabularies[0].pieces(source), vocabularies[1].pieces(target)
    if vocabularies[0].kind == 'words':
        read = source_words(sentence, source, vocabularies[0])
    fed = [SPECIAL[BOS], *made[:-1]]
    names = {
        'encoder/attention': (read, read), 'decoder/attention': (fed, fed), 'decoder/cross_attention': (made, read)
    }  # fmt: skip
    folder = Path(workdir) / 'figures' / f'attend-{slug(sentence)}'
    found = {kind: weights[0] for kind, weights in maps.items()}
    for path in write(folder, found, {kind: names[kind] for kind in found}, layer, head):
        print(path)
