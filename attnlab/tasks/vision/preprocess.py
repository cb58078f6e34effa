"""Preprocessing of images for a model."""

import jax
import jax.numpy as jnp

from attnlab.tasks.vision.dataset import ImageStatistics


def preprocess_images(images: jax.Array, statistics: ImageStatistics, size: tuple[int, int]) -> jax.Array:
    """Return images [B, H, W, C] uint8 as float32, normalised by channel and resized to `size` (height, width).

    The training images have mean 0 and standard deviation 1 in each channel after normalisation. Resizing is bilinear.
    """
    mean, deviation = (
        jnp.asarray(values, jnp.float32)[None, None, None] for values in (statistics.mean, statistics.deviation)
    )
    x = (images.astype(jnp.float32) / 255 - mean) / deviation
    return x if x.shape[1:3] == size else jax.image.resize(x, (len(x), *size, x.shape[-1]), 'bilinear')
