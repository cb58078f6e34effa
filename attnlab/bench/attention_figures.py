"""Figures of `attnlab bench attention`, drawn from the numbers that it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from attnlab.report.figures import COLOURS, style_axes
from attnlab.tasks.heatmap import FONT, MUTED_COLOUR, TEXT_COLOUR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ATTNLAB_COLOUR = COLOURS[0]
COLOUR_ORDER = ('blockwise', 'jax.nn', 'PyTorch', 'dense', 'flax')
"""Implementations in the order of `COLOURS`, so that each has one colour in all figures."""

LABELS = {name: f'attnlab, {name}' for name in ('blockwise', 'dense')}


def plot_speed(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot the speed relative to jax.nn by length.

    Columns: forward, forward and backward.  Rows: plain, causal.  A length that jax.nn cannot run has a note instead.

    rows: {'shape': [B, T, N, H], 'causal', 'backward', 'seconds': implementation -> list, 'chosen', ...}.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 5.0), facecolor='white', layout='constrained')
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    lengths = sorted({row['shape'][1] for row in rows})
    for causal, backward in ((False, False), (False, True), (True, False), (True, True)):
        axes = panels[int(causal), int(backward)]
        style_axes(axes, f'{"causal" if causal else "plain"}, forward{" and backward" if backward else ""}')
        panel_rows = [row for row in rows if (row['causal'], row['backward']) == (causal, backward)]
        _draw_speed_panel(axes, sorted(panel_rows, key=lambda row: row['shape'][1]))
        _set_length_axis(axes, lengths)
        axes.set_yscale('log', base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f'{value:g}x' if value >= 1 else f'1/{1 / value:g}x')
        axes.margins(y=0.12)
    for axes in panels[1]:
        axes.set_xlabel('length T', fontsize=8, color=MUTED_COLOUR, fontfamily=FONT)
    figure.supylabel('times as fast as jax.nn', fontsize=8, color=MUTED_COLOUR, fontfamily=FONT)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside upper left', ncols=4, frameon=False, labelcolor=TEXT_COLOUR,
                  prop={'family': FONT, 'size': 8.5})  # fmt: skip
    return figure


def _draw_speed_panel(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    axes.axhline(1, color=_colour_of('jax.nn'), linewidth=1.5, label='jax.nn = 1x')
    for name, label in (('chosen', 'attnlab'), ('PyTorch', 'PyTorch'), ('flax', 'flax')):
        points = []
        for row in rows:
            seconds = row['seconds']
            implementation = row['chosen'] if name == 'chosen' else name
            if 'jax.nn' in seconds and implementation in seconds:
                speedup = median(seconds['jax.nn']) / median(seconds[implementation])
                points.append((row['shape'][1], speedup))
        if points:
            colour, width, order = (ATTNLAB_COLOUR, 2, 3) if name == 'chosen' else (_colour_of(name), 1.2, 2)
            axes.plot(*zip(*points, strict=True), color=colour, marker='o', markersize=4, linewidth=width, label=label,
                      zorder=order)  # fmt: skip
    for row in rows:
        if 'jax.nn' not in row['seconds']:
            position = {'xycoords': ('data', 'axes fraction'), 'rotation': 90, 'ha': 'center', 'va': 'top'}
            axes.annotate('jax.nn: out of memory', (row['shape'][1], 0.97), fontsize=7, color=MUTED_COLOUR,
                          fontfamily=FONT, **position)  # fmt: skip


def plot_memory(peaks: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot peak memory by length, on logarithmic axes; a line ends where an implementation runs out of memory.

    peaks: {'shape': [B, T, N, H], 'bytes': implementation -> bytes, ...}.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.8, 3.8), facecolor='white', layout='constrained')
    axes = figure.subplots()
    style_axes(axes, 'peak memory, forward and backward')
    axes.set_yscale('log', base=2)
    lengths = sorted({peak['shape'][1] for peak in peaks})
    last_bytes = {name: number for peak in peaks for name, number in sorted(peak['bytes'].items())}
    for name in sorted(last_bytes, key=lambda name: -last_bytes[name]):
        points = [(peak['shape'][1], peak['bytes'][name] / 2**20) for peak in peaks if peak['bytes'].get(name, 0) > 0]
        if points:
            axes.plot(*zip(*points, strict=True), color=_colour_of(name), marker='o', markersize=4,
                      linewidth=2 if name == 'blockwise' else 1.2, label=LABELS.get(name, name))  # fmt: skip
    _set_length_axis(axes, lengths)
    axes.set_xlabel('length T', fontsize=8, color=MUTED_COLOUR, fontfamily=FONT)
    axes.yaxis.set_major_formatter(lambda value, _: f'{value:g} MiB' if value < 1024 else f'{value / 1024:g} GiB')
    axes.legend(frameon=False, labelcolor=TEXT_COLOUR, prop={'family': FONT, 'size': 8})
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file."""
    figure.savefig(path, dpi=160, facecolor='white')


def _colour_of(name: str) -> str:
    return COLOURS[COLOUR_ORDER.index(name) if name in COLOUR_ORDER else -1]


def _set_length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set_xscale('log', base=2)
    axes.set_xticks(lengths, [f'{T:,}' if T % 1024 else f'{T // 1024}k' for T in lengths])
    axes.minorticks_off()
