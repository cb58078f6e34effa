"""BLEU, chrF and alignment error rate of a split."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from attnlab.data.alignments import GoldLinks, Link, alignment_error_rate
from attnlab.data.text import normalise, strip_spacing_mark, tokenise

LENGTH_RANGES = ((1, 5), (6, 10), (11, 15), (16, 20), (21, 25), (26, 30), (31, 1000))
"""Ranges of source lengths in words, both ends included."""


def compute_bleu(outputs: Sequence[str], references: Sequence[str]) -> float:
    """Return sacreBLEU with its defaults: cased, 13a tokenization, detokenised outputs, unchanged references."""
    from sacrebleu.metrics.bleu import BLEU

    return BLEU().corpus_score(list(outputs), [list(references)]).score


def score_texts(outputs: Sequence[str], references: Sequence[str], language: str) -> dict[str, Any]:
    """Return BLEU and chrF, each with the sacreBLEU signature that makes it comparable (Post 2018).

    bleu, chrf: of the texts as they are.
    bleu_words: BLEU of lower-cased, tokenised words with apostrophes split off, as papers on Multi30k score; it is
      higher than `bleu`.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    def tokenised(texts: Sequence[str]) -> list[str]:
        return [' '.join(map(strip_spacing_mark, tokenise(normalise(text, language)))) for text in texts]

    metrics = {
        'bleu': (BLEU(), outputs, references),
        'chrf': (CHRF(), outputs, references),
        # force: no warning that the texts are tokenised
        'bleu_words': (BLEU(lowercase=True, tokenize='none', force=True), tokenised(outputs), tokenised(references)),
    }
    scores: dict[str, Any] = {}
    for name, (metric, hypotheses, targets) in metrics.items():
        scores[name] = metric.corpus_score(list(hypotheses), [list(targets)]).score
        scores[f'{name}_signature'] = str(metric.get_signature())
    return scores


def bleu_by_length(
    sources: Sequence[str], outputs: Sequence[str], references: Sequence[str], language: str
) -> list[dict]:
    """Return BLEU of the sentences in each range of source lengths (in words); ranges without sentences are left out.

    Each result has the keys 'from', 'to' (both included), 'sentences' and 'bleu'.  language: of the sources.
    """
    words = np.array([len(tokenise(normalise(source, language))) for source in sources])
    rows = []
    for low, high in LENGTH_RANGES:
        chosen = np.flatnonzero((words >= low) & (words <= high)).tolist()
        if len(chosen):
            score = compute_bleu([outputs[i] for i in chosen], [references[i] for i in chosen])
            rows.append({'from': low, 'to': min(high, int(words.max())), 'sentences': len(chosen), 'bleu': score})
    return rows


def exact_match_rate(outputs: Sequence[str], references: Sequence[str], language: str) -> float:
    """Return the share of outputs that equal their normalised reference, from 0 to 1."""
    same = [output == normalise(reference, language) for output, reference in zip(outputs, references, strict=True)]
    return float(np.mean(same))


def score_alignments(
    links_by_name: Mapping[str, Sequence[Set[Link]]],
    gold: Sequence[GoldLinks],
    inverted: Sequence[Sequence[Link]] | None,
) -> dict[str, float]:
    """Return `aer_NAME`, `precision_NAME` and `recall_NAME` of alignments.

    links_by_name: name -> links of every sentence; the names are those of `task.ALIGNMENT_SHIFTS`.
    inverted: for each sentence, the links (source, target) of adjectives that change order with their noun. If not
      None, `inversion_NAME` is the share of these links that the alignment has.
    """
    scores: dict[str, float] = {}
    for name, links in links_by_name.items():
        rates = alignment_error_rate(links, gold)
        scores |= {f'aer_{name}': rates.aer, f'precision_{name}': rates.precision, f'recall_{name}': rates.recall}
        if inverted is not None:
            hits = [
                pair in sentence_links for sentence_links, pairs in zip(links, inverted, strict=True) for pair in pairs
            ]
            if hits:  # a split of few sentences may have no inverted adjective
                scores[f'inversion_{name}'] = float(np.mean(hits))
    return scores
