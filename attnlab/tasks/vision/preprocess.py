"""Images as a model takes them."""

import jax
import jax.numpy as jnp

from attnlab.tasks.vision.dataset import ImageStatistics


def preprocess_images(images: jax.Array, scale: ImageStatistics, size: tuple[int, int]) -> jax.Array:
    """uint8 images [B, H, W, C] as float32 of this size, each channel with mean 0 and standard deviation 1."""
    mean, deviation = (jnp.asarray(each, jnp.float32)[None, None, None] for each in (scale.mean, scale.deviation))
    x = (images.astype(jnp.float32) / 255 - mean) / deviation
    return x if x.shape[1:3] == size else jax.image.resize(x, (len(x), *size, x.shape[-1]), 'bilinear')
