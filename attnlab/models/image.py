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
    """A model that classifies images of so many channels, [B, H, W, C].

    The module's `grid` is (rows, columns) of the tokens of an image, which stand after `prefix` others, and `reader`
    the token that the classes are read off, or None.
    """

    module: VisionTransformer | ResNet
    channels: int

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of an image."""
        return self.module.config.image

    def init(self, rng: Array) -> Params:
        return self.module.init(rng, jnp.zeros((1, *self.size, self.channels)))['params']

    def forward(
        self, params: Params, images: Float[Array, 'B H W C'], rng: Array | None
    ) -> tuple[Float[Array, 'B classes'], dict[str, Array]]:
        """Logits, and `aux` of the experts; without dropout if the key is None."""
        output: Any = self.module.apply({'params': params}, images, **dropout_kwargs(rng))
        return output

    def maps(self, params: Params, images: Float[Array, 'B H W C']) -> dict[str, Array]:
        """Every attention of the model by its name, [B, L, N, T, T]; {} without attention."""
        return apply_with_attention_maps(self.module, params, images)[1]


def make_image_model(config: VitConfig | ResNetConfig, classes: int, channels: int) -> ImageModel:
    """The model of a config."""
    module = ResNet(classes, config) if isinstance(config, ResNetConfig) else VisionTransformer(classes, config)
    return ImageModel(module, channels)
