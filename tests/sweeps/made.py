"""Sweep directories with given points and outcomes, as workers would leave them, written without training."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from attnlab.configs import Section, config_dict, config_to_json, field


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    shape: tuple[int, ...] = field((2, 3), 'sizes')
    words: tuple[str, ...] = field(('x',), 'words')
    note: str = field('a "b" c', 'note')


@dataclass(frozen=True, kw_only=True)
class Inner(Section):
    rate: float = field(0.1, 'rate')


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    layers: int = field(2, 'layers')
    order: str = field('pre', 'order')
    tied: bool = field(True, 'tied')
    inner: Inner = field(Inner(), 'inner')


@dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    learning_rate: float = field(0.004, 'rate')
    warmup: str = field('100 steps', 'duration')


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    task: str = field('tests.sweeps.made:Task', 'task')
    seed: int = field(0, 'seed')
    data: Data = field(Data(), 'data')
    model: Model = field(Model(), 'model')
    optimizer: Optimizer = field(Optimizer(), 'optimizer')


class Task:
    Config = Config


BASE = config_to_json(config_dict(Config()))
DIVERGED = 'step 7: the loss is nan; the newest checkpoint is from step 5. Try a lower optimizer.learning_rate'


def make_point(
    overrides, status='done', value=None, step=None, seconds=None, reason=None, metrics=None, diverged_at=None
):
    """Return a point for `write_sweep`.  metrics: records of its run; None if no run was started."""
    ended = status in ('done', 'failed', 'pruned')
    return {
        'overrides': overrides, 'status': status, 'value': value, 'step': step, 'reason': reason, 'metrics': metrics,
        'seconds': 10.0 if seconds is None and ended else seconds, 'diverged_at': diverged_at,
    }  # fmt: skip


def train_records(*losses, every=1):
    """Return training records with these losses, from step 1, `every` steps apart."""
    return [{'step': 1 + i * every, 'split': 'train', 'loss': loss} for i, loss in enumerate(losses)]


def valid_record(step, **scores):
    """Return the record of an evaluation."""
    return {'step': step, 'split': 'valid', **scores}


def write_sweep(
    folder, points, metric='loss', direction='min', config='experiments/a.py', overrides=(), names=('rates',)
):
    """Write the directory of a sweep with points from `make_point`, numbered in their order; return the directory."""
    folder = Path(folder)
    listed = [{'number': i, 'name': f'p{i}', 'overrides': point['overrides']} for i, point in enumerate(points)]
    spec = {'config': config, 'sweep': list(names), 'overrides': overrides, 'points': listed}
    write_json(folder / 'sweep.json', spec)
    for i, point in enumerate(points):
        point_folder = folder / 'points' / f'p{i}'
        if point['status'] == 'running':
            running = {'running': True, 'host': 'a', 'pid': 1, 'started': time.time(), 'seconds': 0.0}
            write_json(point_folder / 'running.json', running)
        elif point['status'] != 'waiting':
            keys = ('status', 'value', 'step', 'seconds', 'reason', 'diverged_at')
            outcome = {'metric': metric, 'direction': direction} | {key: point[key] for key in keys}
            write_json(point_folder / 'outcome.json', outcome)
        if point['metrics'] is not None:
            write_json(point_folder / 'run/config.json', apply_overrides(BASE, point['overrides']))
            lines = ''.join(json.dumps(record) + '\n' for record in point['metrics'])
            (point_folder / 'run/metrics.jsonl').write_text(lines)
    return folder


def apply_overrides(tree, overrides):
    """Return a copy of a JSON tree with values set by dotted key."""
    tree = json.loads(json.dumps(tree))
    for key, value in overrides.items():
        *path, name = key.split('.')
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return tree


def write_json(path, tree):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree))
