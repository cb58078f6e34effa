"""From an image to tokens, and from tokens to one vector."""

from collections.abc import Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jaxtyping import Array, Float

from attnlab.kernels.patches import max_pool_by_two, patch_grid, patchify

PatchEmbeddingForm = Literal['product', 'convolution']


class PatchEmbedding(nn.Module):
    """A linear layer on each patch (Dosovitskiy et al. 2021, eq. 1): a convolution with the patch as its stride.

    Parameters: `kernel` [height, width, C, D], `bias` [D], whatever the form; 'product' cuts the image into rows of a
    matrix.
    """

    features: int
    patch: tuple[int, int]
    form: PatchEmbeddingForm = 'product'
    dtype: Any = None
    kernel_init: Any = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, images: Float[Array, 'B H W C']) -> Float[Array, 'B T D']:
        """Images [B, H, W, C]: tokens [B, T, D], row by row.  ValueError for patches that do not divide them."""
        patch_grid(images.shape[1:3], self.patch)
        flat = lambda shape: (shape[0] * shape[1] * shape[2], shape[3])
        start = lambda key, shape, dtype: self.kernel_init(key, flat(shape), dtype).reshape(shape)
        kernel = self.param('kernel', start, (*self.patch, images.shape[-1], self.features), jnp.float32)
        bias = self.param('bias', nn.initializers.zeros, (self.features,), jnp.float32)
        images, kernel, bias = promote_dtype(images, kernel, bias, dtype=self.dtype)
        match self.form:
            case 'product':
                tokens = patchify(images, self.patch) @ kernel.reshape(-1, self.features)
            case 'convolution':
                tokens = jax.lax.conv_general_dilated(
                    images, kernel, self.patch, 'VALID', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
                ).reshape(len(images), -1, self.features)
            case other:
                raise ValueError(f"the form is {other!r}; expected 'product' or 'convolution'")
        return tokens + bias[None, None]


class ConvolutionalTokenizer(nn.Module):
    """The tokenizer of the compact convolutional Transformer (Hassani et al. 2021, section 3.3).

    Each layer is a convolution of 3 x 3 without bias, a ReLU, and the maximum over 3 x 3 at every second place, so that
    the grid is a quarter of the one before.  channels: of the layers before the last, which has `features`.
    """

    channels: Sequence[int]
    features: int
    dtype: Any = None

    @nn.compact
    def __call__(self, images: Float[Array, 'B H W C']) -> Float[Array, 'B T D']:
        """Images [B, H, W, C]: tokens [B, T, D], row by row."""
        x = images
        for layer, features in enumerate((*self.channels, self.features)):
            x = nn.Conv(
                features, (3, 3), padding=1, use_bias=False, dtype=self.dtype,
                kernel_init=nn.initializers.kaiming_normal(), name=f'convolution_{layer}',
            )(x)  # fmt: skip
            x = max_pool_by_two(nn.relu(x))  # the other way round is the same, and its gradient slower on a CPU
        return x.reshape(len(x), -1, self.features)


def tokenizer_grid(image: tuple[int, int], layers: int) -> tuple[int, int]:
    """(rows, columns) of the tokens that so many layers of `ConvolutionalTokenizer` make of an image (height, width)."""
    rows, columns = image
    for _ in range(layers):
        rows, columns = -(-rows // 2), -(-columns // 2)
    return rows, columns


class AttentionPooling(nn.Module):
    """softmax(x w)-weighted mean of the tokens: the sequence pooling of Hassani et al. 2021, section 3.2."""

    @nn.compact
    def __call__(self, x: Float[Array, 'B T D']) -> Float[Array, 'B D']:
        score = nn.Dense(1, name='score')(x)[..., 0]
        weights = jax.nn.softmax(score.astype(jnp.promote_types(score.dtype, jnp.float32)), axis=-1)
        return jnp.einsum('bt,btd->bd', weights.astype(x.dtype), x)
