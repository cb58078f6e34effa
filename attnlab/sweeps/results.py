"""What came of a sweep: a table for the terminal and one for other programs, and a page.

Reads `outcome.read` and, of the runs, config.json and metrics.jsonl; nothing here trains.
"""

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab import configs, files
from attnlab.report import sweep as page
from attnlab.report.values import described, shown
from attnlab.sweeps import outcome, seeds, sensitivity
from attnlab.sweeps.outcome import Sweep
from attnlab.train import metrics

if TYPE_CHECKING:
    from rich.table import Table

STYLES = {'done': 'green', 'running': 'cyan', 'waiting': 'dim', 'failed': 'bold red', 'pruned': 'yellow'}

PIPE = 200
"""Characters a line where there is no terminal whose width could be asked."""


def report(folder: str | os.PathLike) -> Path:
    """Writes DIR/table.csv and the page DIR/report.html of a sweep as it stands; returns the page's path.

    Raises UserError where the directory holds no sweep.
    """
    sweep = outcome.read(folder)
    write_table(sweep)
    return page.write(sweep.folder / 'report.html', sweep.folder.resolve().name, plain(sweep))


def write_table(sweep: Sweep) -> Path:
    """Writes DIR/table.csv, a line a point, values as the command line takes them; returns its path."""
    varied, notes = seeds.values(sweep), _notes(sweep)
    keys = list(next(iter(varied.values()), {}))
    path = sweep.folder / 'table.csv'
    with files.replaced(path) as part, part.open('w', encoding='utf-8', newline='') as file:
        lines = csv.writer(file)
        lines.writerow(['number', 'status', *keys, f'best_{sweep.metric or "score"}', 'best_step', 'seconds', 'reason'])
        for row in sweep.rows:
            cells = [_exact(value) for value in varied[row.number].values()]
            lines.writerow([row.number, row.status, *cells, row.value, row.step, row.seconds, notes[row.number]])
    return path


def _notes(sweep: Sweep) -> dict[int, str]:
    """By number, the reason of what failed, and which point counts for one that has its config too."""
    again = {number: f'its config is that of point {one}' for number, one in seeds.copies(sweep).items()}
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
    return shown(value)


def show(sweep: Sweep, width: int | None = None) -> None:
    """Prints every point, the groups where one has several seeds, and the best.

    width: in characters; the terminal's if None, where there is one.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width, highlight=False)
    if width is None and not console.is_terminal:
        console.width = PIPE
    found = compared(sweep)
    header, rows = page.points(found)
    reasons = [[point['reason'] or ''] for point in found['points']]
    console.print(_table([*header, 'reason'], [[*row, *reason] for row, reason in zip(rows, reasons, strict=True)]))
    if any(group['of'] > 1 for group in found['groups']):
        console.print()
        console.print(_table(*page.seeds(found)))
    if found['best'] is not None:
        group = found['groups'][found['best']]
        score = page.spread(group['mean'], group['error'], group['done'])
        console.print()
        console.print(Text(f'best {sweep.metric}: {score}, {group["label"]}', style='bold'), soft_wrap=True)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> 'Table':
    """A table without frames: texts at the left, numbers at the right, a status in its colour."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style='dim')
    for name in header:
        side = 'left' if name in ('status', 'reason') else 'right'
        table.add_column(Text(shown(name)), justify=side, overflow='fold')
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, '') if name == 'status' else '')
                        for name, cell in zip(header, row, strict=True)))  # fmt: skip
    return table


def plain(sweep: Sweep) -> dict[str, Any]:
    """All of a sweep that its page shows, as `attnlab.report.sweep.write` takes it."""
    groups, records = seeds.groups(sweep), {row.number: metrics.read(row.run) for row in sweep.rows}
    at = seeds.best(sweep, groups)
    winner = None if at is None else groups[at].done[0]
    return compared(sweep) | {
        'records': records,
        'winner': winner and {'number': winner.number, 'config': configs.read(winner.run / 'config.json').to_dict()},
        'sensitivity': sensitivity.lines(groups, records),
    }


def compared(sweep: Sweep) -> dict[str, Any]:
    """The points, the groups and the best of `plain`."""
    groups, varied, notes = seeds.groups(sweep), seeds.values(sweep), _notes(sweep)
    keys = list(groups[0].values) if groups else []
    return {
        'summary': ' · '.join([sweep.config, ', '.join(sweep.sweep), *('='.join(pair) for pair in sweep.overrides)]),
        'metric': sweep.metric,
        'direction': sweep.direction,
        'keys': dict(zip(keys, seeds.named(dict.fromkeys(keys)), strict=True)),
        'points': [
            {
                'number': row.number, 'status': row.status, 'values': varied[row.number], 'value': row.value,
                'step': row.step, 'seconds': row.seconds, 'reason': notes[row.number],
            }
            for row in sweep.rows
        ],
        'groups': [
            {
                'label': described(seeds.named(group.values)) or 'the only one', 'values': group.values,
                'mean': group.mean, 'error': group.error, 'failed': any(row.status == 'failed' for row in group.rows),
                'numbers': [row.number for row in group.rows], 'done': len(group.done), 'of': len(group.rows),
            }
            for group in groups
        ],
        'best': seeds.best(sweep, groups),
    }  # fmt: skip
