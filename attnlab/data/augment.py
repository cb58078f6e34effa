"""Random augmentation of training images in NumPy, a batch at a time: uint8 in, uint8 out.

    pixels, labels = Augment(crop=4, flip=True, policy='trivial', cutmix=1.0)(pixels, labels, random)

Every function returns pixels of the shape and dtype that it takes.  pixels: [B, H, W, C] uint8.  strength: [B] float32
from 0 to 1.  sign: [B] float32, 1 or -1.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

Policy = Literal['none', 'trivial', 'rand']
Random = np.random.Generator


class MixedLabels(NamedTuple):
    """Labels of images that may be mixtures of two.

    first, second: [B] int32, the labels of the two images; both -1 for an empty row.
    share: [B] float32, the weight of `first`; `second` has the weight 1 - share.
    """

    first: np.ndarray
    second: np.ndarray
    share: np.ndarray


@dataclasses.dataclass(frozen=True)
class Augment:
    """Augmentations, applied to each image in this order.

    crop: pixels of black padding on each side, before a random crop to the original size.
    flip: mirror left and right with probability 1/2.
    policy: 'trivial' applies one of `OPERATIONS` at a random strength (Mueller and Hutter 2021, TrivialAugment).
      'rand' applies `operations` of them, one after the other, at `strength` from 0 to 1 (Cubuk et al. 2020,
      RandAugment, whose magnitude M of 10 is a strength of M / 10).
    erase: probability that a box of 2 to 33 % of the area is filled with noise (Zhong et al. 2020).
    mixup: alpha of the Beta(alpha, alpha) distribution of the weights by which an image is blended with another one
      of the batch (Zhang et al. 2018); 0: none.
    cutmix: the same for the share of the area that is replaced by a box of another image (Yun et al. 2019); 0: none.
      With mixup and cutmix, each call draws one of the two.
    """

    crop: int = 0
    flip: bool = False
    policy: Policy = 'none'
    operations: int = 2
    strength: float = 0.9
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __call__(self, pixels: np.ndarray, labels: np.ndarray, random: Random) -> tuple[np.ndarray, MixedLabels]:
        """Augment a batch; the arguments are not changed.

        pixels: [B, H, W, C] uint8.  labels: [B] int, -1 for an empty row.  random: source of all random numbers.
        Raises ValueError for an unknown policy.
        """
        if self.crop or self.flip:
            pixels = random_crop(pixels, self.crop, self.flip, random)
        match self.policy:
            case 'trivial':
                pixels = apply_random_operation(pixels, random.uniform(0, 1, len(pixels)), random)
            case 'rand':
                for _ in range(self.operations):
                    pixels = apply_random_operation(pixels, np.full(len(pixels), self.strength), random)
            case 'none':
                pass
            case other:
                raise ValueError(f"policy is {other!r}; expected 'none', 'trivial' or 'rand'")
        if self.erase:
            pixels = random_erase(pixels, self.erase, random)
        labels = labels.astype(np.int32)
        methods = [(mix, alpha) for mix, alpha in ((mixup_images, self.mixup), (cutmix_images, self.cutmix)) if alpha]
        present = np.flatnonzero(labels >= 0)
        if not methods or len(present) < 2:
            return pixels, MixedLabels(labels, labels, np.ones(len(labels), np.float32))
        mix, alpha = methods[random.integers(len(methods))]
        partner = np.arange(len(labels))
        partner[present] = np.roll(present, random.integers(1, len(present)))
        pixels, share = mix(pixels, partner, random.beta(alpha, alpha, len(labels)), random)
        return pixels, MixedLabels(labels, labels[partner], share.astype(np.float32))


# Crops and boxes


def random_crop(pixels: np.ndarray, margin: int, flip: bool, random: Random) -> np.ndarray:
    """Pad each image [B, H, W, C] by `margin` black pixels and crop it at random to its original size.

    flip: mirror each image with probability 1/2.
    """
    B, H, W, _ = pixels.shape
    padded = np.pad(pixels, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    top, left = random.integers(2 * margin + 1, size=(2, B))
    rows, columns = top[:, None] + np.arange(H), left[:, None] + np.arange(W)
    if flip:
        columns = np.where(random.random(B)[:, None] < 0.5, columns[:, ::-1], columns)
    return padded[np.arange(B)[:, None, None], rows[:, :, None], columns[:, None, :]]


def random_boxes(
    B: int, H: int, W: int, areas: np.ndarray, ratios: np.ndarray, random: Random, cut: bool
) -> np.ndarray:
    """Draw one box for each image; returns a mask [B, H, W], True inside the box.

    areas: [B], the approximate area of each box as a share of the image.  ratios: [B], height divided by width.
    cut: True: the centre may be anywhere, and the box is cut off at the borders of the image.  False: the whole box is
      inside the image, with a ratio closer to 1 if necessary.
    """
    ratios = ratios if cut else np.clip(ratios, areas, 1 / areas)
    height, width = H * np.sqrt(areas * ratios), W * np.sqrt(areas / ratios)
    margins = (0.0, 0.0) if cut else (height / 2, width / 2)
    row, column = (random.uniform(margin, side - margin, B) for margin, side in zip(margins, (H, W), strict=True))
    in_rows = np.abs(np.arange(H) + 0.5 - row[:, None]) < height[:, None] / 2
    in_columns = np.abs(np.arange(W) + 0.5 - column[:, None]) < width[:, None] / 2
    return in_rows[:, :, None] & in_columns[:, None, :]


def random_erase(pixels: np.ndarray, rate: float, random: Random) -> np.ndarray:
    """Fill a random box of images [B, H, W, C] with noise, in each image with probability `rate`."""
    B, H, W, C = pixels.shape
    selected = np.flatnonzero(random.random(B) < rate)
    n = len(selected)
    ratios = np.exp(random.uniform(np.log(0.3), np.log(1 / 0.3), n))
    inside = random_boxes(n, H, W, random.uniform(0.02, 0.33, n), ratios, random, cut=False)
    noise = random.integers(256, size=(n, H, W, C), dtype=np.uint8)
    out = pixels.copy()
    out[selected] = np.where(inside[..., None], noise, pixels[selected])
    return out


# Mixtures of two images


def mixup_images(
    pixels: np.ndarray, partner: np.ndarray, share: np.ndarray, random: Random
) -> tuple[np.ndarray, np.ndarray]:
    """Return share * image + (1 - share) * partner image, and the share.

    partner: [B] int, the index of the other image of each.  share: [B], from 0 to 1.  random: not used.
    """
    weight = share.astype(np.float32)[:, None, None, None]
    mixed = weight * pixels + (1 - weight) * pixels[partner]
    return np.round(mixed).astype(np.uint8), share


def cutmix_images(
    pixels: np.ndarray, partner: np.ndarray, share: np.ndarray, random: Random
) -> tuple[np.ndarray, np.ndarray]:
    """Replace a random box of each image by that of its partner; returns pixels and the remaining share of the area.

    partner: [B] int, the index of the other image of each.  share: [B], the approximate share of the area to keep.
    """
    B, H, W, _ = pixels.shape
    inside = random_boxes(B, H, W, 1 - share, np.ones(B), random, cut=True)
    return np.where(inside[..., None], pixels[partner], pixels), 1 - inside.mean(axis=(1, 2))


# Operations on images.  Each takes pixels [B, H, W, C] uint8, strength [B] from 0 to 1 and sign [B], 1 or -1, and
# returns new pixels.  The operations that have no direction ignore the sign.


MAX_SHIFT = 150 / 331
"""Largest translation, as a share of the image's side (Cubuk et al. 2019, table 6)."""


def apply_random_operation(pixels: np.ndarray, strength: np.ndarray, random: Random) -> np.ndarray:
    """Apply one random operation of `OPERATIONS` to each image, at its strength [B] and with a random sign."""
    choices = random.integers(len(OPERATIONS), size=len(pixels))
    sign = np.where(random.random(len(pixels)) < 0.5, -1.0, 1.0)
    out = pixels.copy()
    for number, operation in enumerate(OPERATIONS.values()):
        indices = np.flatnonzero(choices == number)
        if len(indices):
            out[indices] = operation(pixels[indices], strength[indices], sign[indices])
    return out


def affine_transform(pixels: np.ndarray, matrix: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Return out[x] = in[matrix x + shift] with x measured from the image's centre; nearest pixel, black outside.

    matrix: [B or 1, 2, 2] and shift: [B or 1, 2], both for (row, column).
    """
    B, H, W, _ = pixels.shape
    centre = np.array([(H - 1) / 2, (W - 1) / 2])
    grid = np.stack(np.meshgrid(np.arange(H), np.arange(W), indexing='ij'), axis=-1).reshape(-1, 2) - centre
    sources = np.rint(grid @ matrix.swapaxes(1, 2) + (shift + centre)[:, None]).astype(int)  # [B, HW, 2]
    row, column = sources[..., 0], sources[..., 1]
    inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
    values = pixels[np.arange(B)[:, None], np.clip(row, 0, H - 1), np.clip(column, 0, W - 1)]
    return np.where(inside[..., None], values, 0).astype(np.uint8).reshape(pixels.shape)


def _vector(*entries: np.ndarray | float) -> np.ndarray:
    """Stack entries, each a number or [B], to [B, entries]; to [entries] if all are numbers."""
    return np.stack(np.broadcast_arrays(*entries), axis=-1)


def _matrix(*entries: np.ndarray | float) -> np.ndarray:
    """Stack 4 entries, each a number or [B], to [B or 1, 2, 2]."""
    return _vector(*entries).reshape(-1, 2, 2)


def shear_x(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Shift each row by up to 0.3 times its distance from the centre."""
    return affine_transform(pixels, _matrix(1, 0, 0.3 * strength * sign, 1), np.zeros((1, 2)))


def shear_y(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Shift each column by up to 0.3 times its distance from the centre."""
    return affine_transform(pixels, _matrix(1, 0.3 * strength * sign, 0, 1), np.zeros((1, 2)))


def translate_x(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Translate along the columns by up to MAX_SHIFT of the width."""
    return affine_transform(pixels, _matrix(1, 0, 0, 1), _vector(0, MAX_SHIFT * pixels.shape[2] * strength * sign))


def translate_y(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Translate along the rows by up to MAX_SHIFT of the height."""
    return affine_transform(pixels, _matrix(1, 0, 0, 1), _vector(MAX_SHIFT * pixels.shape[1] * strength * sign, 0))


def rotate(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Rotate by up to 30 degrees about the centre."""
    angle = np.deg2rad(30) * strength * sign
    cos, sin = np.cos(angle), np.sin(angle)
    return affine_transform(pixels, _matrix(cos, -sin, sin, cos), np.zeros((1, 2)))


def _enhance(pixels: np.ndarray, reference: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Return reference + (1 + 0.9 * sign * strength) * (pixels - reference), clipped to 0 to 255."""
    factor = (1 + 0.9 * strength * sign).astype(np.float32)[:, None, None, None]
    return np.clip(np.round(reference + factor * (pixels - reference)), 0, 255).astype(np.uint8)


def luminance(pixels: np.ndarray) -> np.ndarray:
    """Return the luminance of RGB images (ITU-R 601), or the mean of other channels, [B, H, W, 1] float32."""
    if pixels.shape[-1] != 3:
        return pixels.mean(axis=-1, keepdims=True, dtype=np.float32)
    return (pixels @ np.array([0.299, 0.587, 0.114], np.float32))[..., None]


def brightness(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Brighten (sign 1) or darken (sign -1)."""
    return _enhance(pixels, np.zeros(1, np.float32), strength, sign)


def contrast(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Raise or lower the contrast: distance of each pixel from the mean luminance."""
    return _enhance(pixels, luminance(pixels).mean(axis=(1, 2), keepdims=True), strength, sign)


def color(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Raise or lower the saturation: distance of each pixel from its luminance."""
    return _enhance(pixels, luminance(pixels), strength, sign)


def sharpness(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Sharpen or blur: distance of each pixel from a 3 x 3 weighted mean."""
    H, W = pixels.shape[1:3]
    padded = np.pad(pixels.astype(np.float32), ((0, 0), (1, 1), (1, 1), (0, 0)), mode='edge')
    neighbourhood = sum(padded[:, i : i + H, j : j + W] for i in range(3) for j in range(3))
    return _enhance(pixels, (neighbourhood + 4 * padded[:, 1:-1, 1:-1]) / 13, strength, sign)


def posterize(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Set up to 4 of the low bits of each value to zero."""
    bits = np.rint(4 * strength).astype(np.uint8)
    return pixels & (np.uint8(255) << bits)[:, None, None, None]


def solarize(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Invert values at or above a threshold, which is lower at a larger strength."""
    return np.where(pixels >= 256 * (1 - strength)[:, None, None, None], 255 - pixels, pixels)


def autocontrast(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Stretch the values of each channel to 0 to 255; a constant channel is not changed."""
    low, high = (f(pixels, axis=(1, 2), keepdims=True).astype(np.float32) for f in (np.min, np.max))
    width = np.where(high > low, high - low, 1)
    stretched = np.round(255 * (pixels - low) / width)
    return np.where(high > low, stretched, pixels).astype(np.uint8)


def equalize(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Equalise the histogram of each channel.

    Each value becomes the number of darker pixels of its channel, scaled from 0 for the darkest to 255 for the
    brightest; a constant channel is not changed.
    """
    B, H, W, C = pixels.shape
    rows = np.arange(B * C)[:, None]
    flat = pixels.transpose(0, 3, 1, 2).reshape(B * C, -1)
    counts = np.bincount((256 * rows + flat).ravel(), minlength=256 * B * C).reshape(-1, 256)
    darker = np.cumsum(counts, axis=1) - counts
    highest = darker[rows, flat.max(axis=1, keepdims=True)]  # 0 for a constant channel
    table = np.where(highest > 0, np.round(255 * np.minimum(darker / np.maximum(highest, 1), 1)), np.arange(256))
    return table.astype(np.uint8)[rows, flat].reshape(B, C, H, W).transpose(0, 2, 3, 1)


def identity(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Return the pixels as they are."""
    return pixels


OPERATIONS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    operation.__name__: operation
    for operation in (
        identity, shear_x, shear_y, translate_x, translate_y, rotate, brightness, contrast, color, sharpness,
        posterize, solarize, autocontrast, equalize,
    )
}  # fmt: skip
"""The operations of RandAugment and TrivialAugment by name, in the ranges of RandAugment."""
