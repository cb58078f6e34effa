"""What came of a sweep: a table for the terminal and one for other programs, and a page.

Reads `outcome.read_sweep` and, of the runs, config.json and metrics.jsonl; nothing here trains.
"""

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab import configs, files
from attnlab.report import sweep_page as page
from attnlab.report.values import describe_values, format_value
from attnlab.sweeps import seeds, sensitivity, sweep_files
from attnlab.sweeps.sweep_files import SweepResults
from attnlab.train import metrics

if TYPE_CHECKING:
    from rich.table import Table

STATUS_STYLES = {'done': 'green', 'running': 'cyan', 'waiting': 'dim', 'failed': 'bold red', 'pruned': 'yellow'}

PIPE_WIDTH = 200
"""Characters a line where there is no terminal whose width could be asked."""


def write_sweep_report(folder: str | os.PathLike) -> Path:
    """Writes DIR/table.csv and the page DIR/report.html of a sweep as it stands; returns the page's path.

    Raises UserError where the directory holds no sweep.
    """
    sweep = sweep_files.read_sweep(folder)
    write_csv_table(sweep)
    return page.write_sweep_page(sweep.folder / 'report.html', sweep.folder.resolve().name, page_data(sweep))


def write_csv_table(sweep: SweepResults) -> Path:
    """Writes DIR/table.csv, a line a point, values as the command line takes them; returns its path."""
    varied, notes = seeds.varied_values(sweep), _notes(sweep)
    keys = list(next(iter(varied.values()), {}))
    path = sweep.folder / 'table.csv'
    with files.replace_atomically(path) as part, part.open('w', encoding='utf-8', newline='') as file:
        lines = csv.writer(file)
        lines.writerow(['number', 'status', *keys, f'best_{sweep.metric or "score"}', 'best_step', 'seconds', 'reason'])
        for row in sweep.rows:
            cells = [_exact(value) for value in varied[row.number].values()]
            lines.writerow([row.number, row.status, *cells, row.value, row.step, row.seconds, notes[row.number]])
    return path


def _notes(sweep: SweepResults) -> dict[int, str]:
    """By number, the reason of what failed, and which point counts for one that has its config too."""
    again = {number: f'its config is that of point {one}' for number, one in seeds.find_duplicates(sweep).items()}
    return {
        row.number: (row.reason or again.get(row.number, '')) + (', counted once' if row.number in again else '')
        for row in sweep.rows
    }


def _exact(value: Any) -> str:
    match value:
        case None:
            return ''
        case tuple():
            return ','.join(map(_exact, value))
        case str():
            return value
        case float():
            return repr(value)
    return format_value(value)


def print_sweep(sweep: SweepResults, width: int | None = None) -> None:
    """Prints every point, the groups where one has several seeds, and the best.

    width: in characters; the terminal's if None, where there is one.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width, highlight=False)
    if width is None and not console.is_terminal:
        console.width = PIPE_WIDTH
    found = comparison_data(sweep)
    header, rows = page.points_table(found)
    reasons = [[point['reason'] or ''] for point in found['points']]
    console.print(_table([*header, 'reason'], [[*row, *reason] for row, reason in zip(rows, reasons, strict=True)]))
    if any(group['of'] > 1 for group in found['groups']):
        console.print()
        console.print(_table(*page.seeds_table(found)))
    if found['best'] is not None:
        group = found['groups'][found['best']]
        score = page.format_mean(group['mean'], group['error'], group['done'])
        console.print()
        console.print(Text(f'best {sweep.metric}: {score}, {group["label"]}', style='bold'), soft_wrap=True)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> 'Table':
    """A table without frames: texts at the left, numbers at the right, a status in its colour."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style='dim')
    for name in header:
        side = 'left' if name in ('status', 'reason') else 'right'
        table.add_column(Text(format_value(name)), justify=side, overflow='fold')
    for row in rows:
        table.add_row(*(Text(cell, style=STATUS_STYLES.get(cell, '') if name == 'status' else '')
                        for name, cell in zip(header, row, strict=True)))  # fmt: skip
    return table


def page_data(sweep: SweepResults) -> dict[str, Any]:
    """All of a sweep that its page shows, as `attnlab.report.sweep_page.write_sweep_page` takes it."""
    groups, records = seeds.group_by_seed(sweep), {row.number: metrics.read_metrics(row.run) for row in sweep.rows}
    at = seeds.best_group_index(sweep, groups)
    winner = None if at is None else groups[at].done[0]
    return comparison_data(sweep) | {
        'records': records,
        'winner': winner
        and {'number': winner.number, 'config': configs.load_config(winner.run / 'config.json').to_dict()},
        'sensitivity': sensitivity.sensitivity_lines(groups, records),
    }


def comparison_data(sweep: SweepResults) -> dict[str, Any]:
    """The points, the groups and the best of `page_data`."""
    groups, varied, notes = seeds.group_by_seed(sweep), seeds.varied_values(sweep), _notes(sweep)
    keys = list(groups[0].values) if groups else []
    return {
        'summary': ' · '.join([sweep.config, ', '.join(sweep.sweep), *('='.join(pair) for pair in sweep.overrides)]),
        'metric': sweep.metric,
        'direction': sweep.direction,
        'keys': dict(zip(keys, seeds.shorten_keys(dict.fromkeys(keys)), strict=True)),
        'points': [
            {
                'number': row.number, 'status': row.status, 'values': varied[row.number], 'value': row.value,
                'step': row.step, 'seconds': row.seconds, 'reason': notes[row.number],
            }
            for row in sweep.rows
        ],
        'groups': [
            {
                'label': describe_values(seeds.shorten_keys(group.values)) or 'the only one', 'values': group.values,
                'mean': group.mean, 'error': group.error, 'failed': any(row.status == 'failed' for row in group.rows),
                'numbers': [row.number for row in group.rows], 'done': len(group.done), 'of': len(group.rows),
            }
            for group in groups
        ],
        'best': seeds.best_group_index(sweep, groups),
    }  # fmt: skip
