"""Images changed at random for training, a batch at a time in NumPy: uint8 in, uint8 out.

    pixels, labels = Augment(crop=4, flip=True, policy='trivial', cutmix=1.0)(pixels, labels, random)
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

Policy = Literal['none', 'trivial', 'rand']
Random = np.random.Generator


class MixedLabels(NamedTuple):
    """What each image shows: `first` int32 [B] to the `share` float32 [B] of it, and `second` to the rest.

    Both are -1 where there is no image.
    """

    first: np.ndarray
    second: np.ndarray
    share: np.ndarray


@dataclasses.dataclass(frozen=True)
class Augment:
    """What is done to each image, in this order.

    crop: pixels of black around it, of which a window of its size is cut.  flip: left and right, half of the time.
    policy: 'trivial', one of `OPERATIONS` at a random strength (Mueller and Hutter 2021); 'rand', `operations` of them,
      one after the other, at `strength` from 0 to 1 (Cubuk et al. 2020, whose M of 10 is a strength of M / 10).
    erase: how often a box of 2 to 33 % of its area is filled with noise (Zhong et al. 2020).
    mixup, cutmix: alpha of the Beta(alpha, alpha) by which it is blended with another of the images (Zhang et al.
      2018), or a box of it taken from the other (Yun et al. 2019); 0 for none; with both, one is drawn for each call.
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
        """pixels uint8 [B, H, W, C] and labels int [B], -1 for an empty row: both after it; neither is changed."""
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
        kinds = [(mix, alpha) for mix, alpha in ((mixup_images, self.mixup), (cutmix_images, self.cutmix)) if alpha]
        real = np.flatnonzero(labels >= 0)
        if not kinds or len(real) < 2:
            return pixels, MixedLabels(labels, labels, np.ones(len(labels), np.float32))
        mix, alpha = kinds[random.integers(len(kinds))]
        other = np.arange(len(labels))
        other[real] = np.roll(real, random.integers(1, len(real)))
        pixels, share = mix(pixels, other, random.beta(alpha, alpha, len(labels)), random)
        return pixels, MixedLabels(labels, labels[other], share.astype(np.float32))


# Places


def random_crop(pixels: np.ndarray, margin: int, flip: bool, random: Random) -> np.ndarray:
    """A window of the same size, anywhere within `margin` pixels of black around each image, half of them mirrored."""
    B, H, W, _ = pixels.shape
    framed = np.pad(pixels, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    top, left = random.integers(2 * margin + 1, size=(2, B))
    rows, columns = top[:, None] + np.arange(H), left[:, None] + np.arange(W)
    if flip:
        columns = np.where(random.random(B)[:, None] < 0.5, columns[:, ::-1], columns)
    return framed[np.arange(B)[:, None, None], rows[:, :, None], columns[:, None, :]]


def random_boxes(
    B: int, H: int, W: int, areas: np.ndarray, ratios: np.ndarray, random: Random, cut: bool
) -> np.ndarray:
    """[B, H, W], True in a box of about that part of the image's area and that height by width.

    cut: its middle is anywhere, and it ends at the borders; else it lies within them, less oblong where it must.
    """
    ratios = ratios if cut else np.clip(ratios, areas, 1 / areas)
    tall, wide = H * np.sqrt(areas * ratios), W * np.sqrt(areas / ratios)
    edges = (0.0, 0.0) if cut else (tall / 2, wide / 2)
    row, column = (random.uniform(edge, side - edge, B) for edge, side in zip(edges, (H, W), strict=True))
    in_rows = np.abs(np.arange(H) + 0.5 - row[:, None]) < tall[:, None] / 2
    in_columns = np.abs(np.arange(W) + 0.5 - column[:, None]) < wide[:, None] / 2
    return in_rows[:, :, None] & in_columns[:, None, :]


def random_erase(pixels: np.ndarray, rate: float, random: Random) -> np.ndarray:
    """Noise in a box of that part of the images."""
    B, H, W, C = pixels.shape
    chosen = np.flatnonzero(random.random(B) < rate)
    n = len(chosen)
    ratios = np.exp(random.uniform(np.log(0.3), np.log(1 / 0.3), n))
    inside = random_boxes(n, H, W, random.uniform(0.02, 0.33, n), ratios, random, cut=False)
    noise = random.integers(256, size=(n, H, W, C), dtype=np.uint8)
    out = pixels.copy()
    out[chosen] = np.where(inside[..., None], noise, pixels[chosen])
    return out


# Two images in one


def mixup_images(
    pixels: np.ndarray, other: np.ndarray, share: np.ndarray, random: Random
) -> tuple[np.ndarray, np.ndarray]:
    """share x image + (1 - share) x the other one, and the share."""
    part = share.astype(np.float32)[:, None, None, None]
    mixed = part * pixels + (1 - part) * pixels[other]
    return np.round(mixed).astype(np.uint8), share


def cutmix_images(
    pixels: np.ndarray, other: np.ndarray, share: np.ndarray, random: Random
) -> tuple[np.ndarray, np.ndarray]:
    """The image with a box of the other one, and the part of its area that is left of it."""
    B, H, W, _ = pixels.shape
    inside = random_boxes(B, H, W, 1 - share, np.ones(B), random, cut=True)
    return np.where(inside[..., None], pixels[other], pixels), 1 - inside.mean(axis=(1, 2))


# Operations on an image, at a strength from 0 to 1


MAX_SHIFT = 150 / 331
"""Of an image's side, that it is shifted by (Cubuk et al. 2019, table 6)."""


def apply_random_operation(pixels: np.ndarray, strength: np.ndarray, random: Random) -> np.ndarray:
    """Each image after one of `OPERATIONS`, drawn for it, at its strength [B]; what has a sign takes either."""
    chosen = random.integers(len(OPERATIONS), size=len(pixels))
    sign = np.where(random.random(len(pixels)) < 0.5, -1.0, 1.0)
    out = pixels.copy()
    for number, operation in enumerate(OPERATIONS.values()):
        at = np.flatnonzero(chosen == number)
        if len(at):
            out[at] = operation(pixels[at], strength[at], sign[at])
    return out


def affine_transform(pixels: np.ndarray, frame: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """out[x] = in[frame x + shift], from the image's centre, by the nearest pixel; black from outside.

    frame: [B or 1, 2, 2] and shift: [B or 1, 2], both over (row, column).
    """
    B, H, W, _ = pixels.shape
    middle = np.array([(H - 1) / 2, (W - 1) / 2])
    grid = np.stack(np.meshgrid(np.arange(H), np.arange(W), indexing='ij'), axis=-1).reshape(-1, 2) - middle
    places = np.rint(grid @ frame.swapaxes(1, 2) + (shift + middle)[:, None]).astype(int)  # [B, HW, 2]
    row, column = places[..., 0], places[..., 1]
    inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
    found = pixels[np.arange(B)[:, None], np.clip(row, 0, H - 1), np.clip(column, 0, W - 1)]
    return np.where(inside[..., None], found, 0).astype(np.uint8).reshape(pixels.shape)


def _stacked(*entries: np.ndarray | float) -> np.ndarray:
    return np.stack(np.broadcast_arrays(*entries), axis=-1)


def _frame(*entries: np.ndarray | float) -> np.ndarray:
    return _stacked(*entries).reshape(-1, 2, 2)


def shear_x(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    return affine_transform(pixels, _frame(1, 0, 0.3 * strength * sign, 1), np.zeros((1, 2)))


def shear_y(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    return affine_transform(pixels, _frame(1, 0.3 * strength * sign, 0, 1), np.zeros((1, 2)))


def translate_x(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    return affine_transform(pixels, _frame(1, 0, 0, 1), _stacked(0, MAX_SHIFT * pixels.shape[2] * strength * sign))


def translate_y(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    return affine_transform(pixels, _frame(1, 0, 0, 1), _stacked(MAX_SHIFT * pixels.shape[1] * strength * sign, 0))


def rotate(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    angle = np.deg2rad(30) * strength * sign
    cos, sin = np.cos(angle), np.sin(angle)
    return affine_transform(pixels, _frame(cos, -sin, sin, cos), np.zeros((1, 2)))


def _towards(pixels: np.ndarray, end: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Away from `end` or towards it: end + (1 +- 0.9 strength) (pixels - end), cut to what a pixel can be."""
    part = (1 + 0.9 * strength * sign).astype(np.float32)[:, None, None, None]
    return np.clip(np.round(end + part * (pixels - end)), 0, 255).astype(np.uint8)


def luminance(pixels: np.ndarray) -> np.ndarray:
    """float32 [B, H, W, 1], the luminance (ITU-R 601)."""
    if pixels.shape[-1] != 3:
        return pixels.mean(axis=-1, keepdims=True, dtype=np.float32)
    return (pixels @ np.array([0.299, 0.587, 0.114], np.float32))[..., None]


def brightness(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    return _towards(pixels, np.zeros(1, np.float32), strength, sign)


def contrast(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    return _towards(pixels, luminance(pixels).mean(axis=(1, 2), keepdims=True), strength, sign)


def color(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    return _towards(pixels, luminance(pixels), strength, sign)


def sharpness(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    H, W = pixels.shape[1:3]
    near = np.pad(pixels.astype(np.float32), ((0, 0), (1, 1), (1, 1), (0, 0)), mode='edge')
    around = sum(near[:, i : i + H, j : j + W] for i in range(3) for j in range(3))
    return _towards(pixels, (around + 4 * near[:, 1:-1, 1:-1]) / 13, strength, sign)


def posterize(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    bits = np.rint(4 * strength).astype(np.uint8)  # dropped of eight
    return pixels & (np.uint8(255) << bits)[:, None, None, None]


def solarize(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    return np.where(pixels >= 256 * (1 - strength)[:, None, None, None], 255 - pixels, pixels)


def autocontrast(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    low, high = (f(pixels, axis=(1, 2), keepdims=True).astype(np.float32) for f in (np.min, np.max))
    width = np.where(high > low, high - low, 1)
    stretched = np.round(255 * (pixels - low) / width)
    return np.where(high > low, stretched, pixels).astype(np.uint8)


def equalize(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """How many of its channel's pixels are darker, from 0 for the darkest that there are to 255 for the brightest."""
    B, H, W, C = pixels.shape
    rows = np.arange(B * C)[:, None]
    flat = pixels.transpose(0, 3, 1, 2).reshape(B * C, -1)
    counts = np.bincount((256 * rows + flat).ravel(), minlength=256 * B * C).reshape(-1, 256)
    darker = np.cumsum(counts, axis=1) - counts
    most = darker[rows, flat.max(axis=1, keepdims=True)]  # 0 where all are alike, which stay as they are
    table = np.where(most > 0, np.round(255 * np.minimum(darker / np.maximum(most, 1), 1)), np.arange(256))
    return table.astype(np.uint8)[rows, flat].reshape(B, C, H, W).transpose(0, 2, 3, 1)


def identity(pixels: np.ndarray, strength: np.ndarray, sign: np.ndarray) -> np.ndarray:
    return pixels


OPERATIONS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    each.__name__: each
    for each in (identity, shear_x, shear_y, translate_x, translate_y, rotate, brightness, contrast, color, sharpness,
                 posterize, solarize, autocontrast, equalize)
}  # fmt: skip
"""Those of RandAugment and TrivialAugment, in the ranges of the former."""
