"""Train, load and evaluate a run in a directory, for any task."""

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
    """A trained run: its task, the parameters of its best step, and the number of that step.

    A method raises UserError if the task of the run does not support it.
    """

    task: Task
    params: Params
    step: int

    def __repr__(self) -> str:
        size = sum(x.size for x in jax.tree.leaves(self.params))
        return f'TrainedRun(task={self.config.task!r}, step={self.step}, parameters={size:,})'

    @property
    def config(self) -> RunConfig:
        """The config of the run."""
        return self.task.config

    def translate(
        self, sentences: str | Sequence[str], joined: bool = False, layer: int | None = None, shifted: bool = False
    ) -> list[TranslatedSentence]:
        """Translate a sentence or several; return each with its alignment.

        joined: whether to align words instead of sub-words.
        layer: number, from 1, of the layer whose cross-attention is the alignment, instead of that of the config
          (Transformers only).
        shifted: whether to read the alignment of a token one step after the token was produced (Transformers only).
        """
        sentences = [sentences] if isinstance(sentences, str) else sentences
        task = require_support(self.task, SupportsTranslate, 'translate')
        return list(task.translate(self.params, sentences, joined, layer, shifted))

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
        """Evaluate the run on a split and return its scores; the task writes its samples into the directory of the run.

        split: name of the split; the default split of the task if None.
        """
        return self.task.evaluate(self.params, split or self.task.default_split)

    def attention_maps(self, text: str) -> AttentionMaps:
        """Return the attention weights of all layers and heads.

        text: the input text, or for an image its file or its number in the test split.
        """
        return require_support(self.task, SupportsAttend, 'attend').attention_maps(self.params, text)


def check_config(config: RunConfig | ConfigDict) -> Task:
    """Check a config without reading data, and return its task.

    Raises UserError if the config is invalid, or cannot be trained on the devices of this process.
    """
    task = tasks.create_task(config)
    task.check()
    make_setup(task.config, examples=1)  # checks durations and devices, which any number of examples can do
    return task


def train_run(
    config: RunConfig | ConfigDict,
    workdir: str | Path,
    **options: Unpack[loop.TrainOptions],
) -> dict[str, float]:
    """Train a config in a directory, from its latest checkpoint if it has one; return the last and the best scores.

    If the directory has no checkpoint yet, training starts from the beginning, even if it has a config of another run.

    options: as in `attnlab.train.loop.run_training_loop`.

    Raises UserError if the config cannot be trained, or if the directory has checkpoints of another config; nothing has
    been written then.
    """
    if isinstance(config, str | Path):
        expected = 'expected a RunConfig or a ConfigDict, such as attnlab.configs.load_experiment(path) returns'
        raise UserError(f'the config is the text {str(config)!r}; {expected}')
    workdir = Path(workdir)
    # All processes finish reading before one writes.
    start = processes.run_in_all(lambda: _prepare_start(config, workdir, options.get('profile')))
    task = start.task
    with ExitStack() as stack:

        def write() -> None:
            stack.enter_context(_lock_directory(workdir))
            if _read_directory_state(workdir) != start.directory_state:
                raise UserError(f'{workdir} was trained by another process in the meantime')
            configs.save_config(configs.config_dict(task.config), workdir / 'config.json')
            task.save(workdir)

        processes.run_in_first(write)
        return loop.run_training_loop(task.config, task, workdir, start.params, **options)


class _DirectoryState(NamedTuple):
    """The bytes of the config in a run's directory, None if there is none, and the steps of its checkpoints."""

    config: bytes | None
    steps: list[int]


class _Start(NamedTuple):
    """Everything that a training starts from; `params` is None if they do not come from another run."""

    directory_state: _DirectoryState
    task: Task
    params: Params | None


def _prepare_start(config: RunConfig | ConfigDict, workdir: Path, profile: tuple[int, int] | None) -> _Start:
    """Check a config, and read the data and the start of the training; nothing is written."""
    task = check_config(config)
    checkpoint.checkpoint_folder(workdir)
    directory_state, params = _read_directory_state(workdir), None
    if directory_state.steps:
        if directory_state.config is not None:
            saved_config = load_task(workdir).config
            configs.check_same_config(configs.config_dict(task.config), configs.config_dict(saved_config))
        task = tasks.create_task(task.config, workdir)
    elif task.config.start:
        params = _load_start_params(task)
    setup = make_setup(task.config, task.examples)
    memory.check_memory(task, setup)
    if profile is not None and profile[1] > (total := setup.durations.total):
        raise UserError(f'--profile is {profile[0]}..{profile[1]}; expected steps of the run, which has {total}')
    return _Start(directory_state, task, params)


def _read_directory_state(workdir: Path) -> _DirectoryState:
    config = workdir / 'config.json'
    return _DirectoryState(config.read_bytes() if config.exists() else None, checkpoint.list_steps(workdir))


@contextmanager
def _lock_directory(workdir: Path) -> Iterator[None]:
    """Create a run's directory and lock it; the lock ends with the block or with this process.

    Raises UserError if another process has locked it.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    try:
        lock = files.lock_file(workdir / '.lock')
    except OSError as error:
        logging.warning('%s cannot be locked (%s): do not start a second run there', workdir, error.strerror)
        yield
        return
    if lock is None:
        raise UserError(f'{workdir} is being trained by another process')
    with lock:
        yield


def _load_start_params(task: Task) -> Params:
    """Return the parameters of the run that `config.start` names, adapted to this task, as host arrays."""
    start, name = task.config.start, task.config.task
    source = Path(files.expand_home(start, 'start'))
    if not (source / 'config.json').is_file():
        raise UserError(f'start is {start!r}; expected the directory of a trained run')
    source_run = load_run(source)
    if source_run.task.config.task != name:
        raise UserError(f'start is {start!r}, a run of task {source_run.task.config.task!r}; expected {name!r}')
    adapting_task = require_support(task, SupportsAdapt, 'start from another run')
    params = adapting_task.adapt_params(source_run.task, source_run.params)
    shapes = jax.eval_shape(tasks.create_task(task.config, source).init, jax.random.key(0))
    checkpoint.check_shapes(f'start {start}', params, shapes)
    return jax.device_get(params)  # host arrays can be put on any devices


def load_task(workdir: Path) -> Task:
    """Return the task of the run in a directory.

    Raises UserError if there is no config, or if it is not valid in this version.
    """
    path = workdir / 'config.json'
    config = configs.load_config(path)
    try:
        task = tasks.create_task(config, workdir)
        task.check()
    except UserError as error:
        raise UserError(f'{path}: {error}') from error
    return task


def load_run(workdir: str | Path) -> TrainedRun:
    """Load the run in a directory, with its parameters on one device.

    Raises UserError if it has no checkpoint yet, and RunError if its parameters are not finite.
    """
    workdir = Path(workdir)
    return _load_best(load_task(workdir), workdir)


def _load_best(task: Task, workdir: Path, layout: devices.Layout | None = None) -> TrainedRun:
    """Load the best parameters of a run, on one device or with the shardings of a layout."""
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    if layout is not None:
        shapes = layout.stored_shapes(shapes)
    best = None
    if (workdir / 'checkpoints').is_dir():
        with checkpoint.checkpoint_manager(workdir, read_only=True) as manager:
            best = checkpoint.restore_best(manager, shapes)
    if best is None:
        raise UserError(f'{workdir} has no checkpoint yet: train it first')
    if not jax.jit(precision.all_finite)(best.params):
        raise RunError(f'{workdir}: the parameters of step {best.step} are not all finite')
    return TrainedRun(task, best.params, best.step)


def evaluate_run(workdir: Path, split: str | None = None) -> tuple[str, dict[str, Any]]:
    """Evaluate a run on a whole split, and write `scores-SPLIT.json` and the samples of its task.

    split: name of the split; the default split of the task if None.

    Returns the name of the split and the scores, also if the directory cannot be written.
    """
    task = load_task(workdir)
    layout = devices.make_evaluation_layout(task.config.train.mesh, task.config.train.batch_size)
    _, params, step = _load_best(task, workdir, layout)
    split = split or task.default_split
    scores = layout.evaluate(lambda params: task.evaluate(params, split), params)
    scores |= {'step': step, 'parameters': sum(x.size for x in jax.tree.leaves(params))}
    for name, value in scores.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise RunError(f'the {name} of split {split!r} is {value}: the parameters of step {step} have diverged')
    text = json.dumps(scores, indent=1, ensure_ascii=False, allow_nan=False)
    with files.log_write_errors(workdir):
        files.write_file(workdir / f'scores-{split}.json', text + '\n')
    return split, scores
