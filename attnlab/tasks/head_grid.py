"""Attention maps of every layer and head: one figure for each layer with a panel for each head, and an array file."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.errors import UserError
from attnlab.tasks import heatmap

MapLabels = Mapping[str, tuple[Sequence[str], Sequence[str]]]
"""(rows, columns) for each kind of attention: the query tokens, and the key tokens."""


def draw_head_grids(
    folder: Path, maps: Mapping[str, np.ndarray], labels: MapLabels, layer: int | None = None, head: int | None = None
) -> None:
    """Write one picture for each layer, its heads side by side, and `weights.npz`; print the paths of the files.

    maps: the attention weights [L, N, T, S] of each kind, such as 'decoder/cross_attention'. `weights.npz` has all of
      them, and the arrays `rows KIND` and `columns KIND`, with a dot in place of the slash in KIND.
    layer, head: the layer and the head to draw, counted from 1; None draws all.

    Raises UserError, before anything is written, for a layer or head that the model does not have.
    """
    check_layer_and_head(maps, layer, head)
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = dict(maps)
    for kind in maps:
        rows, columns = labels[kind]
        arrays |= {f'rows {kind}': np.array(rows, str), f'columns {kind}': np.array(columns, str)}
    path = folder / 'weights.npz'
    np.savez_compressed(path, **{name.replace('/', '.'): array for name, array in arrays.items()})
    print(path)
    for kind, weights in maps.items():
        for number, heads in enumerate(weights, 1):
            if layer not in (None, number):
                continue
            name = f'{kind.replace("/", "-")}-layer{number}' + (f'-head{head}' if head else '')
            title = f'{kind.replace("/", ", ").replace("_", " ")}, layer {number}'
            drawn_heads = heads if head is None else heads[head - 1 : head]
            path = folder / f'{name}.png'
            path.write_bytes(heatmap.render_png(plot_head_grid(drawn_heads, *labels[kind], title, head or 1)))
            print(path)


def check_layer_and_head(maps: Mapping[str, np.ndarray], layer: int | None, head: int | None) -> None:
    """Raise UserError if the weights [L, N, T, S] lack the layer or the head, counted from 1, or if `maps` is empty."""
    if not maps:
        raise UserError('this model has no attention to draw')
    for kind, weights in maps.items():
        for name, number, size in (('layer', layer, weights.shape[0]), ('head', head, weights.shape[1])):
            if number is not None and not 1 <= number <= size:
                raise UserError(f'--{name} is {number}; expected 1 to {size}, the {name}s of {kind}')


def plot_head_grid(heads: np.ndarray, rows: Sequence[str], columns: Sequence[str], title: str, first: int = 1) -> Any:
    """Return a matplotlib figure with one panel for each head, from white (0) to black (1).

    heads: attention weights [N, T, S].  rows: T query tokens.  columns: S key tokens. Row labels are drawn at the first
      panel of each row, column labels at the first panel of each column.
    first: number of the first head, for the titles of the panels.
    """
    from matplotlib.figure import Figure

    N, T, S = heads.shape
    panel_columns = min(N, max(4, math.ceil(math.sqrt(N))))
    panel_rows = math.ceil(N / panel_columns)
    max_cell = min(
        (heatmap.MAX_INCHES / panel_columns - 0.25) / S, max(heatmap.MAX_INCHES / panel_rows - 0.45, 0.2) / T
    )
    cell = min(float(np.clip(3.6 / max(T, S), 0.045, 0.3)), max_cell)  # inches
    readable = heatmap.has_room_for_labels(rows, columns) and cell >= 0.04
    fontsize = min(72 * cell * 0.62, 9.0)  # points
    figure = Figure(figsize=(panel_columns * (S * cell + 0.25), panel_rows * (T * cell + 0.45)), facecolor='white')
    panels = figure.subplots(panel_rows, panel_columns, squeeze=False)
    for number, axes in enumerate(panels.flat):
        if number >= N:
            axes.set_visible(False)
            continue
        axes.imshow(heads[number], cmap='Greys', vmin=0, vmax=1, aspect='equal', interpolation='nearest')
        axes.set_title(
            f'head {first + number}', loc='left', fontsize=8, color=heatmap.MUTED_COLOUR, fontfamily=heatmap.FONT
        )
        if readable:
            row_labels = rows if number % panel_columns == 0 else []
            column_labels = columns if number + panel_columns >= N else []
            heatmap.label_axes(axes, row_labels, column_labels, fontsize)
        else:
            axes.set(xticks=[], yticks=[])
    # Inches: the title stands above the slanted column labels and the titles of the panels.
    label_height = max(map(len, columns), default=0) * 0.6 * fontsize / 72 if readable else 0.0
    title += '' if readable else f' ({heatmap.describe_size(T, S)})'
    title_y = figure.subplotpars.top + (label_height + 0.4) / figure.get_figheight()
    figure.suptitle(title, x=0.125, y=title_y, ha='left', va='bottom', fontsize=10, color=heatmap.TEXT_COLOUR,
                    fontfamily=heatmap.FONT)  # fmt: skip
    return figure


def figure_path(workdir: Path, command: str, text: str) -> Path:
    """Return the path, in a run's directory, for the pictures of a command over a text; it is unique to the text."""
    words = re.sub(r'[^a-z0-9]+', '-', text.lower()).strip('-')[:40].strip('-')
    return workdir / 'figures' / f'{command}-{words}-{hashlib.sha256(text.encode()).hexdigest()[:6]}'
