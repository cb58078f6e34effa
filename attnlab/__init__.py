"""Attention and Transformers in JAX: kernels, Flax modules, models, decoding, and training of experiment configs.

Letters in shapes, einsums and annotations:

B batch, T query length, S key and value length, N query heads, K key and value heads, G = N / K,
H head width, D model width, F MLP width, V vocabulary, E experts, A experts active per token, L layers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnlab.decode.beam import beam_search
    from attnlab.decode.cache import DecodingCache, init_cache, make_decode_step, prefill
    from attnlab.decode.greedy import greedy_search
    from attnlab.decode.sampling import sample_tokens
    from attnlab.errors import RunError, UserError
    from attnlab.kernels.additive import additive_attention
    from attnlab.kernels.attention import dot_product_attention
    from attnlab.kernels.linear import linear_attention
    from attnlab.kernels.masks import (
        Mask,
        causal_mask,
        packed_mask,
        padding_mask,
        prefix_mask,
        segment_mask,
        window_mask,
    )
    from attnlab.layers.block import TransformerBlock, TransformerStack
    from attnlab.layers.experts import MixtureOfExperts
    from attnlab.layers.mlp import MLP
    from attnlab.layers.multihead import MultiHeadAttention
    from attnlab.models.language import LanguageModel
    from attnlab.models.recurrent import RecurrentSeq2Seq
    from attnlab.models.resnet import ResNet
    from attnlab.models.transformer import TransformerSeq2Seq
    from attnlab.models.vision import VisionTransformer
    from attnlab.notebook import HeatMap, show
    from attnlab.train.run import TrainedRun
    from attnlab.train.run import load_run as load
    from attnlab.train.run import train_run as train

__version__ = '0.1.0'
__all__ = [
    'MLP', 'DecodingCache', 'HeatMap', 'LanguageModel', 'Mask', 'MixtureOfExperts', 'MultiHeadAttention',
    'RecurrentSeq2Seq', 'ResNet', 'RunError', 'TrainedRun', 'TransformerBlock', 'TransformerSeq2Seq',
    'TransformerStack', 'UserError', 'VisionTransformer', 'additive_attention', 'beam_search', 'causal_mask',
    'dot_product_attention', 'greedy_search', 'init_cache', 'linear_attention', 'load', 'make_decode_step',
    'packed_mask', 'padding_mask', 'prefill', 'prefix_mask', 'sample_tokens', 'segment_mask', 'show', 'train',
    'window_mask',
]  # fmt: skip

EXPORTS = {
    'kernels.attention': ('dot_product_attention',),
    'kernels.additive': ('additive_attention',),
    'kernels.linear': ('linear_attention',),
    'kernels.masks': (
        'Mask', 'causal_mask', 'window_mask', 'prefix_mask', 'padding_mask', 'segment_mask', 'packed_mask'
    ),
    'layers.multihead': ('MultiHeadAttention',),
    'layers.mlp': ('MLP',),
    'layers.experts': ('MixtureOfExperts',),
    'layers.block': ('TransformerBlock', 'TransformerStack'),
    'models.language': ('LanguageModel',),
    'models.recurrent': ('RecurrentSeq2Seq',),
    'models.transformer': ('TransformerSeq2Seq',),
    'models.vision': ('VisionTransformer',),
    'models.resnet': ('ResNet',),
    'decode.cache': ('DecodingCache', 'init_cache', 'prefill', 'make_decode_step'),
    'decode.greedy': ('greedy_search',),
    'decode.sampling': ('sample_tokens',),
    'decode.beam': ('beam_search',),
    'train.run': ('TrainedRun', 'load', 'train'),
    'notebook': ('show', 'HeatMap'),
    'errors': ('UserError', 'RunError'),
}  # fmt: skip
"""Names of this package by the module that defines them, in the order of docs/api.md."""

RENAMED = {'load': 'load_run', 'train': 'train_run'}
"""Names in their modules of the exports that are called otherwise there."""

_MODULES = {name: f'attnlab.{module}' for module, names in EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first used: JAX takes a second to load, and `attnlab --help` needs none."""
    if name == 'train':  # the package, which is callable: see attnlab/train/__init__.py
        return importlib.import_module('attnlab.train')
    if name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(_MODULES[name]), RENAMED.get(name, name))


def __dir__() -> list[str]:
    return sorted({'__version__', *__all__})
