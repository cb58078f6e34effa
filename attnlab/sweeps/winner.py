"""Writing the config of a sweep's best point as an experiment file.

The file holds the complete config, so later changes to the swept experiment do not affect it.
"""

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
_FIELD_ORDER = {'task': 0, 'name': 0, 'seed': 1}
"""Fields that come first in their section."""

_FUNCTION = '''

from ml_collections import ConfigDict


def get_config(arg: str = '') -> ConfigDict:
    """Return the config; `arg` must be empty."""
    if arg:
        raise ValueError(f"the argument is {arg!r}; expected ''")
    config = ConfigDict()
'''


def write_best_config(sweep: SweepResults, path: str | os.PathLike) -> PointRow:
    """Write an experiment file from which `attnlab.configs.load_experiment` returns the best point's config.

    Returns the best point: the first seed of the best group, because the seed with the best score would be best by
    chance.

    Raises UserError if no point is done, the name does not end in .py, the file exists, or its folder does not.
    """
    path = Path(path)
    if path.suffix != '.py':
        raise UserError(f'--best expects the name of an experiment file, FILE.py, got {str(path)!r}')
    if path.exists():
        raise UserError(f'--best={path} exists already; expected the name of a new file')
    if not path.parent.is_dir():
        raise UserError(f'--best={path}: there is no folder {path.parent}')
    groups = seeds.group_by_seed(sweep)
    best = seeds.best_group_index(sweep, groups)
    if best is None:
        raise UserError(f'{sweep.folder}: no point is done yet, so there is no best one')
    files.write_file(path, _experiment_text(sweep, groups[best], path))
    return groups[best].done[0]


def _experiment_text(sweep: SweepResults, group: seeds.SeedGroup, path: Path) -> str:
    config = configs.load_config(group.done[0].run / 'config.json')
    fields = ''.join(f'    config[{key!r}] = {_literal(value)}\n' for key, value in _ordered_fields(config))
    return f'"""{_docstring(sweep, group, path)}"""{_FUNCTION}{fields}    return config\n'


def _docstring(sweep: SweepResults, group: seeds.SeedGroup, path: Path) -> str:
    row = group.done[0]
    done = sum(other.status == 'done' for other in sweep.rows)
    score = f'{sweep.metric} {format_mean(group.mean or 0.0, group.error, len(group.done))}'
    title = f'Best config of --sweep={",".join(sweep.sweep)} of {sweep.config}: {score}.'
    command = f'attnlab train --config={path} --workdir=runs/{path.stem}'
    changes = describe_values(dict(sweep.overrides) | row.overrides) or 'none'
    details = f'Point {row.number} of {len(sweep.rows)}, of which {done} are done. Changes to that file: {changes}.'
    if len(group.done) > 1:
        details += f' This is the first seed of its group; its own best {sweep.metric} is {row.value:.6g}, '
        details += f'at step {row.step}.'
    paragraphs = [textwrap.fill(title, LINE_LENGTH - 3), command, textwrap.fill(details, LINE_LENGTH)]
    return '\n\n'.join(paragraphs).replace('\\', '\\\\').replace('"""', "'''") + '\n'


def _literal(value: Any, indent: str = '    ') -> str:
    """Return Python source of a value; a section becomes a dict with one field in each line."""
    if not isinstance(value, ConfigDict):
        return repr(value)
    fields = _ordered_fields(value)
    lines = ''.join(f'{indent}    {key!r}: {_literal(inner, indent + "    ")},\n' for key, inner in fields)
    return f'{{\n{lines}{indent}}}' if lines else '{}'


def _ordered_fields(section: ConfigDict) -> list[tuple[str, Any]]:
    """Return the fields of a section by name: first those in `_FIELD_ORDER`, last the sections inside it."""
    return sorted(section.items(), key=lambda field: (_FIELD_ORDER.get(field[0], 9), isinstance(field[1], ConfigDict)))
