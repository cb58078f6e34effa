"""Checkpoints of a run: saved in the background, verified by checksums, the newest two and the best step kept.

A checkpoint holds three items: `params`, `optimizer`, and `progress` (JSON), the progress of the training loop.
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
    """Progress of a run.

    best: the best score so far.  best_step: its step.  waited: number of evaluations since then.
    """

    best: float | None = None
    best_step: int | None = None
    waited: int = 0


class Checkpoint(NamedTuple):
    """One checkpoint, restored or to be saved.

    params: the parameters to evaluate.
    optimizer: everything else that resuming needs; None if only the parameters were restored.
    """

    step: int
    params: Params
    optimizer: Any
    progress: RunProgress


class _ArrayRecord(NamedTuple):
    """Record of one array of a checkpoint; in JSON a list of the two."""

    shape: tuple[int, ...]
    checksum: str


class _Folder(type(epath.Path())):
    """A path whose `glob` treats the characters of the folder's own name literally.

    The `glob` of etils joins the folder and the pattern without escaping the folder.  Orbax lists the parts of a
    checkpoint with it: in a folder such as 'run[1]' it found no parts and wrote a checkpoint without an index, which
    could not be read.
    """

    def glob(self, pattern: str) -> Iterator['_Folder']:
        return map(type(self), glob.glob(os.path.join(glob.escape(os.fspath(self)), pattern)))


def checkpoint_folder(workdir: Path) -> epath.Path:
    """Return the folder of a run's checkpoints.

    Raises UserError for a path that the libraries below would change: tensorstore reads a backslash as a slash, and
    etils and orbax read a folder 'gs:' as the start of a URL.
    """
    absolute = (Path(workdir) / 'checkpoints').absolute()
    path, folder = os.fspath(absolute), _Folder(absolute)
    try:
        spec: Any = ts.KvStore.Spec({'driver': 'file', 'path': f'{path}/'}).to_json()
        is_unchanged = spec['path'] == f'{path}/' and os.fspath(folder) == path and 'gs:/' not in path
    except (ValueError, RuntimeError):  # raised by tensorstore for a path that is not UTF-8
        is_unchanged = False
    if not is_unchanged:
        expected = "a path in UTF-8 without backslashes and without a folder such as 'gs:'"
        raise UserError(f'checkpoints cannot be saved in {path!r}; expected {expected}')
    return folder


@contextmanager
def checkpoint_manager(workdir: Path, read_only: bool = False):
    """Yield the checkpoint manager of a run's directory, for the functions of this module.

    At the end it waits for the last save.  Raises RunError if that save has failed.
    """
    options = ocp.CheckpointManagerOptions(
        # The clean-up runs in its own thread and prints a traceback if the process ends first, which is likely for a
        # process that only reads.
        cleanup_tmp_directories=not read_only,
        enable_async_checkpointing=not read_only,
        create=not read_only,
        # One process lists the steps for all: on a shared file system, processes may see different lists for a while.
        single_host_load_and_broadcast=not read_only,
        lightweight_initialize=True,  # do not read each step at the start, which fails for a damaged one
        preservation_policy=SimpleNamespace(should_preserve=_steps_to_keep),  # type: ignore
    )
    handlers = {
        'params': ocp.StandardCheckpointHandler(),
        'optimizer': ocp.StandardCheckpointHandler(),
        'progress': ocp.JsonCheckpointHandler(),
    }
    manager = ocp.CheckpointManager(checkpoint_folder(workdir), options=options, item_handlers=handlers)
    with _suppress_event_loop_tracebacks():
        try:
            yield manager
        finally:
            with _raise_run_error(manager):
                manager.close()


def list_steps(workdir: Path) -> list[int]:
    """Return the steps of the checkpoints in a run's directory, in order, without those that were set aside."""
    return sorted(int(path.name) for path in (workdir / 'checkpoints').glob('*') if path.name.isdecimal())


@contextmanager
def _suppress_event_loop_tracebacks():
    """Suppress tracebacks of writing threads: after the first error of a save, their event loop is closed."""
    default_hook = sys.unraisablehook
    sys.unraisablehook = lambda info: None if 'Event loop is closed' in str(info.exc_value) else default_hook(info)
    try:
        yield
    finally:
        sys.unraisablehook = default_hook


def _steps_to_keep(steps: Sequence[Any], *, context: Any) -> list[bool]:
    """Return, for each step in order, whether to keep it: the newest two and the best one, which the newest names.

    Orbax calls this when a save begins, and deletes the other steps when the save is complete.
    """
    return [step in steps[-2:] or step.step == steps[-1].metrics['best_step'] for step in steps]


@contextmanager
def _raise_run_error(manager: ocp.CheckpointManager):
    """Raise RunError with a one-line message for a file error in this block or in the save before it."""
    try:
        yield
    except Exception as error:  # orbax and tensorstore raise many types, for a full disk among others
        raise RunError(f'a checkpoint could not be saved in {manager.directory}: {_first_line(error)}') from error


def _first_line(error: Exception) -> str:
    """Return the first line of an error message, without the details that tensorstore appends."""
    line = (str(error).strip() or repr(error)).splitlines()[0]
    return re.split(r' \[(?:tensorstore_spec|source locations|os_error_code)', line)[0]


def save_checkpoint(manager: ocp.CheckpointManager, checkpoint: Checkpoint) -> None:
    """Save a step that is newer than all others; afterwards only the newest two steps and the best one are kept.

    Returns when the state has been copied; the copy is written in the background.  Every process of a run must call
    this.

    Raises RunError if this save cannot begin, or if the previous one has failed.
    """
    wait_for_save(manager)
    newest = manager.latest_step()
    if newest is not None and checkpoint.step <= newest:
        # Orbax would return False and save nothing.
        raise ValueError(f'step {checkpoint.step} is not newer than the saved step {newest}')
    # On a CPU, orbax may write from the arrays themselves, and the next training step reuses their memory.
    trees = _copy({'params': checkpoint.params, 'optimizer': checkpoint.optimizer})
    arrays = {name: _array_records(tree) for name, tree in trees.items()}
    record = _add_checksum(checkpoint.progress._asdict() | {'arrays': arrays})
    items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
    with _raise_run_error(manager):
        manager.save(
            checkpoint.step,
            args=ocp.args.Composite(**items, progress=ocp.args.JsonSave(record)),
            metrics={'best_step': checkpoint.progress.best_step},  # for _steps_to_keep; not written to disk
        )


def wait_for_save(manager: ocp.CheckpointManager) -> None:
    """Wait for the last save.

    Raises RunError if it has failed, or if the newest step cannot be read.
    """
    with _raise_run_error(manager):
        manager.wait_until_finished()
        newest = manager.latest_step()
        if newest is not None and processes.is_first_process():
            _check_readable(Path(manager.directory) / str(newest))


def _check_readable(folder: Path) -> None:
    """Open every array of a step; raise ValueError if one does not have the shape that was saved.

    Orbax reports no error if it has written the arrays but not the index that locates them.  The arrays are opened and
    not read, as reading would need the memory of a second state.
    """
    record = _verify_record(json.loads((folder / 'progress' / 'metadata').read_bytes()))
    for name, arrays in record['arrays'].items():
        for (path, saved), opened in zip(arrays.items(), _open_arrays(folder / name, arrays), strict=True):
            if (shape := opened.result().shape) != saved.shape:
                raise ValueError(f'step {folder.name}: {name}/{path} has shape {shape} once saved, not {saved.shape}')


def set_aside_damaged(manager: ocp.CheckpointManager, step: int) -> None:
    """Rename the steps newer than `step`, from which a run continues, to `STEP.damaged`: the run will save them again.

    The newer steps are damaged.  They are not deleted, in case they could not be read for another reason.  Every
    process of a run must call this.
    """
    newer_steps = [newer for newer in manager.all_steps() if newer > step]
    for newer in newer_steps:
        folder = Path(manager.directory)
        names = (f'{newer}.damaged' + (f'-{number}' if number else '') for number in itertools.count())
        name = next(name for name in names if not (folder / name).exists())
        logging.warning('checkpoint of step %d is now %s: the run continues from step %d', newer, folder / name, step)
        if processes.is_first_process():
            with _raise_run_error(manager):
                (folder / str(newer)).rename(folder / name)
    if newer_steps:
        processes.barrier('damaged checkpoints are set aside')
        manager.reload()


@jax.jit
def _copy(tree: T) -> T:
    return jax.tree.map(jnp.copy, tree)


def _array_records(tree: Params) -> dict[str, _ArrayRecord]:
    """Return the shape and checksum of every array of a tree, by its path."""
    shapes = {checksum.path_string(keys): leaf.shape for keys, leaf in _flatten_with_path(tree)}
    return {path: _ArrayRecord(shapes[path], digits) for path, digits in checksum.tree_checksums(tree).items()}


def _add_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with a checksum of its own content."""
    return record | {'sha256': hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()}


def restore_latest(manager: ocp.CheckpointManager, params: Params, optimizer: Any) -> Checkpoint | None:
    """Restore the newest complete step; None if no step was ever saved.

    A damaged step is skipped with a warning, and the one before it is tried.  Every process of a run must call this.

    params, optimizer: trees of shapes in the form of the saved ones.  Each array is restored with the `sharding` of its
      shape, or on the first device if it has none; it may have been saved from other devices.

    Raises UserError if all steps are damaged, or if the shapes are not those that were saved.
    """
    return _restore_newest(manager, manager.all_steps(), {'params': params, 'optimizer': optimizer})


def restore_best(manager: ocp.CheckpointManager, params: Params) -> Checkpoint | None:
    """Restore the parameters of the best step, or of the newest complete step if there is no best one.

    params: tree of shapes, as in `restore_latest`.  The result has `optimizer` None.
    """
    newest = _restore_newest(manager, manager.all_steps(), {'params': params})
    if newest is None or newest.progress.best_step in (None, newest.step):
        return newest
    return _restore_newest(manager, [newest.progress.best_step], {'params': params}, newest)


def _restore_newest(
    manager: ocp.CheckpointManager, steps: Sequence[int], trees: dict[str, Params], default: Checkpoint | None = None
) -> Checkpoint | None:
    """Restore the newest complete one of some steps; `default` if there is none."""
    with _raise_run_error(manager):
        manager.wait_until_finished()  # a save in progress may be the newest step
    for step in sorted(steps, reverse=True):
        folder = Path(manager.directory) / str(step)
        restored = _restore(folder, trees)
        if isinstance(restored, Checkpoint):
            return restored
        # Missing: deleted by a training that is still running, or by a user.
        state = 'damaged' if folder.is_dir() else 'missing'
        logging.warning('checkpoint of step %d is %s and skipped: %s', step, state, restored)
    if steps and default is None:
        raise UserError(f'no checkpoint in {manager.directory} can be read; tried steps {sorted(steps)}')
    return default


def _restore(folder: Path, trees: dict[str, Params]) -> Checkpoint | str:
    """Return the step in a folder, or the reason why it cannot be restored."""
    record, restored, reason = {}, {}, ''
    try:
        record = _verify_record(json.loads((folder / 'progress' / 'metadata').read_bytes()))
        for name, tree in trees.items():
            check_shapes(f'checkpoint of step {folder.name}: {name}', record['arrays'][name], tree)
            restored[name] = _read_arrays(folder / name, tree)
    except UserError:
        raise
    except Exception as error:  # files are missing, empty or truncated: many types of errors
        reason = _first_line(error)
    if not _true_in_all_processes(not reason):
        return reason or 'another process cannot read it'
    for name, tree in restored.items():
        if changed := _find_changed_array(record, name, tree):
            return f'{changed} does not have the checksum that it was saved with'
    progress = RunProgress(**{name: record[name] for name in RunProgress._fields})
    return Checkpoint(int(folder.name), restored['params'], restored.get('optimizer'), progress)


def _verify_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record that `_add_checksum` received, with an `_ArrayRecord` for each array.

    Raises ValueError if it has changed since then.
    """
    content = {name: value for name, value in record.items() if name != 'sha256'}
    if _add_checksum(content) != record:
        raise ValueError('progress does not have the checksum that it was saved with')
    arrays = {
        name: {path: _ArrayRecord(tuple(shape), digits) for path, (shape, digits) in tree.items()}
        for name, tree in content['arrays'].items()
    }
    return content | {'arrays': arrays}


def _find_changed_array(record: dict[str, Any], name: str, tree: Params) -> str | None:
    """Return the first array of an item whose checksum is not the saved one."""
    saved = record['arrays'][name]
    checksums = checksum.tree_checksums(tree)
    return next((f'{name}/{path}' for path in checksums if checksums[path] != saved[path].checksum), None)


def _read_arrays(folder: Path, tree: T) -> T:
    """Read the arrays of an item; each process reads its own shards.

    Orbax is not used for this: if one process cannot read its shards, orbax lets the others wait for it, and after the
    first error its threads print tracebacks.
    """
    first_device = SingleDeviceSharding(jax.local_devices()[0])
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = [checksum.path_string(keys) for keys, _ in leaves]
    reads = []
    for (_, leaf), path, opened in zip(leaves, paths, _open_arrays(folder, paths), strict=True):
        stored = opened.result()
        if stored.dtype.numpy_dtype != leaf.dtype:
            raise ValueError(f'{path} has dtype {stored.dtype.name}; this config expects {leaf.dtype}')
        sharding = leaf.sharding or first_device
        indices = sharding.addressable_devices_indices_map(leaf.shape).values()
        reads.append((leaf.shape, sharding, {str(index): stored[index].read() for index in indices}))
    arrays = [
        jax.make_array_from_callback(shape, sharding, lambda index, shards=shards: shards[str(index)].result())
        for shape, sharding, shards in reads
    ]
    return jax.tree.unflatten(structure, arrays)


def _open_arrays(folder: Path, paths: Iterable[str]) -> list[Any]:
    """Open the arrays of an item for reading; return their futures."""
    kvstore = {'driver': 'ocdbt', 'base': {'driver': 'file', 'path': f'{folder}/'}}
    names = (path.replace('/', '.') for path in paths)
    return [ts.open({'driver': 'zarr', 'kvstore': kvstore | {'path': f'{name}/'}}, read=True) for name in names]


def _true_in_all_processes(value: bool) -> bool:
    if jax.process_count() == 1:
        return value
    return bool(np.all(multihost_utils.process_allgather(np.array(value))))


def check_shapes(name: str, tree: Params, expected: Params) -> None:
    """Raise UserError if the arrays of a tree do not have the expected paths and shapes.

    name: name of the tree; the error has it before the path of the first wrong array.
    """
    shapes, expected_shapes = (
        {checksum.path_string(keys): tuple(leaf.shape) for keys, leaf in _flatten_with_path(arrays)}
        for arrays in (tree, expected)
    )
    for path in sorted(shapes.keys() | expected_shapes.keys()):
        if shapes.get(path) != expected_shapes.get(path):
            raise UserError(
                f'{name}/{path} has shape {shapes.get(path)}; this config expects {expected_shapes.get(path)}'
            )


def _flatten_with_path(tree: Params) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, _ArrayRecord))[0]
