"""The config fields of translation with alignment."""

from dataclasses import dataclass
from typing import Literal

from attnlab.configs.block import TextConfig, check_depth
from attnlab.configs.fields import REQUIRED, Section, field
from attnlab.configs.run import RunConfig
from attnlab.errors import UserError

SPECIAL_TOKEN_COUNT = 4  # of every vocabulary


@dataclass(frozen=True, kw_only=True)
class PairsData(Section):
    """What every parallel corpus has."""

    vocabulary: Literal['words', 'subwords'] = field('words', 'unit of a token')
    vocabulary_size: int = field(2000, 'largest number of tokens of each vocabulary', above=SPECIAL_TOKEN_COUNT)
    shared: bool = field(False, 'one vocabulary for both languages')
    widths: tuple[int, ...] = field((12, 20), 'ascending numbers of tokens that a batch may be padded to', least=2)

    def check(self) -> None:
        if not self.widths or list(self.widths) != sorted(set(self.widths)):
            raise UserError(f'widths is {self.widths}; expected ascending numbers of tokens, 2 or more')


@dataclass(frozen=True, kw_only=True)
class GrammarPairs(PairsData):
    """Sentences of the embedded English-French grammar, with gold alignments."""

    name: Literal['grammar'] = field('grammar', 'corpus')
    train_examples: int = field(40_000, 'sentences to train on', least=1)
    test_examples: int = field(500, 'sentences of each other split', least=1)


@dataclass(frozen=True, kw_only=True)
class Multi30kData(PairsData):
    """Multi30k, English to French."""

    name: Literal['multi30k'] = field('multi30k', 'corpus')
    folder: str = field('', 'one that holds train.en.gz and so on; else $ATTNLAB_DATA/multi30k, else a download')


@dataclass(frozen=True, kw_only=True)
class PairFiles(PairsData):
    """Parallel text in files."""

    name: Literal['files'] = field('files', 'corpus')
    languages: tuple[str, str] = field(
        ('en', 'fr'), 'suffixes of the files, source first; French and English spacing are known'
    )
    train: str = field('', 'two files X.en and X.fr, plain or .gz: --config.data.train=X')
    valid: str = field('', 'the same, to choose parameters by')
    test: str = field('', 'the same, to score')


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(Section):
    """Recurrent encoder and decoder with attention (Bahdanau et al. 2015)."""

    name: Literal['recurrent'] = field('recurrent', 'model')
    cell: Literal['gru', 'lstm'] = field('gru', 'recurrent cell')
    attention: Literal['additive', 'dot', 'none'] = field('additive', 'score; none: one fixed context vector')
    embedding: int = field(64, 'features of an embedding', least=1)
    hidden: int = field(128, 'features of a state', least=1)
    encoder_layers: int = field(1, 'layers of the encoder', least=1)
    bidirectional: bool = field(True, 'encoder in both directions')
    reverse_source: bool = field(False, 'source sentence from its end (Sutskever et al. 2014)')
    dropout: float = field(0.0, 'dropout rate', least=0.0, below=1.0)
    original: bool = field(False, 'as in the appendix of Bahdanau et al. 2015, which is larger')

    def check(self) -> None:
        check_depth('encoder_layers', self.encoder_layers)
        if self.original and (self.cell != 'gru' or self.attention == 'dot' or self.hidden % 2):
            made = f'cell {self.cell!r}, attention {self.attention!r} and hidden {self.hidden}'
            raise UserError(f"original has a GRU, attention 'additive' or 'none' and an even hidden, not {made}")


@dataclass(frozen=True, kw_only=True)
class TranslatorConfig(TextConfig):
    """Transformer encoder and decoder (Vaswani et al. 2017)."""

    name: Literal['transformer'] = field('transformer', 'model')
    shared_embedding: bool = field(False, 'one embedding for both languages')
    alignment_layer: int = field(1, 'decoder layer whose cross-attention is the alignment, from 1', least=1)
    alignment_shift: int = field(0, '1: the alignment is read one step after the word is made', least=0, most=1)

    def check(self) -> None:
        super().check()
        if self.mixer != 'attention':
            raise UserError(f"mixer is {self.mixer!r}; an encoder sees both sides, expected 'attention'")
        if self.alignment_layer > self.layers:
            raise UserError(f'alignment_layer is {self.alignment_layer}; expected 1 to {self.layers}, the layers')


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(Section):
    """Decoding of translations when a run is scored or used."""

    beams: int = field(1, 'hypotheses of beam search; 1: greedy', least=1)
    length_penalty: float = field(0.0, 'exponent of the length that a score is divided by', least=0)


@dataclass(frozen=True, kw_only=True)
class AlignConfig(RunConfig):
    """English to French, and the alignment that attention learns."""

    task: str = field('align', 'task')
    data: GrammarPairs | Multi30kData | PairFiles = field(REQUIRED, 'parallel corpus')
    model: RecurrentConfig | TranslatorConfig = field(REQUIRED, 'translation model')
    decode: DecodeConfig = field(DecodeConfig(), 'decoding')

    def check(self) -> None:
        if isinstance(self.model, TranslatorConfig) and self.model.positions == 'learned':
            longest = self.data.widths[-1]
            if self.model.context < max_translation_tokens(longest):
                needed = f'at least {max_translation_tokens(longest)}, what a translation of {longest} tokens may take'
                raise UserError(f'model.context is {self.model.context} with learned positions; expected {needed}')


def max_translation_tokens(width: int) -> int:
    """The tokens after which a translation of a source of this width is cut: far more than French needs."""
    return 2 * width + 8
