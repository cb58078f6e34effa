"""Flax modules over the kernels."""

from attnlab.layers.multihead import MultiHeadAttention, Rotary, attention_fn

__all__ = ['MultiHeadAttention', 'Rotary', 'attention_fn']
