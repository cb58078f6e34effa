"""Checkpoints of a run: the latest and the best step, each whole and checked.

A checkpoint holds three items: `params`, `optimizer`, and `progress`, what the loop knows besides (JSON).
"""

import glob
import hashlib
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from attnlab.errors import RunError, UserError
from attnlab.tasks.task import Params
from attnlab.train import checksum, processes

T = TypeVar('T')


class RunProgress(NamedTuple):
    """Where a run stands: the best score so far, its step, and how many evaluations have passed since."""

    best: float | None = None
    best_step: int | None = None
    waited: int = 0


class Checkpoint(NamedTuple):
    """One restored checkpoint."""

    step: int
    params: Params
    optimizer: Any
    progress: RunProgress


class _Array(NamedTuple):
    """What is noted of an array; a list of both in JSON."""

    shape: tuple[int, ...]
    checksum: str


class _Folder(type(epath.Path())):
    """A path in which no character of the folder's own name is a wildcard.

    etils joins the folder and the pattern of `glob` unescaped.  Orbax lists the parts of a checkpoint with it: in a
    folder such as 'run[1]' it found none and left the checkpoint without an index, which nothing could read.
    """

    def glob(self, pattern: str) -> Iterator['_Folder']:
        return map(type(self), glob.glob(os.path.join(glob.escape(os.fspath(self)), pattern)))


def checkpoint_folder(workdir: Path) -> epath.Path:
    """Path of a run's checkpoints; raises UserError for one that the libraries that save them write as another.

    tensorstore takes a backslash for a slash, and etils and orbax a folder 'gs:' for the start of a URL.
    """
    folder = (Path(workdir) / 'checkpoints').absolute()
    path, opened = os.fspath(folder), _Folder(folder)
    try:
        spec: Any = ts.KvStore.Spec({'driver': 'file', 'path': f'{path}/'}).to_json()
        same = spec['path'] == f'{path}/' and os.fspath(opened) == path and 'gs:/' not in path
    except (ValueError, RuntimeError):  # what tensorstore raises for a path that is not UTF-8
        same = False
    if not same:
        wanted = "a path in UTF-8 without backslashes and without a folder such as 'gs:'"
        raise UserError(f'checkpoints cannot be saved in {path!r}; expected {wanted}')
    return opened


@contextmanager
def checkpoint_manager(workdir: Path, read_only: bool = False):
    """The checkpoint manager of a run's directory, for `save_checkpoint`, `restore_latest` and `restore_best`; waits for the last save at the end.

    Raises RunError where that save has failed.
    """
    options = ocp.CheckpointManagerOptions(
        # Cleaning up runs in a thread of its own: who only reads may be gone before it, and it ends in a traceback.
        cleanup_tmp_directories=not read_only,
        enable_async_checkpointing=not read_only,
        create=not read_only,
        # One process lists the steps for all: what they see of a folder that they share may differ for a while.
        single_host_load_and_broadcast=not read_only,
        lightweight_initialize=True,  # without reading each step, which fails for a damaged one
        preservation_policy=SimpleNamespace(should_preserve=_preserved),  # type: ignore
    )
    handlers = {
        'params': ocp.StandardCheckpointHandler(),
        'optimizer': ocp.StandardCheckpointHandler(),
        'progress': ocp.JsonCheckpointHandler(),
    }
    opened = ocp.CheckpointManager(checkpoint_folder(workdir), options=options, item_handlers=handlers)
    with _quiet():
        try:
            yield opened
        finally:
            with _writing(opened):
                opened.close()


def list_steps(workdir: Path) -> list[int]:
    """The steps that stand in a run's directory under their own names, in order."""
    return sorted(int(path.name) for path in (workdir / 'checkpoints').glob('*') if path.name.isdecimal())


@contextmanager
def _quiet():
    """Without the tracebacks of writing threads that find, after the first error of a save, nobody waiting for them."""
    usual = sys.unraisablehook
    sys.unraisablehook = lambda what: None if 'Event loop is closed' in str(what.exc_value) else usual(what)
    try:
        yield
    finally:
        sys.unraisablehook = usual


def _preserved(steps: Sequence[Any], *, context: Any) -> list[bool]:
    """Of all steps, in order, the newest two and the best one, which the newest names.

    Orbax asks when a save begins, and deletes what is not preserved when it is complete.
    """
    return [step in steps[-2:] or step.step == steps[-1].metrics['best_step'] for step in steps]


@contextmanager
def _writing(manager: ocp.CheckpointManager):
    """Turns what goes wrong with files, now or in the save before this one, into one line."""
    try:
        yield
    except Exception as error:  # orbax and tensorstore raise many kinds, for a full disk among others
        raise RunError(f'a checkpoint could not be saved in {manager.directory}: {_line(error)}') from error


def _line(error: Exception) -> str:
    """The first line of an error, without the details that tensorstore puts behind it."""
    first = (str(error).strip() or repr(error)).splitlines()[0]
    return re.split(r' \[(?:tensorstore_spec|source locations|os_error_code)', first)[0]


def save_checkpoint(manager: ocp.CheckpointManager, saved: Checkpoint) -> None:
    """Saves a step that is newer than all others; then only the newest two and the best one are kept.

    Returns when there is a copy, which is written while training goes on.  Every process of a run calls it.

    Raises RunError where this save cannot begin, and where the one before has failed.
    """
    wait_for_save(manager)
    newest = manager.latest_step()
    if newest is not None and saved.step <= newest:
        # Orbax would return False and save nothing.
        raise ValueError(f'step {saved.step} is not newer than the saved step {newest}')
    # Orbax may keep a CPU's arrays as they are; the next step takes over their memory.
    trees = _copy({'params': saved.params, 'optimizer': saved.optimizer})
    record = _sealed(saved.progress._asdict() | {'arrays': {name: _described(tree) for name, tree in trees.items()}})
    items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
    with _writing(manager):
        manager.save(
            saved.step,
            args=ocp.args.Composite(**items, progress=ocp.args.JsonSave(record)),
            metrics={'best_step': saved.progress.best_step},  # for _preserved; written nowhere
        )


def wait_for_save(manager: ocp.CheckpointManager) -> None:
    """Waits for the last save; raises RunError where it has failed, and where the newest step cannot be read."""
    with _writing(manager):
        manager.wait_until_finished()
        newest = manager.latest_step()
        if newest is not None and processes.is_first_process():
            _check_readable(Path(manager.directory) / str(newest))


def _check_readable(folder: Path) -> None:
    """Opens every array of a step; raises ValueError for one that has not the shape that was saved.

    Orbax says nothing where it has written the arrays and not the index that finds them.  No array is read: that would
    need the memory of a second state.
    """
    record = _unsealed(json.loads((folder / 'progress' / 'metadata').read_bytes()))
    for name, arrays in record['arrays'].items():
        for (path, saved), opened in zip(arrays.items(), _opened(folder / name, arrays), strict=True):
            if (shape := opened.result().shape) != saved.shape:
                raise ValueError(f'step {folder.name}: {name}/{path} has shape {shape} once saved, not {saved.shape}')


def set_aside_damaged(manager: ocp.CheckpointManager, step: int) -> None:
    """Renames the damaged steps that are newer than the one that a run goes on from, so that it can save them again.

    Nothing is lost where they could not be read for some other reason.  Every process of a run calls it.
    """
    newer = [each for each in manager.all_steps() if each > step]
    for each in newer:
        folder = Path(manager.directory)
        names = (f'{each}.damaged' + (f'-{number}' if number else '') for number in itertools.count())
        name = next(name for name in names if not (folder / name).exists())
        logging.warning('checkpoint of step %d is now %s: the run goes on from step %d', each, folder / name, step)
        if processes.is_first_process():
            with _writing(manager):
                (folder / str(each)).rename(folder / name)
    if newer:
        processes.barrier('damaged checkpoints are set aside')
        manager.reload()


@jax.jit
def _copy(tree: T) -> T:
    return jax.tree.map(jnp.copy, tree)


def _described(tree: Params) -> dict[str, _Array]:
    """Shape and checksum of every array by its path."""
    shapes = {checksum.path_string(keys): leaf.shape for keys, leaf in _leaves(tree)}
    return {path: _Array(shapes[path], found) for path, found in checksum.tree_checksums(tree).items()}


def _sealed(record: dict[str, Any]) -> dict[str, Any]:
    """With a checksum of itself."""
    return record | {'sha256': hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()}


def restore_latest(manager: ocp.CheckpointManager, params: Params, optimizer: Any) -> Checkpoint | None:
    """The newest step that is whole, in the form of the given trees of shapes; None if none was ever saved.

    Each array comes back as its shape's `sharding` says, on the first device if it has none, whatever devices it was
    saved from.  A damaged step is passed over with a warning for the one before it.  Every process of a run calls it.

    Raises UserError if all are damaged, and for shapes that are not the saved ones.
    """
    return _newest_of(manager, manager.all_steps(), {'params': params, 'optimizer': optimizer})


def restore_best(manager: ocp.CheckpointManager, params: Params) -> Checkpoint | None:
    """The parameters of the best step, or of the newest whole one where there is no best; `optimizer` is None."""
    restored = _newest_of(manager, manager.all_steps(), {'params': params})
    if restored is None or restored.progress.best_step in (None, restored.step):
        return restored
    return _newest_of(manager, [restored.progress.best_step], {'params': params}, restored)


def _newest_of(
    manager: ocp.CheckpointManager, steps: Sequence[int], trees: dict[str, Params], otherwise: Checkpoint | None = None
) -> Checkpoint | None:
    with _writing(manager):
        manager.wait_until_finished()  # what is being saved counts
    for step in sorted(steps, reverse=True):
        folder = Path(manager.directory) / str(step)
        found = _restore(folder, trees)
        if isinstance(found, Checkpoint):
            return found
        state = 'damaged' if folder.is_dir() else 'missing'  # a training that goes on deletes steps, and so do users
        logging.warning('checkpoint of step %d is %s and passed over: %s', step, state, found)
    if steps and otherwise is None:
        raise UserError(f'no checkpoint in {manager.directory} can be read; tried steps {sorted(steps)}')
    return otherwise


def _restore(folder: Path, trees: dict[str, Params]) -> Checkpoint | str:
    """The step in a folder, or what is wrong with it."""
    record, restored, wrong = {}, {}, ''
    try:
        record = _unsealed(json.loads((folder / 'progress' / 'metadata').read_bytes()))
        for name, tree in trees.items():
            check_shapes(f'checkpoint of step {folder.name}: {name}', record['arrays'][name], tree)
            restored[name] = _read(folder / name, tree)
    except UserError:
        raise
    except Exception as error:  # files missing, empty, cut off: errors of many kinds
        wrong = _line(error)
    if not _all(not wrong):
        return wrong or 'another process cannot read it'
    for name, tree in restored.items():
        if changed := _changed(record, name, tree):
            return f'{changed} does not have the checksum that it was saved with'
    progress = RunProgress(**{name: record[name] for name in RunProgress._fields})
    return Checkpoint(int(folder.name), restored['params'], restored.get('optimizer'), progress)


def _unsealed(record: dict[str, Any]) -> dict[str, Any]:
    """The record that `_sealed` was given, each array described by an `_Array`; ValueError if it has changed since."""
    content = {name: value for name, value in record.items() if name != 'sha256'}
    if _sealed(content) != record:
        raise ValueError('progress does not have the checksum that it was saved with')
    arrays = {
        name: {path: _Array(tuple(shape), found) for path, (shape, found) in tree.items()}
        for name, tree in content['arrays'].items()
    }
    return content | {'arrays': arrays}


def _changed(record: dict[str, Any], name: str, tree: Params) -> str | None:
    """The first array of a tree whose checksum is not the saved one."""
    saved = record['arrays'][name]
    found = checksum.tree_checksums(tree)
    return next((f'{name}/{path}' for path in found if found[path] != saved[path].checksum), None)


def _read(folder: Path, tree: T) -> T:
    """The arrays of an item, each process its own parts.

    Not by orbax, whose processes wait for one that cannot read its part, and whose threads go on after the first error
    into tracebacks of their own.
    """
    here = SingleDeviceSharding(jax.local_devices()[0])
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = [checksum.path_string(keys) for keys, _ in leaves]
    reading = []
    for (_, leaf), path, array in zip(leaves, paths, _opened(folder, paths), strict=True):
        stored = array.result()
        if stored.dtype.numpy_dtype != leaf.dtype:
            raise ValueError(f'{path} has dtype {stored.dtype.name}; this config expects {leaf.dtype}')
        sharding = leaf.sharding or here
        indices = sharding.addressable_devices_indices_map(leaf.shape).values()
        reading.append((leaf.shape, sharding, {str(index): stored[index].read() for index in indices}))
    arrays = [
        jax.make_array_from_callback(shape, sharding, lambda index, parts=parts: parts[str(index)].result())
        for shape, sharding, parts in reading
    ]
    return jax.tree.unflatten(structure, arrays)


def _opened(folder: Path, paths: Iterable[str]) -> list[Any]:
    """Futures of the arrays of an item, opened to read."""
    kvstore = {'driver': 'ocdbt', 'base': {'driver': 'file', 'path': f'{folder}/'}}
    names = (path.replace('/', '.') for path in paths)
    return [ts.open({'driver': 'zarr', 'kvstore': kvstore | {'path': f'{name}/'}}, read=True) for name in names]


def _all(fine: bool) -> bool:
    """Whether it is fine in all processes."""
    return fine if jax.process_count() == 1 else bool(np.all(multihost_utils.process_allgather(np.array(fine))))


def check_shapes(where: str, have: Params, want: Params) -> None:
    """Raises UserError naming the first array of a tree whose shape is not the one in another."""
    stored, wanted = (
        {checksum.path_string(keys): tuple(leaf.shape) for keys, leaf in _leaves(tree)} for tree in (have, want)
    )
    for path in sorted(stored.keys() | wanted.keys()):
        if stored.get(path) != wanted.get(path):
            came, expected = stored.get(path), wanted.get(path)
            raise UserError(f'{where}/{path} has shape {came}; this config expects {expected}')


def _leaves(tree: Params) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, _Array))[0]
