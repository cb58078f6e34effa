"""Figures of a run: loss and scores over the steps, BLEU by the length of the source."""

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
PANEL_TITLES = {'loss': 'loss', 'bleu': 'validation BLEU', 'accuracy': 'validation accuracy'}


def plot_training_curves(runs: Mapping[str, Sequence[Mapping]]) -> Figure:
    """Loss (training faint, validation strong) and validation scores against the step, one colour a run.

    The scores are those of `PANEL_TITLES`, and those of a task of one's own that `values.SCORE_FORMATS` does not know.

    runs: name -> records of metrics.jsonl, each {'step': int, 'split': 'train' | 'valid' | ..., 'loss': float, ...}.
    A panel is left out where no record has its score.
    """
    from matplotlib.figure import Figure

    scored = dict.fromkeys(key for records in runs.values() for r in records if r.get('split') == 'valid' for key in r)
    titles = PANEL_TITLES | {
        key: f'validation {key}' for key in scored if key not in {*PANEL_TITLES, *SCORE_FORMATS, 'step', 'split'}
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
                faint = {'alpha': 0.45, 'linewidth': 1} if split == 'train' else {'marker': 'o', 'markersize': 2.5}
                axes.plot(*points.T, color=colour, label=label, **faint)
        axes.set_ylim(bottom=0)
        if panel == 'loss':
            add_legend(axes)
    return figure


def plot_bleu_by_length(runs: Mapping[str, Sequence[Mapping]]) -> Figure:
    """BLEU by the number of source words, a group of bars a bin, one colour a run, the sentences counted below.

    runs: name -> bins, each {'from': int, 'to': int | None, 'sentences': int, 'bleu': float | None}.
    """
    from matplotlib.figure import Figure

    bins = {(b['from'], b['to']): b['sentences'] for rows in runs.values() for b in rows}
    edges = sorted(bins, key=lambda edge: edge[0])
    figure = Figure(figsize=(max(3.2, 1.4 + len(edges) * max(0.75, 0.42 * len(runs))), 2.7), facecolor='white',
                    layout='constrained')
    axes = figure.subplots()
    style_axes(axes, 'BLEU')
    axes.grid(visible=False, axis='x')
    wide = min(0.5, 0.76 / max(1, len(runs)))
    for index, ((name, rows), colour) in enumerate(zip(runs.items(), _colours(len(runs)), strict=True)):
        scored = [b for b in rows if b['bleu'] is not None]
        places = [edges.index((b['from'], b['to'])) + (index - (len(runs) - 1) / 2) * wide for b in scored]
        bars = axes.bar(places, [b['bleu'] for b in scored], 0.92 * wide, color=colour, label=name)
        axes.bar_label(bars, fmt='%.0f', fontsize=7, color=TEXT_COLOUR, padding=1.5, fontfamily=FONT)
    axes.set_xticks(range(len(edges)), [f'{first}+' if last is None else f'{first}–{last}' for first, last in edges])
    for place, edge in enumerate(edges):
        axes.annotate(f'n = {bins[edge]:,}', (place, 0), xytext=(0, -17), textcoords='offset points', ha='center',
                      va='top', fontsize=7, color=MUTED_COLOUR, fontfamily=FONT, xycoords=('data', 'axes fraction'))
    axes.set_xlabel('source words', fontsize=8, color=MUTED_COLOUR, fontfamily=FONT, labelpad=14)
    axes.margins(y=0.15)
    if len(runs) > 1:
        add_legend(axes, loc='lower right', bbox_to_anchor=(1, 1), ncols=len(runs))
    return figure


def metric_points(records: Sequence[Mapping], split: str, key: str) -> np.ndarray:
    """[n, 2] of (step, value); a resumed run may write a step twice: the last counts."""
    found = {r['step']: r[key] for r in records if r.get('split') == split and r.get(key) is not None}
    return np.array(sorted(found.items()), float)


def _colours(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def style_axes(axes: Axes, title: str) -> None:
    """A title at the left, faint lines behind the data, and no frame but the bottom."""
    axes.set_title(title, loc='left', fontsize=9, color=TEXT_COLOUR, fontfamily=FONT)
    axes.grid(color=GRID_COLOUR, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, labelcolor=MUTED_COLOUR, length=0, labelfontfamily=FONT)
    for side, spine in axes.spines.items():
        spine.set(visible=side == 'bottom', color=MUTED_COLOUR, linewidth=0.6)


def add_legend(axes: Axes, panels: Sequence[Axes] = (), **place) -> None:
    """A legend in `axes` of all labels in `panels` (default: in `axes`), each once; none where there are no labels.

    Labels may begin with an underscore, unlike in matplotlib's own choice of what to name.
    """
    named = labelled_artists(*(panels or [axes]))
    if not named:
        return
    small = {'family': FONT, 'size': 7.5}
    made = axes.legend(list(named.values()), list(named), frameon=False, labelcolor=TEXT_COLOUR, prop=small,
                       title_fontproperties=small, **place)
    made.get_title().set_color(MUTED_COLOUR)


def labelled_artists(*panels: Axes) -> dict[str, Any]:
    """Lines and bars of the panels by their label, without those that have none."""
    artists = [artist for panel in panels for artist in (*panel.lines, *panel.containers)]
    return {label: artist for artist in artists if not _AUTOMATIC.fullmatch(label := str(artist.get_label()))}


_AUTOMATIC = re.compile(r'(_child\d+|_container\d+|_nolegend_)?')  # matplotlib's labels of what has none
