"""An alignment to look at: as a picture, in a terminal, and as an array file.

T produced tokens stand down the left (rows), S source tokens along the top (columns); cell (t, s) is the weight
that token t gave to source token s.  Bahdanau, Cho and Bengio 2015, section 5.2.1 and figure 3.
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
MAX_LABEL_WIDTH, MAX_TITLE_WIDTH = 40, 600
DPI, MAX_INCHES = 200, 20.0  # dots an inch; inches of a picture's longer side without its labels: 4,000 dots
MAX_LABELS = 200  # tokens of a side; the labels of more are too small to read
SHADE_CHARACTERS = ((0.05, '·'), (0.25, '░'), (0.5, '▒'), (0.75, '▓'), (np.inf, '█'))  # (below, character)


def draw_heatmap(path: str | Path, weights, rows: Sequence[str], columns: Sequence[str], title: str = '',
         gold: GoldLinks | None = None) -> None:
    """Writes `plot_heatmap` of the same arguments as a PNG."""
    Path(path).write_bytes(render_png(plot_heatmap(weights, rows, columns, title, gold)))


def plot_heatmap(
    weights, rows: Sequence[str], columns: Sequence[str], title: str = '', gold: GoldLinks | None = None
) -> Figure:
    """The alignment as a matplotlib figure: white 0, black 1, never rescaled.

    weights [T, S] float; rows: T produced tokens; columns: S source tokens, both with the end of sentence where the
    weights have it.  gold: links (source index, target index) outlined, sure ones solid, possible ones dashed.
    Labels lie outside the figure's own size: save it with `bbox_inches='tight'`, as `render_png` does.  A side of more than
    `MAX_LABELS` tokens has no labels, and the title gives their number.
    Raises ValueError where the sizes disagree, a weight is not finite, or a link lies outside.
    """
    from matplotlib.figure import Figure

    weights = check_weights(weights, rows, columns)
    steps, length = weights.shape
    cell = float(np.clip(9 / max(steps, length), 0.2, 0.4))  # inches
    cell = min(cell, MAX_INCHES / max(steps, length))
    size = min(72 * cell * 0.48, 10.5)  # points; below the distance of neighbouring slanted labels
    picture = Figure(figsize=(length * cell, steps * cell), facecolor='white')
    axes = picture.add_axes((0, 0, 1, 1))
    image = axes.imshow(weights, cmap='Greys', vmin=0, vmax=1, aspect='auto', interpolation='nearest')
    title = _crop(title, MAX_TITLE_WIDTH)
    if has_room_for_labels(rows, columns):
        label_axes(axes, rows, columns, size)
    else:
        axes.set(xticks=[], yticks=[])
        title = f'{title} ({describe_size(steps, length)})'.lstrip()
    if title:
        wrapped = textwrap.fill(title, max(36, int(12 * length * cell)))
        axes.set_title(wrapped, loc='left', fontsize=11, color=TEXT_COLOUR, fontfamily=FONT, pad=12, parse_math=False)
    bar = picture.add_axes((1 + 0.15 / (length * cell), 0, 0.09 / (length * cell), min(1, 1.2 / (steps * cell))))
    picture.colorbar(image, cax=bar, ticks=[0, 0.5, 1] if steps * cell > 0.6 else [0, 1])
    bar.tick_params(labelsize=7, labelcolor=MUTED_COLOUR, color=MUTED_COLOUR, length=2, width=0.5, labelfontfamily=FONT)
    for spine in (*axes.spines.values(), *bar.spines.values()):
        spine.set(color=MUTED_COLOUR, linewidth=0.5)
    if gold is not None:
        _outline(axes, gold, steps, length, cell)
    return picture


def check_weights(weights, rows: Sequence[str], columns: Sequence[str]) -> np.ndarray:
    weights = np.asarray(weights, np.float32)
    if weights.shape != (len(rows), len(columns)) or not weights.size:
        raise ValueError(f'weights have shape {weights.shape}, labels ask for ({len(rows)}, {len(columns)}): '
                         'rows are produced tokens, columns are source tokens, and neither may be empty')
    if not np.isfinite(weights).all():
        raise ValueError('weights hold a number that is not finite')
    return weights


def label_axes(axes: Axes, rows: Sequence[str], columns: Sequence[str], size: float) -> None:
    """Labels of a picture: produced tokens down the left, source tokens along the top, none of a side without any."""
    style = {'fontsize': size, 'fontfamily': FONT, 'color': TEXT_COLOUR, 'parse_math': False}
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(columns)), [_crop(_printable(label), MAX_LABEL_WIDTH) for label in columns],
                    rotation=60, ha='left', va='bottom', rotation_mode='anchor', **style)
    axes.set_yticks(range(len(rows)), [_crop(_printable(label), MAX_LABEL_WIDTH) for label in rows], **style)
    axes.tick_params(length=0, pad=4)
    steps, length = axes.images[0].get_size()
    axes.set_xticks(np.arange(0.5, length - 1), minor=True)
    axes.set_yticks(np.arange(0.5, steps - 1), minor=True)
    axes.tick_params(which='minor', length=0)
    axes.grid(which='minor', color=GRID_COLOUR, linewidth=0.5)


def has_room_for_labels(rows: Sequence[str], columns: Sequence[str]) -> bool:
    """Whether a picture and a terminal have room for the labels of so many tokens."""
    return max(len(rows), len(columns)) <= MAX_LABELS


def describe_size(steps: int, length: int) -> str:
    """The numbers of tokens, for the title of a picture without labels."""
    return f'{length:,} tokens across, {steps:,} down: no room for labels'


def _outline(axes: Axes, gold: GoldLinks, steps: int, length: int, cell: float) -> None:
    from matplotlib.patches import Rectangle

    def box(link: tuple[int, int], style) -> Rectangle:
        source, target = link
        if not (0 <= source < length and 0 <= target < steps):
            raise ValueError(f'gold link (source {source}, target {target}) lies outside {length} source '
                             f'and {steps} target tokens')
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
    """Writes weights (float32 [T, S]), rows and columns (unicode arrays) to a .npz file; ValueError as in `plot_heatmap`."""
    weights = check_weights(weights, rows, columns)
    with open(path, 'wb') as file:  # an open file keeps numpy from adding a suffix
        np.savez_compressed(file, weights=weights, rows=np.array(rows, str), columns=np.array(columns, str))


def load_alignment(path: str | Path) -> tuple[np.ndarray, list[str], list[str]]:
    """Reads (weights, rows, columns) as `save_alignment` wrote them; nothing pickled is ever read."""
    with np.load(path, allow_pickle=False) as file:
        return file['weights'], file['rows'].tolist(), file['columns'].tolist()


def render_text(weights, rows: Sequence[str], columns: Sequence[str], width: int = 80, colour: bool = False) -> str:
    """The alignment for a terminal of `width` columns; more source tokens than fit are continued below.

    Each source token stands at the top of its column, on a line of its own.  colour: shades as 24-bit backgrounds,
    else five block characters, explained in the last line.  One line in place of more than `MAX_LABELS` tokens of a
    side.  ValueError as in `plot_heatmap`.
    """
    weights = check_weights(weights, rows, columns)
    if not has_room_for_labels(rows, columns):
        return f'{len(rows):,} produced and {len(columns):,} source tokens: too many to show here or to label'
    longest = max(8, width // 3)
    rows = [_crop(_printable(label), longest) for label in rows]
    columns = [_crop(_printable(label), longest) for label in columns]
    left = max(map(_width, rows)) + 1
    room = width - left - 2 - max(map(_width, columns))  # for the stems before the last label
    cell = 2 if 2 * (len(columns) - 1) <= room else 1
    fit = max(1, room // cell + 1)
    panels = [_panel(weights[:, start:start + fit], rows, columns[start:start + fit], left, cell, colour)
              for start in range(0, len(columns), fit)]
    return '\n\n'.join([*panels, _key(left, colour)])


def _panel(weights: np.ndarray, rows: Sequence[str], columns: Sequence[str], left: int, cell: int, colour: bool) -> str:
    stem = '│'.ljust(cell)
    head = [' ' * left + stem * index + '╭ ' + label for index, label in enumerate(columns)]
    body = [label + ' ' * (left - _width(label)) + ''.join(_shade(weight, cell, colour) for weight in row)
            for label, row in zip(rows, weights, strict=True)]
    return '\n'.join(line.rstrip() for line in head + body)


def _shade(weight: float, cell: int, colour: bool) -> str:
    if colour:
        dark, light = np.array((28, 30, 38)), np.array((255, 246, 220))
        red, green, blue = (dark + np.clip(weight, 0, 1) * (light - dark)).astype(int)
        return f'\x1b[48;2;{red};{green};{blue}m{" " * cell}\x1b[0m'
    shade = next(character for below, character in SHADE_CHARACTERS if weight < below)
    return shade.ljust(cell) if shade == '·' else shade * cell


def _key(left: int, colour: bool) -> str:
    if colour:
        return ' ' * left + '0 ' + ''.join(_shade(weight, 1, True) for weight in np.linspace(0, 1, 16)) + ' 1'
    *shades, (_, last) = SHADE_CHARACTERS
    return ' ' * left + '  '.join([*(f'{shade} <{below:g}' for below, shade in shades), f'{last} more'])


def _printable(label: str) -> str:
    return ''.join(c if c.isprintable() else ' ' for c in unicodedata.normalize('NFC', label))


def _width(label: str) -> int:
    """Terminal columns: none for a combining mark, two for an East Asian wide character."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in 'WF' else 1 for c in label)


def _crop(label: str, width: int) -> str:
    """The label in at most `width` terminal columns, the last one a dot sign where it is cut."""
    if _width(label) <= width:
        return label
    ends = itertools.accumulate(map(_width, label))
    return label[: sum(1 for _ in itertools.takewhile(lambda end: end < width, ends))] + '…'


def render_png(figure: Figure) -> bytes:
    """The figure as a PNG of at most 256 colours (a third of the bytes), cut to what is drawn.

    A figure whose longer side exceeds `MAX_INCHES` inches has fewer dots an inch, so that its pixels are bounded too.
    Texts are drawn as they are, in installed fonts; see `fonts.set_text_fonts`.
    """
    from PIL import Image

    set_text_fonts(figure)
    dpi = DPI * min(1.0, MAX_INCHES / max(figure.get_size_inches()))
    drawn, file = io.BytesIO(), io.BytesIO()
    with warnings.catch_warnings():  # of characters without a font, which the line above has named
        warnings.filterwarnings('ignore', r'Glyph .* missing from font')
        figure.savefig(drawn, format='png', dpi=dpi, bbox_inches='tight', pad_inches=0.12)
    with Image.open(drawn) as picture:
        picture.convert('RGB').quantize(256, dither=Image.Dither.NONE).save(file, 'png', compress_level=9)
    return file.getvalue()
