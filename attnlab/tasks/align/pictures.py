"""Alignments of a run's translations: labels, samples for the run's page, pictures, and text for a terminal."""

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
"""Samples on the page of a run."""


def label_alignment(
    sentence: str,
    source: Sequence[int],
    translation: Translation,
    vocabularies: Vocabularies,
    joined: bool,
    shift: int = 0,
) -> tuple[np.ndarray, list[str], list[str]]:
    """Return (weights [T, S], rows, columns) of one translation: T produced tokens and S source tokens as text.

    source: the token ids of `sentence`, with EOS.
    joined: words instead of sub-words; see `alignment.join_subwords`.
    shift: 1 takes the weights of the step whose decoder input is the token, one step after the token was produced. The
      last token, EOS, is never an input, so it has no row.
    """
    words = label_source_words(sentence, source, vocabularies[0])
    weights, target = translation.weights[shift:], translation.target[: len(translation.target) - shift]
    if not joined:
        columns = words if vocabularies[0].kind == 'words' else vocabularies[0].pieces(source)
        return weights, vocabularies[1].pieces(target), columns
    rows, columns = vocabularies[1].words(target), vocabularies[0].words(source)
    return join_subwords(weights, rows, columns), [row[0] for row in rows], words


def label_source_words(sentence: str, source: Sequence[int], vocabulary: Vocabulary) -> list[str]:
    """Return the words of a sentence as typed, with `<unk>` after each unknown word, and the end of sentence.

    source: the token ids of `sentence`, with EOS.
    """
    spans = vocabulary.words(source)
    words = [strip_spacing_mark(word) for word in tokenise(normalise(sentence, vocabulary.language))]
    words = [*words[: len(spans) - 1], SPECIAL_TOKENS[EOS]]  # evaluation cuts long sentences
    unknown = f' {SPECIAL_TOKENS[UNK]}'
    return [
        word + unknown * vocabulary.is_unknown(source[start:stop])
        for word, (_, start, stop) in zip(words, spans, strict=True)
    ]


def label_maps(sentence: str, source: Sequence[int], target: Sequence[int], vocabularies: Vocabularies) -> MapLabels:
    """Return the labels of each attention map of a model that translates the ids `source` into the ids `target`."""
    source_labels, target_labels = vocabularies[0].pieces(source), vocabularies[1].pieces(target)
    if vocabularies[0].kind == 'words':
        source_labels = label_source_words(sentence, source, vocabularies[0])
    input_labels = [SPECIAL_TOKENS[BOS], *target_labels[:-1]]  # of the decoder
    return {
        'encoder/attention': (source_labels, source_labels),
        'decoder/attention': (input_labels, input_labels),
        'decoder/cross_attention': (target_labels, source_labels),
    }


def select_samples(
    pairs: SentencePairs,
    outputs: Sequence[str],
    source: Sequence[Sequence[int]],
    translations: Sequence[Translation],
    vocabularies: Vocabularies,
    shift: int,
) -> list[dict[str, Any]]:
    """Return the samples for the page of a run: the translations with the most reversed pairs of neighbouring words.

    For a model without attention, the first translations. Samples are in the order of the split; their fields are those
    of `samples/SPLIT.json` in `attnlab.report.page.write_run_page`.
    outputs: the translations as text.  source: token ids of each source sentence.  shift: as in `label_alignment`.
    """

    def reversals(i: int) -> int:
        if not _has_weights(translations[i]):
            return 0
        rows, columns = vocabularies[1].words(translations[i].target), vocabularies[0].words(source[i])
        return count_reversals(extract_links(translations[i].weights, rows, columns, shift))

    counts = [reversals(i) for i in range(len(translations))]
    chosen = sorted(sorted(range(len(outputs)), key=lambda i: (-counts[i], i))[:MAX_SAMPLES])

    def sample(i: int) -> dict[str, Any]:
        texts = {'source': pairs.source[i], 'reference': pairs.target[i], 'output': outputs[i], 'gold': None}
        if not _has_weights(translations[i]):
            return texts | {'rows': [], 'columns': [], 'weights': None}
        weights, rows, columns = label_alignment(pairs.source[i], source[i], translations[i], vocabularies, True, shift)
        # Gold links refer to the words of the reference, so they fit the heat map only if the output is the reference.
        if pairs.links is not None and outputs[i] == normalise(pairs.target[i], vocabularies[1].language):
            gold = pairs.links[i]
            texts['gold'] = {'sure': sorted(gold.sure), 'possible': sorted(gold.possible)}
        return texts | {'rows': rows, 'columns': columns, 'weights': weights.round(4).tolist()}

    return [sample(i) for i in chosen]


def _has_weights(translation: Translation) -> bool:
    return translation.weights.size > 0 and len(translation.target) > 1


def show_alignment(workdir: Path, translated: TranslatedSentence) -> None:
    """Print the alignment of a translation, and write it as a picture and as an array file.

    The heat map is printed to stdout if that is a terminal, otherwise to stderr, so that a pipe gets only translations.
    Colours are off if the environment variable NO_COLOR is set or TERM is 'dumb'.
    """
    path = figure_path(workdir, 'translate', translated.source)
    weights, rows, columns = translated.weights, translated.rows, translated.columns
    written = ''
    with files.log_write_errors(workdir):
        path.parent.mkdir(exist_ok=True)
        heatmap.draw_heatmap(path.with_suffix('.png'), weights, rows, columns, title=translated.text)
        heatmap.save_alignment(path.with_suffix('.npz'), weights, rows, columns)
        written = f'{path}.png  {path}.npz'
    is_terminal = sys.stdout.isatty()
    colour = is_terminal and not os.environ.get('NO_COLOR') and os.environ.get('TERM') != 'dumb'
    width = shutil.get_terminal_size().columns
    stream = sys.stdout if is_terminal else sys.stderr
    print(heatmap.render_text(weights, rows, columns, width, colour), file=stream)
    if written:
        print(written, file=stream)
