"""Layers that turn an image into tokens, and tokens into one vector."""

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
    """A linear layer on each patch (Dosovitskiy et al. 2021, eq. 1): a convolution with the patch size as its stride.

    Parameters: `kernel` [height, width, C, D], `bias` [D], for both forms.

    form: 'product' cuts the image into patches, one row of a matrix each; 'convolution' uses XLA's convolution.
    """

    features: int
    patch: tuple[int, int]
    form: PatchEmbeddingForm = 'product'
    dtype: Any = None
    kernel_init: Any = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, images: Float[Array, 'B H W C']) -> Float[Array, 'B T D']:
        """Return the tokens [B, T, D] of images [B, H, W, C], row by row.

        Raises:
          ValueError: if the patches do not divide the images, or the form is unknown.
        """
        patch_grid(images.shape[1:3], self.patch)

        def init(key, shape, dtype):
            """Initialise the kernel as a matrix [height * width * C, D], so that its fan-in is that of a patch."""
            height, width, channels, features = shape
            return self.kernel_init(key, (height * width * channels, features), dtype).reshape(shape)

        kernel = self.param('kernel', init, (*self.patch, images.shape[-1], self.features), jnp.float32)
        bias = self.param('bias', nn.initializers.zeros, (self.features,), jnp.float32)
        images, kernel, bias = promote_dtype(images, kernel, bias, dtype=self.dtype)
        match self.form:
            case 'product':
                tokens = patchify(images, self.patch) @ kernel.reshape(-1, self.features)
            case 'convolution':
                tokens = jax.lax.conv_general_dilated(
                    images, kernel, self.patch, 'VALID', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
                ).reshape(len(images), -1, self.features)
            case form:
                raise ValueError(f"form is {form!r}; expected 'product' or 'convolution'")
        return tokens + bias[None, None]


class ConvolutionalTokenizer(nn.Module):
    """The tokenizer of the compact convolutional Transformer (Hassani et al. 2021, section 3.3).

    Each layer is a 3 x 3 convolution without bias, a ReLU, and 3 x 3 max pooling with stride 2, which divides the
    number of grid cells by four.

    channels: the output channels of the layers before the last, which has `features`.
    """

    channels: Sequence[int]
    features: int
    dtype: Any = None

    @nn.compact
    def __call__(self, images: Float[Array, 'B H W C']) -> Float[Array, 'B T D']:
        """Return the tokens [B, T, D] of images [B, H, W, C], row by row."""
        x = images
        for layer, features in enumerate((*self.channels, self.features)):
            x = nn.Conv(
                features, (3, 3), padding=1, use_bias=False, dtype=self.dtype,
                kernel_init=nn.initializers.kaiming_normal(), name=f'convolution_{layer}',
            )(x)  # fmt: skip
            # ReLU after pooling gives the same result, but its gradient is slower on a CPU.
            x = max_pool_by_two(nn.relu(x))
        return x.reshape(len(x), -1, self.features)


def tokenizer_grid(image: tuple[int, int], layers: int) -> tuple[int, int]:
    """Return (rows, columns) of the tokens of an image (height, width) after `layers` of a `ConvolutionalTokenizer`."""
    rows, columns = image
    for _ in range(layers):
        rows, columns = -(-rows // 2), -(-columns // 2)
    return rows, columns


class AttentionPooling(nn.Module):
    """The mean of the tokens with weights softmax(x w): the sequence pooling of Hassani et al. 2021, section 3.2."""

    @nn.compact
    def __call__(self, x: Float[Array, 'B T D']) -> Float[Array, 'B D']:
        """Return the weighted mean [B, D] of the tokens [B, T, D]."""
        score = nn.Dense(1, name='score')(x)[..., 0]
        weights = jax.nn.softmax(score.astype(jnp.promote_types(score.dtype, jnp.float32)), axis=-1)
        return jnp.einsum('bt,btd->bd', weights.astype(x.dtype), x)
