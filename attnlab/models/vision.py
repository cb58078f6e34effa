"""The Vision Transformer."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.configs.vision import VitConfig
from attnlab.kernels.masks import Mask
from attnlab.kernels.patches import patch_grid
from attnlab.layers.block import TransformerStack, compute_dtype
from attnlab.layers.patches import (
    AttentionPooling,
    ConvolutionalTokenizer,
    PatchEmbedding,
    tokenizer_grid,
)
from attnlab.layers.positions import PositionEncoding, make_position_encoding


class VisionTransformer(nn.Module):
    """Tokens of an image, their positions, blocks without a mask, one vector, a linear head (Dosovitskiy et al. 2021).

    The vector is the 'mean' of the image's tokens after the last norm, the 'class' token, which stands in front of them
    and has a learned position but no other kind, or 'attention' (Hassani et al. 2021).  Registers have no position and
    are read by no one but the other tokens.
    """

    classes: int
    config: VitConfig

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of the image's tokens."""
        if self.config.embedding == 'tokenizer':
            return tokenizer_grid(self.config.image, self.config.convolutions)
        return patch_grid(self.config.image, self.config.patch)

    @property
    def encoding(self) -> PositionEncoding:
        """The encoding of positions in the grid."""
        return make_position_encoding(self.config, self.grid)

    @property
    def prefix(self) -> int:
        """Number of tokens in front of those of the image: registers, then the class."""
        return self.config.registers + (self.config.pool == 'class')

    @property
    def reader(self) -> int | None:
        """The token that the classes are read off; None: all of the image."""
        return self.prefix - 1 if self.config.pool == 'class' else None

    @nn.compact
    def __call__(
        self, images: Float[Array, 'B H W C'], deterministic: bool = True
    ) -> tuple[Float[Array, 'B classes'], dict[str, Array]]:
        """Logits [B, classes], float32 or wider, of images [B, H, W, C], and `aux` of the experts of each layer [L].

        Raises:
          ValueError: for images of another size, and patches that do not divide them.
        """
        config = self.config
        if images.shape[1:3] != config.image:
            raise ValueError(f'images have height and width {images.shape[1:3]}; expected {config.image}')
        x = self._placed(self._tokens(images))
        x = nn.Dropout(config.dropout)(x, deterministic=deterministic)
        x, aux = TransformerStack(config, self.encoding, name='stack')(x, Mask(), None, deterministic)
        start = nn.initializers.normal(config.init or 0.02)
        logits = nn.Dense(self.classes, dtype=compute_dtype(config), kernel_init=start, name='head')(self._pooled(x))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), aux

    def _tokens(self, images: Array) -> Array:
        config, dtype = self.config, compute_dtype(self.config)
        if config.embedding == 'tokenizer':
            channels = (config.channels,) * (config.convolutions - 1)
            return ConvolutionalTokenizer(channels, config.width, dtype, name='tokenizer')(images)
        return PatchEmbedding(config.width, config.patch, config.embedding, dtype, name='embedding')(images)

    def _placed(self, x: Array) -> Array:
        """The image's tokens with their positions, behind the class token and the registers."""
        front = self._row('class', 1) if self.config.pool == 'class' else jnp.zeros((0, self.config.width), x.dtype)
        codes = self.encoding.codes(x, prefix=len(front))
        if codes is not None:
            front, x = front + codes[0, : len(front)], x + codes[:, len(front) :]
        if self.config.registers:
            front = jnp.concatenate([self._row('registers', self.config.registers), front])
        if not self.prefix:
            return x
        return jnp.concatenate([jnp.broadcast_to(front[None].astype(x.dtype), (len(x), *front.shape)), x], axis=1)

    def _row(self, name: str, count: int) -> Array:
        # One axis, as decay is for matrices.
        row = self.param(name, nn.initializers.normal(0.02), (count * self.config.width,), jnp.float32)
        return row.reshape(count, self.config.width)

    def _pooled(self, x: Array) -> Array:
        match self.config.pool:
            case 'mean':
                return jnp.mean(x[:, self.prefix :], axis=1)
            case 'class':
                return x[:, self.prefix - 1]
            case 'attention':
                return AttentionPooling(name='pool')(x[:, self.prefix :])
