"""Sentence pairs of a parallel corpus."""

from dataclasses import dataclass

from attnlab.data.alignments import GoldLinks


@dataclass(frozen=True)
class SentencePairs:
    """One split of a parallel corpus: source[i] and target[i] are translations of each other, as raw text.

    links[i], if the corpus has gold alignments, are the links between the words `tokenise(normalise(text, language))`
    of both sides.  Raises ValueError for sides of unequal length.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    links: tuple[GoldLinks, ...] | None = None

    def __post_init__(self):
        counts = [len(side) for side in (self.source, self.target, self.links) if side is not None]
        if len(set(counts)) > 1:
            raise ValueError(f'source, target and links have lengths {counts}; expected equal lengths')
