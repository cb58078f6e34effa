"""The directory of a sweep, as its workers would leave it, made by hand."""

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


def point(overrides, status='done', value=None, step=None, seconds=None, reason=None, metrics=None, diverged_at=None):
    """metrics: records of its run; None where no run was begun."""
    ended = status in ('done', 'failed', 'pruned')
    return {
        'overrides': overrides, 'status': status, 'value': value, 'step': step, 'reason': reason, 'metrics': metrics,
        'seconds': 10.0 if seconds is None and ended else seconds, 'diverged_at': diverged_at,
    }  # fmt: skip


def train(*losses, every=1):
    return [{'step': 1 + at * every, 'split': 'train', 'loss': loss} for at, loss in enumerate(losses)]


def valid(step, **scores):
    return {'step': step, 'split': 'valid', **scores}


def sweep(folder, points, metric='loss', direction='min', config='experiments/a.py', overrides=(), names=('rates',)):
    """Writes the directory of points made by `point`, numbered in their order; returns it."""
    folder = Path(folder)
    listed = [{'number': at, 'name': f'p{at}', 'overrides': each['overrides']} for at, each in enumerate(points)]
    write(folder / 'sweep.json', {'config': config, 'sweep': list(names), 'overrides': overrides, 'points': listed})
    for at, each in enumerate(points):
        place = folder / 'points' / f'p{at}'
        if each['status'] == 'running':
            who = {'running': True, 'host': 'a', 'pid': 1, 'started': time.time(), 'seconds': 0.0}
            write(place / 'running.json', who)
        elif each['status'] != 'waiting':
            keys = ('status', 'value', 'step', 'seconds', 'reason', 'diverged_at')
            write(place / 'outcome.json', {'metric': metric, 'direction': direction} | {key: each[key] for key in keys})
        if each['metrics'] is not None:
            write(place / 'run/config.json', changed(BASE, each['overrides']))
            lines = ''.join(json.dumps(record) + '\n' for record in each['metrics'])
            (place / 'run/metrics.jsonl').write_text(lines)
    return folder


def changed(tree, overrides):
    tree = json.loads(json.dumps(tree))
    for key, value in overrides.items():
        *path, name = key.split('.')
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return tree


def write(path, tree):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree))
