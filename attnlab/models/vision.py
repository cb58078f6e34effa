"""The Vision Transformer: an image as a set of vectors."""

import dataclasses
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.kernels.masks import Visibility
from attnlab.kernels.patches import grid_of
from attnlab.kernels.positions import sinusoidal_2d
from attnlab.layers.block import Recipe, Stack
from attnlab.layers.patches import (
    AttentionPool,
    ConvolutionalTokens,
    Form,
    GridRotary,
    PatchEmbedding,
    tokens_grid,
)
from attnlab.layers.positions import LearnedPositions

Places = Literal['learned', 'sinusoidal', 'rotary', 'none']
Pool = Literal['mean', 'class', 'attention']


class VisionTransformer(nn.Module):
    """Tokens of an image, their positions, blocks without a mask, one vector, a linear head (Dosovitskiy et al. 2021).

    image: (height, width) of what comes in.  patch: (height, width) of a token.
    embedding: 'product' or 'convolution' of patches, two forms of one layer, or 'tokenizer', the convolutions of
      Hassani et al. 2021, with `channels` before the last, whatever the patch.
    positions: 'learned' [T, D] and 'sinusoidal' (2-D, `attnlab.kernels.positions.sinusoidal_2d`), added to the tokens;
      'rotary' (2-D) with base `rotary_base`; 'none'.
    pool: the 'mean' of the image's tokens after the last norm, a 'class' token in front of them, which has a learned
      position of its own and none of the others, or 'attention' (Hassani et al. 2021).
    registers: tokens that belong to no place and are read by no one but the others (Darcet et al. 2024).
    scan, remat: as in `Stack`.
    """

    classes: int
    image: tuple[int, int]
    patch: tuple[int, int]
    width: int
    layers: int
    recipe: Recipe
    embedding: Form | Literal['tokenizer'] = 'product'
    channels: tuple[int, ...] = ()
    positions: Places = 'learned'
    rotary_base: float = 100.0
    pool: Pool = 'mean'
    registers: int = 0
    scan: bool = False
    remat: Literal['none', 'full', 'dots'] = 'none'

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of the image's tokens."""
        if self.embedding == 'tokenizer':
            return tokens_grid(self.image, 1 + len(self.channels))
        return grid_of(self.image, self.patch)

    @property
    def prefix(self) -> int:
        """The tokens in front of those of the image: registers, then the class."""
        return self.registers + (self.pool == 'class')

    @nn.compact
    def __call__(
        self, images: Float[Array, 'B H W C'], deterministic: bool = True
    ) -> tuple[Float[Array, 'B classes'], dict[str, Array]]:
        """Logits [B, classes], float32 or wider, of images [B, H, W, C], and what the experts of each layer say [L].

        Raises:
          ValueError: for images of another size, patches that do not divide them, and names that are none.
        """
        if images.shape[1:3] != self.image:
            raise ValueError(f'images have height and width {images.shape[1:3]}; expected {self.image}')
        x = self._placed(self._tokens(images))
        x = nn.Dropout(self.recipe.dropout)(x, deterministic=deterministic)
        recipe = self.recipe
        if self.positions == 'rotary':
            recipe = dataclasses.replace(recipe, rotary=GridRotary(*self.grid, self.prefix, self.rotary_base))
        x, said = Stack(recipe, self.layers, self.scan, self.remat, name='stack')(x, Visibility(), None, deterministic)
        start = nn.initializers.normal(0.02 if recipe.init is None else recipe.init)
        logits = nn.Dense(self.classes, dtype=recipe.dtype, kernel_init=start, name='head')(self._pooled(x))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), said

    def _tokens(self, images: Array) -> Array:
        if self.embedding == 'tokenizer':
            return ConvolutionalTokens(self.channels, self.width, self.recipe.dtype, name='tokenizer')(images)
        return PatchEmbedding(self.width, self.patch, self.embedding, self.recipe.dtype, name='embedding')(images)

    def _placed(self, x: Array) -> Array:
        """The image's tokens with their positions, behind the class token and the registers."""
        front = self._row('class', 1) if self.pool == 'class' else jnp.zeros((0, self.width), x.dtype)
        match self.positions:
            case 'learned':
                table = LearnedPositions(len(front) + x.shape[1], self.width, name='positions')
                places = table(len(front) + x.shape[1])
                front, x = front + places[: len(front)], x + places[None, len(front) :]
            case 'sinusoidal':
                x = x + sinusoidal_2d(*self.grid, self.width)[None].astype(x.dtype)
            case 'rotary' | 'none':
                pass
            case other:
                raise ValueError(f"positions is {other!r}; expected 'learned', 'sinusoidal', 'rotary' or 'none'")
        if self.registers:
            front = jnp.concatenate([self._row('registers', self.registers), front])
        if not self.prefix:
            return x
        return jnp.concatenate([jnp.broadcast_to(front[None].astype(x.dtype), (len(x), *front.shape)), x], axis=1)

    def _row(self, name: str, count: int) -> Array:
        # One axis, as decay is for matrices.
        row = self.param(name, nn.initializers.normal(0.02), (count * self.width,), jnp.float32)
        return row.reshape(count, self.width)

    def _pooled(self, x: Array) -> Array:
        match self.pool:
            case 'mean':
                return jnp.mean(x[:, self.prefix :], axis=1)
            case 'class':
                return x[:, self.prefix - 1]
            case 'attention':
                return AttentionPool(name='pool')(x[:, self.prefix :])
            case other:
                raise ValueError(f"pool is {other!r}; expected 'mean', 'class' or 'attention'")
