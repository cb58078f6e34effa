"""Config fields of the Transformer block and of text models."""

from dataclasses import dataclass
from typing import Literal

from attnlab.configs.fields import Section, field
from attnlab.errors import UserError

MAX_LAYERS = 1000
"""Most layers without scan: each layer is traced several times, about 10 ms each time."""

MAX_SCANNED_LAYERS = 100_000
"""Most layers with scan, which traces all layers once; each layer still has a drop rate of its own."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig(Section):
    """A Transformer block; each variant of it is one field."""

    layers: int = field(4, 'L, number of blocks', ge=1)
    width: int = field(128, 'D, model width', ge=1)
    heads: int = field(4, 'N, query heads', ge=1)
    kv_heads: int = field(0, 'K, key and value heads; 0: the number of query heads', ge=0)
    head_width: int = field(0, 'H, head width; 0: width / heads', ge=0)
    positions: str = field('none', 'position encoding', choices='attnlab.layers.positions:ENCODINGS')
    rotary_base: float = field(10000.0, 'base of the frequencies of rotary positions', gt=1.0)
    qk_norm: Literal['none', 'rms', 'l2'] = field('none', 'normalisation of queries and keys (Dehghani et al. 2023)')
    sinks: bool = field(False, 'attention sink: one learned logit for each head, without a value (Xiao et al. 2024)')
    norm: Literal['layer', 'rms'] = field('layer', 'LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019)')
    order: Literal['pre', 'post', 'sandwich'] = field(
        'pre', 'pre: x + f(norm(x)); post: norm(x + f(x)); sandwich: x + norm(f(norm(x)))'
    )
    parallel: bool = field(False, 'attention and MLP in parallel, after one norm (Wang and Komatsuzaki 2021)')
    mlp: Literal['relu', 'gelu', 'gelu_tanh', 'swiglu', 'geglu', 'reglu'] = field(
        'gelu', "the MLP's activation, or gated linear unit"
    )
    mlp_width: int = field(0, 'F, hidden width of the MLP; 0: 4 width, or 8/3 width if gated', ge=0)
    experts: int = field(0, 'E, experts in place of the MLP; 0: no experts', ge=0)
    experts_per_token: int = field(2, 'A, experts that each token is sent to', ge=1, former='active')
    capacity_factor: float = field(0.0, 'maximum tokens of an expert, relative to an even split; 0: no limit', ge=0)
    shared_expert: bool = field(False, 'one more expert, which processes all tokens')
    load_balance: float = field(0.01, 'weight of the load-balancing loss of experts', ge=0)
    router_z: float = field(0.001, 'weight of the z-loss of the router', ge=0)
    use_bias: bool = field(True, 'biases in dense layers and norms')
    dropout: float = field(0.0, 'dropout rate of embeddings and of the output of each residual branch', ge=0.0, lt=1.0)
    attention_dropout: float = field(0.0, 'dropout rate of attention weights', ge=0.0, lt=1.0)
    layer_drop: float = field(
        0.0, 'drop rate of the last block in training, linearly less before it (Huang et al. 2016)', ge=0.0, lt=1.0
    )
    scaled_init: bool = field(True, 'divide initial output kernels of branches by sqrt(2 layers) (Radford et al. 2019)')
    init: float = field(0.02, 'standard deviation of initial kernels; 0: from their fan-in', ge=0)
    dtype: Literal['float32', 'bfloat16', 'float16'] = field('float32', 'dtype of the computation')
    implementation: str = field(
        'auto',
        'attention implementation; auto: the fastest that supports the call',
        choices='attnlab.kernels.implementations:IMPLEMENTATION_CHOICES',
    )
    scan: bool = field(False, 'compile the blocks as one loop (jax.lax.scan)')
    remat: Literal['none', 'dots', 'full'] = field(
        'none', 'activations that the backward pass recomputes; dots: all but matrix products'
    )
    mixer: Literal['attention', 'convolution', 'gru', 'lstm'] = field('attention', 'layer that mixes tokens')
    kernel_size: int = field(4, 'kernel size of the convolution mixer', ge=1, former='taps')
    window: int = field(0, 'sliding window: keys before the query that it may attend to; 0: all', ge=0)

    def check(self) -> None:
        """Limit the number of layers."""
        check_depth('layers', self.layers, self.scan)


@dataclass(frozen=True, kw_only=True)
class TextConfig(BlockConfig):
    """A Transformer over text."""

    context: int = field(64, 'tokens of a row, and size of the table of learned positions', ge=1, lt=2**31)
    positions: str = field('learned', 'position encoding', choices='attnlab.layers.positions:ENCODINGS')


def check_depth(name: str, layers: int, scan: bool = False) -> None:
    """Raise UserError for more layers than can be traced; with scan, all layers are traced as one."""
    most = MAX_SCANNED_LAYERS if scan else MAX_LAYERS
    if not 1 <= layers <= most:
        hint = '' if scan or name != 'layers' else f', or up to {MAX_SCANNED_LAYERS} with scan'
        raise UserError(f'{name} is {layers}; expected 1 to {most}{hint}')
