"""Durations, devices, schedule and optimizer of a run, built from its config before the first step."""

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
    """Durations, devices, schedule and optimizer of a run, and functions that build its state and its step."""

    config: RunConfig
    durations: Durations
    layout: devices.Layout
    schedule: optimizer.Schedule
    make_optimizer: optimizer.OptimizerFactory

    def initial_state(
        self, init: Callable[[jax.Array], Params], seed: np.uint32, params: Params | None = None
    ) -> TrainState:
        """Return the state before the first step; a pure function.

        init: (PRNG key) -> initial parameters; called if `params` is None.
        """
        scaled = precision.uses_float16(self.config)
        return step.initial_state(init, self.make_optimizer, seed, params, ema=self.config.train.ema, scaled=scaled)

    def compile_step(
        self, loss: LossFunction, state: TrainState
    ) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
        """Return the compiled training step for the devices of the layout.

        state: a state with the sharding that the step should take and return.
        """
        update = step.make_update(
            loss, self.make_optimizer, self.schedule,
            accumulate=self.config.train.accumulate, ema=self.config.train.ema, layout=self.layout,
        )  # fmt: skip
        compiled = self.layout.compile(update, state)
        hyperparameters = self.layout.initialize(step.Hyperparameters, *self.hyperparameters)
        hyperparameters = self.layout.replicate(hyperparameters)
        return lambda state, batch: compiled(state, batch, hyperparameters)

    @property
    def hyperparameters(self) -> step.Hyperparameters:
        """The arguments of a compiled step that come from the config."""
        learning_rate, weight_decay = self.config.optimizer.learning_rate, self.config.optimizer.weight_decay
        return step.Hyperparameters(np.uint32(self.config.seed), np.float32(learning_rate), np.float32(weight_decay))


def make_setup(config: RunConfig, examples: int) -> Setup:
    """Build the setup of a config.

    examples: number of training examples, for durations in epochs.

    Raises UserError for an invalid duration, and if the devices of the mesh do not exist or do not divide the batch.
    """
    durations = Durations.from_config(config, examples)
    rows = config.train.batch_size // config.train.accumulate
    return Setup(
        config,
        durations,
        devices.make_layout(config.train.parallel, config.train.mesh, rows),
        optimizer.make_schedule(config.optimizer, durations.total, durations.warmup),
        optimizer.make_optimizer_factory(config.optimizer),
    )
