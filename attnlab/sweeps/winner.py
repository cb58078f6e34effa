"""The config of a sweep's best point as an experiment file: whole, so that it stays what it was when others change."""

import os
import textwrap
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from attnlab import configs, files
from attnlab.errors import UserError
from attnlab.report.sweep_page import format_mean
from attnlab.report.values import describe_values
from attnlab.sweeps import seeds
from attnlab.sweeps.sweep_files import PointRow, SweepResults

LINE_LENGTH = 120
_FIRST = {'task': 0, 'name': 0, 'seed': 1}

_FUNCTION = '''

from ml_collections import ConfigDict


def get_config(arg: str = '') -> ConfigDict:
    """It takes no argument."""
    if arg:
        raise ValueError(f"the argument is {arg!r}; expected ''")
    config = ConfigDict()
'''


def write_best_config(sweep: SweepResults, path: str | os.PathLike) -> PointRow:
    """Writes an experiment file that `attnlab.configs.load` turns into the best point's config; returns that point.

    Of the best group it is the first seed's: to choose the luckiest would be to choose noise.

    Raises UserError where no point is done, where the name is that of no experiment file or of one that there is.
    """
    path = Path(path)
    if path.suffix != '.py':
        raise UserError(f'--best expects the name of an experiment file, FILE.py, got {str(path)!r}')
    if path.exists():
        raise UserError(f'--best={path} exists already; expected the name of a new file')
    if not path.parent.is_dir():
        raise UserError(f'--best={path}: there is no folder {path.parent}')
    found = seeds.group_by_seed(sweep)
    at = seeds.best_group_index(sweep, found)
    if at is None:
        raise UserError(f'{sweep.folder}: no point is done yet, so there is no best one')
    files.write_file(path, _text(sweep, found[at], path))
    return found[at].done[0]


def _text(sweep: SweepResults, group: seeds.SeedGroup, path: Path) -> str:
    row = group.done[0]
    config = configs.load_config(row.run / 'config.json')
    fields = ''.join(f'    config[{key!r}] = {_literal(value)}\n' for key, value in _ordered(config))
    return f'"""{_docstring(sweep, group, path)}"""{_FUNCTION}{fields}    return config\n'


def _docstring(sweep: SweepResults, group: seeds.SeedGroup, path: Path) -> str:
    row = group.done[0]
    done = sum(each.status == 'done' for each in sweep.rows)
    score = f'{sweep.metric} {format_mean(group.mean or 0.0, group.error, len(group.done))}'
    lead = f'The best of --sweep={",".join(sweep.sweep)} of {sweep.config}: {score}.'
    changed = dict(sweep.overrides) | row.overrides
    about = [f'Point {row.number} of {len(sweep.rows)}, of which {done} are done; what it sets in that file: '
             f'{describe_values(changed) or "nothing"}.']  # fmt: skip
    if len(group.done) > 1:
        about.append(f'It is the first of the seeds, its own best {sweep.metric} {row.value:.6g}, at step {row.step}.')
    command = f'attnlab train --config={path} --workdir=runs/{path.stem}'
    paragraphs = [textwrap.fill(lead, LINE_LENGTH - 3), command, textwrap.fill(' '.join(about), LINE_LENGTH)]
    return '\n\n'.join(paragraphs).replace('\\', '\\\\').replace('"""', "'''") + '\n'


def _literal(value: Any, indent: str = '    ') -> str:
    """Python that gives the value, a field of a section on a line."""
    if not isinstance(value, ConfigDict):
        return repr(value)
    inner = ''.join(f'{indent}    {key!r}: {_literal(each, indent + "    ")},\n' for key, each in _ordered(value))
    return f'{{\n{inner}{indent}}}' if inner else '{}'


def _ordered(section: ConfigDict) -> list[tuple[str, Any]]:
    """Fields by their names (a config keeps no order): what says which kind of thing it is first, sections last."""
    return sorted(section.items(), key=lambda field: (_FIRST.get(field[0], 9), isinstance(field[1], ConfigDict)))
