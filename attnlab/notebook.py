"""Attention weights as heat maps in a notebook."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnlab.report.html import encode_picture
from attnlab.tasks import heatmap


@dataclass(frozen=True, eq=False, repr=False)
class HeatMap:
    """Attention weights with labels: a picture in a notebook, characters in a terminal.

    weights: [T, S] float, from 0 (white) to 1 (black).  rows: T target tokens.  columns: S source tokens.
    """

    weights: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]
    title: str = ''

    def png(self) -> bytes:
        """Return the picture as a PNG file."""
        figure = heatmap.plot_heatmap(self.weights, self.rows, self.columns, self.title)
        return heatmap.render_png(figure)

    def save(self, path: str | Path) -> None:
        """Write the picture as a PNG file."""
        Path(path).write_bytes(self.png())

    def _repr_html_(self) -> str:
        picture = encode_picture(self.png(), html.escape(self.title))
        source, size = f'data:image/png;base64,{picture.base64}', f'width="{picture.width}" style="max-width:100%"'
        return f'<img src="{source}" alt="{picture.alt}" {size}>'

    def __repr__(self) -> str:
        return heatmap.render_text(self.weights, self.rows, self.columns)


def show(weights: np.ndarray, rows: Sequence[str], columns: Sequence[str], title: str = '') -> HeatMap:
    """Return attention weights [T, S] as a heat map, which a notebook displays as a picture.

    rows: T target tokens.  columns: S source tokens.

    Raises ValueError if the shape does not fit the labels, or if a weight is not finite.
    """
    heatmap.check_weights(weights, rows, columns)
    return HeatMap(np.asarray(weights, np.float32), list(rows), list(columns), title)
