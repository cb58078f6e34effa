"""Flax modules over the kernels."""

from attnlab.layers.multihead import MultiHeadAttention, attention_fn
from attnlab.layers.positions import Rotary

__all__ = ['MultiHeadAttention', 'Rotary', 'attention_fn']
