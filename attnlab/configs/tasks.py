"""The tasks that a config may name, and the dataclass of each one's config."""

import importlib
import os
import sys
from typing import Any

from attnlab.configs.align import AlignConfig
from attnlab.configs.fields import Section, join_names
from attnlab.configs.language import LanguageConfig
from attnlab.configs.run import RunConfig
from attnlab.configs.vision import VisionConfig
from attnlab.errors import UserError

TASKS: dict[str, tuple[type[RunConfig], str]] = {
    'align': (AlignConfig, 'attnlab.tasks.align.task:AlignTask'),
    'language': (LanguageConfig, 'attnlab.tasks.language.task:LanguageTask'),
    'vision': (VisionConfig, 'attnlab.tasks.vision.task:VisionTask'),
}
"""By the value of `config.task`: the dataclass of the config, and where the class of the task is."""


def config_class(name: Any) -> type[RunConfig]:
    """The dataclass of the configs of a task: the class attribute `Config` of a task of one's own."""
    return TASKS[name][0] if isinstance(name, str) and name in TASKS else task_class(name).Config


def task_class(name: Any) -> Any:
    """The class of a task, imported from where its name or the table says.

    Raises UserError for a name that is neither in the table nor the 'package.module:Class' of a class with a `Config`.
    """
    if name is None:
        raise UserError(f'config has no task; expected {join_names(TASKS)}')
    if not isinstance(name, str) or name not in TASKS and ':' not in name:
        raise UserError(
            f"task is {name!r}; expected {join_names(TASKS)}, or 'package.module:Class' of a task of your own"
        )
    module, _, attribute = (TASKS[name][1] if name in TASKS else name).partition(':')
    if name in TASKS:
        return getattr(importlib.import_module(module), attribute)
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)  # behind all others: nothing in it may shadow a package
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module is code, and code may raise anything
        reason = ' '.join(f'{type(error).__name__}: {error}'.split())
        raise UserError(f'task is {name!r}, which cannot be imported: {reason}') from error
    config = getattr(found, 'Config', None)
    if not (isinstance(config, type) and issubclass(config, Section)):
        raise UserError(f"task is {name!r}; expected a class whose `Config` is a dataclass of a config's fields")
    return found
