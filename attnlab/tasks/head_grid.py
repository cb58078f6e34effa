"""Attention maps of every layer and head over one text: a grid of panels for each layer, and one array file."""

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
"""(rows, columns) of each kind of attention: tokens of the queries, and of the keys."""


def draw_head_grids(
    folder: Path, maps: Mapping[str, np.ndarray], labels: MapLabels, layer: int | None = None, head: int | None = None
) -> None:
    """Write a picture for each layer, its heads side by side (or one of them), and `weights.npz`; print the files.

    maps: the weights of each kind [L, N, T, S], such as 'decoder/cross_attention'; `weights.npz` has all of them,
      beside `rows KIND` and `columns KIND`, with a dot for a slash.
    layer, head: from 1; all if None.

    Raises UserError for a layer or head that the model does not have, before anything is written.
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
            chosen = heads if head is None else heads[head - 1 : head]
            path = folder / f'{name}.png'
            path.write_bytes(heatmap.render_png(plot_head_grid(chosen, *labels[kind], title, head or 1)))
            print(path)


def check_layer_and_head(maps: Mapping[str, np.ndarray], layer: int | None, head: int | None) -> None:
    """Raises UserError for a layer or head, from 1, that weights [L, N, T, S] do not have, and where there are none."""
    if not maps:
        raise UserError('this model has no attention to look at')
    for kind, weights in maps.items():
        for name, number, size in (('layer', layer, weights.shape[0]), ('head', head, weights.shape[1])):
            if number is not None and not 1 <= number <= size:
                raise UserError(f'--{name} is {number}; expected 1 to {size}, those of {kind}')


def plot_head_grid(heads: np.ndarray, rows: Sequence[str], columns: Sequence[str], title: str, first: int = 1) -> Any:
    """One panel a head [N, T, S], white 0, black 1, numbered from `first`; the labels stand at the outer panels."""
    from matplotlib.figure import Figure

    N, T, S = heads.shape
    across = min(N, max(4, math.ceil(math.sqrt(N))))
    down = math.ceil(N / across)
    most = min((heatmap.MAX_INCHES / across - 0.25) / S, max(heatmap.MAX_INCHES / down - 0.45, 0.2) / T)
    cell = min(float(np.clip(3.6 / max(T, S), 0.045, 0.3)), most)  # inches
    readable = heatmap.has_room_for_labels(rows, columns) and cell >= 0.04
    size = min(72 * cell * 0.62, 9.0)  # points
    picture = Figure(figsize=(across * (S * cell + 0.25), down * (T * cell + 0.45)), facecolor='white')
    panels = picture.subplots(down, across, squeeze=False)
    for number, axes in enumerate(panels.flat):
        if number >= N:
            axes.set_visible(False)
            continue
        axes.imshow(heads[number], cmap='Greys', vmin=0, vmax=1, aspect='equal', interpolation='nearest')
        axes.set_title(
            f'head {first + number}', loc='left', fontsize=8, color=heatmap.MUTED_COLOUR, fontfamily=heatmap.FONT
        )
        if readable:
            heatmap.label_axes(
                axes, rows if number % across == 0 else [], columns if number + across >= N else [], size
            )
        else:
            axes.set(xticks=[], yticks=[])
    # Inches: the labels slant, and the heads' names stand above them.
    labels = max(map(len, columns), default=0) * 0.6 * size / 72 if readable else 0.0
    title += '' if readable else f' ({heatmap.describe_size(T, S)})'
    above = picture.subplotpars.top + (labels + 0.4) / picture.get_figheight()
    picture.suptitle(title, x=0.125, y=above, ha='left', va='bottom', fontsize=10, color=heatmap.TEXT_COLOUR,
                     fontfamily=heatmap.FONT)  # fmt: skip
    return picture


def figure_path(workdir: Path, command: str, text: str) -> Path:
    """Where the pictures of a command over a text lie in a run's directory; no two texts share a path."""
    words = re.sub(r'[^a-z0-9]+', '-', text.lower()).strip('-')[:40].strip('-')
    return workdir / 'figures' / f'{command}-{words}-{hashlib.sha256(text.encode()).hexdigest()[:6]}'
