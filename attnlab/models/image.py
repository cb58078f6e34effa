"""Image models as pure functions of their parameters."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.configs import ResNetConfig, VitConfig
from attnlab.models.maps import apply_with_attention_maps, dropout_kwargs
from attnlab.models.resnet import ResNet
from attnlab.models.vision import VisionTransformer

Params = Any


@dataclasses.dataclass(frozen=True)
class ImageModel:
    """An image classifier with pure functions of its parameters.

    module: `module.grid` is (rows, columns) of an image's tokens, which follow `module.num_prefix_tokens` others;
      `module.class_token_index` is the index of the class token, or None.
    channels: the number of channels of an image, C.
    """

    module: VisionTransformer | ResNet
    channels: int

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of an image."""
        return self.module.config.image

    def init(self, rng: Array) -> Params:
        """Return initial parameters."""
        return self.module.init(rng, jnp.zeros((1, *self.image_size, self.channels)))['params']

    def forward(
        self, params: Params, images: Float[Array, 'B H W C'], rng: Array | None
    ) -> tuple[Float[Array, 'B classes'], dict[str, Array]]:
        """Return the logits, and `aux` of the experts.  rng: PRNG key of dropout; None: no dropout."""
        output: Any = self.module.apply({'params': params}, images, **dropout_kwargs(rng))
        return output

    def attention_maps(self, params: Params, images: Float[Array, 'B H W C']) -> dict[str, Array]:
        """Return the weights of each attention of the model [B, L, N, T, T] by its name; {} without attention."""
        return apply_with_attention_maps(self.module, params, images)[1]


def make_image_model(config: VitConfig | ResNetConfig, classes: int, channels: int) -> ImageModel:
    """Return the model of a config, for images with that many channels."""
    module = ResNet(classes, config) if isinstance(config, ResNetConfig) else VisionTransformer(classes, config)
    return ImageModel(module, channels)
