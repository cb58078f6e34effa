"""Patches of images: their order, the inverse, max pooling, and interpolation of positions to another grid."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.kernels.patches import max_pool_by_two, patch_grid, patchify, resize_position_table, unpatchify


def test_patches_and_their_pixels_are_row_major():
    images = jnp.arange(2 * 8 * 16 * 3).reshape(2, 8, 16, 3)
    patches = patchify(images, (4, 4))
    assert patches.shape == (2, 8, 48)
    for token in range(8):
        row, column = divmod(token, 4)
        block = images[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        np.testing.assert_array_equal(patches[:, token], block.reshape(2, 48))


@pytest.mark.parametrize(('patch', 'shape'), [((4, 4), (32, 32, 3)), ((2, 3), (8, 6, 1)), ((8, 16), (8, 16, 2))])
def test_unpatchify_inverts_patchify(patch, shape):
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, *shape)), jnp.float32)
    patches = patchify(images, patch)
    assert patches.shape[1] == shape[0] * shape[1] // (patch[0] * patch[1])
    np.testing.assert_array_equal(unpatchify(patches, patch, shape[:2]), images)


@pytest.mark.parametrize(('image', 'patch', 'message'), [
    ((33, 33), (4, 4), 'patches of height 4 do not divide images of height 33'),
    ((32, 30), (4, 4), 'patches of width 4 do not divide images of width 30'),
    ((32, 32), (0, 4), 'patches of height 0 do not divide'),
])  # fmt: skip
def test_patches_that_do_not_divide_the_image_raise(image, patch, message):
    with pytest.raises(ValueError, match=message):
        patch_grid(image, patch)
    with pytest.raises(ValueError, match=message):
        patchify(jnp.zeros((1, *image, 3)), patch)


def test_unpatchify_of_wrong_shape_raises():
    with pytest.raises(ValueError, match=r'patches have shape \(1, 8, 48\); expected \[B, 4, 16 C\]'):
        unpatchify(jnp.zeros((1, 8, 48)), (4, 4), (8, 8))


def test_resized_positions_interpolate_the_grid():
    rows, columns = jnp.meshgrid(jnp.arange(4.0), jnp.arange(6.0), indexing='ij')
    table = jnp.concatenate([jnp.full((1, 2), 9.0), jnp.stack([rows, columns], axis=-1).reshape(24, 2)])
    larger = resize_position_table(table, (4, 6), (8, 12), prefix=1)
    assert larger.shape == (97, 2)
    np.testing.assert_array_equal(larger[0], 9.0)
    grid = np.asarray(larger[1:]).reshape(8, 12, 2)
    # A linear table stays linear: pixel i of the larger grid is at (i + 1/2) / 2 - 1/2 of the smaller grid.
    inner = (np.arange(8)[3:5] + 0.5) / 2 - 0.5
    np.testing.assert_allclose(grid[3:5, :, 0], np.broadcast_to(inner[:, None], (2, 12)), atol=1e-5)
    inner = (np.arange(12)[3:9] + 0.5) / 2 - 0.5
    np.testing.assert_allclose(grid[:, 3:9, 1], np.broadcast_to(inner, (8, 6)), atol=1e-5)
    np.testing.assert_array_equal(resize_position_table(table, (4, 6), (4, 6), prefix=1), table)
    with pytest.raises(ValueError, match='a table of 25 positions; expected 0 and a grid of 4 x 6'):
        resize_position_table(table, (4, 6), (8, 12))


@pytest.mark.slow
@pytest.mark.parametrize('shape', [(8, 6), (7, 5), (1, 2), (3, 1)])
def test_max_pool_by_two_matches_flax_max_pool(shape):
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, *shape, 3)), jnp.float32)
    pool = lambda x: nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
    np.testing.assert_array_equal(max_pool_by_two(images), pool(images))
    gradients = [jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x))))(images) for f in (max_pool_by_two, pool)]
    np.testing.assert_allclose(*gradients, atol=1e-6)
    low = max_pool_by_two(images.astype(jnp.bfloat16) - 100)
    assert low.dtype == jnp.bfloat16 and float(low.max()) < -90  # the padding is never the maximum
