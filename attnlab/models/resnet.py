"""A residual network for small images, to set beside the Vision Transformer."""

import math
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.configs.vision import ResNetConfig


class ResNet(nn.Module):
    """6 `blocks` + 2 layers of 3 x 3 convolutions, of `width`, 2 and 4 `width` channels (He et al. 2016, section 4.2).

    Norms are of groups of channels of one image (Wu and He 2018), not of the batch: an image's logits are its own, and
    there is no state beside the parameters.  Where the grid halves, the shortcut is a product of 1 x 1.
    """

    classes: int
    config: ResNetConfig

    grid: ClassVar[tuple[int, int]] = (1, 1)
    prefix: ClassVar[int] = 0
    reader: ClassVar[int | None] = None

    @nn.compact
    def __call__(
        self, images: Float[Array, 'B H W C'], deterministic: bool = True
    ) -> tuple[Float[Array, 'B classes'], dict[str, Array]]:
        """Logits [B, classes] of images [B, H, W, C], and nothing of experts, as `VisionTransformer` returns them.

        It has no dropout, so `deterministic` changes nothing.
        """
        x = self._convolution(self.config.width, 1, 'stem')(images)
        x = nn.relu(self._norm(self.config.width, 'stem_norm')(x))
        for stage in range(3):
            features = self.config.width * 2**stage
            for block in range(self.config.blocks):
                x = self._block(x, features, 2 if stage and not block else 1, f'stage_{stage}_block_{block}')
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
        start = nn.initializers.kaiming_normal()
        return nn.Conv(features, (3, 3), stride, padding=1, use_bias=False, kernel_init=start, name=name)

    def _norm(self, features: int, name: str) -> nn.GroupNorm:
        return nn.GroupNorm(num_groups=math.gcd(features, 8), name=name)
