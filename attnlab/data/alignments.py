"""Gold word alignments, the links of an aligner, and the alignment error rate.

Each file may have either of two formats.  NAACL 2003: `sentence source target [S|P] [confidence]`, one link a line, all
numbers from 1, sentences without links left out.  Pharaoh or talp: `i-j` sure, `ipj` possible, one sentence a line,
words counted from 0, an empty line for a sentence without links.
"""

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from attnlab.data.text import read_lines
from attnlab.errors import UserError

Link = tuple[int, int]

_NAACL = re.compile(r'(\d+)\s+(\d+)\s+(\d+)(?:\s+([SP]))?(?:\s+[\d.eE+-]+)?')
_PHARAOH = re.compile(r'(\d+)([-p])(\d+)')


@dataclass(frozen=True)
class GoldLinks:
    """Gold links of one sentence pair, each (source index, target index) from 0; `possible` includes `sure`.

    Raises ValueError for a sure link that is not possible.
    """

    sure: frozenset[Link]
    possible: frozenset[Link]

    def __post_init__(self):
        if not self.sure <= self.possible:
            raise ValueError(f'sure links that are not possible: {sorted(self.sure - self.possible)}')


class AlignmentScores(NamedTuple):
    """Alignment error rate, precision and recall of a corpus, each from 0 to 1."""

    aer: float
    precision: float
    recall: float


def read_gold_links(path: str | Path) -> dict[int, GoldLinks]:
    """Read gold links by sentence number, which starts at 1 in both formats.

    Raises UserError with file and line for a line that fits neither format.
    """
    lines = read_lines(path)
    first = next((line for line in lines if line.strip()), '')  # the first line that is not blank shows the format
    if _NAACL.fullmatch(first.strip()):
        return _parse_naacl(path, lines)
    return {number: _parse_pharaoh_line(path, number, line) for number, line in enumerate(lines, 1)}


def read_links(path: str | Path, swap: bool = False) -> dict[int, frozenset[Link]]:
    """Read an aligner's links by sentence number, from 1; sure and possible links are treated alike.

    swap: exchange the two sides, for a file whose links are (target, source).
    """
    return {
        number: _swap_sides(links.possible) if swap else links.possible
        for number, links in read_gold_links(path).items()
    }


def write_links(path: str | Path, links: Iterable[Set[Link]]) -> None:
    """Write links in Pharaoh format, one sentence a line, sorted."""
    lines = (' '.join(f'{i}-{j}' for i, j in sorted(sentence)) for sentence in links)
    Path(path).write_text(''.join(f'{line}\n' for line in lines), encoding='ascii', newline='\n')


def alignment_error_rate(links: Sequence[Set[Link]], gold: Sequence[GoldLinks]) -> AlignmentScores:
    """Score the links of a corpus against its gold links (Och and Ney 2003).

    AER = 1 - (|A & S| + |A & P|) / (|A| + |S|), precision = |A & P| / |A|, recall = |A & S| / |S|, where A are the
    links, S the sure and P the possible gold links.  The counts are summed over the corpus; the scores are not means
    of sentence scores.  0 / 0 counts as 1, so no links against no gold links has an AER of 0.
    """
    if len(links) != len(gold):
        raise ValueError(f'links for {len(links)} sentences, gold for {len(gold)}; expected the same number')
    link_count, sure_count = sum(map(len, links)), sum(len(sentence.sure) for sentence in gold)
    matched_sure = sum(len(a & g.sure) for a, g in zip(links, gold, strict=True))
    matched_possible = sum(len(a & g.possible) for a, g in zip(links, gold, strict=True))
    return AlignmentScores(
        aer=1 - _ratio(matched_sure + matched_possible, link_count + sure_count),
        precision=_ratio(matched_possible, link_count),
        recall=_ratio(matched_sure, sure_count),
    )


def score_alignment_files(gold_path: str | Path, links_path: str | Path, swap: bool = False) -> AlignmentScores:
    """Score the links of one file against the gold links of another, each in either format; each file is read once.

    Both files must end at the same sentence, which is the number of lines in Pharaoh format and the largest sentence
    number in NAACL format: nothing else shows that two files belong to the same corpus.  A file of links may leave out
    sentences before the last one; these count as unaligned.  A sentence that NAACL gold leaves out is not scored.

    Raises UserError for files that end at different sentences, with both numbers; for gold without links; and for files
    with neither links nor sure gold links, where all rates would be 0 / 0.
    """
    gold, links = read_gold_links(gold_path), read_links(links_path, swap)
    last_gold, last_link = max(gold, default=0), max(links, default=0)
    if last_gold != last_link:
        raise UserError(
            f'{links_path} ends at sentence {last_link}, {gold_path} at sentence {last_gold}; expected the same '
            'sentences (in Pharaoh format an empty line is a sentence without links)'
        )
    if not any(sentence.possible for sentence in gold.values()):
        raise UserError(f'{gold_path} has no links, so there is nothing to score; expected gold links')
    if not any(sentence.sure for sentence in gold.values()) and not any(links.values()):
        raise UserError(f'{links_path} has no links and {gold_path} has no sure links, so there is nothing to score')
    return alignment_error_rate([links.get(number, frozenset()) for number in gold], list(gold.values()))


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def _swap_sides(links: Set[Link]) -> frozenset[Link]:
    return frozenset((j, i) for i, j in links)


def _parse_naacl(path: str | Path, lines: Sequence[str]) -> dict[int, GoldLinks]:
    sure: dict[int, set[Link]] = {}
    possible: dict[int, set[Link]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = _NAACL.fullmatch(line.strip())
        if not match:
            raise UserError(f'{path}, line {number}: {line[:60]!r} is not `sentence source target [S|P] [confidence]`')
        sentence, i, j = (int(field) for field in match.groups()[:3])
        if 0 in (sentence, i, j):
            raise UserError(f'{path}, line {number}: {line[:60]!r} has a 0, expected numbers from 1')
        possible.setdefault(sentence, set()).add((i - 1, j - 1))
        if match[4] != 'P':
            sure.setdefault(sentence, set()).add((i - 1, j - 1))
    return {
        sentence: GoldLinks(frozenset(sure.get(sentence, ())), frozenset(links))
        for sentence, links in sorted(possible.items())
    }


def _parse_pharaoh_line(path: str | Path, number: int, line: str) -> GoldLinks:
    matches = [(word, _PHARAOH.fullmatch(word)) for word in line.split()]
    for word, match in matches:
        if not match:
            raise UserError(
                f'{path}, line {number}: {word[:60]!r} is not a link; expected i-j or ipj, or NAACL lines from the '
                'first line on'
            )
    links = [(int(match[1]), int(match[3]), match[2]) for _, match in matches if match]
    return GoldLinks(
        sure=frozenset((i, j) for i, j, kind in links if kind == '-'),
        possible=frozenset((i, j) for i, j, _ in links),
    )
