"""Figures of images, and of what a model makes of them: arrays in, matplotlib figures out."""

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
PANEL_INCHES = 1.05  # inches


def _panels(count: int, across: int, titled: bool, cell: float = PANEL_INCHES) -> tuple[Figure, np.ndarray]:
    """A figure of so many square panels without axes, and they, row by row."""
    from matplotlib.figure import Figure

    down, across = math.ceil(count / across), min(count, across)
    figure = Figure(figsize=(across * cell, down * (cell + 0.32 * titled)), facecolor='white', layout='constrained')
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes in panels:
        axes.set_axis_off()
    return figure, panels


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, fontsize=7, color=TEXT_COLOUR, fontfamily=FONT, pad=2.5, parse_math=False)


def show_image(axes: Any, image: np.ndarray) -> None:
    """An image uint8 [H, W, C] as it is; of other channels than 1 or 3 their mean."""
    shown = image if image.shape[-1] == 3 else image.mean(axis=-1)
    axes.imshow(shown, cmap='gray', vmin=0, vmax=255, interpolation='nearest')


def show_weights(axes: Any, seen: np.ndarray) -> None:
    """Weights over a grid, white 0, black the largest."""
    axes.imshow(seen, cmap='Greys', vmin=0, vmax=max(float(seen.max()), 1e-12), interpolation='nearest')


def plot_rollouts(images: np.ndarray, rolled: np.ndarray, titles: Sequence[str]) -> Figure:
    """Images [n, H, W, C] and beside each the weights over its grid [n, rows, columns]."""
    figure, panels = _panels(2 * len(images), PANELS_PER_ROW, any(titles))
    for number, (image, seen, title) in enumerate(zip(images, rolled, titles, strict=True)):
        show_image(panels[2 * number], image)
        show_weights(panels[2 * number + 1], seen)
        _title(panels[2 * number], title)
    return figure


def plot_heads(image: np.ndarray, seen: np.ndarray, layers: Sequence[int], chosen: Sequence[int]) -> Figure:
    """The image, and what each head looks at, of weights over its grid [L, N, rows, columns]; a row a layer."""
    figure, panels = _panels(len(layers) * (len(chosen) + 1), len(chosen) + 1, True)
    panels = panels.reshape(len(layers), -1)
    show_image(panels[0, 0], image)
    for row, layer in enumerate(layers):
        for column, head in enumerate(chosen, 1):
            show_weights(panels[row, column], seen[layer, head])
            _title(panels[row, column], f'layer {layer + 1}, head {head + 1}')
    return figure


def plot_mistakes(whole: Images, probabilities: np.ndarray, wrong: np.ndarray) -> Figure:
    """Images with the class, what they were taken for, and how surely."""
    figure, panels = _panels(len(wrong), PANELS_PER_ROW, True)
    for axes, at in zip(panels, wrong, strict=False):
        show_image(axes, whole.pixels[at])
        taken = int(probabilities[at].argmax())
        _title(axes, f'{whole.names[whole.labels[at]]}\n{whole.names[taken]} {probabilities[at, taken]:.0%}')
    return figure


def plot_confusion_matrix(probabilities: np.ndarray, whole: Images) -> Figure:
    """The confusion matrix, each row as parts of its class; the numbers and names where there are few classes."""
    from matplotlib.figure import Figure

    table = scores.confusion_matrix(probabilities, whole.labels)
    parts = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    few = len(table) <= 20
    size = max(2.6, 0.36 * len(table)) if few else 5.0
    figure = Figure(figsize=(size + 0.9, size + 0.6), facecolor='white', layout='constrained')
    axes = figure.subplots()
    axes.imshow(parts, cmap='Greys', vmin=0, vmax=1, interpolation='nearest')
    style = {'fontsize': 7, 'fontfamily': FONT, 'color': TEXT_COLOUR}
    if few:
        for (row, column), count in np.ndenumerate(table):
            if count:
                colour = 'white' if parts[row, column] > 0.5 else TEXT_COLOUR
                where = {'ha': 'center', 'va': 'center', 'fontsize': 6.5, 'fontfamily': FONT}
                axes.text(column, row, str(count), color=colour, **where)
    axes.set_xticks(range(len(table)) if few else [], whole.names if few else [], rotation=45, ha='right', **style)
    axes.set_yticks(range(len(table)) if few else [], whole.names if few else [], **style)
    axes.set_xlabel('taken for', fontsize=8, color=MUTED_COLOUR, fontfamily=FONT)
    axes.set_ylabel('class', fontsize=8, color=MUTED_COLOUR, fontfamily=FONT)
    _frame(axes)
    return figure


def plot_calibration(probabilities: np.ndarray, labels: np.ndarray) -> Figure:
    """Accuracy against confidence, a bar a bin, and the line on which both are the same."""
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
    _frame(axes)
    return figure


def plot_position_similarities(table: np.ndarray, grid: tuple[int, int]) -> Figure:
    """The cosine of every position [T, D] with every other: at each place of the grid a small grid of its own."""
    from matplotlib.figure import Figure

    rows, columns = grid
    unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    cosines = (unit @ unit.T).reshape(rows, columns, rows, columns)
    laid = np.full((rows * (rows + 1), columns * (columns + 1)), np.nan)  # a line between two
    for row in range(rows):
        for column in range(columns):
            at = row * (rows + 1), column * (columns + 1)
            laid[at[0] : at[0] + rows, at[1] : at[1] + columns] = cosines[row, column]
    wide = 4.6 if columns >= rows else 4.6 * columns / rows
    figure = Figure(figsize=(wide, wide * rows / columns), facecolor='white')
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.imshow(laid[:-1, :-1], cmap='Greys', vmin=-1, vmax=1, interpolation='nearest')
    return figure


def plot_filters(kernels: np.ndarray) -> Figure:
    """Filters [n, height, width, C], each from its least value (black) to its largest."""
    figure, panels = _panels(len(kernels), 2 * PANELS_PER_ROW, False, 0.5)
    low, high = (f(kernels, axis=(1, 2, 3), keepdims=True) for f in (np.min, np.max))
    shown = np.round(255 * (kernels - low) / np.maximum(high - low, 1e-12)).astype(np.uint8)
    for axes, kernel in zip(panels, shown, strict=False):
        show_image(axes, kernel)
    return figure


def _frame(axes: Any) -> None:
    for spine in axes.spines.values():
        spine.set(color=MUTED_COLOUR, linewidth=0.5)
