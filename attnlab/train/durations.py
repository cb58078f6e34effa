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
    def of(cls, config: RunConfig, examples: int) -> 'Durations':
        """The durations of a config; UserError for one that is no duration, or is less than a step.

        examples: training examples.
        """
        train = config.train
        count = partial(duration_in_steps, batch_size=train.batch_size, examples=examples)
        total = count(train.duration, 'train.duration')
        texts = {'log_every': train.log_every, 'eval_every': train.eval_every, 'save_every': train.save_every}
        periods = {name: count(text, f'train.{name}', total=total) for name, text in texts.items()}
        for name, value in {'duration': total, **periods}.items():
            if value < 1:
                raise UserError(f'train.{name} is {getattr(train, name)!r}; expected one step or more')
        return cls(total, count(config.optimizer.warmup, 'optimizer.warmup', total=total), *periods.values())


def duration_in_steps(text: str, key: str, *, batch_size: int, examples: int, total: int | None = None) -> int:
    """Training steps of '500 steps', '2.5 epochs', '10000 examples', or '5 percent' of `total` steps; rounded up.

    `key` is the config field that held the text.  Raises UserError for anything else.
    """
    match = _PATTERN.fullmatch(text)
    if not match or (match[2] in ('percent', '%') and total is None):
        units = 'steps, epochs or examples' if total is None else 'steps, epochs, examples or percent'
        raise UserError(f"{key} is {text!r}; expected a number of {units}, such as '500 steps'")
    amount = Fraction(match[1])  # exact: in binary, 1.1 x 50 is a little more than 55
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
