"""BLEU, chrF and alignment error rate of a split."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from attnlab.data.alignments import Links, alignment_error_rate
from attnlab.data.text import normalise, tokenise
from attnlab.data.vocabulary import Vocabulary
from attnlab.tasks.align.alignment import links

LENGTHS = ((1, 5), (6, 10), (11, 15), (16, 20), (21, 25), (26, 30), (31, 1000))
"""Source lengths in words, both ends included."""


def bleu(outputs: Sequence[str], references: Sequence[str]) -> float:
    """sacreBLEU with its defaults: cased, 13a tokens, detokenised text, references as they are."""
    from sacrebleu.metrics.bleu import BLEU

    return BLEU().corpus_score(list(outputs), [list(references)]).score


def text_scores(outputs: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """BLEU and chrF with the signatures that make them comparable (Post 2018)."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    scores: dict[str, Any] = {}
    for name, metric in (('bleu', BLEU()), ('chrf', CHRF())):
        scores[name] = metric.corpus_score(list(outputs), [list(references)]).score
        scores[f'{name}_signature'] = str(metric.get_signature())
    return scores


def by_length(sources: Sequence[str], outputs: Sequence[str], references: Sequence[str], language: str) -> list[dict]:
    """BLEU of the sentences of each range of source lengths that occurs."""
    words = np.array([len(tokenise(normalise(source, language))) for source in sources])
    rows = []
    for low, high in LENGTHS:
        chosen = np.flatnonzero((words >= low) & (words <= high)).tolist()
        if len(chosen):
            score = bleu([outputs[i] for i in chosen], [references[i] for i in chosen])
            rows.append({'from': low, 'to': min(high, int(words.max())), 'sentences': len(chosen), 'bleu': score})
    return rows


def exact_match(outputs: Sequence[str], references: Sequence[str], language: str) -> float:
    """Share of outputs that are their reference."""
    same = [out == normalise(reference, language) for out, reference in zip(outputs, references, strict=True)]
    return float(np.mean(same))


def alignment_scores(
    weights: Sequence[np.ndarray],
    source: Sequence[list[int]],
    target: Sequence[list[int]],
    vocabularies: tuple[Vocabulary, Vocabulary],
    gold: Sequence[Links],
    inverted: Sequence[Sequence[tuple[int, int]]] | None,
) -> dict[str, float]:
    """AER of the weights of reference translations, read at the emitting step and shifted by one.

    inverted: (source, target) of each sentence's adjectives that change places with their noun; where known, also the
    share of them whose row has its maximum on their source word.
    """
    scores: dict[str, float] = {}
    spans = [(vocabularies[1].words(t), vocabularies[0].words(s)) for s, t in zip(source, target, strict=True)]
    for name, shift in (('emit', 0), ('shifted', 1)):
        found = [links(w, *span, shift) for w, span in zip(weights, spans, strict=True)]
        rates = alignment_error_rate(found, gold)
        scores |= {f'aer_{name}': rates.aer, f'precision_{name}': rates.precision, f'recall_{name}': rates.recall}
        if inverted is not None:
            hits = [pair in one for one, pairs in zip(found, inverted, strict=True) for pair in pairs]
            scores[f'inversion_{name}'] = float(np.mean(hits))
    return scores
