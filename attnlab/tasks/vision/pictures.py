"""Pictures of an image model: its attention, what it has learned, and its mistakes on a split."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attnlab.data.images import Images
from attnlab.models.image import ImageModel
from attnlab.tasks import head_grid, heatmap
from attnlab.tasks.task import Params
from attnlab.tasks.vision import dataset, figures
from attnlab.tasks.vision.preprocess import preprocess_images

MAX_ROLLOUTS = 8
"""Number of images of a split whose attention is drawn."""


def write_evaluation_pictures(
    folder: Path,
    model: ImageModel,
    params: Params,
    statistics: dataset.ImageStatistics,
    images: Images,
    probabilities: np.ndarray,
) -> None:
    """Write the pictures of an evaluated split, and `pictures.json` with their captions, into a folder.

    probabilities: [n, classes] float of each image.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index = []

    def add(name: str, figure: Any, caption: str) -> None:
        (folder / f'{name}.png').write_bytes(heatmap.render_png(figure))
        index.append({'file': f'{name}.png', 'caption': caption})

    first_pixels = images.pixels[:MAX_ROLLOUTS]
    maps = compute_attention_maps(model, params, statistics, first_pixels)
    if maps:
        rollouts = attention_rollout(maps['attention'], model)
        titles = [images.names[label] for label in images.labels[:MAX_ROLLOUTS]]
        caption = (
            'Attention rollout over all layers (Abnar and Zuidema 2020), from 0 (white) to the largest weight (black)'
        )
        add('rollout', figures.plot_rollouts(first_pixels, rollouts, titles), caption)
    mistakes = np.flatnonzero(probabilities.argmax(axis=1) != images.labels)
    mistakes = mistakes[np.argsort(-probabilities[mistakes].max(axis=1), kind='stable')]
    if len(mistakes):
        figure = figures.plot_mistakes(images, probabilities, mistakes[: figures.MAX_MISTAKES])
        caption = f'The most confident of {len(mistakes):,} mistakes: class, predicted class and its probability'
        add('mistakes', figure, caption)
    confusion = figures.plot_confusion_matrix(probabilities, images)
    add('confusion', confusion, 'Images of each class (row) by predicted class (column)')
    add('calibration', figures.plot_calibration(probabilities, images.labels), 'Accuracy of images by their confidence')
    if 'positions' in params:
        rows, columns = model.module.grid
        table = np.asarray(params['positions']['table'])[-rows * columns :]
        caption = 'Cosine of each position with all positions: one small grid for each, from -1 (white) to 1 (black)'
        add('positions', figures.plot_position_similarities(table, model.module.grid), caption)
    if (filters := first_layer_filters(params)) is not None:
        kernels, caption = filters
        add('filters', figures.plot_filters(kernels), caption)
    (folder / 'pictures.json').write_text(json.dumps(index, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')


def first_layer_filters(params: Params) -> tuple[np.ndarray, str] | None:
    """Return filters of the first layer, [n, height, width, C] float, and their caption.

    For a patch embedding, its first principal components; for a convolution, its first kernels. None if the model has
    neither, or if the filters cannot be drawn because C is not 1 or 3.
    """
    if 'embedding' in params:
        kernel = np.asarray(params['embedding']['kernel'])
        height, width, C, D = kernel.shape
        if C not in (1, 3):
            return None
        _, _, components = np.linalg.svd(kernel.reshape(-1, D).T, full_matrices=False)
        count = min(figures.MAX_FILTERS, len(components))
        caption = f'The first {count} principal components of the patch embedding'
        return components[:count].reshape(-1, height, width, C), caption
    for path in (('tokenizer', 'convolution_0'), ('stem',)):
        layer = params
        for name in path:
            layer = layer.get(name, {})
        if 'kernel' in layer and layer['kernel'].shape[2] in (1, 3):
            kernel = np.moveaxis(np.asarray(layer['kernel']), -1, 0)[: figures.MAX_FILTERS]
            return kernel, f'{len(kernel)} filters of the first convolution'
    return None


def compute_attention_maps(
    model: ImageModel, params: Params, statistics: dataset.ImageStatistics, pixels: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the attention weights [B, L, N, T, T] of each kind of attention over images [B, H, W, C] uint8."""
    maps = model.attention_maps(params, preprocess_images(jax.numpy.asarray(pixels), statistics, model.image_size))
    return {kind: jax.device_get(weights) for kind, weights in maps.items()}


def attention_to_grid(weights: np.ndarray, model: ImageModel) -> np.ndarray:
    """Return the attention to each image token as a grid, [*B, rows, columns], from weights [*B, T, T].

    The query is the class token, or, for a model without one, the mean over the image tokens.
    """
    module = model.module
    to_image = weights[..., module.num_prefix_tokens :]
    if module.class_token_index is None:
        to_image = to_image[..., module.num_prefix_tokens :, :].mean(axis=-2)
    else:
        to_image = to_image[..., module.class_token_index, :]
    return to_image.reshape(*to_image.shape[:-1], *module.grid)


def attention_rollout(weights: np.ndarray, model: ImageModel) -> np.ndarray:
    """Return the attention rollout [B, rows, columns] of the weights [B, L, N, T, T] of all layers.

    The rollout is the product over the layers of (W + I) / 2, with W the mean of a layer's heads and I the identity,
    for the residual connection. Abnar and Zuidema 2020, section 3.
    """
    T = weights.shape[-1]
    product = np.eye(T)
    for layer in range(weights.shape[1]):
        product = (weights[:, layer].mean(axis=1) + np.eye(T)) / 2 @ product
    return attention_to_grid(product, model)


def draw_image_attention(
    folder: Path, image: np.ndarray, maps: dict[str, np.ndarray], model: ImageModel, layer: int | None,
    head: int | None,
) -> None:  # fmt: skip
    """Write `heads.png` (the image and the attention of its heads), `rollout.png` and `weights.npz`; print their paths.

    image: [H, W, C] uint8.  maps: weights [L, N, T, T] of each kind of attention.
    layer, head: the layer and the head to draw in `heads.png`, counted from 1; None draws all.

    Raises UserError, before anything is written, for a layer or head that the model does not have.
    """
    head_grid.check_layer_and_head(maps, layer, head)
    weights = maps['attention']
    rollout, grids = attention_rollout(weights[None], model)[0], attention_to_grid(weights, model)
    layers = range(len(grids)) if layer is None else [layer - 1]
    heads = range(grids.shape[1]) if head is None else [head - 1]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / 'weights.npz', attention=weights, rollout=rollout, image=image)
    (folder / 'heads.png').write_bytes(heatmap.render_png(figures.plot_heads(image, grids, layers, heads)))
    (folder / 'rollout.png').write_bytes(heatmap.render_png(figures.plot_rollouts(image[None], rollout[None], [''])))
    for name in ('weights.npz', 'heads.png', 'rollout.png'):
        print(folder / name)
