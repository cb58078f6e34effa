"""Figures of a run: loss and scores against the step, BLEU by source length; also the style of all report figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnlab.report.values import SCORE_FORMATS
from attnlab.tasks.heatmap import FONT, GRID_COLOUR, MUTED_COLOUR, TEXT_COLOUR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ('#1f5a92', '#c8693a', '#4f8a5b', '#7d5fa3', '#8a6d1d', '#4b8f9c')
"""Colours of lines and bars, in order; further ones repeat them."""

PANEL_TITLES = {'loss': 'loss', 'bleu': 'validation BLEU', 'accuracy': 'validation accuracy'}
"""Score -> title of its panel in `plot_training_curves`."""


def plot_training_curves(runs: Mapping[str, Sequence[Mapping]]) -> Figure:
    """Plot training loss (faint), validation loss and validation scores against the step, one colour for each run.

    There is a panel for each score in `PANEL_TITLES`, and for each validation score that `values.SCORE_FORMATS` lacks,
    such as those of a user's own task. Panels without data are left out.
    runs: name -> records of metrics.jsonl, each {'step': int, 'split': 'train' | 'valid' | ..., 'loss': float, ...}.
    """
    from matplotlib.figure import Figure

    valid_records = [r for records in runs.values() for r in records if r.get('split') == 'valid']
    valid_keys = dict.fromkeys(key for record in valid_records for key in record)
    titles = PANEL_TITLES | {
        key: f'validation {key}' for key in valid_keys if key not in {*PANEL_TITLES, *SCORE_FORMATS, 'step', 'split'}
    }
    lines = [(name, colour, split, key, points)
             for (name, records), colour in zip(runs.items(), _colours(len(runs)), strict=True)
             for split, key in (('train', 'loss'), *(('valid', key) for key in titles))
             if len(points := metric_points(records, split, key))]
    panels = [key for key in titles if any(line[3] == key for line in lines)] or ['loss']
    figure = Figure(figsize=(3.9 * len(panels), 2.7), facecolor='white', layout='constrained')
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        style_axes(axes, titles[panel])
        axes.set_xlabel('step', fontsize=8, color=MUTED_COLOUR, fontfamily=FONT)
        for name, colour, split, key, points in lines:
            if key == panel:
                label = (f'{name}, ' if len(runs) > 1 else '') + {'train': 'training', 'valid': 'validation'}[split]
                style = {'alpha': 0.45, 'linewidth': 1} if split == 'train' else {'marker': 'o', 'markersize': 2.5}
                axes.plot(*points.T, color=colour, label=label, **style)
        axes.set_ylim(bottom=0)
        if panel == 'loss':
            add_legend(axes)
    return figure


def plot_bleu_by_length(runs: Mapping[str, Sequence[Mapping]]) -> Figure:
    """Plot BLEU by the number of source words: a group of bars for each range of lengths, one colour for each run.

    The number of sentences is written below each group.
    runs: name -> ranges, each {'from': int, 'to': int | None, 'sentences': int, 'bleu': float | None}.
    """
    from matplotlib.figure import Figure

    sentences = {(row['from'], row['to']): row['sentences'] for rows in runs.values() for row in rows}
    ranges = sorted(sentences, key=lambda length_range: length_range[0])
    figure = Figure(figsize=(max(3.2, 1.4 + len(ranges) * max(0.75, 0.42 * len(runs))), 2.7), facecolor='white',
                    layout='constrained')
    axes = figure.subplots()
    style_axes(axes, 'BLEU')
    axes.grid(visible=False, axis='x')
    width = min(0.5, 0.76 / max(1, len(runs)))
    for index, ((name, rows), colour) in enumerate(zip(runs.items(), _colours(len(runs)), strict=True)):
        scored = [row for row in rows if row['bleu'] is not None]
        offset = (index - (len(runs) - 1) / 2) * width
        x = [ranges.index((row['from'], row['to'])) + offset for row in scored]
        bars = axes.bar(x, [row['bleu'] for row in scored], 0.92 * width, color=colour, label=name)
        axes.bar_label(bars, fmt='%.0f', fontsize=7, color=TEXT_COLOUR, padding=1.5, fontfamily=FONT)
    axes.set_xticks(range(len(ranges)), [f'{first}+' if last is None else f'{first}–{last}' for first, last in ranges])
    for x_group, length_range in enumerate(ranges):
        axes.annotate(f'n = {sentences[length_range]:,}', (x_group, 0), xytext=(0, -17), textcoords='offset points',
                      ha='center', va='top', fontsize=7, color=MUTED_COLOUR, fontfamily=FONT,
                      xycoords=('data', 'axes fraction'))
    axes.set_xlabel('source words', fontsize=8, color=MUTED_COLOUR, fontfamily=FONT, labelpad=14)
    axes.margins(y=0.15)
    if len(runs) > 1:
        add_legend(axes, loc='lower right', bbox_to_anchor=(1, 1), ncols=len(runs))
    return figure


def metric_points(records: Sequence[Mapping], split: str, key: str) -> np.ndarray:
    """Return the (step, value) points of a metric on a split, [n, 2] float64, sorted by step.

    If a step has several records, as a resumed run may write, the last one counts.
    """
    values = {r['step']: r[key] for r in records if r.get('split') == split and r.get(key) is not None}
    return np.array(sorted(values.items()), float)


def _colours(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def style_axes(axes: Axes, title: str) -> None:
    """Give axes a title at the left, a faint grid behind the data, and a frame only at the bottom."""
    axes.set_title(title, loc='left', fontsize=9, color=TEXT_COLOUR, fontfamily=FONT)
    axes.grid(color=GRID_COLOUR, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, labelcolor=MUTED_COLOUR, length=0, labelfontfamily=FONT)
    for side, spine in axes.spines.items():
        spine.set(visible=side == 'bottom', color=MUTED_COLOUR, linewidth=0.6)


def add_legend(axes: Axes, panels: Sequence[Axes] = (), **options) -> None:
    """Add a legend to `axes` with each label of `panels` (default: of `axes`) once; none if there are no labels.

    Unlike matplotlib's default legend, it has labels that begin with an underscore.
    options: keyword arguments of `Axes.legend`, such as the location.
    """
    artists = labelled_artists(*(panels or [axes]))
    if not artists:
        return
    font = {'family': FONT, 'size': 7.5}
    legend = axes.legend(list(artists.values()), list(artists), frameon=False, labelcolor=TEXT_COLOUR, prop=font,
                         title_fontproperties=font, **options)
    legend.get_title().set_color(MUTED_COLOUR)


def labelled_artists(*panels: Axes) -> dict[str, Any]:
    """Return label -> artist for the lines and bars of the panels that have a label."""
    artists = [artist for panel in panels for artist in (*panel.lines, *panel.containers)]
    return {label: artist for artist in artists if not _NO_LABEL.fullmatch(label := str(artist.get_label()))}


_NO_LABEL = re.compile(r'(_child\d+|_container\d+|_nolegend_)?')  # labels that matplotlib gives to unlabelled artists
