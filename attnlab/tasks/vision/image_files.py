"""Images that a user names: by their number in the test split, or as files in any common format."""

import io
import warnings
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from attnlab.errors import UserError
from attnlab.tasks.vision import dataset

FILE_SIGNATURES = (b'\x89PNG', b'\xff\xd8\xff', b'GIF8', b'RIFF', b'II*\0', b'MM\0*')
"""First bytes of PNG, JPEG, GIF, WebP and TIFF files."""

MAX_DIGITS = 18
"""Most digits of an image number; a longer sequence of digits is the name of a file."""

MAX_FILE_BYTES = 2**28
"""Largest size of an image file; without a limit, reading a device such as /dev/zero would not end."""


def load_chosen_images(data: dataset.ImageData, seed: int, texts: Sequence[str]) -> list[np.ndarray]:
    """Return images [H, W, C] uint8, each given by its number in the test split (from 0) or by the path of a file.

    Raises UserError for a number outside the split, and as `open_image`.
    """
    numbers = {text: int(text) for text in texts if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS}
    test_images = dataset.read_images(data, 'test', seed) if numbers else None
    chosen = []
    for text in texts:
        if test_images is not None and text in numbers:
            if numbers[text] >= len(test_images.labels):
                last = len(test_images.labels) - 1
                raise UserError(f'there is no image {text}; expected 0 to {last}, an image of the test split')
            chosen.append(test_images.pixels[numbers[text]])
        else:
            chosen.append(open_image(text, dataset.image_shape(data)))
    return chosen


def open_image(path: str, shape: tuple[int, int, int]) -> np.ndarray:
    """Return the centre of an image file, as large as possible, resized to `shape`, [H, W, C] uint8.

    The orientation that the camera stored is applied, and transparent pixels are drawn on white.

    Raises UserError if C is not 1 or 3, the pixels have 32 bits, or the file is missing, damaged or too large.
    """
    H, W, C = shape
    if C not in (1, 3):
        raise UserError(f'{path}: the images of this run have {C} channels; expected 1 or 3 to read an image file')
    image = _decode_file(path)
    if image.mode in ('I', 'F'):
        raise UserError(f'{path}: pixels have 32 bits; expected 8 or 16 in each channel')
    image = _remove_transparency(image).convert('L' if C == 1 else 'RGB')
    limit = min(image.width * H, image.height * W)  # an integer, so that rounding cannot put a corner outside
    width, height = limit / H, limit / W
    left, top = (image.width - width) / 2, (image.height - height) / 2
    box = (left, top, (image.width + width) / 2, (image.height + height) / 2)
    return np.asarray(image.resize((W, H), Image.Resampling.BICUBIC, box=box), np.uint8).reshape(H, W, C)


def _decode_file(path: str) -> Image.Image:
    """Return the image of a file, upright; UserError if it is missing, truncated, too large or not an image."""
    expected = 'expected a number of the test split or an image file'
    try:
        with open(path, 'rb') as file:
            data = file.read(MAX_FILE_BYTES + 1)  # Pillow gets bytes, because it would seek in a pipe
    except (OSError, ValueError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise UserError(f'{path}: cannot be read ({reason}); {expected}') from None
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f'{path}: cannot be read (too large: more than {MAX_FILE_BYTES} bytes); {expected}')
    try:
        with warnings.catch_warnings(action='ignore'), Image.open(io.BytesIO(data)) as image:
            return ImageOps.exif_transpose(image)
    except (Image.DecompressionBombError, MemoryError) as error:
        reason = f'too large: {str(error).split(",")[0]}'
    except Exception as error:  # Pillow raises many kinds of errors for damaged bytes
        # Pillow does not identify an image whose header is truncated; its first bytes show that it is one.
        has_signature = data.startswith(FILE_SIGNATURES) or data[4:8] == b'ftyp'
        not_an_image = isinstance(error, UnidentifiedImageError) and not has_signature
        reason = 'empty' if not data else 'not an image' if not_an_image else 'truncated or damaged'
    raise UserError(f'{path}: cannot be read ({reason}); {expected}')


def _remove_transparency(image: Image.Image) -> Image.Image:
    """Return the image with 8 bits in each channel, transparent pixels drawn on white."""
    if image.mode.startswith('I;16'):  # Pillow would clip these at 255
        return Image.fromarray(np.round(np.asarray(image) / 257).astype(np.uint8))
    if not image.has_transparency_data:
        return image
    return Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image.convert('RGBA'))
