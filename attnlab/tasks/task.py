"""The interface of a task, which is all that training, evaluation and the commands use of it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np

from attnlab.configs import RunConfig
from attnlab.errors import UserError
from attnlab.kernels.losses import LossSums

Params = Any
"""A tree of arrays."""

Batch = Any
"""A tree of NumPy arrays whose first axis is the batch."""


class Task(Protocol):
    """Data, model, loss and scores of an experiment.

    Config: dataclass of the task's configs.  best: the score that selects the parameters to keep, and whether the
      highest or the lowest is best.  default_split: the split that `attnlab eval` scores.

    A constructor takes `(config, workdir)` and reads no data. `workdir` is the directory of a run, whose vocabularies
    (or other statistics of the data) are loaded; with None they are built from the training data.
    """

    Config: ClassVar[type[RunConfig]]
    best: ClassVar[tuple[str, Literal['max', 'min']]]
    default_split: ClassVar[str]

    def __init__(self, config: Any, workdir: Path | None = None) -> None: ...

    @property
    def config(self) -> RunConfig:
        """An instance of `Config`."""
        ...

    def check(self) -> None:
        """Raise UserError for a config that no data or no model can be made of; reads no data."""
        ...

    @property
    def examples(self) -> int:
        """Number of training examples in an epoch. Reads all data that training needs, validation split included."""
        ...

    def init(self, rng: jax.Array) -> Params:
        """Return new parameters."""
        ...

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Return the training batch of a step, from 0, or some of its rows.

        The result depends on the arguments alone: a resumed run sees the same batches, and each of several processes
        makes its own rows.
        """
        ...

    def loss(self, params: Params, batch: Batch, rng: jax.Array) -> LossSums:
        """Return the training loss; a pure function, which the trainer compiles."""
        ...

    def validate(self, params: Params) -> dict[str, float]:
        """Return the scores of the validation split that are logged during training.

        The rows of a batch are sharded over the mesh in context, if there is one (`attnlab.kernels.mesh_axes`).
        """
        ...

    def evaluate(self, params: Params, split: str) -> dict[str, Any]:
        """Return all scores of a split; writes samples into `workdir`."""
        ...

    def save(self, workdir: Path) -> None:
        """Write what a task of this run's directory loads, such as vocabularies."""
        ...


class TranslatedSentence(NamedTuple):
    """A translation with its alignment.

    source: the sentence.  text: its translation.
    weights: attention [T, S] float32 that each of T target tokens pays to each of S source tokens; [0, 0] for a model
      without attention.  rows, columns: the T target and S source tokens as text, the end of sentence included.
    """

    source: str
    text: str
    weights: np.ndarray
    rows: list[str]
    columns: list[str]


class AttentionMaps(NamedTuple):
    """All attention weights of a model over one input.

    weights: [L, N, T, S] float32 of each kind of attention, such as 'attention' or 'decoder/cross_attention'.
    labels: (rows, columns) of each kind, the T query and S key tokens as text; empty for an image.
    """

    weights: Mapping[str, np.ndarray]
    labels: Mapping[str, tuple[Sequence[str], Sequence[str]]]


class Outline(NamedTuple):
    """A model and one row of its batch as shapes, to count parameters and operations.

    what: describes the row.  tokens: number of tokens that go through a layer.
    params: shapes of the parameters.  batch: shapes of the arguments of `forward` after `params`.
    forward: (params, *batch) -> output of the model.
    cache: shapes of the key-value cache of a full row; None if decoding needs none that grows with the row.
    """

    what: str
    tokens: int
    params: Any
    batch: tuple[jax.ShapeDtypeStruct, ...]
    forward: Callable[..., jax.Array]
    cache: Any = None


@runtime_checkable
class SupportsOutline(Protocol):
    """A task whose model `attnlab count` can count."""

    def outline(self, layers: int | None, active: bool) -> Outline:
        """Return the shapes of the model.

        layers: number of layers, not scanned; None: as in the config.
        active: with dense attention, and in place of experts a dense MLP with the operations of one token's experts.
        """
        ...


@runtime_checkable
class SupportsAttend(Protocol):
    """A task whose model has attention maps."""

    def attention_maps(self, params: Params, text: str) -> AttentionMaps:
        """Return the attention of all layers and heads over a text, or over an image: a file, or its number."""
        ...

    def attend(self, params: Params, texts: Sequence[str], layer: int | None, head: int | None) -> None:
        """Draw the attention of all layers and heads, or of one, over each input; print the paths of the files."""
        ...


@runtime_checkable
class SupportsTranslate(Protocol):
    """A task that translates."""

    def translate(
        self,
        params: Params,
        sentences: Sequence[str],
        joined: bool = False,
        layer: int | None = None,
        shifted: bool = False,
    ) -> Iterable[TranslatedSentence]:
        """Translate sentences.

        joined: align words, not sub-words.  layer, shifted: which attention is the alignment, if not the config's.
        """
        ...


@runtime_checkable
class SupportsGenerate(Protocol):
    """A task that continues a text."""

    def generate(self, params: Params, prompt: str, **options: Any) -> list[str]:
        """Return the prompt with each sample's continuation; options: as in `attnlab.tasks.language.generation.generate_texts`."""
        ...


@runtime_checkable
class SupportsClassify(Protocol):
    """A task that classifies images."""

    def classify(self, params: Params, pixels: np.ndarray) -> np.ndarray:
        """Return the probability of each class, [n, classes] float64, for images [n, H, W, C] uint8."""
        ...


@runtime_checkable
class SupportsAdapt(Protocol):
    """A task whose runs can start from the parameters of another run."""

    def adapted(self, source: Any, params: Params) -> Params:
        """Return the parameters of `source`, a task of the same class, with the shapes of this one's."""
        ...


Ability = TypeVar('Ability')


def require_support(task: Task, protocol: type[Ability], verb: str) -> Ability:
    """Return the task as an instance of a protocol above; raise UserError naming `verb` if it is none."""
    if not isinstance(task, protocol):
        raise UserError(f'a run of task {task.config.task!r} does not {verb}')
    return task


def perplexity(loss: float) -> float:
    """exp(loss); infinity for the loss of a diverged run, where `math.exp` raises OverflowError."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
