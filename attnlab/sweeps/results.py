"""The results of a sweep: a table for the terminal, a CSV table and an HTML page.

Everything is computed from `sweep_files.read_sweep` and from config.json and metrics.jsonl of the runs.
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
"""Characters in a line of output that does not go to a terminal."""


def write_sweep_report(folder: str | os.PathLike) -> Path:
    """Write DIR/table.csv and the page DIR/report.html with the current state of a sweep; return the page's path.

    Raises UserError if the directory holds no sweep.
    """
    sweep = sweep_files.read_sweep(folder)
    write_csv_table(sweep)
    return page.write_sweep_page(sweep.folder / 'report.html', sweep.folder.resolve().name, page_data(sweep))


def write_csv_table(sweep: SweepResults) -> Path:
    """Write DIR/table.csv with a line for each point and return its path.

    Values have the form that the command line accepts.
    """
    varied, notes = seeds.varied_values(sweep), _notes(sweep)
    keys = list(next(iter(varied.values()), {}))
    path = sweep.folder / 'table.csv'
    with files.replace_atomically(path) as part, part.open('w', encoding='utf-8', newline='') as file:
        writer = csv.writer(file)
        score = f'best_{sweep.metric or "score"}'
        writer.writerow(['number', 'status', *keys, score, 'best_step', 'seconds', 'reason'])
        for row in sweep.rows:
            cells = [_exact_text(value) for value in varied[row.number].values()]
            writer.writerow([row.number, row.status, *cells, row.value, row.step, row.seconds, notes[row.number]])
    return path


def _notes(sweep: SweepResults) -> dict[int, str]:
    """Return, by point number, why a point failed, or which point is counted instead because it has the same config."""
    duplicates = seeds.find_duplicates(sweep)
    notes = {}
    for row in sweep.rows:
        notes[row.number] = row.reason or ''
        if row.number in duplicates:
            reason = row.reason or f'its config is that of point {duplicates[row.number]}'
            notes[row.number] = f'{reason}, counted once'
    return notes


def _exact_text(value: Any) -> str:
    """Format a value without loss, as the command line accepts it."""
    match value:
        case None:
            return ''
        case tuple():
            return ','.join(map(_exact_text, value))
        case str():
            return value
        case float():
            return repr(value)
    return format_value(value)


def print_sweep(sweep: SweepResults, width: int | None = None) -> None:
    """Print a table of the points, a table of the groups if a group has several seeds, and the best group.

    width: characters in a line; if None, the width of the terminal, or `PIPE_WIDTH` if there is none.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width, highlight=False)
    if width is None and not console.is_terminal:
        console.width = PIPE_WIDTH
    data = comparison_data(sweep)
    header, rows = page.points_table(data)
    reasons = [[point['reason'] or ''] for point in data['points']]
    console.print(_table([*header, 'reason'], [[*row, *reason] for row, reason in zip(rows, reasons, strict=True)]))
    if any(group['of'] > 1 for group in data['groups']):
        console.print()
        console.print(_table(*page.seeds_table(data)))
    if data['best'] is not None:
        group = data['groups'][data['best']]
        score = page.format_mean(group['mean'], group['error'], group['done'])
        console.print()
        console.print(Text(f'best {sweep.metric}: {score}, {group["label"]}', style='bold'), soft_wrap=True)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> 'Table':
    """Return a table without frames: texts left-aligned, numbers right-aligned, a status in its colour."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style='dim')
    for name in header:
        justify = 'left' if name in ('status', 'reason') else 'right'
        table.add_column(Text(format_value(name)), justify=justify, overflow='fold')
    for row in rows:
        table.add_row(*(Text(cell, style=STATUS_STYLES.get(cell, '') if name == 'status' else '')
                        for name, cell in zip(header, row, strict=True)))  # fmt: skip
    return table


def page_data(sweep: SweepResults) -> dict[str, Any]:
    """Return everything that the page shows, in the form of `attnlab.report.sweep_page.write_sweep_page`."""
    groups, records = seeds.group_by_seed(sweep), {row.number: metrics.read_metrics(row.run) for row in sweep.rows}
    best = seeds.best_group_index(sweep, groups)
    winner = None
    if best is not None:
        row = groups[best].done[0]
        winner = {'number': row.number, 'config': configs.load_config(row.run / 'config.json').to_dict()}
    return comparison_data(sweep) | {
        'records': records,
        'winner': winner,
        'sensitivity': sensitivity.sensitivity_lines(groups, records),
    }


def comparison_data(sweep: SweepResults) -> dict[str, Any]:
    """Return the part of `page_data` for the terminal: the points, the groups and the index of the best group."""
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
