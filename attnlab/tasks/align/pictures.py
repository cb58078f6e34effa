"""Alignments of a run's own translations: samples for its page, pictures, text for a terminal."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnlab import files
from attnlab.data.pairs import SentencePairs
from attnlab.data.text import normalise, strip_spacing_mark, tokenise
from attnlab.data.vocabulary import BOS, EOS, SPECIAL_TOKENS, UNK, Vocabulary
from attnlab.tasks import heatmap
from attnlab.tasks.align.alignment import count_reversals, extract_links, join_subwords
from attnlab.tasks.align.corpus import Vocabularies
from attnlab.tasks.align.translator import Translation
from attnlab.tasks.head_grid import MapLabels, figure_path
from attnlab.tasks.task import TranslatedSentence

MAX_SAMPLES = 10


def label_alignment(
    sentence: str,
    source: Sequence[int],
    translation: Translation,
    vocabularies: Vocabularies,
    joined: bool,
    shift: int = 0,
) -> tuple[np.ndarray, list[str], list[str]]:
    """(weights, rows, columns) of one translation: rows are the produced tokens, columns those of the source.

    joined: words instead of sub-words, by the sum over a source word and the mean over a produced one.
    shift: 1 reads a token at the step that it feeds, one after it was made; the last one, EOS, feeds none.
    """
    words = label_source_words(sentence, source, vocabularies[0])
    weights, target = translation.weights[shift:], translation.target[: len(translation.target) - shift]
    if not joined:
        columns = words if vocabularies[0].kind == 'words' else vocabularies[0].pieces(source)
        return weights, vocabularies[1].pieces(target), columns
    rows, columns = vocabularies[1].words(target), vocabularies[0].words(source)
    return join_subwords(weights, rows, columns), [row[0] for row in rows], words


def label_source_words(sentence: str, source: Sequence[int], vocabulary: Vocabulary) -> list[str]:
    """The words of a sentence as they were typed, `<unk>` behind those that the model does not know, and EOS."""
    spans = vocabulary.words(source)
    words = [strip_spacing_mark(word) for word in tokenise(normalise(sentence, vocabulary.language))]
    words = [*words[: len(spans) - 1], SPECIAL_TOKENS[EOS]]  # evaluation cuts long sentences
    unknown = f' {SPECIAL_TOKENS[UNK]}'
    return [
        word + unknown * vocabulary.is_unknown(source[start:stop])
        for word, (_, start, stop) in zip(words, spans, strict=True)
    ]


def label_maps(sentence: str, source: Sequence[int], target: Sequence[int], vocabularies: Vocabularies) -> MapLabels:
    """Labels of each attention map of a model that translates `source` into `target`."""
    read, produced = vocabularies[0].pieces(source), vocabularies[1].pieces(target)
    if vocabularies[0].kind == 'words':
        read = label_source_words(sentence, source, vocabularies[0])
    fed = [SPECIAL_TOKENS[BOS], *produced[:-1]]
    return {
        'encoder/attention': (read, read),
        'decoder/attention': (fed, fed),
        'decoder/cross_attention': (produced, read),
    }


def select_samples(
    pairs: SentencePairs,
    outputs: Sequence[str],
    source: Sequence[Sequence[int]],
    translations: Sequence[Translation],
    vocabularies: Vocabularies,
    shift: int,
) -> list[dict[str, Any]]:
    """For the page of a run: the translations that reverse the most neighbouring words, in the order of the split.

    The first ones of a model without attention.
    """
    spans = lambda i: (vocabularies[1].words(translations[i].target), vocabularies[0].words(source[i]))
    reversed_words = lambda i: count_reversals(extract_links(translations[i].weights, *spans(i), shift))
    counts = [reversed_words(i) if _has_weights(each) else 0 for i, each in enumerate(translations)]
    chosen = sorted(sorted(range(len(outputs)), key=lambda i: (-counts[i], i))[:MAX_SAMPLES])

    def sample(i: int) -> dict[str, Any]:
        found = {'source': pairs.source[i], 'reference': pairs.target[i], 'output': outputs[i], 'gold': None}
        if not _has_weights(translations[i]):
            return found | {'rows': [], 'columns': [], 'weights': None}
        weights, rows, columns = label_alignment(pairs.source[i], source[i], translations[i], vocabularies, True, shift)
        # Gold links are of the words of the reference: they fit the picture if the output is the reference.
        if pairs.links is not None and outputs[i] == normalise(pairs.target[i], vocabularies[1].language):
            gold = pairs.links[i]
            found['gold'] = {'sure': sorted(gold.sure), 'possible': sorted(gold.possible)}
        return found | {'rows': rows, 'columns': columns, 'weights': weights.round(4).tolist()}

    return [sample(i) for i in chosen]


def _has_weights(translation: Translation) -> bool:
    return translation.weights.size > 0 and len(translation.target) > 1


def show_alignment(workdir: Path, translated: TranslatedSentence) -> None:
    """Show the alignment of a translation on the screen, and write it as a picture and an array file."""
    path = figure_path(workdir, 'translate', translated.source)
    weights, rows, columns = translated.weights, translated.rows, translated.columns
    written = ''
    with files.log_write_errors(workdir):
        path.parent.mkdir(exist_ok=True)
        heatmap.draw_heatmap(path.with_suffix('.png'), weights, rows, columns, title=translated.text)
        heatmap.save_alignment(path.with_suffix('.npz'), weights, rows, columns)
        written = f'{path}.png  {path}.npz'
    terminal = sys.stdout.isatty()
    colour = terminal and not os.environ.get('NO_COLOR') and os.environ.get('TERM') != 'dumb'
    width = shutil.get_terminal_size().columns
    screen = sys.stdout if terminal else sys.stderr  # a pipe gets the translations alone
    print(heatmap.render_text(weights, rows, columns, width, colour), file=screen)
    if written:
        print(written, file=screen)
