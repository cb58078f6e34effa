"""Config fields that every task has."""

from dataclasses import dataclass
from typing import Literal

from attnlab.configs.fields import Section, field
from attnlab.errors import UserError


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal['adam', 'sgd'] = field('adam', 'optimizer; weight decay is decoupled')
    b2: float = field(0.999, 'decay of the second moment of Adam', ge=0.0, lt=1.0)
    learning_rate: float = field(1e-3, 'peak learning rate', ge=0)
    layer_decay: float = field(1.0, 'learning rate of a block, relative to the next (Bao et al. 2022)', gt=0.0, le=1.0)
    schedule: Literal['constant', 'cosine', 'linear', 'rsqrt'] = field('cosine', 'shape of the schedule after warm-up')
    warmup: str = field('100 steps', 'duration of linear warm-up')
    clip: float = field(1.0, 'largest global norm of the gradient; 0: no clipping', ge=0)
    weight_decay: float = field(0.0, 'weight decay of matrices; other parameters have none', ge=0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """The training loop.  Durations are strings: '100 steps', '3 epochs', '7 percent'."""

    batch_size: int = field(64, 'rows of a batch', ge=1)
    accumulate: int = field(1, 'gradient accumulation: micro-batches of each batch', ge=1)
    mesh: str = field('data=0', "devices by mesh axis, as in 'data=2,tensor=4'; data=0: as many as divide the rows")
    parallel: Literal['jit', 'pmap'] = field('jit', 'jit: one program over all devices; pmap: one on each')
    duration: str = field('1000 steps', 'duration of the run')
    log_every: str = field('50 steps', 'interval between logged metrics')
    eval_every: str = field('500 steps', 'interval between evaluations on the validation split')
    save_every: str = field('500 steps', 'interval between checkpoints')
    patience: int = field(0, 'early stopping: evaluations without a better score before the run ends; 0: never', ge=0)
    label_smoothing: float = field(0.0, 'probability that is spread over all classes', ge=0.0, lt=1.0)
    ema: float = field(0.0, 'decay of the moving average of parameters, which is evaluated; 0: none', ge=0.0, lt=1.0)

    def check(self) -> None:
        """Require that micro-batches divide the batch."""
        if self.batch_size % self.accumulate:
            raise UserError(f'accumulate is {self.accumulate}; expected a divisor of batch_size {self.batch_size}')


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """A whole config; each task adds the sections `data` and `model`, and further ones of its own."""

    task: str = field('', "'align', 'language', 'vision', or 'package.module:Class' of a task of your own")
    seed: int = field(0, 'seed of initial parameters, data order and noise', ge=0, le=2**32 - 1)
    start: str = field('', 'work directory of a run whose parameters are the initial ones')
    optimizer: OptimizerConfig = field(OptimizerConfig(), 'optimizer')
    train: TrainConfig = field(TrainConfig(), 'training loop')
