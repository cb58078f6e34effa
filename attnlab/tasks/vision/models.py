"""The image models of configs, behind one set of functions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnlab.configs import ResNetConfig, VitConfig
from attnlab.errors import UserError
from attnlab.models.maps import attention_maps
from attnlab.models.resnet import ResNet
from attnlab.models.vision import VisionTransformer
from attnlab.tasks.vision.corpus import Scale


class Model(NamedTuple):
    """A model as pure functions of its parameters.

    init: key -> parameters.
    forward: (params, images, key) -> (logits [B, classes], what experts say of themselves); without noise if the key is
      None.
    maps: (params, images) -> every attention of the model [B, L, N, T, T], by its name.
    image: (height, width) of what it takes.  grid: (rows, columns) of its tokens, behind `prefix` others.
    reader: the token that the answer is read off; None where it is read off all of the image.
    """

    init: Callable[..., Any]
    forward: Callable[..., Any]
    maps: Callable[..., Any]
    image: tuple[int, int]
    grid: tuple[int, int]
    prefix: int
    reader: int | None


def build(config: VitConfig | ResNetConfig, classes: int, channels: int) -> Model:
    """The model of a config for images of so many channels; UserError if patches do not divide the image."""
    image = config.image
    if isinstance(config, ResNetConfig):
        made = ResNet(classes, config)
        forward = lambda params, images, rng: (made.apply({'params': params}, images), {})
        return Model(_init(made, (*image, channels)), forward, lambda params, images: {}, image, (1, 1), 0, None)
    made = VisionTransformer(classes, config)

    def forward(params: Any, images: Any, rng: Any) -> Any:
        noise: dict[str, Any] = {} if rng is None else {'deterministic': False, 'rngs': {'dropout': rng}}
        return made.apply({'params': params}, images, **noise)

    def maps(params: Any, images: Any) -> dict[str, Any]:
        sown: Any = made.apply({'params': params}, images, mutable=['intermediates'])[1]
        return attention_maps(sown['intermediates'])

    try:
        grid = made.grid
    except ValueError as error:
        raise UserError(f'model: {error}') from None
    reader = made.prefix - 1 if config.pool == 'class' else None
    return Model(_init(made, (*image, channels)), forward, maps, image, grid, made.prefix, reader)


def _init(made: Any, shape: tuple[int, ...]) -> Callable[[jax.Array], Any]:
    return lambda rng: made.init(rng, jnp.zeros((1, *shape)))['params']


def prepared(images: jax.Array, scale: Scale, size: tuple[int, int]) -> jax.Array:
    """uint8 images [B, H, W, C] as float32, each channel of mean 0 and deviation 1, of the size that a model takes."""
    mean, deviation = (jnp.asarray(each, jnp.float32)[None, None, None] for each in (scale.mean, scale.deviation))
    x = (images.astype(jnp.float32) / 255 - mean) / deviation
    return x if x.shape[1:3] == size else jax.image.resize(x, (len(x), *size, x.shape[-1]), 'bilinear')
