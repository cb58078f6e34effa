"""Durations in steps, epochs, examples or percent, converted to steps."""

import math
import re
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from attnlab.configs.run import RunConfig
from attnlab.errors import UserError

_PATTERN = re.compile(r'\s*(\d{1,18}(?:\.\d{1,18})?)\s*(step|epoch|example|percent|%)s?\s*')


class Durations(NamedTuple):
    """Durations of a run in steps: the whole run, the warm-up, and the periods of logs, evaluations and checkpoints."""

    total: int
    warmup: int
    log: int
    evaluate: int
    save: int

    @classmethod
    def from_config(cls, config: RunConfig, examples: int) -> 'Durations':
        """Return the durations of a config.

        examples: number of training examples.

        Raises UserError for text that is not a duration, and for a total or period of less than one step.
        """
        train = config.train
        to_steps = partial(duration_in_steps, batch_size=train.batch_size, examples=examples)
        total = to_steps(train.duration, 'train.duration')
        texts = {'log_every': train.log_every, 'eval_every': train.eval_every, 'save_every': train.save_every}
        periods = {name: to_steps(text, f'train.{name}', total=total) for name, text in texts.items()}
        for name, value in {'duration': total, **periods}.items():
            if value < 1:
                raise UserError(f'train.{name} is {getattr(train, name)!r}; expected one step or more')
        return cls(total, to_steps(config.optimizer.warmup, 'optimizer.warmup', total=total), *periods.values())


def duration_in_steps(text: str, key: str, *, batch_size: int, examples: int, total: int | None = None) -> int:
    """Return the training steps of '500 steps', '2.5 epochs', '10000 examples' or '5 percent', rounded up.

    key: config field that holds the text, for the error message.
    examples: number of training examples.
    total: steps of the whole run, which percentages refer to; None if percentages are not allowed.

    Raises UserError for text in another format.
    """
    match = _PATTERN.fullmatch(text)
    if not match or (match[2] in ('percent', '%') and total is None):
        units = 'steps, epochs or examples' if total is None else 'steps, epochs, examples or percent'
        raise UserError(f"{key} is {text!r}; expected a number of {units}, such as '500 steps'")
    amount = Fraction(match[1])  # exact: as floats, 1.1 * 50 is a little more than 55
    match match[2]:
        case 'step':
            count = amount
        case 'epoch':
            # An epoch is a whole number of batches, the last one padded.
            count = amount * -(-examples // batch_size)
        case 'example':
            count = amount / batch_size
        case _:
            count = amount / 100 * (total or 0)
    return math.ceil(count)
