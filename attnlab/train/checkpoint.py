"""Checkpoints of a run: the latest and the best step, each whole and checked.

A checkpoint holds three items: `params`, `optimizer`, and `progress`, what the loop knows besides (JSON).
"""

import hashlib
import logging
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from attnlab.errors import UserError


class Progress(NamedTuple):
    """Where a run stands: the best score so far, its step, and how many evaluations have passed since."""

    best: float | None = None
    best_step: int | None = None
    waited: int = 0


class Saved(NamedTuple):
    """One restored checkpoint."""

    step: int
    params: Any
    optimizer: Any
    progress: Progress


@contextmanager
def manager(workdir: Path, read_only: bool = False):
    """The checkpoint manager of a run's directory, for `save`, `latest` and `best`."""
    # Cleaning up runs in a thread of its own: one who only reads may be gone before it, and it ends in a traceback.
    options = ocp.CheckpointManagerOptions(
        cleanup_tmp_directories=not read_only,
        enable_async_checkpointing=False,
        create=not read_only,
    )
    handlers = {
        'params': ocp.StandardCheckpointHandler(),
        'optimizer': ocp.StandardCheckpointHandler(),
        'progress': ocp.JsonCheckpointHandler(),
    }
    folder = (Path(workdir) / 'checkpoints').absolute()
    with ocp.CheckpointManager(folder, options=options, item_handlers=handlers) as opened:
        yield opened


def save(manager: ocp.CheckpointManager, saved: Saved, keep: int = 2) -> None:
    """Writes a step that is newer than all others, then deletes all but the newest `keep` and the best one."""
    newest = manager.latest_step()
    if newest is not None and saved.step <= newest:
        # Orbax would return False and save nothing.
        raise ValueError(f'step {saved.step} is not newer than the saved step {newest}')
    sums = {'params_sha256': digest(saved.params), 'optimizer_sha256': digest(saved.optimizer)}
    progress = saved.progress._asdict() | sums
    manager.save(
        saved.step,
        args=ocp.args.Composite(
            params=ocp.args.StandardSave(saved.params),
            optimizer=ocp.args.StandardSave(saved.optimizer),
            progress=ocp.args.JsonSave(progress),
        ),
    )
    for step in manager.all_steps()[:-keep]:
        if step != saved.progress.best_step:
            manager.delete(step)


def latest(manager: ocp.CheckpointManager, params: Any, optimizer: Any) -> Saved | None:
    """The newest step that is whole, in the form of the given trees of shapes; None if none was ever saved.

    A damaged step is passed over with a warning for the one before it.
    """
    return _newest_of(manager, manager.all_steps(), lambda step: _restore(manager, step, params, optimizer))


def best(manager: ocp.CheckpointManager, params: Any) -> Saved | None:
    """The parameters of the best step, or of the newest whole one where there is no best; `optimizer` is None."""
    steps = manager.all_steps()
    restored = _newest_of(manager, steps, lambda step: _restore(manager, step, params, None))
    if restored is None or restored.progress.best_step in (None, restored.step):
        return restored
    chosen = _newest_of(manager, [restored.progress.best_step], lambda step: _restore(manager, step, params, None))
    return chosen or restored


def _newest_of(manager: ocp.CheckpointManager, steps: Any, restore: Callable[[int], Saved]) -> Saved | None:
    for step in sorted(steps, reverse=True):
        try:
            return restore(step)
        except UserError:
            raise
        except Exception as reason:  # orbax raises many kinds for missing, empty and truncated files
            logging.warning('checkpoint of step %d is damaged and passed over: %s', step, str(reason).splitlines()[0])
    if steps:
        raise UserError(f'no checkpoint in {manager.directory} can be read; tried steps {sorted(steps)}')
    return None


def _restore(manager: ocp.CheckpointManager, step: int, params: Any, optimizer: Any) -> Saved:
    progress = dict(manager.restore(step, args=ocp.args.Composite(progress=ocp.args.JsonRestore()))['progress'])
    trees = {'params': params} if optimizer is None else {'params': params, 'optimizer': optimizer}
    for name, tree in trees.items():
        check_shapes(f'checkpoint of step {step}: {name}', manager.item_metadata(step)[name], tree)
    # Without a sharding an array would come back on the devices that it was saved from.
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    where = lambda x: getattr(x, 'sharding', None) or here
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(x)), trees)
    restored = manager.restore(
        step, args=ocp.args.Composite(**{name: ocp.args.StandardRestore(tree) for name, tree in placed.items()})
    )
    for name in trees:
        if digest(restored[name]) != progress[f'{name}_sha256']:
            raise ValueError(f'{name} do not have the checksum they were saved with')
    state = Progress(**{name: progress[name] for name in Progress._fields})
    return Saved(step, restored['params'], restored['optimizer'] if 'optimizer' in trees else None, state)


def check_shapes(where: str, have: Any, want: Any) -> None:
    """Raises UserError naming the first array of a tree whose shape is not the one in another."""
    stored, wanted = (
        {_path(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
        for tree in (have, want)
    )
    for path in sorted(stored.keys() | wanted.keys()):
        if stored.get(path) != wanted.get(path):
            came, expected = stored.get(path), wanted.get(path)
            raise UserError(f'{where}/{path} has shape {came}; this config expects {expected}')


def _path(path: Any) -> str:
    """Keys, indices and field names alike, since what is on disk has lost the difference."""
    return '/'.join(str(getattr(part, 'key', getattr(part, 'name', getattr(part, 'idx', part)))) for part in path)


def digest(tree: Any) -> str:
    """SHA-256 over paths, dtypes and bytes of all leaves."""
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.asarray(leaf)
        total.update(f'{_path(path)} {array.dtype} {array.shape}'.encode())
        total.update(array.tobytes())
    return total.hexdigest()
