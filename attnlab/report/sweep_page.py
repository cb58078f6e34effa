"""The page of a sweep, from plain data: what it is, its best, pictures, every point."""

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
    'Mean distance of the loss from its best over the learning rates; no loss counts as more than that of '
    'initialisation (Wortsman et al. 2023, section 2.2).'
)

Table = tuple[list[str], list[list[str]]]
"""Header and rows."""


def write_sweep_page(path: str | Path, title: str, found: Mapping[str, Any]) -> Path:
    """Write the page and return its path.

    found: {
      'summary': a line of what the sweep is,
      'metric': name or None, 'direction': 'min' | 'max' | None, as long as no point has ended,
      'keys': {dotted key that varies, the seed apart: how it is shown},
      'points': [{'number', 'status', 'values' (of the keys and, where it varies, 'seed'), 'value', 'step', 'seconds',
                  'reason'}, ...],
      'records': those of metrics.jsonl of every point, by its number,
      'groups': as in `attnlab.report.sweep_figures`, each with 'done' and 'of' besides, the numbers of its points,
      'best': index of a group, or None; 'winner': {'number', 'config' (nested)} of its point, or None,
      'sensitivity': the lines of `attnlab.report.sweep_figures.plot_sensitivity`, [] where there are none}
    """
    path = Path(path)
    statuses = [point['status'] for point in found['points']]
    reasons = lambda failed: [f'{point["number"]}: {point["reason"]}' for point in found['points']
                              if point['reason'] and (point['status'] == 'failed') == failed]  # fmt: skip
    header, rows = points_table(found)
    rows = [[number, f'{STATUS_MARKS[status]} {status}', *rest] for number, status, *rest in rows]
    html.write_html(
        path, 'sweep.html', title=title, summary=found['summary'], large=_large(found, statuses),
        counts=', '.join(f'{statuses.count(status)} {status}' for status in STATUS_MARKS if status in statuses),
        best=_best(found) if found['winner'] else [],
        winner=html.config_lines(found['winner']['config']) if found['winner'] else [], figures=_figures(found),
        seeds=seeds_table(found) if any(group['of'] > 1 for group in found['groups']) else None,
        points=(header, rows), notes=reasons(failed=False), failures=reasons(failed=True),
    )  # fmt: skip
    return path


def _large(found: Mapping[str, Any], statuses: list[str]) -> list[tuple[str, str]]:
    """The numbers that matter most."""
    large = [('points done', f'{statuses.count("done")} of {len(statuses)}'),
             ('time of all points', format_duration(sum(point['seconds'] or 0.0 for point in found['points'])))]  # fmt: skip
    if found['best'] is not None:
        group = found['groups'][found['best']]
        seeds = f', {group["done"]} seeds' if group['done'] > 1 else ''
        large.insert(0, (f'best {found["metric"]}{seeds}', format_number(group['mean'])))
    return large


def _best(found: Mapping[str, Any]) -> list[str]:
    group = found['groups'][found['best']]
    what = describe_values({found['keys'][key]: value for key, value in group['values'].items()}) or 'the only one'
    lines = [f'{what}: {found["metric"]} {format_mean(group["mean"], group["error"], group["done"])}.']
    if group['of'] > 1:
        lines.append(f'The config is that of point {found["winner"]["number"]}, the first of its seeds.')
    return lines


def _figures(found: Mapping[str, Any]) -> list[tuple[str, str, html.Picture]]:
    """Heading, note and picture of each."""
    groups, keys, metric, direction, best = (found[key] for key in ('groups', 'keys', 'metric', 'direction', 'best'))
    pictures = []

    def add(heading: str, figure: Figure, alt: str, note: str = '') -> None:
        pictures.append((heading, note, html.encode_picture(figure, alt)))

    if found['sensitivity']:
        figure, alt = figures.plot_sensitivity(found['sensitivity']), 'Final loss against the learning rate'
        add('Sensitivity to the learning rate', figure, alt, SENSITIVITY_NOTE)
    if keys and any(group['mean'] is not None for group in groups):
        add(
            'By what varies',
            figures.plot_metric_by_field(groups, keys, metric, direction, best),
            f'{metric} against each key',
        )
        if len(keys) > 1:
            figure = figures.plot_parallel_coordinates(groups, keys, metric, direction, best)
            add('Parallel coordinates', figure, f'Every key, and {metric}')
    if metric and any(found['records'].values()):
        figure = figures.plot_sweep_curves(groups, found['records'], metric, best)
        add('Training', figure, f'Training loss and {metric} by step')
    return pictures


def seeds_table(found: Mapping[str, Any]) -> Table:
    """A row per group, the best first; those without a number last."""
    sign = -1.0 if found['direction'] == 'max' else 1.0
    groups = sorted(found['groups'], key=lambda group: (group['mean'] is None, sign * (group['mean'] or 0.0)))
    rows = [[*_cells(group['values'], found['keys']), format_number(group['mean']), format_number(group['error']),
             f'{group["done"]} of {group["of"]}'] for group in groups]  # fmt: skip
    return [*found['keys'].values(), f'mean {found["metric"] or "score"}', 'standard error', 'seeds'], rows


def points_table(found: Mapping[str, Any]) -> Table:
    """A row per point: number, status, what varies, score, step, time."""
    seed = {'seed': 'seed'} if any('seed' in point['values'] for point in found['points']) else {}
    keys = found['keys'] | seed
    rows = [[f'{point["number"]}', point['status'], *_cells(point['values'], keys),
             format_number(point['value']), '' if point['step'] is None else f'{point["step"]:,}',
             '' if point['seconds'] is None else format_duration(point['seconds'])] for point in found['points']]  # fmt: skip
    return ['point', 'status', *keys.values(), f'best {found["metric"] or "score"}', 'step', 'time'], rows


def _cells(values: Mapping[str, Any], keys: Mapping[str, str]) -> list[str]:
    return ['' if values[key] is None else format_value(values[key]) for key in keys]


def format_number(value: float | None) -> str:
    """Four digits behind the point, unless these are more than such a number needs, or fewer."""
    if value is None:
        return '–'
    return f'{value:.4f}' if value == 0 or 0.0005 <= abs(value) < 100 else f'{value:.4g}'


def format_mean(mean: float, error: float | None, seeds: int) -> str:
    """`1.7581 ± 0.0053 (standard error of 3 seeds)`, or the number alone."""
    return (
        format_number(mean)
        if error is None
        else f'{format_number(mean)} ± {format_number(error)} (standard error of {seeds} seeds)'
    )


def format_duration(seconds: float) -> str:
    """`12 s`, `3:05`, `2:00:07`."""
    if seconds < 60:
        return f'{seconds:.0f} s'
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02}:{seconds:02}' if hours else f'{minutes}:{seconds:02}'
