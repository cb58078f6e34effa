"""A residual network for small images, to compare with the Vision Transformer."""

import math
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.configs.vision import ResNetConfig


class ResNet(nn.Module):
    """A residual network of 6 * blocks + 2 layers (He et al. 2016, section 4.2).

    Three stages of 3 x 3 convolutions have width, 2 * width and 4 * width channels.  Group norm (Wu and He 2018)
    replaces batch norm: the logits of an image do not depend on the batch, and there is no state besides the
    parameters.  Where the resolution halves, the shortcut is a 1 x 1 convolution.

    classes: the number of classes.
    """

    classes: int
    config: ResNetConfig

    grid: ClassVar[tuple[int, int]] = (1, 1)
    num_prefix_tokens: ClassVar[int] = 0
    class_token_index: ClassVar[int | None] = None

    @nn.compact
    def __call__(
        self, images: Float[Array, 'B H W C'], deterministic: bool = True
    ) -> tuple[Float[Array, 'B classes'], dict[str, Array]]:
        """Return the logits [B, classes] of images [B, H, W, C], and an empty `aux` as from `VisionTransformer`.

        There is no dropout, so `deterministic` has no effect.
        """
        x = self._convolution(self.config.width, 1, 'stem')(images)
        x = nn.relu(self._norm(self.config.width, 'stem_norm')(x))
        for stage in range(3):
            features = self.config.width * 2**stage
            for block in range(self.config.blocks):
                stride = 2 if stage and not block else 1
                x = self._block(x, features, stride, f'stage_{stage}_block_{block}')
        return nn.Dense(self.classes, name='head')(jnp.mean(x, axis=(1, 2))), {}

    def _block(self, x: Array, features: int, stride: int, name: str) -> Array:
        branch = self._convolution(features, stride, f'{name}_first')(x)
        branch = nn.relu(self._norm(features, f'{name}_first_norm')(branch))
        branch = self._convolution(features, 1, f'{name}_second')(branch)
        branch = self._norm(features, f'{name}_second_norm')(branch)
        if x.shape[-1] != features:
            x = nn.Conv(features, (1, 1), stride, use_bias=False, name=f'{name}_shortcut')(x)
        return jax.nn.relu(x + branch)

    def _convolution(self, features: int, stride: int, name: str) -> nn.Conv:
        init = nn.initializers.kaiming_normal()
        return nn.Conv(features, (3, 3), stride, padding=1, use_bias=False, kernel_init=init, name=name)

    def _norm(self, features: int, name: str) -> nn.GroupNorm:
        return nn.GroupNorm(num_groups=math.gcd(features, 8), name=name)
