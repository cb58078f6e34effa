"""The exceptions that the command line tells in one line, each with an exit code of its own."""

import signal


class UserError(ValueError):
    """What came and what was expected, in one line; the command line prints it and exits with code 2."""


class RunError(RuntimeError):
    """A run that cannot go on; printed in one line, exit code 1."""


class Diverged(RunError):
    """A run whose loss, gradient or score is no longer finite.

    step: the training step.  name: the value, such as 'loss'.  advice: one line on what to do, without a full stop.
    """

    def __init__(self, step: int, name: str, value: float, advice: str) -> None:
        super().__init__(step, name, value, advice)  # pickle calls __init__ with these arguments
        self.step, self.name, self.value, self.advice = step, name, value, advice

    def __str__(self) -> str:
        return f'step {self.step}: the {self.name} is {self.value}; {self.advice}'


class Stopped(BaseException):
    """A run or a sweep that a signal has stopped; exit code 128 + the signal's number.

    step: at which a run has saved its state; None for a sweep.

    As a KeyboardInterrupt it is no Exception: what makes the best of whatever went wrong must let it pass.
    """

    def __init__(self, number: int, step: int | None = None) -> None:
        done = 'stopped' if step is None else f'saved at step {step}'
        super().__init__(f'{signal.Signals(number).name}: {done}; the same command goes on from there')
        self.code = 128 + number


class Pruned(Exception):
    """A run that whoever watches it has ended, as others do better; it has saved where it stands."""
