"""Figures of a sweep: curves of all points, the metric against each key that varies, sensitivity to the learning rate.

All arguments are plain data.
A group is a mapping that describes the points which differ only in their seed:
  label: text; values: key -> bool, int, float, str, None or a tuple of these;
  mean, error: of the metric over the seeds, and its standard error (None for one seed); both None if no seed is done;
  numbers: the numbers of its points; failed: whether one of them failed.
keys: dotted key -> its name in the figure.
direction: 'min' or 'max', whether a low or a high metric is good.
best: index of the best group, or None.
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
MAX_NAMED_GROUPS = len(COLOURS)  # more groups have no colour and no label of their own


def plot_sweep_curves(
    groups: Sequence[Mapping], records: Mapping[int, Sequence[Mapping]], metric: str, best: int | None
) -> Figure:
    """Plot training loss and validation metric against the step: one line for each point, one colour for each group.

    records: number of a point -> its records of metrics.jsonl.

    With more groups than colours, all but the best group are faint. The loss axis ends at the first training loss
    (median of all points), so that a run that diverges leaves the figure.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = _panel_figure(2, 2)
    axes[1].sharex(axes[0])
    lines = {split: [(index, points) for index, group in enumerate(groups) for number in group['numbers']
                     if len(points := metric_points(records.get(number, ()), split, key))]
             for split, key in (('train', 'loss'), ('valid', metric))}  # fmt: skip
    for panel, split, key in zip(axes, lines, ('loss', metric), strict=True):
        style_axes(panel, {'train': 'training ', 'valid': 'validation '}[split] + shorten_label(key))
        panel.set_xlabel('step', fontsize=8, color=MUTED_COLOUR, fontfamily=FONT)
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        for index, points in lines[split]:
            colour, label = _group_style(groups, index, best)
            is_strong = index == best or len(groups) <= MAX_NAMED_GROUPS
            panel.plot(
                *points.T,
                color=colour,
                label=label,
                linewidth=1.2 if is_strong else 0.7,
                alpha=0.9,
                zorder=3 if index == best else 2,
                marker='o' if split == 'valid' else '',
                markersize=2,
            )
        if key == 'loss' and lines['train'] and lines[split]:
            first_loss = statistics.median(points[0, 1] for _, points in lines['train'])
            losses = np.concatenate([points[:, 1] for _, points in lines[split]])
            if losses.min() < first_loss < losses.max():
                panel.set_ylim(*_add_margin(losses.min(), first_loss))
    add_legend(axes[-1], axes)
    return figure


def plot_metric_by_field(
    groups: Sequence[Mapping], keys: Mapping[str, str], metric: str, direction: str, best: int | None
) -> Figure:
    """Plot the metric against each key: one panel for each key, one point with its standard error for each group.

    Groups that differ only in this key are joined by a line if the key is numeric. If there are too many such lines for
    a label each, all are faint, and the best group at each value is drawn strong instead. A cross at the edge marks a
    group that failed without a score, and an outlier whose metric is far worse than the others.
    """
    figure, axes = _panel_figure(len(keys), 3)
    best_group = None if best is None else groups[best]
    groups = [group for group in groups if _can_be_drawn(group, keys)]
    low, high = _range_without_outliers([group['mean'] for group in groups if group['mean'] is not None], direction)
    bottom, top = _add_margin(*_extend_by_errors(groups, low, high))
    if not all(_is_within(group, low, high) for group in groups):  # space for the crosses
        space = 0.08 * (top - bottom)
        bottom, top = (bottom - space, top) if direction == 'max' else (bottom, top + space)
    cross_y = 0.03 if direction == 'max' else 0.97
    for panel, (key, name) in zip(axes, keys.items(), strict=True):
        style_axes(panel, shorten_label(name))
        scale = build_axis_scale([group['values'][key] for group in groups])
        _set_x_axis(panel, scale)
        lines: dict[str, list[Mapping]] = {}
        for group in groups:
            other_values = [format_value(group['values'][other]) for other in keys if other != key]
            lines.setdefault(', '.join(other_values), []).append(group)
        have_labels = len(lines) <= MAX_NAMED_GROUPS
        crosses, circle = [], None
        for index, (label, line) in enumerate(lines.items()):
            # Lines of categories stand beside each other.
            offset = (index - (len(lines) - 1) / 2) * min(0.1, 0.5 / len(lines)) if scale.kind == 'category' else 0.0
            if best_group is not None and any(group is best_group for group in line):
                best_x = scale.coordinate(best_group['values'][key]) + (offset if have_labels else 0.0)
                circle = best_x, best_group['mean']
            points = [(scale.coordinate(group['values'][key]) + offset, group['mean'], group['error'])
                      for group in line if _is_within(group, low, high)]  # fmt: skip
            crosses += [scale.coordinate(group['values'][key]) + offset
                        for group in line if not _is_within(group, low, high)]  # fmt: skip
            _plot_with_errors(
                panel,
                points,
                '-' if have_labels and scale.kind != 'category' else '',
                COLOURS[index % MAX_NAMED_GROUPS] if have_labels else FAINT_COLOUR,
                shorten_label(label) if have_labels else '',
            )
        if not have_labels and len(scale.coordinates) <= MAX_VALUE_TICKS:
            _plot_best_at_each_value(panel, groups, key, scale, direction)
        if crosses:
            panel.plot(crosses, [cross_y] * len(crosses), 'x', color=FAILED_COLOUR, markersize=5,
                       label='failed or outlier', transform=panel.get_xaxis_transform())  # fmt: skip
        if circle is not None:
            panel.plot(*circle, 'o', markersize=9, zorder=1, markerfacecolor='none', markeredgecolor=BEST_COLOUR)
        panel.set_ylim(bottom, top)
        other_names = ', '.join(name for other, name in keys.items() if other != key)
        _add_legend_below(panel, shorten_label(other_names) if have_labels else '')
    axes[0].set_ylabel(shorten_label(metric), fontsize=8, color=MUTED_COLOUR, fontfamily=FONT)
    return figure


def _can_be_drawn(group: Mapping, keys: Mapping[str, str]) -> bool:
    """Whether a group has a mean, or has failed and has a value for each key."""
    return group['mean'] is not None or (group['failed'] and all(group['values'][key] is not None for key in keys))


def _is_within(group: Mapping, low: float, high: float) -> bool:
    """Whether a group has a mean, and it lies between two numbers."""
    return group['mean'] is not None and low <= group['mean'] <= high


def _range_without_outliers(means: Sequence[float], direction: str) -> tuple[float, float]:
    """Return the smallest and the largest mean, without means that are far worse than the others.

    Far worse is worse than the worse quartile by more than three times the interquartile range (Tukey 1977).
    """
    first, third = np.quantile(means, (0.25, 0.75))
    sign = 1.0 if direction == 'min' else -1.0
    fence = (third if direction == 'min' else first) + sign * 3 * (third - first)
    inliers = [mean for mean in means if sign * mean <= sign * fence]
    return min(inliers), max(inliers)


def _extend_by_errors(groups: Sequence[Mapping], low: float, high: float) -> tuple[float, float]:
    """Return the range of the error bars of the groups whose mean is between `low` and `high`."""
    within = [group for group in groups if _is_within(group, low, high)]
    errors = [group['error'] or 0.0 for group in within]
    ends = [group['mean'] + sign * error for group, error in zip(within, errors, strict=True) for sign in (-1, 1)]
    return min(ends), max(ends)


def _add_margin(low: float, high: float) -> tuple[float, float]:
    """Return a range that is 6 % larger at both ends, and not empty."""
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _plot_with_errors(
    panel: Axes, points: Sequence[tuple[float, float, float | None]], line: str, colour: str, label: str
) -> None:
    """Plot points (x, mean, standard error), joined from left to right in the line style `line`, which may be ''."""
    points = sorted(points, key=lambda point: point[0])
    if not points:
        return
    panel.plot([point[0] for point in points], [point[1] for point in points], f'o{line}', color=colour, markersize=3.5,
               linewidth=1.1, label=label)  # fmt: skip
    with_error = [point for point in points if point[2] is not None]
    if with_error:
        panel.errorbar(*np.array(with_error).T, fmt='none', ecolor=colour, elinewidth=0.9, capsize=2)


def _plot_best_at_each_value(
    panel: Axes, groups: Sequence[Mapping], key: str, scale: AxisScale, direction: str
) -> None:
    """Plot the best mean of all groups that share a value of the key."""
    best: dict[float, float] = {}
    choose: Any = min if direction == 'min' else max
    for group in groups:
        if group['mean'] is not None:
            x = scale.coordinate(group['values'][key])
            best[x] = choose(best.get(x, group['mean']), group['mean'])
    line = '' if scale.kind == 'category' else '-'
    panel.plot(*np.array(sorted(best.items())).T, f'o{line}', color=COLOURS[0], markersize=4.5, linewidth=1.4,
               label='best at each value', zorder=3)  # fmt: skip


def plot_parallel_coordinates(
    groups: Sequence[Mapping], keys: Mapping[str, str], metric: str, direction: str, best: int | None
) -> Figure:
    """Plot parallel coordinates: an axis for each key and for the metric, a line for each group, darker if better.

    The line of a group that failed without a score is dashed and ends before the metric. The line of an outlier, whose
    metric is far worse than the others, ends at the end of the metric's axis.
    """
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    drawn = [index for index, group in enumerate(groups) if _can_be_drawn(group, keys)]
    done = [index for index in drawn if groups[index]['mean'] is not None]
    done.sort(key=lambda index: groups[index]['mean'], reverse=direction == 'min')
    scales = [build_axis_scale([groups[index]['values'][key] for index in drawn], max_value_ticks=10) for key in keys]
    low, high = _range_without_outliers([groups[index]['mean'] for index in done], direction)
    metric_scale = build_axis_scale([low, high], max_value_ticks=1)
    figure = Figure(figsize=(max(3.6, 1.55 * (len(keys) + 1) + 0.6), 3.1), facecolor='white', layout='constrained')
    axes = figure.subplots()
    names = [*keys.values(), metric]
    for x, (scale, name) in enumerate(zip([*scales, metric_scale], names, strict=True)):
        _draw_vertical_axis(axes, x, scale, shorten_label(name), is_last=x == len(keys))
    colormap = LinearSegmentedColormap.from_list('ranks', RANK_COLOURS)
    for index in drawn:
        values = [groups[index]['values'][key] for key in keys]
        y = [scale.fraction(scale.coordinate(value)) for scale, value in zip(scales, values, strict=True)]
        if index in done:
            rank = done.index(index) / max(1, len(done) - 1)
            style = {'color': colormap(rank), 'linewidth': 1, 'zorder': 2 + rank}
            if index == best:
                style = {'color': BEST_COLOUR, 'linewidth': 2, 'zorder': 4, 'label': 'best'}
            y.append(metric_scale.fraction(min(max(groups[index]['mean'], low), high)))
        else:
            style = {
                'color': FAILED_COLOUR,
                'linewidth': 0.9,
                'linestyle': (0, (3, 2)),
                'zorder': 3.5,
                'label': 'failed',
            }
        axes.plot(y, **style)
    axes.set(xlim=(-0.15, len(keys) + 0.15), ylim=(-0.06, 1.06))
    axes.axis('off')
    add_legend(axes, loc='upper right', bbox_to_anchor=(1, 0), ncols=2)
    return figure


def _draw_vertical_axis(axes: Axes, x: int, scale: AxisScale, name: str, is_last: bool) -> None:
    """Draw one axis of parallel coordinates: a line, its tick labels and, above it, its name."""
    axes.plot([x, x], [0, 1], color=GRID_COLOUR, linewidth=1.5, zorder=1, solid_capstyle='round')
    style: dict[str, Any] = {'fontfamily': FONT, 'va': 'center', 'textcoords': 'offset points'}
    axes.annotate(name, (x, 1), xytext=(0, 14), ha='center', color=TEXT_COLOUR, fontsize=8.5, **style)
    side: dict[str, Any] = {'xytext': (5, 0), 'ha': 'left'} if is_last else {'xytext': (-5, 0), 'ha': 'right'}
    for coordinate, label in scale.ticks:
        y = scale.fraction(coordinate)
        if -0.01 <= y <= 1.01:
            text = axes.annotate(label, (x, y), color=MUTED_COLOUR, fontsize=7.5, zorder=5, **side, **style)
            text.set_bbox({'facecolor': 'white', 'alpha': 0.75, 'edgecolor': 'none', 'pad': 0.8})


def plot_sensitivity(lines: Sequence[Mapping]) -> Figure:
    """Plot the final validation loss against the learning rate, one line for each variant.

    The legend gives the sensitivity of each variant.

    lines: each {'label', 'rates', 'losses', 'errors' (None for one seed), 'capped', 'sensitivity' (or None)}. A loss is
      at most that of initialisation; `capped` is True where it was above that, or where the run never ended.

    Wortsman et al. 2023, "Small-scale proxies for large-scale Transformer training instabilities", figure 1.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.1), facecolor='white', layout='constrained')
    axes = figure.subplots()
    style_axes(axes, 'final validation loss')
    _set_x_axis(axes, build_axis_scale([rate for line in lines for rate in line['rates']]))
    axes.set_xlabel('learning rate', fontsize=8, color=MUTED_COLOUR, fontfamily=FONT)
    for index, line in enumerate(lines):
        colour, style = COLOURS[index % MAX_NAMED_GROUPS], ('-', '--', ':')[index // MAX_NAMED_GROUPS % 3]
        sensitivity = 'not known yet' if line['sensitivity'] is None else f'{line["sensitivity"]:.3f}'
        points = list(zip(line['rates'], line['losses'], line['errors'], strict=True))
        label = ': '.join(filter(None, [shorten_label(line['label']), sensitivity]))
        _plot_with_errors(axes, points, style, colour, label)
        capped = [i for i, is_capped in enumerate(line['capped']) if is_capped]
        axes.plot([line['rates'][i] for i in capped], [line['losses'][i] for i in capped], 'o', color=colour,
                  markersize=5, markerfacecolor='white', zorder=3)  # fmt: skip
    if any(any(line['capped']) for line in lines):
        axes.plot(
            [], [], 'o', color=MUTED_COLOUR, markersize=5, markerfacecolor='white', label='no better than untrained'
        )
    add_legend(axes, title='sensitivity', alignment='left', loc='center left', bbox_to_anchor=(1, 0.5))
    return figure


def _panel_figure(count: int, per_row: int) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels, at most `per_row` in a row, and its panels."""
    from matplotlib.figure import Figure

    columns, rows = min(count, per_row), math.ceil(count / per_row)
    figure = Figure(figsize=(3.9 * columns if columns > 1 else 4.6, 3.0 * rows), facecolor='white',
                    layout='constrained')  # fmt: skip
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in panels[count:]:
        unused.remove()
    return figure, panels[:count]


def _add_legend_below(panel: Axes, title: str) -> None:
    """Add a legend below a panel, where it covers no data."""
    longest = max(map(len, labelled_artists(panel)), default=0)
    columns = max(1, min(4, 48 // (longest + 7)))
    y = -0.32 if any(label.get_rotation() for label in panel.get_xticklabels()) else -0.09
    add_legend(panel, title=title, alignment='left', loc='upper left', bbox_to_anchor=(-0.02, y),
               ncols=columns, columnspacing=1.2)  # fmt: skip


def _set_x_axis(axes: Axes, scale: AxisScale) -> None:
    """Set the kind and the ticks of the horizontal axis; labels that are too long are cropped and rotated."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale('log' if scale.kind == 'log' else 'linear')
    axes.xaxis.set_minor_locator(NullLocator())
    max_length = 52 // max(1, len(scale.ticks))
    labels = [crop_text(label, max(max_length, 12)) for _, label in scale.ticks]
    is_rotated = max(map(len, labels), default=0) > max_length
    rotation = {'rotation': 30, 'ha': 'right', 'rotation_mode': 'anchor'} if is_rotated else {}
    axes.set_xticks([coordinate for coordinate, _ in scale.ticks], labels, **rotation)
    if scale.kind == 'category':
        axes.set_xlim(-0.5, len(scale.ticks) - 0.5)
        axes.grid(visible=False, axis='x')


def _group_style(groups: Sequence[Mapping], index: int, best: int | None) -> tuple[str, str]:
    """Return the colour and the label of a group's curves."""
    if len(groups) <= MAX_NAMED_GROUPS:
        return COLOURS[index], shorten_label(groups[index]['label'])
    return (BEST_COLOUR, 'best') if index == best else (FAINT_COLOUR, 'others')
