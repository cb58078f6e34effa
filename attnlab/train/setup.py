"""Everything that a run's config determines, made in one place before the first step."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from attnlab.configs import RunConfig
from attnlab.tasks.task import Batch, Params
from attnlab.train import devices, optimizer, precision, step
from attnlab.train.durations import Durations
from attnlab.train.step import LossFunction, StepMetrics, TrainState


@dataclass(frozen=True)
class Setup:
    """Durations, devices, schedule and optimizer of a run, and the functions of its state that they give."""

    config: RunConfig
    durations: Durations
    layout: devices.Layout
    schedule: optimizer.Schedule
    optimize: optimizer.OptimizerFactory

    def initial(self, init: Callable[[jax.Array], Params], seed: np.uint32, params: Params | None = None) -> TrainState:
        """The state before the first step; pure.  init: (key) -> parameters, where `params` is None."""
        scaled = precision.uses_float16(self.config)
        return step.initial_state(init, self.optimize, seed, params, ema=self.config.train.ema, scaled=scaled)

    def compiled(
        self, loss: LossFunction, state: TrainState
    ) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
        """The training step on the layout's devices.  state: shows the sharding."""
        update = step.make_update(
            loss, self.optimize, self.schedule,
            accumulate=self.config.train.accumulate, ema=self.config.train.ema, layout=self.layout,
        )  # fmt: skip
        run, numbers = self.layout.compile(update, state), self.layout.start(step.Hyperparameters, *self.numbers)
        numbers = self.layout.replicate(numbers)
        return lambda state, batch: run(state, batch, numbers)

    @property
    def numbers(self) -> step.Hyperparameters:
        """The arguments of a compiled step that come from the config."""
        rate, decay = self.config.optimizer.learning_rate, self.config.optimizer.weight_decay
        return step.Hyperparameters(np.uint32(self.config.seed), np.float32(rate), np.float32(decay))


def make_setup(config: RunConfig, examples: int) -> Setup:
    """Make the setup of a config.

    examples: training examples, which durations in epochs depend on.

    Raises UserError for durations that make no sense and for devices that are not there.
    """
    durations = Durations.of(config, examples)
    rows = config.train.batch_size // config.train.accumulate
    return Setup(
        config,
        durations,
        devices.make_layout(config.train.parallel, config.train.mesh, rows),
        optimizer.make_schedule(config.optimizer, durations.total, durations.warmup),
        optimizer.make_optimizer_factory(config.optimizer),
    )
