"""BLEU, chrF and alignment error rate of a split."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from attnlab.data.alignments import GoldLinks, Link, alignment_error_rate
from attnlab.data.text import normalise, strip_spacing_mark, tokenise

LENGTH_RANGES = ((1, 5), (6, 10), (11, 15), (16, 20), (21, 25), (26, 30), (31, 1000))
"""Source lengths in words, both ends included."""


def compute_bleu(outputs: Sequence[str], references: Sequence[str]) -> float:
    """sacreBLEU with its defaults: cased, 13a tokens, detokenised text, references as they are."""
    from sacrebleu.metrics.bleu import BLEU

    return BLEU().corpus_score(list(outputs), [list(references)]).score


def score_texts(outputs: Sequence[str], references: Sequence[str], language: str) -> dict[str, Any]:
    """BLEU and chrF with the signatures that make them comparable (Post 2018).

    bleu_words: BLEU of lower-cased words, apostrophes apart, the way that papers on Multi30k score; it is higher.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    words = lambda texts: [' '.join(map(strip_spacing_mark, tokenise(normalise(text, language)))) for text in texts]
    texts, apart = (outputs, references), (words(outputs), words(references))
    scores: dict[str, Any] = {}
    by_words = BLEU(lowercase=True, tokenize='none', force=True)  # force: yes, tokenised
    for name, metric, (found, expected) in (
        ('bleu', BLEU(), texts), ('chrf', CHRF(), texts), ('bleu_words', by_words, apart)
    ):  # fmt: skip
        scores[name] = metric.corpus_score(list(found), [list(expected)]).score
        scores[f'{name}_signature'] = str(metric.get_signature())
    return scores


def bleu_by_length(
    sources: Sequence[str], outputs: Sequence[str], references: Sequence[str], language: str
) -> list[dict]:
    """BLEU of the sentences of each range of source lengths that occurs."""
    words = np.array([len(tokenise(normalise(source, language))) for source in sources])
    rows = []
    for low, high in LENGTH_RANGES:
        chosen = np.flatnonzero((words >= low) & (words <= high)).tolist()
        if len(chosen):
            score = compute_bleu([outputs[i] for i in chosen], [references[i] for i in chosen])
            rows.append({'from': low, 'to': min(high, int(words.max())), 'sentences': len(chosen), 'bleu': score})
    return rows


def exact_match_rate(outputs: Sequence[str], references: Sequence[str], language: str) -> float:
    """Share of outputs that are their reference."""
    same = [out == normalise(reference, language) for out, reference in zip(outputs, references, strict=True)]
    return float(np.mean(same))


def score_alignments(
    found: Mapping[str, Sequence[Set[Link]]], gold: Sequence[GoldLinks], inverted: Sequence[Sequence[Link]] | None
) -> dict[str, float]:
    """AER, precision and recall of each reading of the attention (name -> links of every sentence).

    inverted: (source, target) of each sentence's adjectives that change places with their noun; where known, also the
    share of them that are linked to their source word.
    """
    scores: dict[str, float] = {}
    for name, links in found.items():
        rates = alignment_error_rate(links, gold)
        scores |= {f'aer_{name}': rates.aer, f'precision_{name}': rates.precision, f'recall_{name}': rates.recall}
        if inverted is not None:
            hits = [pair in one for one, pairs in zip(links, inverted, strict=True) for pair in pairs]
            if hits:  # a handful of sentences may turn nothing round
                scores[f'inversion_{name}'] = float(np.mean(hits))
    return scores
