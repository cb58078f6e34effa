"""Data, model, loss, scores and pictures of each kind of experiment, found by the config's `task`.

A task is a module with
  check(config): raises UserError for values that nothing can be made of, before anything is read or written;
  build(config, workdir) -> Task: what the loop trains;
  init(config, workdir) -> (key -> parameters): of a run whose vocabularies lie in its directory;
  BEST: the `best` of its tasks;
  SPLIT, and evaluate(config, workdir, params, split) -> scores: of a whole split, with samples in the directory;
  check_model(config), and outline(config, layers, active) -> Outline: its shapes, with so many layers in a loop or, if
    None, as it is; active: with a dense layer of the same products in place of the experts that a token meets;
and what one does with it besides, such as `translate`: `able` says who can.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from attnlab.configs import fields
from attnlab.configs.tasks import config_class
from attnlab.errors import UserError


def module(config: Any) -> ModuleType:
    """The task that a config names.

    Every command comes here before it reads any other field, so this is where `typed` raises UserError for an
    unknown or missing field and for a value of another type.
    """
    fields.typed(config_class(config.get('task')), config)
    match config.task:
        case 'align':
            from attnlab.tasks import align

            return align
        case 'language':
            from attnlab.tasks import language

            return language
        case _:
            from attnlab.tasks import vision

            return vision


def able(config: Any, action: str) -> Callable[..., Any]:
    """What a config's task does by that name; UserError where it does no such thing."""
    kind = module(config)
    if not hasattr(kind, action):
        raise UserError(f'a run of task {config.task!r} does not {action}')
    return getattr(kind, action)
