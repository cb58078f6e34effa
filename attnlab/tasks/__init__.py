"""Tasks: data, model, loss, scores and pictures of each kind of experiment; the interface is `task.Task`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from attnlab.configs import RunConfig, fields
from attnlab.configs.tasks import config_class, task_class

if TYPE_CHECKING:
    from attnlab.tasks.task import Task


def create_task(config: RunConfig | ConfigDict, workdir: Path | None = None) -> Task:
    """Return the task of a config; no data is read.

    workdir: directory of a run, from which the task loads its vocabularies. If None, the task builds them from the
      training data.

    Raises UserError for an unknown task, and for a config with an unknown field or an invalid value; the message names
    the key.
    """
    if not isinstance(config, RunConfig):
        config = fields.to_dataclass(config_class(config.get('task')), config)
    return task_class(config.task)(config, workdir)
