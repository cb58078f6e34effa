"""What came of a sweep: a table for the terminal and one for other programs, and a page.

Reads `outcome.read` and, of the runs, config.json and metrics.jsonl; nothing here trains.
"""

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab import configs, files
from attnlab.report import sweep as page
from attnlab.report.values import described, shown
from attnlab.sweeps import outcome, seeds, sensitivity
from attnlab.sweeps.outcome import Sweep
from attnlab.train import metrics

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
    if isinstance(value, tuple):
        return ','.join(map(_exact, value))
    if isinstance(value, str):
        return value
    return repr(value) if isinstance(value, float) else _cell(value)


def _cell(value: Any) -> str:
    return '' if value is None else shown(value)


def show(sweep: Sweep, width: int | None = None) -> None:
    """Prints every point, the groups where one has several seeds, and the best.

    width: in characters; the terminal's if None, where there is one.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width, highlight=False)
    if width is None and not console.is_terminal:
        console.width = PIPE
    groups = seeds.groups(sweep)
    console.print(_points(sweep))
    if any(len(group.rows) > 1 for group in groups):
        console.print()
        console.print(_groups(sweep, groups))
    at = seeds.best(sweep, groups)
    if at is not None:
        what = described(seeds.named(groups[at].values)) or f'point {groups[at].done[0].number}'
        score = page.spread(groups[at].mean or 0.0, groups[at].error, len(groups[at].done))
        console.print()
        console.print(Text(f'best {sweep.metric}: {score}, {what}', style='bold'), soft_wrap=True)


def _points(sweep: Sweep) -> Any:
    from rich.text import Text

    varied, notes = [seeds.named(each) for each in seeds.values(sweep).values()], _notes(sweep)
    names = list(varied[0]) if varied else []
    table = _table(['point', 'status', *names, f'best {sweep.metric or "score"}', 'step', 'time'], left=1)
    table.add_column('reason', overflow='fold')
    for row, each in zip(sweep.rows, varied, strict=True):
        step = '' if row.step is None else str(row.step)
        time = '' if row.seconds is None else page.duration(row.seconds)
        cells = [*map(_cell, each.values()), page.number(row.value), step, time, notes[row.number]]
        table.add_row(str(row.number), Text(row.status, style=STYLES[row.status]), *map(Text, cells))
    return table


def _groups(sweep: Sweep, groups: Sequence[seeds.Group]) -> Any:
    from rich.text import Text

    table = _table([*seeds.named(groups[0].values), f'mean {sweep.metric or "score"}', 'standard error', 'seeds'])
    for group in groups:
        numbers = [page.number(group.mean), page.number(group.error), f'{len(group.done)} of {len(group.rows)}']
        table.add_row(*map(Text, [*map(_cell, group.values.values()), *numbers]))
    return table


def _table(names: Sequence[str], left: int | None = None) -> Any:
    """A table without frames, its columns at the right but for the one of number `left`."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style='dim')
    for at, name in enumerate(names):
        table.add_column(Text(shown(name)), justify='left' if at == left else 'right', overflow='fold')
    return table


def plain(sweep: Sweep) -> dict[str, Any]:
    """All of a sweep that its page shows, as `attnlab.report.sweep.write` takes it."""
    groups, varied, notes = seeds.groups(sweep), seeds.values(sweep), _notes(sweep)
    records = {row.number: metrics.read(row.run) for row in sweep.rows}
    at = seeds.best(sweep, groups)
    keys = list(groups[0].values) if groups else []
    winner = None if at is None else groups[at].done[0]
    return {
        'summary': ' · '.join([sweep.config, ', '.join(sweep.sweep), *('='.join(pair) for pair in sweep.overrides)]),
        'metric': sweep.metric,
        'direction': sweep.direction,
        'keys': dict(zip(keys, seeds.named(dict.fromkeys(keys)), strict=True)),
        'points': [
            {
                'number': row.number, 'status': row.status, 'values': varied[row.number], 'value': row.value,
                'step': row.step, 'seconds': row.seconds, 'reason': notes[row.number], 'records': records[row.number],
            }
            for row in sweep.rows
        ],
        'groups': [_plain(group) for group in groups],
        'best': at,
        'winner': winner and {'number': winner.number, 'config': configs.read(winner.run / 'config.json').to_dict()},
        'sensitivity': sensitivity.lines(groups, records),
    }  # fmt: skip


def _plain(group: seeds.Group) -> dict[str, Any]:
    return {
        'label': described(seeds.named(group.values)) or 'the only one', 'values': group.values, 'mean': group.mean,
        'error': group.error, 'failed': any(row.status == 'failed' for row in group.rows),
        'numbers': [row.number for row in group.rows], 'done': len(group.done), 'of': len(group.rows),
    }  # fmt: skip
