"""Checks that no field of a config can make alone."""

from collections.abc import Callable
from typing import Any

import jax

from attnlab.configs import ImageFiles, PairFiles, Section, TextFile
from attnlab.errors import UserError

_INITIALISED: set[Section] = set()


def check_model_init(model: Section, init: Callable[[jax.Array], Any]) -> None:
    """Raise UserError with the reason that the layers give if no parameters can be made; allocates none.

    model: the config of everything that `init` depends on. Points of a sweep often share it: each is tried once.
    """
    if model in _INITIALISED:
        return
    try:
        jax.eval_shape(init, jax.random.key(0))
    except (ValueError, NotImplementedError, TypeError, OverflowError) as error:  # the last two for sizes over 63 bits
        raise UserError(f'model: {str(error).splitlines()[0]}') from error
    _INITIALISED.add(model)


_PATHS = {PairFiles: ('train', 'valid', 'test'), TextFile: ('path',), ImageFiles: ('train', 'test')}


def check_data_paths(data: Section) -> None:
    """Raise UserError if a path that training reads is empty; the fields have no default, and `count` needs none."""
    for name in _PATHS.get(type(data), ()):
        if not getattr(data, name):
            raise UserError(f'data.{name} is empty; expected a path: --config.data.{name}=FILE')
