"""Training, loading and scoring of a run in a directory, whatever its task."""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np
from ml_collections import ConfigDict

from attnlab import configs, files, tasks
from attnlab.configs import RunConfig
from attnlab.errors import RunError, UserError
from attnlab.tasks.task import (
    AttentionMaps,
    Params,
    SupportsAdapt,
    SupportsAttend,
    SupportsClassify,
    SupportsGenerate,
    SupportsTranslate,
    Task,
    TranslatedSentence,
    require_support,
)
from attnlab.train import checkpoint, devices, loop, memory, precision, processes
from attnlab.train.setup import make_setup


class TrainedRun(NamedTuple):
    """A trained run: its task, and the parameters of its best step.

    A method raises UserError if the task of the run does not have what it returns.
    """

    task: Task
    params: Params
    step: int

    @property
    def config(self) -> RunConfig:
        """The config of the run."""
        return self.task.config

    def translate(
        self, sentences: Sequence[str], joined: bool = False, layer: int | None = None, shifted: bool = False
    ) -> list[TranslatedSentence]:
        """Translate sentences, each with its alignment.

        joined: align words, not sub-words.  layer, shifted: read the alignment off this layer's cross-attention, from
          1, and one step after a token was made, in place of what the config says (Transformers only).
        """
        return list(
            require_support(self.task, SupportsTranslate, 'translate').translate(
                self.params, sentences, joined, layer, shifted
            )
        )

    def generate(self, prompt: str = '', **options: Any) -> list[str]:
        """Return continuations of a prompt, each with the prompt before it.

        options: `tokens` (200), `samples` (1), `seed` (0), `temperature` (1.0), `top_k` and `top_p` (None), as in
          `attnlab.tasks.language.generation.generate_texts`.
        """
        return require_support(self.task, SupportsGenerate, 'generate').generate(self.params, prompt, **options)

    def classify(self, pixels: np.ndarray) -> np.ndarray:
        """Return the probability of each class, [n, classes] float64, for images [n, H, W, C] uint8."""
        return require_support(self.task, SupportsClassify, 'classify').classify(self.params, pixels)

    def evaluate(self, split: str | None = None) -> dict[str, Any]:
        """Return all scores of a split, by default the task's; writes samples into the directory of the run."""
        return self.task.evaluate(self.params, split or self.task.default_split)

    def attention_maps(self, text: str) -> AttentionMaps:
        """Return the attention weights of all layers and heads over a text, or over an image: a file, or its number in
        the test split."""
        return require_support(self.task, SupportsAttend, 'attend').attention_maps(self.params, text)


def check_config(config: RunConfig | ConfigDict) -> Task:
    """Return the task of a config; reads no data.

    Raises UserError for a config that cannot be trained on the devices of this process.
    """
    task = tasks.create_task(config)
    task.check()
    make_setup(task.config, examples=1)  # checks durations and devices, whatever the data
    return task


def train_run(
    config: RunConfig | ConfigDict,
    workdir: str | Path,
    **options: Unpack[loop.TrainOptions],
) -> dict[str, float]:
    """Train a config in a directory, from its last checkpoint if it has one; return the last and the best scores.

    options: as in `attnlab.train.loop.run_training_loop`.

    A run that has no checkpoint yet starts anew, also with another config.

    Raises UserError for a config that cannot be trained, and for a directory that holds checkpoints of another config,
    before anything is written.
    """
    workdir = Path(workdir)
    # No process writes before all have read.
    start = processes.run_in_all(lambda: _prepare(config, workdir, options.get('profile')))
    task = start.task
    with ExitStack() as stack:

        def write() -> None:
            stack.enter_context(_locked(workdir))
            if _saved(workdir) != start.saved:
                raise UserError(f'{workdir} was trained by another process in the meantime')
            configs.save_config(configs.config_dict(task.config), workdir / 'config.json')
            task.save(workdir)

        processes.run_in_first(write)
        return loop.run_training_loop(task.config, task, workdir, start.params, **options)


class _Saved(NamedTuple):
    """What a directory has of a run: the bytes of its config, and the steps of its checkpoints."""

    config: bytes | None
    steps: list[int]


class _Start(NamedTuple):
    """params: those that training starts from if they are another run's."""

    saved: _Saved
    task: Task
    params: Params | None


def _prepare(config: RunConfig | ConfigDict, workdir: Path, profile: tuple[int, int] | None) -> _Start:
    """Check a config, and read the data and all that training starts from; nothing is written."""
    task = check_config(config)
    checkpoint.checkpoint_folder(workdir)
    saved, params = _saved(workdir), None
    if saved.steps:
        if saved.config is not None:
            before = load_task(workdir).config
            configs.check_same_config(configs.config_dict(task.config), configs.config_dict(before))
        task = tasks.create_task(task.config, workdir)
    elif task.config.start:
        params = _params_of_start(task)
    setup = make_setup(task.config, task.examples)
    memory.check_memory(task, setup)
    if profile is not None and profile[1] > (total := setup.durations.total):
        raise UserError(f'--profile={profile[0]}..{profile[1]} asks for steps that are not: the run has {total}')
    return _Start(saved, task, params)


def _saved(workdir: Path) -> _Saved:
    config = workdir / 'config.json'
    return _Saved(config.read_bytes() if config.exists() else None, checkpoint.list_steps(workdir))


@contextmanager
def _locked(workdir: Path) -> Iterator[None]:
    """Make a run's directory and lock it, until this process ends at the latest; UserError if another has locked it."""
    workdir.mkdir(parents=True, exist_ok=True)
    try:
        held = files.lock_file(workdir / '.lock')
    except OSError as error:
        logging.warning('%s cannot be locked (%s): start no second run there', workdir, error.strerror)
        yield
        return
    if held is None:
        raise UserError(f'{workdir} is being trained by another process')
    with held:
        yield


def _params_of_start(task: Task) -> Params:
    """The parameters of the run that `config.start` names, adapted to this task."""
    start, name = task.config.start, task.config.task
    source = Path(files.expand_home(start, 'start'))
    if not (source / 'config.json').is_file():
        raise UserError(f'start is {start!r}; expected the directory of a trained run')
    loaded = load_run(source)
    if loaded.task.config.task != name:
        raise UserError(f'start is {start!r}, a run of task {loaded.task.config.task!r}; expected {name!r}')
    params = require_support(task, SupportsAdapt, 'start from another run').adapted(loaded.task, loaded.params)
    shapes = jax.eval_shape(tasks.create_task(task.config, source).init, jax.random.key(0))
    checkpoint.check_shapes(f'start {start}', params, shapes)
    return jax.device_get(params)  # from where they can be put on any devices


def load_task(workdir: Path) -> Task:
    """The task of the run in a directory; UserError for a config that no run of this version has."""
    path = workdir / 'config.json'
    config = configs.load_config(path)
    try:
        task = tasks.create_task(config, workdir)
        task.check()
    except UserError as error:
        raise UserError(f'{path}: {error}') from error
    return task


def load_run(workdir: str | Path) -> TrainedRun:
    """The run in a directory, on one device.

    Raises UserError if it has no checkpoint yet, and RunError if its parameters are not finite.
    """
    workdir = Path(workdir)
    return _best(load_task(workdir), workdir)


def _best(task: Task, workdir: Path, layout: devices.Layout | None = None) -> TrainedRun:
    """The best parameters of a run, on one device or sharded as a layout says."""
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    if layout is not None:
        shapes = layout.stored(shapes)
    saved = None
    if (workdir / 'checkpoints').is_dir():
        with checkpoint.checkpoint_manager(workdir, read_only=True) as manager:
            saved = checkpoint.restore_best(manager, shapes)
    if saved is None:
        raise UserError(f'{workdir} has no checkpoint yet: train it first')
    if not jax.jit(precision.all_finite)(saved.params):
        raise RunError(f'{workdir}: the parameters of step {saved.step} are not all finite')
    return TrainedRun(task, saved.params, saved.step)


def evaluate_run(workdir: Path, split: str | None = None) -> tuple[str, dict[str, Any]]:
    """Score a run on a whole split, its task's default if None; write `scores-SPLIT.json` and the task's samples.

    Returns the split's name and the scores, also if nothing can be written in the directory.
    """
    task = load_task(workdir)
    layout = devices.make_evaluation_layout(task.config.train.mesh, task.config.train.batch_size)
    _, params, step = _best(task, workdir, layout)
    split = split or task.default_split
    scores = layout.use(lambda params: task.evaluate(params, split), params)
    scores |= {'step': step, 'parameters': sum(x.size for x in jax.tree.leaves(params))}
    for name, value in scores.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise RunError(f'the {name} of split {split!r} is {value}: the parameters of step {step} have diverged')
    text = json.dumps(scores, indent=1, ensure_ascii=False, allow_nan=False)
    with files.log_write_errors(workdir):
        files.write_file(workdir / f'scores-{split}.json', text + '\n')
    return split, scores
