"""Heat map of an alignment: a picture, text for a terminal, an array file. Also the style and the PNGs of all figures.

Rows are the T produced tokens, from top to bottom; columns are the S source tokens, from left to right. Cell (t, s)
is the attention weight from produced token t to source token s (Bahdanau, Cho and Bengio 2015, section 5.2.1 and
figure 3).
"""

from __future__ import annotations

import io
import itertools
import textwrap
import unicodedata
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnlab.tasks.fonts import FONT, set_text_fonts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnlab.data.alignments import GoldLinks

TEXT_COLOUR, MUTED_COLOUR, GRID_COLOUR, GOLD_COLOUR = '#1f2430', '#6b7280', '#e3e6ea', '#d9480f'
MAX_LABEL_WIDTH, MAX_TITLE_WIDTH = 40, 600  # terminal columns
DPI, MAX_INCHES = 200, 20.0  # the longer side of a figure, without its labels, has at most 20 inches: 4,000 dots
MAX_LABELS = 200  # labels on one side of a figure; more are too small to read
SHADE_CHARACTERS = ((0.05, '·'), (0.25, '░'), (0.5, '▒'), (0.75, '▓'), (np.inf, '█'))  # (weights below, character)


def draw_heatmap(path: str | Path, weights, rows: Sequence[str], columns: Sequence[str], title: str = '',
                 gold: GoldLinks | None = None) -> None:
    """Write a heat map as a PNG; arguments and errors of `plot_heatmap`."""
    Path(path).write_bytes(render_png(plot_heatmap(weights, rows, columns, title, gold)))


def plot_heatmap(
    weights, rows: Sequence[str], columns: Sequence[str], title: str = '', gold: GoldLinks | None = None
) -> Figure:
    """Return a heat map of an alignment as a matplotlib figure, from white (weight 0) to black (weight 1).

    weights: [T, S] float, drawn without rescaling.
    rows: the T produced tokens.  columns: the S source tokens. Both include the end of sentence if `weights` does.
    gold: gold links (source index, target index), drawn as outlines: sure links solid, possible links dashed.

    The labels lie outside the figure's own area: save the figure with `bbox_inches='tight'`, as `render_png` does. If
    one side has more than `MAX_LABELS` tokens, no labels are drawn, and the title gives the numbers of tokens.

    Raises ValueError if the sizes differ, a weight is not finite, or a gold link lies outside the sentences.
    """
    from matplotlib.figure import Figure

    weights = check_weights(weights, rows, columns)
    T, S = weights.shape
    cell = float(np.clip(9 / max(T, S), 0.2, 0.4))  # inches
    cell = min(cell, MAX_INCHES / max(T, S))
    fontsize = min(72 * cell * 0.48, 10.5)  # points; less than the distance of neighbouring slanted labels
    figure = Figure(figsize=(S * cell, T * cell), facecolor='white')
    axes = figure.add_axes((0, 0, 1, 1))
    image = axes.imshow(weights, cmap='Greys', vmin=0, vmax=1, aspect='auto', interpolation='nearest')
    title = _crop(title, MAX_TITLE_WIDTH)
    if has_room_for_labels(rows, columns):
        label_axes(axes, rows, columns, fontsize)
    else:
        axes.set(xticks=[], yticks=[])
        title = f'{title} ({describe_size(T, S)})'.lstrip()
    if title:
        wrapped = textwrap.fill(title, max(36, int(12 * S * cell)))
        axes.set_title(wrapped, loc='left', fontsize=11, color=TEXT_COLOUR, fontfamily=FONT, pad=12, parse_math=False)
    colorbar = figure.add_axes((1 + 0.15 / (S * cell), 0, 0.09 / (S * cell), min(1, 1.2 / (T * cell))))
    figure.colorbar(image, cax=colorbar, ticks=[0, 0.5, 1] if T * cell > 0.6 else [0, 1])
    colorbar.tick_params(
        labelsize=7, labelcolor=MUTED_COLOUR, color=MUTED_COLOUR, length=2, width=0.5, labelfontfamily=FONT
    )
    for spine in (*axes.spines.values(), *colorbar.spines.values()):
        spine.set(color=MUTED_COLOUR, linewidth=0.5)
    if gold is not None:
        _outline_gold_links(axes, gold, T, S, cell)
    return figure


def check_weights(weights, rows: Sequence[str], columns: Sequence[str]) -> np.ndarray:
    """Return weights [T, S] as float32; ValueError for another shape than the labels', or a weight not finite."""
    weights = np.asarray(weights, np.float32)
    if weights.shape != (len(rows), len(columns)) or not weights.size:
        raise ValueError(f'weights have shape {weights.shape}; the labels have shape ({len(rows)}, {len(columns)}): '
                         'expected one row for each produced token, one column for each source token, at least one of '
                         'each')
    if not np.isfinite(weights).all():
        raise ValueError('weights contain NaN or infinity; expected numbers that are finite')
    return weights


def label_axes(axes: Axes, rows: Sequence[str], columns: Sequence[str], fontsize: float) -> None:
    """Label the rows at the left and the columns at the top of an image; an empty sequence leaves a side unlabelled."""
    style = {'fontsize': fontsize, 'fontfamily': FONT, 'color': TEXT_COLOUR, 'parse_math': False}
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(columns)), [_crop(_printable(label), MAX_LABEL_WIDTH) for label in columns],
                    rotation=60, ha='left', va='bottom', rotation_mode='anchor', **style)
    axes.set_yticks(range(len(rows)), [_crop(_printable(label), MAX_LABEL_WIDTH) for label in rows], **style)
    axes.tick_params(length=0, pad=4)
    T, S = axes.images[0].get_size()
    axes.set_xticks(np.arange(0.5, S - 1), minor=True)
    axes.set_yticks(np.arange(0.5, T - 1), minor=True)
    axes.tick_params(which='minor', length=0)
    axes.grid(which='minor', color=GRID_COLOUR, linewidth=0.5)


def has_room_for_labels(rows: Sequence[str], columns: Sequence[str]) -> bool:
    """Whether neither side has more than `MAX_LABELS` tokens, so that figures and terminals can show the labels."""
    return max(len(rows), len(columns)) <= MAX_LABELS


def describe_size(T: int, S: int) -> str:
    """Return the numbers of tokens as text, for the title of a figure without labels."""
    return f'{S:,} tokens across, {T:,} down: no room for labels'


def _outline_gold_links(axes: Axes, gold: GoldLinks, T: int, S: int, cell: float) -> None:
    """Draw a box around the cell of each gold link, and a legend; `cell` is the width of a cell in inches."""
    from matplotlib.patches import Rectangle

    def box(link: tuple[int, int], style) -> Rectangle:
        source, target = link
        if not (0 <= source < S and 0 <= target < T):
            raise ValueError(f'gold link (source {source}, target {target}) lies outside {S} source '
                             f'and {T} target tokens')
        return Rectangle((source - 0.42, target - 0.42), 0.84, 0.84, fill=False, edgecolor=GOLD_COLOUR, linestyle=style,
                         linewidth=4 * cell)

    kinds = [('gold, sure', sorted(gold.sure), 'solid'),
             ('gold, possible', sorted(gold.possible - gold.sure), (0, (2, 1.2)))]
    handles = []
    for name, links, style in kinds:
        for link in links:
            axes.add_patch(box(link, style))
        if links:
            handles.append(Rectangle((0, 0), 1, 1, fill=False, edgecolor=GOLD_COLOUR, linestyle=style, label=name))
    if handles:
        axes.legend(handles=handles, loc='upper left', bbox_to_anchor=(0, 0), ncols=2, frameon=False,
                    borderaxespad=0.4, borderpad=0, handlelength=0.9, handleheight=0.9, labelcolor=MUTED_COLOUR,
                    prop={'family': FONT, 'size': 7.5})


def save_alignment(path: str | Path, weights, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Write an alignment to a .npz file: `weights` float32 [T, S], `rows` and `columns` arrays of text.

    Raises ValueError if the sizes differ or a weight is not finite.
    """
    weights = check_weights(weights, rows, columns)
    with open(path, 'wb') as file:  # NumPy appends a suffix to a path, not to an open file
        np.savez_compressed(file, weights=weights, rows=np.array(rows, str), columns=np.array(columns, str))


def load_alignment(path: str | Path) -> tuple[np.ndarray, list[str], list[str]]:
    """Return (weights [T, S] float32, rows, columns) of a file of `save_alignment`; pickled data are refused."""
    with np.load(path, allow_pickle=False) as file:
        return file['weights'], file['rows'].tolist(), file['columns'].tolist()


def render_text(weights, rows: Sequence[str], columns: Sequence[str], width: int = 80, colour: bool = False) -> str:
    """Return a heat map as text for a terminal that is `width` columns wide.

    Each source token is on a line of its own, at the top of its column. Source tokens that do not fit into the width
    continue in a second panel below. The last line explains the shades.
    colour: shades are 24-bit background colours; otherwise five block characters.

    If one side has more than `MAX_LABELS` tokens, the result is one line that gives the numbers of tokens.

    Raises ValueError if the sizes differ or a weight is not finite.
    """
    weights = check_weights(weights, rows, columns)
    if not has_room_for_labels(rows, columns):
        return f'{len(rows):,} produced and {len(columns):,} source tokens: too many to show here or to label'
    max_label = max(8, width // 3)
    rows = [_crop(_printable(label), max_label) for label in rows]
    columns = [_crop(_printable(label), max_label) for label in columns]
    indent = max(map(_width, rows)) + 1
    free = width - indent - 2 - max(map(_width, columns))  # for the columns before the last label
    cell = 2 if 2 * (len(columns) - 1) <= free else 1
    panel_size = max(1, free // cell + 1)
    panels = [
        _text_panel(weights[:, start:start + panel_size], rows, columns[start:start + panel_size], indent, cell, colour)
        for start in range(0, len(columns), panel_size)
    ]
    return '\n\n'.join([*panels, _shade_legend(indent, colour)])


def _text_panel(
    weights: np.ndarray, rows: Sequence[str], columns: Sequence[str], indent: int, cell: int, colour: bool
) -> str:
    """Return the lines of some source tokens and all rows; a cell is `cell` characters wide."""
    stem = '│'.ljust(cell)
    head = [' ' * indent + stem * index + '╭ ' + label for index, label in enumerate(columns)]
    body = [label + ' ' * (indent - _width(label)) + ''.join(_shade(weight, cell, colour) for weight in row)
            for label, row in zip(rows, weights, strict=True)]
    return '\n'.join(line.rstrip() for line in head + body)


def _shade(weight: float, cell: int, colour: bool) -> str:
    """Return the text of one cell."""
    if colour:
        dark, light = np.array((28, 30, 38)), np.array((255, 246, 220))
        red, green, blue = (dark + np.clip(weight, 0, 1) * (light - dark)).astype(int)
        return f'\x1b[48;2;{red};{green};{blue}m{" " * cell}\x1b[0m'
    shade = next(character for bound, character in SHADE_CHARACTERS if weight < bound)
    return shade.ljust(cell) if shade == '·' else shade * cell


def _shade_legend(indent: int, colour: bool) -> str:
    """Return the line that explains the shades."""
    if colour:
        return ' ' * indent + '0 ' + ''.join(_shade(weight, 1, True) for weight in np.linspace(0, 1, 16)) + ' 1'
    *shades, (_, last) = SHADE_CHARACTERS
    return ' ' * indent + '  '.join([*(f'{shade} <{bound:g}' for bound, shade in shades), f'{last} more'])


def _printable(label: str) -> str:
    """Return the label in Unicode NFC, a space for each character that cannot be printed."""
    return ''.join(c if c.isprintable() else ' ' for c in unicodedata.normalize('NFC', label))


def _width(label: str) -> int:
    """Return the terminal columns of a label: combining marks have none, wide East Asian characters have two."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in 'WF' else 1 for c in label)


def _crop(label: str, width: int) -> str:
    """Return the label in at most `width` terminal columns; a label that is cut ends in an ellipsis."""
    if _width(label) <= width:
        return label
    ends = itertools.accumulate(map(_width, label))
    return label[: sum(1 for _ in itertools.takewhile(lambda end: end < width, ends))] + '…'


def render_png(figure: Figure) -> bytes:
    """Return the figure as a PNG with at most 256 colours (a third of the bytes), cropped to what is drawn.

    A figure whose longer side exceeds `MAX_INCHES` inches has fewer dots per inch, so that its pixels are bounded too.
    Texts get their fonts here; see `fonts.set_text_fonts`.
    """
    from PIL import Image

    set_text_fonts(figure)
    dpi = DPI * min(1.0, MAX_INCHES / max(figure.get_size_inches()))
    full_colour, quantized = io.BytesIO(), io.BytesIO()
    with warnings.catch_warnings():  # `set_text_fonts` has logged the characters without a font
        warnings.filterwarnings('ignore', r'Glyph .* missing from font')
        figure.savefig(full_colour, format='png', dpi=dpi, bbox_inches='tight', pad_inches=0.12)
    with Image.open(full_colour) as image:
        image.convert('RGB').quantize(256, dither=Image.Dither.NONE).save(quantized, 'png', compress_level=9)
    return quantized.getvalue()
