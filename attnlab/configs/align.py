"""Config fields of translation with alignment."""

from dataclasses import dataclass
from typing import Literal

from attnlab.configs.block import TextConfig, check_depth
from attnlab.configs.fields import REQUIRED, Section, field
from attnlab.configs.run import RunConfig
from attnlab.errors import UserError

SPECIAL_TOKEN_COUNT = 4
"""Number of special tokens of every vocabulary, `len(attnlab.data.vocabulary.SPECIAL_TOKENS)`."""


@dataclass(frozen=True, kw_only=True)
class PairsData(Section):
    """Fields of every parallel corpus."""

    vocabulary: Literal['words', 'subwords'] = field('words', 'unit of a token')
    vocabulary_size: int = field(2000, 'maximum size of each vocabulary', gt=SPECIAL_TOKEN_COUNT)
    shared: bool = field(False, 'one vocabulary shared by both languages')
    widths: tuple[int, ...] = field((12, 20), 'ascending sequence lengths that batches are padded to', ge=2)

    def check(self) -> None:
        """Require ascending widths."""
        if not self.widths or list(self.widths) != sorted(set(self.widths)):
            raise UserError(f'widths is {self.widths}; expected ascending numbers of tokens, 2 or more')


@dataclass(frozen=True, kw_only=True)
class GrammarPairs(PairsData):
    """Sentences of the embedded English-French grammar, with gold alignments."""

    name: Literal['grammar'] = field('grammar', 'corpus')
    train_examples: int = field(40_000, 'training sentences', ge=1)
    test_examples: int = field(500, 'sentences of every other split', ge=1)


@dataclass(frozen=True, kw_only=True)
class Multi30kData(PairsData):
    """Multi30k, English to French."""

    name: Literal['multi30k'] = field('multi30k', 'corpus')
    folder: str = field('', 'folder with train.en.gz and so on; empty: $ATTNLAB_DATA/multi30k if set, else a download')


@dataclass(frozen=True, kw_only=True)
class PairFiles(PairsData):
    """Parallel text in files."""

    name: Literal['files'] = field('files', 'corpus')
    languages: tuple[str, str] = field(
        ('en', 'fr'), 'suffixes of the files, source first; en and fr are tokenised by their own spacing rules'
    )
    train: str = field('', 'training text, two files X.en and X.fr, plain or .gz: --config.data.train=X')
    valid: str = field('', 'validation text, in the same form')
    test: str = field('', 'test text, in the same form')


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(Section):
    """Recurrent encoder and decoder with attention (Bahdanau et al. 2015)."""

    name: Literal['recurrent'] = field('recurrent', 'model')
    cell: Literal['gru', 'lstm'] = field('gru', 'recurrent cell')
    attention: Literal['additive', 'dot', 'none'] = field('additive', 'attention score; none: one fixed context vector')
    embedding: int = field(64, 'embedding width', ge=1)
    hidden: int = field(128, 'width of the recurrent state', ge=1)
    encoder_layers: int = field(1, 'encoder layers', ge=1)
    bidirectional: bool = field(True, 'bidirectional encoder')
    reverse_source: bool = field(False, 'reverse the source sentence (Sutskever et al. 2014)')
    dropout: float = field(0.0, 'dropout rate', ge=0.0, lt=1.0)
    original: bool = field(False, 'exact architecture of appendix A of Bahdanau et al. 2015, with more parameters')

    def check(self) -> None:
        """Limit the number of layers; if `original`, require the options of the paper."""
        check_depth('encoder_layers', self.encoder_layers)
        if self.original and (self.cell != 'gru' or self.attention == 'dot' or self.hidden % 2):
            values = f'cell {self.cell!r}, attention {self.attention!r} and hidden {self.hidden}'
            raise UserError(
                f"original is true with {values}; expected 'gru', 'additive' or 'none', and an even number"
            )


@dataclass(frozen=True, kw_only=True)
class TranslatorConfig(TextConfig):
    """Transformer encoder and decoder (Vaswani et al. 2017)."""

    name: Literal['transformer'] = field('transformer', 'model')
    shared_embedding: bool = field(False, 'one embedding shared by both languages')
    alignment_layer: int = field(1, 'decoder layer whose cross-attention is the alignment, from 1', ge=1)
    alignment_shift: int = field(0, '1: read the alignment one step after a word is produced', ge=0, le=1)

    def check(self) -> None:
        """Require attention as mixer, and an alignment layer that exists."""
        super().check()
        if self.mixer != 'attention':
            raise UserError(f"mixer is {self.mixer!r}; expected 'attention': the others are causal, an encoder is not")
        if self.alignment_layer > self.layers:
            raise UserError(f'alignment_layer is {self.alignment_layer}; expected 1 to layers, {self.layers}')


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(Section):
    """Decoding of translations, in evaluation and for new sentences."""

    beams: int = field(1, 'beam size; 1: greedy decoding', ge=1)
    length_penalty: float = field(0.0, 'exponent of the length by which a score is divided', ge=0)


@dataclass(frozen=True, kw_only=True)
class AlignConfig(RunConfig):
    """Translation, with the word alignment that attention learns."""

    task: str = field('align', 'task')
    data: GrammarPairs | Multi30kData | PairFiles = field(REQUIRED, 'parallel corpus')
    model: RecurrentConfig | TranslatorConfig = field(REQUIRED, 'translation model')
    decode: DecodeConfig = field(DecodeConfig(), 'decoding')

    def check(self) -> None:
        """Require that learned positions suffice for the longest translation."""
        if isinstance(self.model, TranslatorConfig) and self.model.positions == 'learned':
            longest = self.data.widths[-1]
            if self.model.context < max_translation_tokens(longest):
                needed = f'at least {max_translation_tokens(longest)}, the longest translation of {longest} tokens'
                raise UserError(f'model.context is {self.model.context} with learned positions; expected {needed}')


def max_translation_tokens(width: int) -> int:
    """Return the maximum length of a translation of `width` source tokens, which is much more than French needs."""
    return 2 * width + 8
