"""The config fields of the Transformer block, and those of models of text."""

from dataclasses import dataclass
from typing import Literal

from attnlab.configs.fields import Section, field
from attnlab.errors import UserError

MAX_LAYERS = 1000
"""Layers outside of a scan: tracing takes about 10 ms a layer, several times."""

MAX_SCANNED_LAYERS = 100_000
"""Layers in a scan, each of which has a drop rate of its own."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig(Section):
    """Every block of a model. Each variant of the Transformer block is one field."""

    layers: int = field(4, 'L, number of blocks', least=1)
    width: int = field(128, 'D, features of a token', least=1)
    heads: int = field(4, 'N, query heads', least=1)
    kv_heads: int = field(0, 'K, key and value heads; 0: as many as query heads', least=0)
    head_width: int = field(0, 'H, features of a head; 0: width / heads', least=0)
    positions: str = field('none', 'position encoding', choices='attnlab.layers.positions:ENCODINGS')
    rotary_base: float = field(10000.0, 'base of the frequencies of rotary positions', above=1.0)
    qk_norm: Literal['none', 'rms', 'l2'] = field('none', 'norm of queries and keys (Dehghani et al. 2023)')
    sinks: bool = field(False, 'one learned logit a head that takes attention and gives nothing (Xiao et al. 2024)')
    norm: Literal['layer', 'rms'] = field('layer', 'LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019)')
    order: Literal['pre', 'post', 'sandwich'] = field(
        'pre', 'pre: x + f(norm(x)); post: norm(x + f(x)); sandwich: x + norm(f(norm(x)))'
    )
    parallel: bool = field(False, 'attention and MLP side by side on one norm (Wang and Komatsuzaki 2021)')
    mlp: Literal['relu', 'gelu', 'gelu_tanh', 'swiglu', 'geglu', 'reglu'] = field(
        'gelu', "the MLP's activation or gate"
    )
    mlp_width: int = field(0, 'F, hidden features of the MLP; 0: 4 width, or 8/3 width where gated', least=0)
    experts: int = field(0, 'E, experts in place of the MLP; 0: none', least=0)
    experts_per_token: int = field(2, 'A, experts that each token is sent to', least=1, former='active')
    capacity_factor: float = field(0.0, 'tokens an expert takes, relative to an even split; 0: all', least=0)
    shared_expert: bool = field(False, 'one more expert that all tokens go through')
    load_balance: float = field(0.01, 'weight of the load-balancing loss of experts', least=0)
    router_z: float = field(0.001, 'weight of the z-loss of the router', least=0)
    use_bias: bool = field(True, 'biases of products and norms')
    dropout: float = field(0.0, 'dropout rate of embeddings and of what a branch adds', least=0.0, below=1.0)
    attention_dropout: float = field(0.0, 'dropout rate of attention weights', least=0.0, below=1.0)
    layer_drop: float = field(
        0.0, 'rate of skipping the last block in training, less for others (Huang et al. 2016)', least=0.0, below=1.0
    )
    scaled_init: bool = field(True, 'output kernels of branches start smaller by sqrt(2 layers) (Radford et al. 2019)')
    init: float = field(0.02, 'standard deviation of initial kernels; 0: by their fan-in', least=0)
    dtype: Literal['float32', 'bfloat16', 'float16'] = field('float32', 'dtype of the computation')
    implementation: str = field(
        'auto',
        'attention kernel; auto: the fastest that serves',
        choices='attnlab.kernels.implementations:IMPLEMENTATION_CHOICES',
    )
    scan: bool = field(False, 'blocks as one compiled loop')
    remat: Literal['none', 'dots', 'full'] = field('none', 'what the backward pass computes again')
    mixer: Literal['attention', 'convolution', 'gru', 'lstm'] = field('attention', 'what reads the other tokens')
    kernel_size: int = field(4, 'kernel size of the convolution mixer', least=1, former='taps')
    window: int = field(0, 'keys before the query that it may attend to; 0: all', least=0)

    def check(self) -> None:
        check_depth('layers', self.layers, self.scan)


@dataclass(frozen=True, kw_only=True)
class TextConfig(BlockConfig):
    """A Transformer of text."""

    context: int = field(64, 'tokens a row; the rows of a table of learned positions', least=1, below=2**31)
    positions: str = field('learned', 'position encoding', choices='attnlab.layers.positions:ENCODINGS')


def check_depth(name: str, layers: int, scan: bool = False) -> None:
    """Raise UserError for more layers than can be traced; in a scan the layers are traced once."""
    most = MAX_SCANNED_LAYERS if scan else MAX_LAYERS
    if not 1 <= layers <= most:
        more = '' if scan or name != 'layers' else f', or up to {MAX_SCANNED_LAYERS} with scan'
        raise UserError(f'{name} is {layers}; expected 1 to {most}{more}')
