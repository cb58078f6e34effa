"""Config checks that need more than one field: whether the model can be built, whether the data paths are set."""

from collections.abc import Callable
from typing import Any

import jax

from attnlab.configs import ImageFiles, PairFiles, Section, TextFile
from attnlab.errors import UserError

_VALID_MODELS: set[Section] = set()
"""Model configs that `check_model_init` has accepted; the points of a sweep often share one."""


def check_model_init(model: Section, init: Callable[[jax.Array], Any]) -> None:
    """Raise UserError with the message of the layer that rejects the config; no parameters are allocated.

    model: the config of everything that `init` depends on. Each config is checked once.
    init: PRNG key -> parameters.
    """
    if model in _VALID_MODELS:
        return
    try:
        jax.eval_shape(init, jax.random.key(0))
    except (ValueError, NotImplementedError, TypeError, OverflowError) as error:  # the last two for sizes over 63 bits
        raise UserError(f'model: {str(error).splitlines()[0]}') from error
    _VALID_MODELS.add(model)


_PATH_FIELDS = {PairFiles: ('train', 'valid', 'test'), TextFile: ('path',), ImageFiles: ('train', 'test')}


def check_data_paths(data: Section) -> None:
    """Raise UserError if a path that training reads is empty.

    The default of these fields is the empty string, so that `attnlab count`, which reads no data, needs no path.
    """
    for name in _PATH_FIELDS.get(type(data), ()):
        if not getattr(data, name):
            raise UserError(f'data.{name} is empty; expected a path: --config.data.{name}=FILE')
