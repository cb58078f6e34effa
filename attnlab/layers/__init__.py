"""Flax modules: the layers of attention models, built on `attnlab.kernels`."""

from attnlab.layers.multihead import MultiHeadAttention, attention_fn
from attnlab.layers.positions import RotaryEncoding

__all__ = ['MultiHeadAttention', 'RotaryEncoding', 'attention_fn']
