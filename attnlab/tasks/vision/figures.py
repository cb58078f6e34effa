"""Matplotlib figures of images, attention, mistakes, calibration, positions and filters, from arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnlab.tasks.heatmap import FONT, GRID_COLOUR, MUTED_COLOUR, TEXT_COLOUR
from attnlab.tasks.vision import scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attnlab.data.images import Images

MAX_MISTAKES, MAX_FILTERS = 24, 32
PANELS_PER_ROW = 8
PANEL_INCHES = 1.05


def _panel_figure(count: int, per_row: int, titled: bool, inches: float = PANEL_INCHES) -> tuple[Figure, np.ndarray]:
    """Return a figure of at least `count` square panels without axes, and its panels, row by row."""
    from matplotlib.figure import Figure

    rows, columns = math.ceil(count / per_row), min(count, per_row)
    figure = Figure(
        figsize=(columns * inches, rows * (inches + 0.32 * titled)), facecolor='white', layout='constrained'
    )
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels:
        axes.set_axis_off()
    return figure, panels


def _set_title(axes: Any, text: str) -> None:
    axes.set_title(text, fontsize=7, color=TEXT_COLOUR, fontfamily=FONT, pad=2.5, parse_math=False)


def show_image(axes: Any, image: np.ndarray) -> None:
    """Draw an image [H, W, C] uint8; if C is neither 1 nor 3, the mean of its channels."""
    pixels = image if image.shape[-1] == 3 else image.mean(axis=-1)
    axes.imshow(pixels, cmap='gray', vmin=0, vmax=255, interpolation='nearest')


def show_weights(axes: Any, weights: np.ndarray) -> None:
    """Draw weights [rows, columns] from white (0) to black (the largest)."""
    axes.imshow(weights, cmap='Greys', vmin=0, vmax=max(float(weights.max()), 1e-12), interpolation='nearest')


def plot_rollouts(images: np.ndarray, rollouts: np.ndarray, titles: Sequence[str]) -> Figure:
    """Plot images [n, H, W, C] uint8, each with its attention rollout [n, rows, columns] beside it."""
    figure, panels = _panel_figure(2 * len(images), PANELS_PER_ROW, any(titles))
    for number, (image, rollout, title) in enumerate(zip(images, rollouts, titles, strict=True)):
        show_image(panels[2 * number], image)
        show_weights(panels[2 * number + 1], rollout)
        _set_title(panels[2 * number], title)
    return figure


def plot_heads(image: np.ndarray, weights: np.ndarray, layers: Sequence[int], heads: Sequence[int]) -> Figure:
    """Plot an image [H, W, C] uint8 and the attention of its heads, one row for each layer.

    weights: attention to each image token, [L, N, rows, columns].  layers, heads: indices to plot, from 0.
    """
    figure, panels = _panel_figure(len(layers) * (len(heads) + 1), len(heads) + 1, True)
    panels = panels.reshape(len(layers), -1)
    show_image(panels[0, 0], image)
    for row, layer in enumerate(layers):
        for column, head in enumerate(heads, 1):
            show_weights(panels[row, column], weights[layer, head])
            _set_title(panels[row, column], f'layer {layer + 1}, head {head + 1}')
    return figure


def plot_mistakes(images: Images, probabilities: np.ndarray, mistakes: np.ndarray) -> Figure:
    """Plot misclassified images with their class, their predicted class and its probability.

    probabilities: [n, classes] of all images.  mistakes: indices of the images to plot.
    """
    figure, panels = _panel_figure(len(mistakes), PANELS_PER_ROW, True)
    for axes, index in zip(panels, mistakes, strict=False):
        show_image(axes, images.pixels[index])
        predicted = int(probabilities[index].argmax())
        name, predicted_name = images.names[images.labels[index]], images.names[predicted]
        _set_title(axes, f'{name}\n{predicted_name} {probabilities[index, predicted]:.0%}')
    return figure


def plot_confusion_matrix(probabilities: np.ndarray, images: Images) -> Figure:
    """Plot the confusion matrix of probabilities [n, classes], each row as shares of its class.

    Up to 20 classes have their counts and names written out.
    """
    from matplotlib.figure import Figure

    counts = scores.confusion_matrix(probabilities, images.labels)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    written_out = len(counts) <= 20
    size = max(2.6, 0.36 * len(counts)) if written_out else 5.0
    figure = Figure(figsize=(size + 0.9, size + 0.6), facecolor='white', layout='constrained')
    axes = figure.subplots()
    axes.imshow(shares, cmap='Greys', vmin=0, vmax=1, interpolation='nearest')
    style = {'fontsize': 7, 'fontfamily': FONT, 'color': TEXT_COLOUR}
    if written_out:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                colour = 'white' if shares[row, column] > 0.5 else TEXT_COLOUR
                number_style = {'ha': 'center', 'va': 'center', 'fontsize': 6.5, 'fontfamily': FONT}
                axes.text(column, row, str(count), color=colour, **number_style)
    ticks, names = (range(len(counts)), images.names) if written_out else ([], [])
    axes.set_xticks(ticks, names, rotation=45, ha='right', **style)
    axes.set_yticks(ticks, names, **style)
    axes.set_xlabel('predicted class', fontsize=8, color=MUTED_COLOUR, fontfamily=FONT)
    axes.set_ylabel('class', fontsize=8, color=MUTED_COLOUR, fontfamily=FONT)
    _style_frame(axes)
    return figure


def plot_calibration(probabilities: np.ndarray, labels: np.ndarray) -> Figure:
    """Plot accuracy against confidence, one bar for each bin, with the line on which both are equal.

    probabilities: [n, classes].  labels: [n] int.
    """
    from matplotlib.figure import Figure

    sizes, _, accuracy = scores.calibration_bins(probabilities, labels)
    figure = Figure(figsize=(3.2, 2.9), facecolor='white', layout='constrained')
    axes = figure.subplots()
    edges = np.arange(scores.CALIBRATION_BINS) / scores.CALIBRATION_BINS
    axes.bar(edges, np.where(sizes > 0, accuracy, 0), 0.94 / scores.CALIBRATION_BINS, align='edge', color='#1f5a92')
    axes.plot([0, 1], [0, 1], color=MUTED_COLOUR, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.grid(color=GRID_COLOUR, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel('confidence', fontsize=8, color=MUTED_COLOUR, fontfamily=FONT)
    axes.set_ylabel('accuracy', fontsize=8, color=MUTED_COLOUR, fontfamily=FONT)
    axes.tick_params(labelsize=7, labelcolor=MUTED_COLOUR, length=0, labelfontfamily=FONT)
    _style_frame(axes)
    return figure


def plot_position_similarities(table: np.ndarray, grid: tuple[int, int]) -> Figure:
    """Plot the cosine similarities of learned positions, as in Dosovitskiy et al. 2021, figure 7.

    table: position embeddings [T, D] of T = rows * columns tokens.  grid: (rows, columns).
    The figure has a grid of small grids: the small grid at a position shows its similarity to every position.
    """
    from matplotlib.figure import Figure

    rows, columns = grid
    normalised = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    cosines = (normalised @ normalised.T).reshape(rows, columns, rows, columns)
    canvas = np.full((rows * (rows + 1), columns * (columns + 1)), np.nan)  # with an empty line between small grids
    for row in range(rows):
        for column in range(columns):
            top, left = row * (rows + 1), column * (columns + 1)
            canvas[top : top + rows, left : left + columns] = cosines[row, column]
    width = 4.6 if columns >= rows else 4.6 * columns / rows
    figure = Figure(figsize=(width, width * rows / columns), facecolor='white')
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.imshow(canvas[:-1, :-1], cmap='Greys', vmin=-1, vmax=1, interpolation='nearest')
    return figure


def plot_filters(kernels: np.ndarray) -> Figure:
    """Plot filters [n, height, width, C], each scaled from its smallest value (black) to its largest (white)."""
    figure, panels = _panel_figure(len(kernels), 2 * PANELS_PER_ROW, False, 0.5)
    low, high = (reduce(kernels, axis=(1, 2, 3), keepdims=True) for reduce in (np.min, np.max))
    pixels = np.round(255 * (kernels - low) / np.maximum(high - low, 1e-12)).astype(np.uint8)
    for axes, image in zip(panels, pixels, strict=False):
        show_image(axes, image)
    return figure


def _style_frame(axes: Any) -> None:
    for spine in axes.spines.values():
        spine.set(color=MUTED_COLOUR, linewidth=0.5)
