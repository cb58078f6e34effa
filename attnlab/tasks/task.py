"""The interface of a task; training, evaluation and the commands use nothing else of it.

`Task` is what every task has. The protocols `Supports...` are optional: a command raises UserError for a task without
the method that it needs.
"""

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
"""Model parameters: a tree of arrays."""

Batch = Any
"""A tree of NumPy arrays whose first axis is the batch."""


class Task(Protocol):
    """Data, model, loss and scores of an experiment.

    Config: dataclass of the task's config.
    best: name of the score by which the best checkpoint is selected, and whether its maximum or its minimum is best.
    default_split: the split that `attnlab eval` scores.

    The constructor takes `(config, workdir)` and reads no data. `workdir` is the directory of a run, from which the
    task loads its vocabularies or other statistics of the data. If it is None, they are computed from the training
    data.
    """

    Config: ClassVar[type[RunConfig]]
    best: ClassVar[tuple[str, Literal['max', 'min']]]
    default_split: ClassVar[str]

    def __init__(self, config: Any, workdir: Path | None = None) -> None: ...

    @property
    def config(self) -> RunConfig:
        """The config of this task, an instance of `Config`."""
        ...

    def check(self) -> None:
        """Raise UserError for a config whose data or model cannot be built; no data is read."""
        ...

    @property
    def examples(self) -> int:
        """Number of training examples in an epoch. Reads all data that training needs, validation split included."""
        ...

    def init(self, rng: jax.Array) -> Params:
        """Return newly initialised parameters."""
        ...

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Return the training batch of a step, counted from 0, or some of its rows.

        The result depends on the arguments alone: a resumed run gets the same batches, and each of several processes
        computes only its own rows.
        """
        ...

    def loss(self, params: Params, batch: Batch, rng: jax.Array) -> LossSums:
        """Return the training loss. A pure function: the trainer compiles it and takes its gradient."""
        ...

    def validate(self, params: Params) -> dict[str, float]:
        """Return the scores of the validation split that are logged during training.

        The rows of a batch are sharded over the mesh in context, if there is one (`attnlab.kernels.mesh_axes`).
        """
        ...

    def evaluate(self, params: Params, split: str) -> dict[str, Any]:
        """Return all scores of a split; write samples into `workdir` if the task has one."""
        ...

    def save(self, workdir: Path) -> None:
        """Write the vocabularies or other statistics that a task created with this `workdir` loads."""
        ...


class TranslatedSentence(NamedTuple):
    """A translation with its alignment.

    source: the sentence.  text: its translation.
    weights: attention [T, S] float32 from each of T target tokens to each of S source tokens; [0, 0] for a model
      without attention.
    rows, columns: the T target tokens and the S source tokens as text, the end of sentence included.
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
    """Shapes of a model and of one row of its batch, from which parameters and operations are counted.

    description: text that describes the row.  tokens: number of tokens that pass through a layer.
    params: shapes of the parameters.  batch: shapes of the arguments of `forward` after `params`.
    forward: (params, *batch) -> output of the model.
    cache: shapes of the key-value cache of a full row; None if decoding has no cache that grows with the row.
    """

    description: str
    tokens: int
    params: Any
    batch: tuple[jax.ShapeDtypeStruct, ...]
    forward: Callable[..., jax.Array]
    cache: Any = None


@runtime_checkable
class SupportsOutline(Protocol):
    """A task whose parameters and operations `attnlab count` can count."""

    def outline(self, layers: int | None, countable: bool) -> Outline:
        """Return the shapes of the model and of one row.

        layers: number of layers, without a scan over them; None: as in the config.
        countable: use dense attention, and replace a mixture of experts by a dense MLP with as many operations as the
          experts of one token.
        """
        ...


@runtime_checkable
class SupportsAttend(Protocol):
    """A task whose model has attention maps."""

    def attention_maps(self, params: Params, text: str) -> AttentionMaps:
        """Return the attention of all layers and heads over a text, or over an image given as a path or a number."""
        ...

    def attend(self, params: Params, texts: Sequence[str], layer: int | None, head: int | None) -> None:
        """Draw the attention over each input, of one layer or head (from 1) or of all (None); print the paths."""
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

        joined: align words instead of sub-words.
        layer: decoder layer, from 1, whose attention is the alignment; None: as in the config.
        shifted: read the alignment of a token one step later than the step that emits it; False: as in the config.
        """
        ...


@runtime_checkable
class SupportsGenerate(Protocol):
    """A task that continues a text."""

    def generate(self, params: Params, prompt: str, **options: Any) -> list[str]:
        """Return the prompt with a continuation, for each sample.

        options: keyword arguments of `attnlab.tasks.language.generation.generate_texts`.
        """
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

    def adapt_params(self, source: Any, params: Params) -> Params:
        """Return parameters of `source`, a task of the same class, in the shapes of this task's parameters."""
        ...


SupportProtocol = TypeVar('SupportProtocol')


def require_support(task: Task, protocol: type[SupportProtocol], verb: str) -> SupportProtocol:
    """Return the task, typed as one of the protocols above.

    verb: completes 'a run of task ... does not', the message of the UserError for a task without that protocol.
    """
    if not isinstance(task, protocol):
        raise UserError(f'the task {task.config.task!r} does not {verb}')
    return task


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity for the loss of a diverged run, where `math.exp` raises OverflowError."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
