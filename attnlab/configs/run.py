"""The config fields that every task has."""

from dataclasses import dataclass
from typing import Literal

from attnlab.configs.fields import Section, field
from attnlab.errors import UserError


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal['adam', 'sgd'] = field('adam', 'optimizer; weight decay is decoupled')
    b2: float = field(0.999, 'decay of the second moment of Adam', least=0.0, below=1.0)
    learning_rate: float = field(1e-3, 'peak of the schedule', least=0)
    layer_decay: float = field(1.0, 'rate of a block relative to the next one (Bao et al. 2022)', above=0.0, most=1.0)
    schedule: Literal['constant', 'cosine', 'linear', 'rsqrt'] = field('cosine', 'shape after the warm-up')
    warmup: str = field('100 steps', 'duration of the linear warm-up')
    clip: float = field(1.0, 'largest global norm of the gradient; 0: no clipping', least=0)
    weight_decay: float = field(0.0, 'decay of matrices', least=0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """The training loop. Durations are texts: '100 steps', '3 epochs', '7 percent'."""

    batch_size: int = field(64, 'rows of a batch', least=1)
    accumulate: int = field(1, 'micro-batches that a batch is cut into', least=1)
    mesh: str = field('data=0', "devices by axis, as in 'data=2,tensor=4'; data=0: as many as divide the rows")
    parallel: Literal['jit', 'pmap'] = field('jit', 'one program over all devices, or one on each')
    duration: str = field('1000 steps', 'of the whole run')
    log_every: str = field('50 steps', 'between lines of metrics')
    eval_every: str = field('500 steps', 'between evaluations on the validation split')
    save_every: str = field('500 steps', 'between checkpoints')
    patience: int = field(0, 'evaluations without a better score before the run ends; 0: never', least=0)
    label_smoothing: float = field(0.0, 'share of the target spread over all classes', least=0.0, below=1.0)
    ema: float = field(0.0, 'decay of the averaged parameters, which are evaluated; 0: none', least=0.0, below=1.0)

    def check(self) -> None:
        if self.batch_size % self.accumulate:
            raise UserError(f'accumulate is {self.accumulate}; expected a divisor of batch_size {self.batch_size}')


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """A whole config; each task adds its `data`, its `model` and other sections of its own."""

    task: str = field('', "'align', 'language', 'vision', or 'package.module:Class' of a task of one's own")
    seed: int = field(0, 'of parameters, order of the data and noise', least=0, most=2**32 - 1)
    start: str = field('', 'directory of a run whose parameters this one starts from')
    optimizer: OptimizerConfig = field(OptimizerConfig(), 'optimizer')
    train: TrainConfig = field(TrainConfig(), 'training loop')
