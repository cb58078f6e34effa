"""What one looks at: where a model looks, what it has learned, and where it is wrong."""

import io
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from attnlab.data.images import Images
from attnlab.errors import UserError
from attnlab.models.image import ImageModel
from attnlab.tasks import head_grid, heatmap
from attnlab.tasks.task import Params
from attnlab.tasks.vision import dataset, figures
from attnlab.tasks.vision.preprocess import preprocess_images

MAX_ROLLOUTS = 8
"""So many images of a split have their attention drawn."""

FILE_SIGNATURES = (b'\x89PNG', b'\xff\xd8\xff', b'GIF8', b'RIFF', b'II*\0', b'MM\0*')
"""First bytes of PNG, JPEG, GIF, WebP and TIFF files."""

MAX_DIGITS = 18
"""Digits of an image's number at most; what has more is the name of a file."""


def write_evaluation_pictures(
    folder: Path,
    model: ImageModel,
    params: Params,
    scale: dataset.ImageStatistics,
    whole: Images,
    probabilities: np.ndarray,
) -> None:
    """Write the pictures of a scored split, and their captions into `pictures.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = []

    def add(name: str, figure: Any, caption: str) -> None:
        (folder / f'{name}.png').write_bytes(heatmap.render_png(figure))
        shown.append({'file': f'{name}.png', 'caption': caption})

    first = whole.pixels[:MAX_ROLLOUTS]
    maps = compute_attention_maps(model, params, scale, first)
    if maps:
        rolled = attention_rollout(maps['attention'], model)
        titles = [whole.names[label] for label in whole.labels[:MAX_ROLLOUTS]]
        caption = 'Attention rolled out over all layers (Abnar and Zuidema 2020), from 0 (white) to its largest (black)'
        add('rollout', figures.plot_rollouts(first, rolled, titles), caption)
    wrong = np.flatnonzero(probabilities.argmax(axis=1) != whole.labels)
    wrong = wrong[np.argsort(-probabilities[wrong].max(axis=1), kind='stable')]
    if len(wrong):
        figure = figures.plot_mistakes(whole, probabilities, wrong[: figures.MAX_MISTAKES])
        add('mistakes', figure, f'The surest of {len(wrong):,} mistakes: the class, what it was taken for, how surely')
    add(
        'confusion',
        figures.plot_confusion_matrix(probabilities, whole),
        'Images of each class (row) by what they were taken for',
    )
    add('calibration', figures.plot_calibration(probabilities, whole.labels), 'Accuracy of images by their confidence')
    if 'positions' in params:
        table = np.asarray(params['positions']['table'])[-model.module.grid[0] * model.module.grid[1] :]
        caption = 'Cosine of each position with all: one small grid a position, from -1 (white) to 1 (black)'
        add('positions', figures.plot_position_similarities(table, model.module.grid), caption)
    if (kernel := first_layer_filters(params)) is not None:
        add('filters', figures.plot_filters(kernel[0]), kernel[1])
    (folder / 'pictures.json').write_text(json.dumps(shown, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')


def first_layer_filters(params: Params) -> tuple[np.ndarray, str] | None:
    """The first layer's filters [n, height, width, C], and what they are; None where they have no colours to show."""
    if 'embedding' in params:
        kernel = np.asarray(params['embedding']['kernel'])
        height, width, C, D = kernel.shape
        if C not in (1, 3):
            return None
        _, _, components = np.linalg.svd(kernel.reshape(-1, D).T, full_matrices=False)
        count = min(figures.MAX_FILTERS, len(components))
        what = f'The first {count} principal components of the patch embedding'
        return components[:count].reshape(-1, height, width, C), what
    for names in (('tokenizer', 'convolution_0'), ('stem',)):
        found = params
        for name in names:
            found = found.get(name, {})
        if 'kernel' in found and found['kernel'].shape[2] in (1, 3):
            kernel = np.moveaxis(np.asarray(found['kernel']), -1, 0)[: figures.MAX_FILTERS]
            return kernel, f'{len(kernel)} filters of the first convolution'
    return None


def compute_attention_maps(
    model: ImageModel, params: Params, scale: dataset.ImageStatistics, pixels: np.ndarray
) -> dict[str, np.ndarray]:
    """Every attention of the model over images uint8 [B, H, W, C]: [B, L, N, T, T] by its name."""
    found = model.attention_maps(params, preprocess_images(jax.numpy.asarray(pixels), scale, model.image_size))
    return {kind: jax.device_get(weights) for kind, weights in found.items()}


def attention_to_grid(weights: np.ndarray, model: ImageModel) -> np.ndarray:
    """What is looked at [*B, rows, columns], of weights [*B, T, T]: by the class token, else by the mean of the image's
    tokens."""
    module = model.module
    seen = weights[..., module.num_prefix_tokens :]
    if module.class_token_index is None:
        rows = seen[..., module.num_prefix_tokens :, :].mean(axis=-2)
    else:
        rows = seen[..., module.class_token_index, :]
    return rows.reshape(*rows.shape[:-1], *module.grid)


def attention_rollout(weights: np.ndarray, model: ImageModel) -> np.ndarray:
    """[B, rows, columns], of all layers' weights [B, L, N, T, T] (Abnar and Zuidema 2020, section 3): the product of
    (W + 1) / 2, with W the mean of a layer's heads and 1 for the residual."""
    T = weights.shape[-1]
    total = np.eye(T)
    for layer in range(weights.shape[1]):
        total = (weights[:, layer].mean(axis=1) + np.eye(T)) / 2 @ total
    return attention_to_grid(total, model)


def draw_image_attention(
    folder: Path, image: np.ndarray, maps: dict[str, np.ndarray], model: ImageModel, layer: int | None,
    head: int | None,
) -> None:  # fmt: skip
    """Draw an image, the attention of its heads by layer, and the rollout; write an array file; print the files.

    maps: the weights [L, N, T, T] of each kind of attention.

    Raises UserError for a layer or head, from 1, that the model does not have, before anything is written.
    """
    head_grid.check_layer_and_head(maps, layer, head)
    weights = maps['attention']
    rolled, seen = attention_rollout(weights[None], model)[0], attention_to_grid(weights, model)
    layers = range(len(seen)) if layer is None else [layer - 1]
    heads = range(seen.shape[1]) if head is None else [head - 1]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / 'weights.npz', attention=weights, rollout=rolled, image=image)
    (folder / 'heads.png').write_bytes(heatmap.render_png(figures.plot_heads(image, seen, layers, heads)))
    (folder / 'rollout.png').write_bytes(heatmap.render_png(figures.plot_rollouts(image[None], rolled[None], [''])))
    for name in ('weights.npz', 'heads.png', 'rollout.png'):
        print(folder / name)


def load_chosen_images(data: dataset.Data, seed: int, texts: Sequence[str]) -> list[np.ndarray]:
    """The images uint8 [H, W, C]: by their number in the test split, or of a file, brought to the others' size."""
    numbers = {text: int(text) for text in texts if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS}
    whole = dataset.read_images(data, 'test', seed) if numbers else None
    found = []
    for text in texts:
        if whole is not None and text in numbers:
            if numbers[text] >= len(whole.labels):
                last = len(whole.labels) - 1
                raise UserError(f'there is no image {text}; expected 0 to {last}, those of the test split')
            found.append(whole.pixels[numbers[text]])
        else:
            found.append(open_image(text, dataset.image_shape(data)))
    return found


def open_image(path: str, shape: tuple[int, int, int]) -> np.ndarray:
    """The middle of an image file, as large as its sides allow, brought to a shape (height, width, channels).

    It is turned as its camera says, and what is transparent lies on white.
    """
    H, W, C = shape
    if C not in (1, 3):
        raise UserError(f'{path}: images of this run have {C} channels, and files of pictures 1 or 3')
    image = _decoded(path)
    if image.mode in ('I', 'F'):
        raise UserError(f'{path}: pixels have 32 bits; expected 8 or 16 in each channel')
    image = _opaque(image).convert('L' if C == 1 else 'RGB')
    part = min(image.width * H, image.height * W)  # whole numbers: no rounding puts a corner outside
    wide, high = part / H, part / W
    box = ((image.width - wide) / 2, (image.height - high) / 2, (image.width + wide) / 2, (image.height + high) / 2)
    return np.asarray(image.resize((W, H), Image.Resampling.BICUBIC, box=box), np.uint8).reshape(H, W, C)


MAX_FILE_BYTES = 2**28
"""Bytes of a picture's file; a device such as /dev/zero has no end."""


def _decoded(path: str) -> Image.Image:
    """The image of a file, upright; UserError for a file that is missing, truncated, too large or not an image."""
    expected = 'expected a number of the test split or a picture'
    try:
        with open(path, 'rb') as file:
            data = file.read(MAX_FILE_BYTES + 1)  # before it is opened as a picture, as Pillow would seek in a pipe
    except (OSError, ValueError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise UserError(f'{path}: cannot be read ({reason}); {expected}') from None
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f'{path}: cannot be read (too large: more than {MAX_FILE_BYTES} bytes); {expected}')
    try:
        with warnings.catch_warnings(action='ignore'), Image.open(io.BytesIO(data)) as file:
            return ImageOps.exif_transpose(file)
    except (Image.DecompressionBombError, MemoryError) as error:
        reason = f'too large: {str(error).split(",")[0]}'
    except Exception as error:  # damaged bytes raise many kinds
        # Pillow does not identify an image whose header is cut short.
        begun = data.startswith(FILE_SIGNATURES) or data[4:8] == b'ftyp'
        unknown = isinstance(error, UnidentifiedImageError) and not begun
        reason = 'empty' if not data else 'not an image' if unknown else 'truncated or damaged'
    raise UserError(f'{path}: cannot be read ({reason}); {expected}')


def _opaque(image: Image.Image) -> Image.Image:
    """With 8 bits a channel, on white."""
    if image.mode.startswith('I;16'):  # which Pillow would cut at 255
        return Image.fromarray(np.round(np.asarray(image) / 257).astype(np.uint8))
    if not image.has_transparency_data:
        return image
    return Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image.convert('RGBA'))
