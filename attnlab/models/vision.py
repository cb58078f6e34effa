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
    """The Vision Transformer (Dosovitskiy et al. 2021): patch embedding, blocks without a mask, pooling, a linear head.

    The tokens of a sequence are the registers, the class token if there is one, and the tokens of the image.

    `config.pool` selects the input of the head, from the tokens after the last norm: the 'mean' of the image's tokens;
    the 'class' token, which has a learned position but none of another kind; or the 'attention' pooling of Hassani et
    al. 2021.  Registers have no position, and only the other tokens read them.

    classes: the number of classes.
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
        """The position encoding of the grid."""
        return make_position_encoding(self.config, self.grid)

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before those of the image: the registers, then the class token."""
        return self.config.registers + (self.config.pool == 'class')

    @property
    def class_token_index(self) -> int | None:
        """Index of the class token, whose state is the input of the head; None without a class token."""
        return self.num_prefix_tokens - 1 if self.config.pool == 'class' else None

    @nn.compact
    def __call__(
        self, images: Float[Array, 'B H W C'], deterministic: bool = True
    ) -> tuple[Float[Array, 'B classes'], dict[str, Array]]:
        """Return the logits [B, classes] of images [B, H, W, C], float32 or wider, and `aux`.

        `aux` holds the auxiliary losses and statistics of the experts in each layer, as arrays [L].  Unless
        `deterministic`, dropout draws from the `dropout` stream of rngs.

        Raises:
          ValueError: if the images have another size than `config.image`, or the patches do not divide them.
        """
        config = self.config
        if images.shape[1:3] != config.image:
            raise ValueError(f'images have height and width {images.shape[1:3]}; expected {config.image}')
        x = self._add_positions_and_prefix(self._image_tokens(images))
        x = nn.Dropout(config.dropout)(x, deterministic=deterministic)
        x, aux = TransformerStack(config, self.encoding, name='stack')(x, Mask(), None, deterministic)
        init = nn.initializers.normal(config.init or 0.02)
        logits = nn.Dense(self.classes, dtype=compute_dtype(config), kernel_init=init, name='head')(self._pool(x))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), aux

    def _image_tokens(self, images: Array) -> Array:
        """Return the tokens [B, rows * columns, D] of images, without positions."""
        config, dtype = self.config, compute_dtype(self.config)
        if config.embedding == 'tokenizer':
            channels = (config.channels,) * (config.convolutions - 1)
            return ConvolutionalTokenizer(channels, config.width, dtype, name='tokenizer')(images)
        return PatchEmbedding(config.width, config.patch, config.embedding, dtype, name='embedding')(images)

    def _add_positions_and_prefix(self, x: Array) -> Array:
        """Return the image's tokens with their positions, after the registers and the class token."""
        if self.config.pool == 'class':
            prefix = self._learned_tokens('class', 1)
        else:
            prefix = jnp.zeros((0, self.config.width), x.dtype)
        embeddings = self.encoding.position_embeddings(x, prefix=len(prefix))
        if embeddings is not None:
            prefix, x = prefix + embeddings[0, : len(prefix)], x + embeddings[:, len(prefix) :]
        if self.config.registers:
            prefix = jnp.concatenate([self._learned_tokens('registers', self.config.registers), prefix])
        if not self.num_prefix_tokens:
            return x
        return jnp.concatenate([jnp.broadcast_to(prefix[None].astype(x.dtype), (len(x), *prefix.shape)), x], axis=1)

    def _learned_tokens(self, name: str, count: int) -> Array:
        """Return `count` learned tokens [count, D]."""
        # The parameter has one axis, because weight decay applies to parameters with more.
        tokens = self.param(name, nn.initializers.normal(0.02), (count * self.config.width,), jnp.float32)
        return tokens.reshape(count, self.config.width)

    def _pool(self, x: Array) -> Array:
        """Return the input [B, D] of the head."""
        match self.config.pool:
            case 'mean':
                return jnp.mean(x[:, self.num_prefix_tokens :], axis=1)
            case 'class':
                return x[:, self.num_prefix_tokens - 1]
            case 'attention':
                return AttentionPooling(name='pool')(x[:, self.num_prefix_tokens :])
