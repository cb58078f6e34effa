"""A split of sentence pairs, whatever it was made from."""

from dataclasses import dataclass

from attnlab.data.alignments import GoldLinks


@dataclass(frozen=True)
class SentencePairs:
    """Sentence pairs: source[i] and target[i] are raw text, as read, and mean the same.

    links[i], where known, is the gold alignment over the words `tokenise(normalise(text, language))` of both sides.
    Sides of unequal length raise ValueError.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    links: tuple[GoldLinks, ...] | None = None

    def __post_init__(self):
        counts = [len(side) for side in (self.source, self.target, self.links) if side is not None]
        if len(set(counts)) > 1:
            raise ValueError(f'a pair needs all its sides: came {counts} of source, target and links')
