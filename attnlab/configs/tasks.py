"""Tasks by name: the dataclass of the config and the class of each."""

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
"""Built-in tasks by the value of `config.task`: config dataclass, and 'package.module:Class' of the task."""


def config_class(name: Any) -> type[RunConfig]:
    """Return the config dataclass of a task; for a user's own task, the class attribute `Config`."""
    return TASKS[name][0] if isinstance(name, str) and name in TASKS else task_class(name).Config


def task_class(name: Any) -> Any:
    """Import and return the class of a task.

    name: one of `TASKS`, or 'package.module:Class' of a user's own task, which may be in the current folder.

    Raises UserError for another name, for a class that cannot be imported, and for one without a dataclass `Config`.
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
        sys.path.append(folder)  # last, so that no file in it shadows a package
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs the user's code, which may raise any exception
        reason = ' '.join(f'{type(error).__name__}: {error}'.split())
        raise UserError(f'task is {name!r}, which cannot be imported: {reason}') from error
    config = getattr(cls, 'Config', None)
    if not (isinstance(config, type) and issubclass(config, Section)):
        raise UserError(f"task is {name!r}; expected a class whose `Config` is a dataclass of a config's fields")
    return cls
