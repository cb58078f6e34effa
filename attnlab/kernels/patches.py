"""An image as a sequence of patches, a smaller grid by maxima, and positions seen on another grid."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped


def patch_grid(image: Sequence[int], patch: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of the patches (height, width) of an image (height, width).

    Raises:
      ValueError: for a patch that does not divide the image, which would leave pixels unseen.
    """
    for side, size, part in zip(('height', 'width'), image, patch, strict=True):
        if part < 1 or size < 1 or size % part:
            raise ValueError(f'patches of {side} {part} do not divide images of {side} {size}; expected a divisor')
    return image[0] // patch[0], image[1] // patch[1]


def patchify(images: Shaped[Array, 'B H W C'], patch: Sequence[int]) -> Shaped[Array, 'B T P']:
    """The patches (height, width) of images, row by row: token t is row t // columns, column t % columns of the grid.

    The P = height width C numbers of a patch are row-major too, with channels last.
    """
    B, H, W, C = images.shape
    rows, columns = patch_grid((H, W), patch)
    split = images.reshape(B, rows, patch[0], columns, patch[1], C)
    return split.transpose(0, 1, 3, 2, 4, 5).reshape(B, rows * columns, patch[0] * patch[1] * C)


def unpatchify(patches: Shaped[Array, 'B T P'], patch: Sequence[int], image: Sequence[int]) -> Shaped[Array, 'B H W C']:
    """The images (height, width) that `patchify` took apart."""
    rows, columns = patch_grid(image, patch)
    B, T, P = patches.shape
    C = P // (patch[0] * patch[1])
    if rows * columns != T or C * patch[0] * patch[1] != P:
        raise ValueError(f'patches have shape {patches.shape}; expected [B, {rows * columns}, {patch[0] * patch[1]} C]')
    split = patches.reshape(B, rows, columns, patch[0], patch[1], C)
    return split.transpose(0, 1, 3, 2, 4, 5).reshape(B, rows * patch[0], columns * patch[1], C)


def max_pool_by_two(images: Float[Array, 'B H W C']) -> Float[Array, 'B h w C']:
    """The maximum over 3 x 3 pixels around every second one, [B, ceil(H / 2), ceil(W / 2), C].

    `flax.linen.max_pool` with a window of 3, strides of 2 and a padding of 1.  As maxima of rows, then of columns, its
    gradient needs no search for where a maximum stood, which is slow on a CPU.  Among equal ones the gradient is
    shared, where `max_pool` takes the first.
    """

    def along(x: Array, axis: int) -> Array:
        size = x.shape[axis]
        even, odd = (jax.lax.slice_in_dim(x, start, size, 2, axis) for start in (0, min(1, size)))
        count, low = even.shape[axis], jnp.array(-jnp.inf, x.dtype)
        padded = lambda x, before, after: jax.lax.pad(
            x, low, [(before, after, 0) if at == axis else (0, 0, 0) for at in range(x.ndim)]
        )
        behind = padded(odd, 0, count - odd.shape[axis])
        ahead = padded(jax.lax.slice_in_dim(odd, 0, count - 1, 1, axis), 1, 0)
        return jnp.maximum(jnp.maximum(even, behind), ahead)

    return along(along(images, 1), 2)


def resize_position_table(
    table: Float[Array, 'T D'], old: tuple[int, int], new: tuple[int, int], prefix: int = 0
) -> Float[Array, 'S D']:
    """Positions learned on one grid (rows, columns) for another, by cubic interpolation (Dosovitskiy et al. 2021, 3.2).

    prefix: rows of the table in front of the grid, such as a class token's, which stay as they are.
    """
    D = table.shape[-1]
    if len(table) != prefix + old[0] * old[1]:
        raise ValueError(f'a table of {len(table)} positions; expected {prefix} and a grid of {old[0]} x {old[1]}')
    if old == new:
        return table
    grid = jax.image.resize(table[prefix:].reshape(*old, D), (*new, D), method='bicubic')
    return jnp.concatenate([table[:prefix], grid.reshape(-1, D)])
