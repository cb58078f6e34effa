"""Data, model, loss, scores and pictures of each kind of experiment, found by the config's `task`.

A task is a module with
  check(config): raises UserError for values that nothing can be made of, before anything is read or written;
  build(config, workdir) -> Task: what the loop trains;
  init(config, workdir) -> (key -> parameters): of a run whose vocabularies lie in its directory;
  evaluate(config, workdir, params, split) -> scores: of a whole split, with samples in the directory;
and what one does with it besides, such as `translate`.
"""

from types import ModuleType
from typing import Any

from attnlab.errors import UserError


def module(config: Any) -> ModuleType:
    """The task that a config names."""
    match config.task:
        case 'align':
            from attnlab.tasks import align

            return align
        case name:
            raise UserError(f"task is {name!r}; expected 'align'")
