"""Image patches as tokens, max pooling, and interpolation of learned positions to another grid."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped


def patch_grid(image: Sequence[int], patch: Sequence[int]) -> tuple[int, int]:
    """Return how many (rows, columns) of patches (height, width) an image (height, width) has.

    Raises:
      ValueError: if the patch size does not divide the image size, because pixels would be left out.
    """
    for side, image_size, patch_size in zip(('height', 'width'), image, patch, strict=True):
        if patch_size < 1 or image_size < 1 or image_size % patch_size:
            raise ValueError(
                f'patches of {side} {patch_size} do not divide images of {side} {image_size}; expected a divisor'
            )
    return image[0] // patch[0], image[1] // patch[1]


def patchify(images: Shaped[Array, 'B H W C'], patch: Sequence[int]) -> Shaped[Array, 'B T P']:
    """Cut images into patches (height, width), row by row.

    Token t is the patch in row t // columns and column t % columns of the grid.  The P = height width C numbers of a
    patch are row-major too, with channels last.
    """
    B, H, W, C = images.shape
    rows, columns = patch_grid((H, W), patch)
    split = images.reshape(B, rows, patch[0], columns, patch[1], C)
    return split.transpose(0, 1, 3, 2, 4, 5).reshape(B, rows * columns, patch[0] * patch[1] * C)


def unpatchify(patches: Shaped[Array, 'B T P'], patch: Sequence[int], image: Sequence[int]) -> Shaped[Array, 'B H W C']:
    """Return the images (height, width) of which `patchify` made these patches.

    Raises ValueError if the number or the size of the patches does not fit the image.
    """
    rows, columns = patch_grid(image, patch)
    B, T, P = patches.shape
    C = P // (patch[0] * patch[1])
    if rows * columns != T or C * patch[0] * patch[1] != P:
        raise ValueError(f'patches have shape {patches.shape}; expected [B, {rows * columns}, {patch[0] * patch[1]} C]')
    split = patches.reshape(B, rows, columns, patch[0], patch[1], C)
    return split.transpose(0, 1, 3, 2, 4, 5).reshape(B, rows * patch[0], columns * patch[1], C)


def max_pool_by_two(images: Float[Array, 'B H W C']) -> Float[Array, 'B h w C']:
    """Return the maximum over 3 x 3 pixels around every second pixel, [B, ceil(H / 2), ceil(W / 2), C].

    The same as `flax.linen.max_pool` with a window of 3, strides of 2 and a padding of 1.  It is computed as maxima
    along rows, then along columns, because the gradient then needs no search for the position of a maximum, which is
    slow on a CPU.  Equal maxima share the gradient, whereas `max_pool` gives it to the first.
    """

    def pool_axis(x: Array, axis: int) -> Array:
        size = x.shape[axis]
        even, odd = (jax.lax.slice_in_dim(x, start, size, 2, axis) for start in (0, min(1, size)))
        count, lowest = even.shape[axis], jnp.array(-jnp.inf, x.dtype)

        def pad(x: Array, before: int, after: int) -> Array:
            return jax.lax.pad(x, lowest, [(before, after, 0) if i == axis else (0, 0, 0) for i in range(x.ndim)])

        right = pad(odd, 0, count - odd.shape[axis])
        left = pad(jax.lax.slice_in_dim(odd, 0, count - 1, 1, axis), 1, 0)
        return jnp.maximum(jnp.maximum(even, right), left)

    return pool_axis(pool_axis(images, 1), 2)


def resize_position_table(
    table: Float[Array, 'T D'], old: tuple[int, int], new: tuple[int, int], prefix: int = 0
) -> Float[Array, 'S D']:
    """Interpolate positions learned on one grid to another (Dosovitskiy et al. 2021, 3.2), by cubic interpolation.

    Args:
      table: [prefix + rows * columns, D].
      old, new: (rows, columns) of the two grids.
      prefix: the number of rows of the table before the grid, such as that of a class token; they are not changed.

    Raises:
      ValueError: if the table does not have prefix + rows * columns rows.
    """
    D = table.shape[-1]
    if len(table) != prefix + old[0] * old[1]:
        raise ValueError(f'a table of {len(table)} positions; expected {prefix} and a grid of {old[0]} x {old[1]}')
    if old == new:
        return table
    grid = jax.image.resize(table[prefix:].reshape(*old, D), (*new, D), method='bicubic')
    return jnp.concatenate([table[:prefix], grid.reshape(-1, D)])
