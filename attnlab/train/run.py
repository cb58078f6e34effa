"""A run's directory: trained, loaded, scored; the task is whatever its config names."""

import json
import logging
import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from attnlab import configs, files, tasks
from attnlab.errors import RunError, UserError
from attnlab.tasks.task import Params, Task
from attnlab.train import checkpoint, devices, loop, memory, precision, processes
from attnlab.train.setup import assemble


class Run(NamedTuple):
    """A trained run: its config, and the parameters of its best step."""

    config: Any
    workdir: Path
    params: Params
    step: int


def check(config: Any) -> None:
    """Raises UserError for a config that cannot be trained on the devices of this process, with no data read."""
    tasks.module(config).check(config)
    assemble(config, examples=1)  # whatever the data


def train(
    config: Any,
    workdir: Path,
    *,
    debug_nans: bool = False,
    profile: tuple[int, int] | None = None,
    watch: loop.Watch = lambda step, scores: None,
) -> dict[str, float]:
    """Trains a config in a directory, or goes on where its last run stopped; returns the last and the best scores.

    debug_nans, profile, watch: as in `attnlab.train.loop.train`.

    A run that has no checkpoint yet is started anew, also with another config.

    Raises UserError for a config that cannot be trained, and for a directory that holds checkpoints of another config,
    before anything is written.
    """
    # No process writes before all have read.
    found, task, params = processes.in_all(lambda: _prepared(config, workdir, profile))
    with ExitStack() as held:

        def begin() -> None:
            held.enter_context(_alone(workdir))
            if _found(workdir) != found:
                raise UserError(f'{workdir} was trained by another process in the meantime')
            configs.save(config, workdir / 'config.json')
            task.save(workdir)

        processes.by_first(begin)
        return loop.train(config, task, workdir, params, debug_nans=debug_nans, profile=profile, watch=watch)


class _Found(NamedTuple):
    """What there is of a run: the bytes of its config, and the steps that it can go on from."""

    config: bytes | None
    steps: list[int]


def _prepared(config: Any, workdir: Path, profile: tuple[int, int] | None) -> tuple[_Found, Task, Params | None]:
    """What there is of a run, its task, and what it starts from if that is another run; with nothing written."""
    check(config)
    checkpoint.folder_of(workdir)
    found = _found(workdir)
    if found.steps and found.config is not None:
        configs.check_same(config, configs.read(workdir / 'config.json'))
    params = _started(config) if config.get('start') and not found.steps else None
    task = _built(config, workdir if found.steps else None)
    memory.check(config, task)
    if profile is not None and profile[1] > (total := assemble(config, task.examples).durations.total):
        raise UserError(f'--profile={profile[0]}..{profile[1]} asks for steps that are not: the run has {total}')
    return found, task, params


def _built(config: Any, workdir: Path | None) -> Task:
    """The task of a config, with the vocabularies of a run's directory; None builds them from the data.

    A run without a checkpoint may have left a vocabulary of another config.
    """
    if workdir is not None:
        return tasks.module(config).build(config, workdir)
    with tempfile.TemporaryDirectory() as empty:
        return tasks.module(config).build(config, Path(empty))


def _found(workdir: Path) -> _Found:
    config = workdir / 'config.json'
    return _Found(config.read_bytes() if config.exists() else None, checkpoint.steps(workdir))


@contextmanager
def _alone(workdir: Path) -> Iterator[None]:
    """Makes a run's directory and holds it, until this process ends at the latest; UserError where another does."""
    workdir.mkdir(parents=True, exist_ok=True)
    try:
        held = files.lock(workdir / '.lock')
    except OSError as error:
        logging.warning('%s cannot be locked (%s): start no second run there', workdir, error.strerror)
        yield
        return
    if held is None:
        raise UserError(f'{workdir} is being trained by another process')
    with held:
        yield


def _started(config: Any) -> Params:
    """The parameters of the run that a config starts from, as this one needs them."""
    source = Path(files.at_home(config.start, 'start'))
    if not (source / 'config.json').is_file():
        raise UserError(f'start is {config.start!r}; expected the directory of a trained run')
    loaded = load(source)
    if loaded.config.task != config.task:
        raise UserError(f'start is {config.start!r}, a run of task {loaded.config.task!r}; expected {config.task!r}')
    params = tasks.able(config, 'adapted')(config, loaded.config, loaded.params)
    shapes = jax.eval_shape(tasks.module(config).init(config, source), jax.random.key(0))
    checkpoint.check_shapes(f'start {config.start}', params, shapes)
    return jax.device_get(params)  # from where they can be put on any devices


def config(workdir: Path) -> Any:
    """The config of the run in a directory; raises UserError for one that no run of this version has."""
    path = workdir / 'config.json'
    found = configs.read(path)
    try:
        tasks.module(found).check(found)
    except UserError as error:
        raise UserError(f'{path}: {error}') from error
    return found


def load(workdir: Path, layout: devices.Layout | None = None) -> Run:
    """The run in a directory, on one device or as a layout divides it.

    Raises UserError if it has no checkpoint yet, and RunError if its parameters are not finite.
    """
    found = config(workdir)
    shapes = jax.eval_shape(tasks.module(found).init(found, workdir), jax.random.key(0))
    if layout is not None:
        shapes = layout.stored(shapes)
    saved = None
    if (workdir / 'checkpoints').is_dir():
        with checkpoint.manager(workdir, read_only=True) as manager:
            saved = checkpoint.best(manager, shapes)
    if saved is None:
        raise UserError(f'{workdir} has no checkpoint yet: train it first')
    if not jax.jit(precision.finite)(saved.params):
        raise RunError(f'{workdir}: the parameters of step {saved.step} are not all finite')
    return Run(found, workdir, saved.params, saved.step)


def evaluate(workdir: Path, split: str | None = None) -> tuple[str, dict[str, Any]]:
    """Scores a run on a whole split, its task's own if None; writes `scores-SPLIT.json` and the task's samples.

    Returns the split's name and the scores, also where nothing can be written in the directory.
    """
    train = config(workdir).train
    layout = devices.to_use(train.get('mesh', 'data=0'), train.batch_size)
    run = load(workdir, layout)
    kind = tasks.module(run.config)
    split = split or str(kind.SPLIT)
    scores = layout.use(lambda params: kind.evaluate(run.config, workdir, params, split), run.params)
    scores |= {'step': run.step, 'parameters': sum(x.size for x in jax.tree.leaves(run.params))}
    for name, value in scores.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise RunError(f'the {name} of split {split!r} is {value}: the parameters of step {run.step} have diverged')
    text = json.dumps(scores, indent=1, ensure_ascii=False, allow_nan=False)
    with files.optional(workdir):
        files.write(workdir / f'scores-{split}.json', text + '\n')
    return split, scores
