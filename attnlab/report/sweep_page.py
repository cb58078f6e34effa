"""The HTML page of a sweep, from plain data: its best result, figures, and a table of all points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.report import html
from attnlab.report import sweep_figures as figures
from attnlab.report.values import describe_values, format_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATUS_MARKS = {'done': '✓', 'running': '…', 'waiting': '·', 'failed': '✗', 'pruned': '✂'}

SENSITIVITY_NOTE = (
    'Mean distance of the loss from the best loss over the learning rates; a loss above that of initialisation counts '
    'as the loss of initialisation (Wortsman et al. 2023, section 2.2).'
)

Table = tuple[list[str], list[list[str]]]
"""Header and rows."""


def write_sweep_page(path: str | Path, title: str, sweep: Mapping[str, Any]) -> Path:
    """Write the page of a sweep and return its path.

    sweep: {
      'summary': a line that describes the sweep,
      'metric': name or None, 'direction': 'min' | 'max' | None; both None until a point has ended,
      'keys': {dotted key that varies, except the seed: its name on the page},
      'points': [{'number', 'status', 'values' (of the keys and, if it varies, 'seed'), 'value', 'step', 'seconds',
                  'reason'}, ...],
      'records': {number of a point: its records of metrics.jsonl},
      'groups': groups of `attnlab.report.sweep_figures`, each also with 'done' and 'of': the numbers of its done points
                and of all its points,
      'best': index of the best group, or None; 'winner': {'number', 'config' (nested)} of its point, or None,
      'sensitivity': lines of `attnlab.report.sweep_figures.plot_sensitivity`; [] if there are none}
    """
    path = Path(path)
    statuses = [point['status'] for point in sweep['points']]
    reasons = [(point['status'] == 'failed', f'{point["number"]}: {point["reason"]}')
               for point in sweep['points'] if point['reason']]  # fmt: skip
    header, rows = points_table(sweep)
    rows = [[number, f'{STATUS_MARKS[status]} {status}', *cells] for number, status, *cells in rows]
    html.write_html(
        path, 'sweep.html', title=title, summary=sweep['summary'], tiles=_tiles(sweep, statuses),
        counts=', '.join(f'{statuses.count(status)} {status}' for status in STATUS_MARKS if status in statuses),
        best=_describe_best(sweep) if sweep['winner'] else [],
        winner=html.config_lines(sweep['winner']['config']) if sweep['winner'] else [], figures=_figures(sweep),
        seeds=seeds_table(sweep) if any(group['of'] > 1 for group in sweep['groups']) else None,
        points=(header, rows), notes=[reason for failed, reason in reasons if not failed],
        failures=[reason for failed, reason in reasons if failed],
    )  # fmt: skip
    return path


def _tiles(sweep: Mapping[str, Any], statuses: list[str]) -> list[tuple[str, str]]:
    """Return label and value of the numbers in large type: the best score, points done, total time."""
    total_seconds = sum(point['seconds'] or 0.0 for point in sweep['points'])
    tiles = [('points done', f'{statuses.count("done")} of {len(statuses)}'),
             ('time of all points', format_duration(total_seconds))]  # fmt: skip
    if sweep['best'] is not None:
        group = sweep['groups'][sweep['best']]
        seeds = f', {group["done"]} seeds' if group['done'] > 1 else ''
        tiles.insert(0, (f'best {sweep["metric"]}{seeds}', format_number(group['mean'])))
    return tiles


def _describe_best(sweep: Mapping[str, Any]) -> list[str]:
    """Return lines that describe the best group."""
    group = sweep['groups'][sweep['best']]
    values = {sweep['keys'][key]: value for key, value in group['values'].items()}
    description = describe_values(values) or 'the only one'
    lines = [f'{description}: {sweep["metric"]} {format_mean(group["mean"], group["error"], group["done"])}.']
    if group['of'] > 1:
        lines.append(f'The config is that of point {sweep["winner"]["number"]}, the first of its seeds.')
    return lines


def _figures(sweep: Mapping[str, Any]) -> list[tuple[str, str, html.Picture]]:
    """Return heading, note and picture of each figure."""
    groups, keys, metric, direction, best = (sweep[key] for key in ('groups', 'keys', 'metric', 'direction', 'best'))
    pictures = []

    def add(heading: str, figure: Figure, alt: str, note: str = '') -> None:
        pictures.append((heading, note, html.encode_picture(figure, alt)))

    if sweep['sensitivity']:
        figure, alt = figures.plot_sensitivity(sweep['sensitivity']), 'Final loss against the learning rate'
        add('Sensitivity to the learning rate', figure, alt, SENSITIVITY_NOTE)
    if keys and any(group['mean'] is not None for group in groups):
        figure = figures.plot_metric_by_field(groups, keys, metric, direction, best)
        add('Metric by field', figure, f'{metric} against each key')
        if len(keys) > 1:
            figure = figures.plot_parallel_coordinates(groups, keys, metric, direction, best)
            add('Parallel coordinates', figure, f'Every key, and {metric}')
    if metric and any(sweep['records'].values()):
        figure = figures.plot_sweep_curves(groups, sweep['records'], metric, best)
        add('Training', figure, f'Training loss and {metric} by step')
    return pictures


def seeds_table(sweep: Mapping[str, Any]) -> Table:
    """Return a row for each group, best first, with the mean over its seeds; groups without a score come last."""
    sign = -1.0 if sweep['direction'] == 'max' else 1.0
    groups = sorted(sweep['groups'], key=lambda group: (group['mean'] is None, sign * (group['mean'] or 0.0)))
    rows = [[*_cells(group['values'], sweep['keys']), format_number(group['mean']), format_number(group['error']),
             f'{group["done"]} of {group["of"]}'] for group in groups]  # fmt: skip
    return [*sweep['keys'].values(), f'mean {sweep["metric"] or "score"}', 'standard error', 'seeds'], rows


def points_table(sweep: Mapping[str, Any]) -> Table:
    """Return a row for each point: number, status, values that vary, best score, its step, time."""
    seed = {'seed': 'seed'} if any('seed' in point['values'] for point in sweep['points']) else {}
    keys = sweep['keys'] | seed
    rows = [
        [
            f'{point["number"]}', point['status'], *_cells(point['values'], keys), format_number(point['value']),
            '' if point['step'] is None else f'{point["step"]:,}',
            '' if point['seconds'] is None else format_duration(point['seconds']),
        ]
        for point in sweep['points']
    ]  # fmt: skip
    return ['point', 'status', *keys.values(), f'best {sweep["metric"] or "score"}', 'step', 'time'], rows


def _cells(values: Mapping[str, Any], keys: Mapping[str, str]) -> list[str]:
    """Return the text of each key's value; empty for None."""
    return ['' if values[key] is None else format_value(values[key]) for key in keys]


def format_number(value: float | None) -> str:
    """Return a score with four decimals, or with four significant digits if it is very small or at least 100."""
    if value is None:
        return '–'
    return f'{value:.4f}' if value == 0 or 0.0005 <= abs(value) < 100 else f'{value:.4g}'


def format_mean(mean: float, error: float | None, seeds: int) -> str:
    """Return `1.7581 ± 0.0053 (standard error of 3 seeds)`, or only the mean if there is no error."""
    if error is None:
        return format_number(mean)
    return f'{format_number(mean)} ± {format_number(error)} (standard error of {seeds} seeds)'


def format_duration(seconds: float) -> str:
    """Return a duration as `12 s`, `3:05` or `2:00:07`."""
    if seconds < 60:
        return f'{seconds:.0f} s'
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02}:{seconds:02}' if hours else f'{minutes}:{seconds:02}'
