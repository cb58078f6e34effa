"""Pictures of a sweep: curves of all points, its metric against what varies, and how much the learning rate matters.

Everything comes in as plain data.  A group is a mapping of what points that differ in their seed alone have in common:
  label: text; values: key -> bool, int, float, str, None or a tuple of these;
  mean, error: of the metric over the seeds, its standard error (None of one seed); both None where no seed is done;
  numbers: of its points; failed: whether one of them failed.
keys: dotted key -> how it is shown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnlab.report.figures import COLOURS, add_legend, labelled_artists, metric_points, style_axes
from attnlab.report.values import MAX_VALUE_TICKS, AxisScale, build_axis_scale, crop_text, format_value, shorten_label
from attnlab.tasks.heatmap import FONT, GRID_COLOUR, MUTED_COLOUR, TEXT_COLOUR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BEST_COLOUR, FAINT_COLOUR, FAILED_COLOUR = '#c8693a', '#9db4cb', '#b3261e'
RANK_COLOURS = ('#cfdbe7', '#1f5a92')  # from the worst to the best
MAX_NAMED_GROUPS = len(COLOURS)  # groups that can have a colour and a name each


def plot_sweep_curves(
    groups: Sequence[Mapping], records: Mapping[int, Sequence[Mapping]], metric: str, best: int | None
) -> Figure:
    """Training loss and the metric on the validation split against the step, a line a point, a colour a group.

    records: of metrics.jsonl, by the number of the point.  best: the index of the best group.
    More groups than there are colours are faint, but for the best one.  A loss above that of the first record, as of a
    run that diverges, is off the picture.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = _panels(2, 2)
    axes[1].sharex(axes[0])
    lines = {split: [(index, points) for index, group in enumerate(groups) for number in group['numbers']
                     if len(points := metric_points(records.get(number, ()), split, key))]
             for split, key in (('train', 'loss'), ('valid', metric))}  # fmt: skip
    for panel, split, key in zip(axes, lines, ('loss', metric), strict=True):
        style_axes(panel, {'train': 'training ', 'valid': 'validation '}[split] + shorten_label(key))
        panel.set_xlabel('step', fontsize=8, color=MUTED_COLOUR, fontfamily=FONT)
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        for index, points in lines[split]:
            colour, label = _colour(groups, index, best)
            strong = index == best or len(groups) <= MAX_NAMED_GROUPS
            panel.plot(
                *points.T,
                color=colour,
                label=label,
                linewidth=1.2 if strong else 0.7,
                alpha=0.9,
                zorder=3 if index == best else 2,
                marker='o' if split == 'valid' else '',
                markersize=2,
            )
        if key == 'loss' and lines['train'] and lines[split]:
            start = statistics.median(points[0, 1] for _, points in lines['train'])
            every = np.concatenate([points[:, 1] for _, points in lines[split]])
            if every.min() < start < every.max():
                panel.set_ylim(*_padded(every.min(), start))
    add_legend(axes[-1], axes)
    return figure


def plot_metric_by_field(
    groups: Sequence[Mapping], keys: Mapping[str, str], metric: str, direction: str, best: int | None
) -> Figure:
    """The metric against each key: a panel a key, a point a group with its standard error.

    Groups that differ in this key alone are joined where it is a number.  Where the others are too many to name, the
    best at each value is what is strong.  A cross at the edge is a group of which no point is done and one has failed,
    or one that is far off the others.
    """
    figure, axes = _panels(len(keys), 3)
    chosen = None if best is None else groups[best]
    groups = [group for group in groups if _drawn(group, keys)]
    low, high = _view([group['mean'] for group in groups if group['mean'] is not None], direction)
    bottom, top = _padded(*_with_error(groups, low, high))
    if any(group['mean'] is None or not low <= group['mean'] <= high for group in groups):  # room for their crosses
        room = 0.08 * (top - bottom)
        bottom, top = (bottom - room, top) if direction == 'max' else (bottom, top + room)
    edge = 0.03 if direction == 'max' else 0.97
    for panel, (key, name) in zip(axes, keys.items(), strict=True):
        style_axes(panel, shorten_label(name))
        along = build_axis_scale([group['values'][key] for group in groups])
        _fit(panel, along)
        rows: dict[str, list[Mapping]] = {}
        for group in groups:
            rest = [format_value(group['values'][other]) for other in keys if other != key]
            rows.setdefault(', '.join(rest), []).append(group)
        few = len(rows) <= MAX_NAMED_GROUPS
        off, circle = [], None
        for index, (label, row) in enumerate(rows.items()):
            shift = (index - (len(rows) - 1) / 2) * min(0.1, 0.5 / len(rows)) if along.kind == 'category' else 0.0
            if chosen is not None and any(group is chosen for group in row):
                circle = along.place(chosen['values'][key]) + (shift if few else 0.0), chosen['mean']
            seen = [(along.place(group['values'][key]) + shift, group['mean'], group['error'])
                    for group in row if group['mean'] is not None and low <= group['mean'] <= high]  # fmt: skip
            off += [along.place(group['values'][key]) + shift
                    for group in row if group['mean'] is None or not low <= group['mean'] <= high]  # fmt: skip
            line = '-' if few and along.kind != 'category' else ''
            _with_errors(
                panel,
                seen,
                line,
                COLOURS[index % MAX_NAMED_GROUPS] if few else FAINT_COLOUR,
                shorten_label(label) if few else '',
            )
        if not few and len(along.places) <= MAX_VALUE_TICKS:
            _best_at_each(panel, groups, key, along, direction)
        if off:
            panel.plot(off, [edge] * len(off), 'x', color=FAILED_COLOUR, markersize=5, label='failed, or far off',
                       transform=panel.get_xaxis_transform())  # fmt: skip
        if circle is not None:
            panel.plot(*circle, 'o', markersize=9, zorder=1, markerfacecolor='none', markeredgecolor=BEST_COLOUR)
        panel.set_ylim(bottom, top)
        others = ', '.join(name for other, name in keys.items() if other != key)
        _below(panel, shorten_label(others) if few else '')
    axes[0].set_ylabel(shorten_label(metric), fontsize=8, color=MUTED_COLOUR, fontfamily=FONT)
    return figure


def _drawn(group: Mapping, keys: Mapping[str, str]) -> bool:
    """What has a mean, and what failed, unless it did so before all of its values were known."""
    return group['mean'] is not None or (group['failed'] and all(group['values'][key] is not None for key in keys))


def _view(means: Sequence[float], direction: str) -> tuple[float, float]:
    """The range of a metric that is worth its room: what is far worse than the others is left out of it.

    Far is three times the distance of the quartiles behind the worse of them (Tukey 1977).
    """
    first, third = np.quantile(means, (0.25, 0.75))
    sign = 1.0 if direction == 'min' else -1.0
    fence = (third if direction == 'min' else first) + sign * 3 * (third - first)
    seen = [mean for mean in means if sign * mean <= sign * fence]
    return min(seen), max(seen)


def _with_error(groups: Sequence[Mapping], low: float, high: float) -> tuple[float, float]:
    """The range from low to high, widened by the error bars of the means inside it."""
    seen = [group for group in groups if group['mean'] is not None and low <= group['mean'] <= high]
    errors = [group['error'] or 0.0 for group in seen]
    ends = [group['mean'] + sign * error for group, error in zip(seen, errors, strict=True) for sign in (-1, 1)]
    return min(ends), max(ends)


def _padded(low: float, high: float) -> tuple[float, float]:
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _with_errors(
    panel: Axes, points: Sequence[tuple[float, float, float | None]], line: str, colour: str, label: str
) -> None:
    """Points (place, mean, standard error), joined from the left to the right if `line`."""
    points = sorted(points, key=lambda point: point[0])
    if not points:
        return
    panel.plot([point[0] for point in points], [point[1] for point in points], f'o{line}', color=colour, markersize=3.5,
               linewidth=1.1, label=label)  # fmt: skip
    several = [point for point in points if point[2] is not None]
    if several:
        panel.errorbar(*np.array(several).T, fmt='none', ecolor=colour, elinewidth=0.9, capsize=2)


def _best_at_each(panel: Axes, groups: Sequence[Mapping], key: str, along: AxisScale, direction: str) -> None:
    best: dict[float, float] = {}
    choose: Any = min if direction == 'min' else max
    for group in groups:
        if group['mean'] is not None:
            at = along.place(group['values'][key])
            best[at] = choose(best.get(at, group['mean']), group['mean'])
    line = '' if along.kind == 'category' else '-'
    panel.plot(*np.array(sorted(best.items())).T, f'o{line}', color=COLOURS[0], markersize=4.5, linewidth=1.4,
               label='best at each value', zorder=3)  # fmt: skip


def plot_parallel_coordinates(
    groups: Sequence[Mapping], keys: Mapping[str, str], metric: str, direction: str, best: int | None
) -> Figure:
    """Parallel coordinates: an axis a key and one for the metric, a line a group, the darker the better.

    A group of which no point is done and one has failed is dashed and ends before the metric; one that is far off the
    others ends at the end of that axis.
    """
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    drawn = [index for index, group in enumerate(groups) if _drawn(group, keys)]
    done = [index for index in drawn if groups[index]['mean'] is not None]
    done.sort(key=lambda index: groups[index]['mean'], reverse=direction == 'min')
    scales = [build_axis_scale([groups[index]['values'][key] for index in drawn], few=10) for key in keys]
    low, high = _view([groups[index]['mean'] for index in done], direction)
    scales.append(build_axis_scale([low, high], few=1))
    figure = Figure(figsize=(max(3.6, 1.55 * len(scales) + 0.6), 3.1), facecolor='white', layout='constrained')
    axes = figure.subplots()
    for at, (each, name) in enumerate(zip(scales, [*keys.values(), metric], strict=True)):
        _upright(axes, at, each, shorten_label(name), last=at == len(keys))
    shades = LinearSegmentedColormap.from_list('shades', RANK_COLOURS)
    for index in drawn:
        values = [groups[index]['values'][key] for key in keys]
        if index in done:
            rank = done.index(index) / max(1, len(done) - 1)
            style = {'color': shades(rank), 'linewidth': 1, 'zorder': 2 + rank}
            if index == best:
                style = {'color': BEST_COLOUR, 'linewidth': 2, 'zorder': 4, 'label': 'best'}
        else:
            style = {
                'color': FAILED_COLOUR,
                'linewidth': 0.9,
                'linestyle': (0, (3, 2)),
                'zorder': 3.5,
                'label': 'failed',
            }
        heights = [each.height(each.place(value)) for each, value in zip(scales, values, strict=False)]
        if index in done:
            heights.append(scales[-1].height(min(max(groups[index]['mean'], low), high)))
        axes.plot(heights, **style)
    axes.set(xlim=(-0.15, len(keys) + 0.15), ylim=(-0.06, 1.06))
    axes.axis('off')
    add_legend(axes, loc='upper right', bbox_to_anchor=(1, 0), ncols=2)
    return figure


def _upright(axes: Axes, at: int, each: AxisScale, name: str, last: bool) -> None:
    """One axis of parallel coordinates: a line, its ticks and, above it, its name."""
    axes.plot([at, at], [0, 1], color=GRID_COLOUR, linewidth=1.5, zorder=1, solid_capstyle='round')
    style: dict[str, Any] = {'fontfamily': FONT, 'va': 'center', 'textcoords': 'offset points'}
    axes.annotate(name, (at, 1), xytext=(0, 14), ha='center', color=TEXT_COLOUR, fontsize=8.5, **style)
    for place, label in each.ticks:
        if -0.01 <= each.height(place) <= 1.01:
            side: dict[str, Any] = {'xytext': (5, 0), 'ha': 'left'} if last else {'xytext': (-5, 0), 'ha': 'right'}
            text = axes.annotate(
                label, (at, each.height(place)), color=MUTED_COLOUR, fontsize=7.5, zorder=5, **side, **style
            )
            text.set_bbox({'facecolor': 'white', 'alpha': 0.75, 'edgecolor': 'none', 'pad': 0.8})


def plot_sensitivity(lines: Sequence[Mapping]) -> Figure:
    """Final validation loss against the learning rate, a line a variant, its sensitivity in the legend.

    lines: each {'label', 'rates', 'losses', 'errors' (None of one seed), 'capped', 'sensitivity' (or None)}, where
    losses are at most that of initialisation, and `capped` says which were above it or never came to an end.
    Wortsman et al. 2023, "Small-scale proxies for large-scale Transformer training instabilities", figure 1.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.1), facecolor='white', layout='constrained')
    axes = figure.subplots()
    style_axes(axes, 'final validation loss')
    _fit(axes, build_axis_scale([rate for line in lines for rate in line['rates']]))
    axes.set_xlabel('learning rate', fontsize=8, color=MUTED_COLOUR, fontfamily=FONT)
    for index, line in enumerate(lines):
        colour, style = COLOURS[index % MAX_NAMED_GROUPS], ('-', '--', ':')[index // MAX_NAMED_GROUPS % 3]
        number = 'not known yet' if line['sensitivity'] is None else f'{line["sensitivity"]:.3f}'
        points = list(zip(line['rates'], line['losses'], line['errors'], strict=True))
        _with_errors(axes, points, style, colour, ': '.join(filter(None, [shorten_label(line['label']), number])))
        capped = [at for at, each in enumerate(line['capped']) if each]
        axes.plot([line['rates'][at] for at in capped], [line['losses'][at] for at in capped], 'o', color=colour,
                  markersize=5, markerfacecolor='white', zorder=3)  # fmt: skip
    if any(any(line['capped']) for line in lines):
        axes.plot(
            [], [], 'o', color=MUTED_COLOUR, markersize=5, markerfacecolor='white', label='no better than untrained'
        )
    add_legend(axes, title='sensitivity', alignment='left', loc='center left', bbox_to_anchor=(1, 0.5))
    return figure


def _panels(count: int, across: int) -> tuple[Figure, list[Axes]]:
    """So many panels, at most `across` beside each other."""
    from matplotlib.figure import Figure

    columns, rows = min(count, across), math.ceil(count / across)
    figure = Figure(figsize=(3.9 * columns if columns > 1 else 4.6, 3.0 * rows), facecolor='white',
                    layout='constrained')  # fmt: skip
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in every[count:]:
        spare.remove()
    return figure, every[:count]


def _below(panel: Axes, title: str) -> None:
    """The legend of a panel under it, where it hides nothing."""
    longest = max(map(len, labelled_artists(panel)), default=0)
    columns = max(1, min(4, 48 // (longest + 7)))
    low = -0.32 if any(label.get_rotation() for label in panel.get_xticklabels()) else -0.09
    add_legend(panel, title=title, alignment='left', loc='upper left', bbox_to_anchor=(-0.02, low),
           ncols=columns, columnspacing=1.2)  # fmt: skip


def _fit(axes: Axes, along: AxisScale) -> None:
    """The horizontal axis of a picture, as its values ask for."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale('log' if along.kind == 'log' else 'linear')
    axes.xaxis.set_minor_locator(NullLocator())
    room = 52 // max(1, len(along.ticks))
    labels = [crop_text(label, max(room, 12)) for _, label in along.ticks]
    turned = (
        {'rotation': 30, 'ha': 'right', 'rotation_mode': 'anchor'} if max(map(len, labels), default=0) > room else {}
    )
    axes.set_xticks([place for place, _ in along.ticks], labels, **turned)
    if along.kind == 'category':
        axes.set_xlim(-0.5, len(along.ticks) - 0.5)
        axes.grid(visible=False, axis='x')


def _colour(groups: Sequence[Mapping], index: int, best: int | None) -> tuple[str, str]:
    """Colour and name of a group's curves."""
    if len(groups) <= MAX_NAMED_GROUPS:
        return COLOURS[index], shorten_label(groups[index]['label'])
    return (BEST_COLOUR, 'best') if index == best else (FAINT_COLOUR, 'others')
