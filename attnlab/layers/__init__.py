"""Flax modules over the kernels."""
