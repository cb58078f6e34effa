"""Exceptions that the command line prints in one line, each with its own exit code."""

import signal


class UserError(ValueError):
    """Wrong input: the message is one line with the value that came and what is expected; exit code 2."""


class RunError(RuntimeError):
    """A run cannot continue: the message is one line; exit code 1."""


class Diverged(RunError):
    """Raised when the loss, a gradient or a score of a run is not finite.

    step: the training step.  name: name of the value, such as 'loss'.  advice: what to do, in one line without a full
    stop.
    """

    def __init__(self, step: int, name: str, value: float, advice: str) -> None:
        super().__init__(step, name, value, advice)  # pickle calls __init__ with these arguments
        self.step, self.name, self.value, self.advice = step, name, value, advice

    def __str__(self) -> str:
        return f'step {self.step}: the {self.name} is {self.value}; {self.advice}'


class Stopped(BaseException):
    """Raised when a signal has stopped a run or a sweep; exit code 128 + the number of the signal.

    step: the step at which a run has saved its state; None for a sweep.

    Like KeyboardInterrupt it does not derive from Exception, so that `except Exception` does not catch it.
    """

    def __init__(self, number: int, step: int | None = None) -> None:
        result = 'stopped' if step is None else f'saved at step {step}'
        super().__init__(f'{signal.Signals(number).name}: {result}; run the same command again to continue')
        self.code = 128 + number


class Pruned(Exception):
    """Raised when the pruner of a sweep stops a run; the state of the run has been saved."""
